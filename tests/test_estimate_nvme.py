"""`estimate` and `describe` of optimizer state in files: bytes on the disk, what moves, time, wear; flags."""

import json
from typing import Any

import pytest

import jzero
import test_cli
from small import grouped

RATES: dict[str, Any] = dict(tokens="32K", peak="989TFLOP/s", pcie="55GB/s", host_update="40GB/s")


def test_the_host_has_tiles_and_what_is_on_its_way():
    """Whatever the model's size: gradients and parameters in 16 bits, and the buffers."""
    for num in ("1B", "100B"):
        found = jzero.estimate(num, devices=8, memory=jzero.NVMe("x", host_bytes=2**28))
        assert found.on_host == 2**28 + 2 * (2 * found.num_params // 8)
        assert found.on_disk == 2 * 12 * found.num_params // 8


def test_time_and_wear():
    found = jzero.estimate(
        "70B", devices=8, **grouped(offload=jzero.NVMe("x"), disk="6GB/s", **RATES)
    )
    time = found.time
    assert time is not None
    written = 12 * found.num_params // 8
    assert time.parts[-1].ways["disk"] == 2 * written / 6e9  # Reads and writes share it.
    assert time.written == written
    assert time.written_a_day == pytest.approx(written * 86400 / time.seconds)
    assert "Each step writes 105 GB to the disks for each device, 171 TB a day" in str(found)
    without = jzero.estimate("70B", devices=8, **grouped(offload=jzero.NVMe("x"), **RATES))
    assert "Not counted, because no rate was given: between devices, disk." in str(without)


def test_the_largest_model_of_a_disk():
    found = jzero.estimate(1, devices=8, memory=jzero.NVMe("x"))
    assert found.largest_model("80GB", disk_memory="240GB") == 80 * 10**9
    assert found.largest_model("80GB", "20GB", "240GB") < 80 * 10**9
    with pytest.raises(jzero.OptionError, match="disk_memory='2T'"):
        found.largest_model("80GB", disk_memory="2T")


def test_a_disk_without_files_is_refused():
    with pytest.raises(
        jzero.OptionError, match=r"disk='6GB/s'\), and nothing moves at such a rate"
    ):
        jzero.estimate("70B", devices=8, **grouped(offload=jzero.HostCPU(), disk="6GB/s", **RATES))


def test_flags():
    flags = "estimate --params 70B --devices 8 --stage 3 --offload nvme --host-bytes 2GiB --in-place --json"
    more = (
        "--tokens 32K --peak 989TFLOP/s --pcie 55GB/s --host-update 40GB/s --disk 6GB/s --memory 80GB "
        "--disk-memory 1TB"
    )
    done = test_cli.output(*flags.split(), *more.split())
    policy = jzero.NVMe("x", host_bytes=2**31, in_place=True)
    expected = jzero.estimate("70B", devices=8, **grouped(offload=policy, disk="6GB/s", **RATES))
    (stage,) = json.loads(done)["stages"]
    wanted = expected.to_dict() | {
        "largest_model": expected.largest_model("80GB", disk_memory="1TB")
    }
    assert stage == {
        name: value for name, value in wanted.items() if name not in ("num_params", "axes")
    }


def in_files(in_place: bool = False) -> dict[str, Any]:
    return {
        "offload": jzero.NVMe("x", host_bytes=2**28, in_place=in_place),
        "offload_params": jzero.NVMe("x", host_bytes=2**27, device_bytes=2**26, in_place=in_place),
    }


@pytest.mark.parametrize(("in_place", "slots"), [(False, 2), (True, 1)])
def test_parameters_in_files(in_place: bool, slots: int):
    """The device has a window of them, the host what is on its way, and each slot of a disk 14 Psi bytes."""
    for num in ("10B", "1T"):
        found = jzero.estimate(num, devices=8, **grouped(**in_files(in_place)))
        each = found.num_params // 8
        assert found.at_rest == 0
        assert found.total == 2**26
        assert found.on_host == 2**28 + 2**27 + 2 * each  # Gradients wait in pinned memory.
        assert found.on_disk == slots * 14 * each
        rows = {row.role: row for row in found.memory}
        assert rows["parameter"].on_disk == 2 * each
        assert rows["parameters in transfer"].on_host == 2**27


def test_time_and_wear_of_parameters_in_files():
    found = jzero.estimate("70B", devices=8, **grouped(disk="6GB/s", **RATES, **in_files()))
    time, each = found.time, found.num_params // 8
    assert time is not None
    ways = {part.name: part.ways["disk"] for part in time.parts}
    # Tiles are updated as their gradients come.
    assert ways == {"forward pass": 2 * each / 6e9, "backward pass": 30 * each / 6e9}
    assert time.written == 14 * each
    # 2 operations hide 2 bytes of a shard of an eighth: 989e12 / 6e9 / 8 tokens.
    assert time.hides_from["forward pass"] == -(-989_000 // (6 * 8))


def test_the_largest_model_with_parameters_in_files():
    """The device bounds nothing; gradients in pinned memory or the disk do."""
    found = jzero.estimate(1, devices=16, **grouped(**in_files()))
    assert found.largest_model("32GB", disk_memory="28TB") == 28 * 10**12 // 28 * 16
    bytes_of_host = 2**28 + 2**27 + 2 * 10**9
    assert found.largest_model("32GB", bytes_of_host, "28TB") == 16 * 10**9


@pytest.mark.parametrize("flags", ["--offload host --offload-params 2GiB", "--offload nvme"])
def test_flags_of_parameters_in_files_without_their_policy(flags: str):
    given = f"estimate --params 1T --devices 16 --stage 3 {flags} --params-in-files"
    done = test_cli.run(*given.split())
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert (
        "--params-in-files. Parameters in files are updated beside their optimizer state." in said
    )
