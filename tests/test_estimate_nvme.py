"""`estimate` and `describe` of optimizer state in files: bytes on the disk, what moves, time, wear; flags."""

import json
from pathlib import Path
from typing import Any

import pytest

import jzero
import test_cli
from test_estimate_offload import COUNTER, PRECISIONS, PSI, by_way, found_by

RATES: dict[str, Any] = dict(tokens="32K", peak="989TFLOP/s", pcie="55GB/s", host_update="40GB/s")


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_is_as_estimated(stage: int, precision: str, in_place: bool, tmp_path: Path):
    policy = jzero.NVMe(tmp_path, host_bytes=2**16, in_place=in_place)
    found = found_by(precision, stage=stage, offload=policy)
    expected = jzero.estimate(PSI, devices=8, stage=stage, precision=precision, offload=policy)
    assert by_way(found.crossings) == by_way(expected.crossings) != {}
    rows = {row.role: row for row in found.memory}
    wanted = {row.role: row for row in expected.memory}
    assert rows["optimizer state"].per_device == COUNTER
    assert rows["optimizer state"].on_host == wanted["optimizer state"].on_host == 0
    assert rows["optimizer state"].on_disk == wanted["optimizer state"].on_disk > 0
    assert expected.on_disk == (1 if in_place else 2) * rows["optimizer state"].on_disk
    assert rows["parameter"].per_device == wanted["parameter"].per_device
    text = " ".join(str(found).split())
    assert "leaves rest in files on NVMe" in text
    assert ("(once, written over)" if in_place else "(twice, the new one beside the old)") in text


def test_the_host_has_tiles_and_what_is_on_its_way():
    """Whatever the model's size: gradients and parameters in 16 bits, and the buffers."""
    for num in ("1B", "100B"):
        found = jzero.estimate(num, devices=8, offload=jzero.NVMe("x", host_bytes=2**28))
        assert found.on_host == 2**28 + 2 * (2 * found.num_params // 8)
        assert found.on_disk == 2 * 12 * found.num_params // 8


def test_time_and_wear():
    found = jzero.estimate("70B", devices=8, offload=jzero.NVMe("x"), disk="6GB/s", **RATES)
    time = found.time
    assert time is not None
    written = 12 * found.num_params // 8
    assert time.parts[-1].ways["disk"] == 2 * written / 6e9  # Reads and writes share it.
    assert time.written == written
    assert time.written_a_day == pytest.approx(written * 86400 / time.seconds)
    assert "Each step writes 105 GB to the disks for each device, 171 TB a day" in str(found)
    without = jzero.estimate("70B", devices=8, offload=jzero.NVMe("x"), **RATES)
    assert "No time is counted for: between devices, disk." in str(without)


def test_the_largest_model_of_a_disk():
    found = jzero.estimate(1, devices=8, offload=jzero.NVMe("x"))
    assert found.largest_model("80GB", disk_memory="240GB") == 80 * 10**9
    assert found.largest_model("80GB", "20GB", "240GB") < 80 * 10**9
    with pytest.raises(jzero.OptionError, match="disk_memory='2T'"):
        found.largest_model("80GB", disk_memory="2T")


def test_a_disk_without_files_is_refused():
    with pytest.raises(jzero.OptionError, match=r"disk='6GB/s', and nothing moves at such a rate"):
        jzero.estimate("70B", devices=8, offload=jzero.HostCPU(), disk="6GB/s", **RATES)


def test_flags():
    flags = "estimate --params 70B --devices 8 --stage 3 --offload nvme --host-bytes 2GiB --in-place --json"
    more = (
        "--tokens 32K --peak 989TFLOP/s --pcie 55GB/s --host-update 40GB/s --disk 6GB/s --memory 80GB "
        "--disk-memory 1TB"
    )
    done = test_cli.output(*flags.split(), *more.split())
    policy = jzero.NVMe("x", host_bytes=2**31, in_place=True)
    expected = jzero.estimate("70B", devices=8, offload=policy, disk="6GB/s", **RATES)
    (stage,) = json.loads(done)["stages"]
    wanted = expected.to_dict() | {
        "largest_model": expected.largest_model("80GB", disk_memory="1TB")
    }
    assert stage == {
        name: value for name, value in wanted.items() if name not in ("num_params", "axes")
    }


def test_with_parameters_on_the_hosts(tmp_path: Path):
    """The same crosses as with `HostCPU`, the disk aside; no new parameters are beside the old ones."""
    params = jzero.PinnedHost(2**16)
    found, other = (
        [found_by("mixed", stage=3, offload=policy, offload_params=params),
         jzero.estimate(PSI, devices=8, stage=3, offload=policy, offload_params=params)]
        for policy in (jzero.NVMe(tmp_path, host_bytes=2**16), jzero.HostCPU())
    )  # fmt: skip
    for one, two in zip(found, other, strict=True):
        crossing = by_way(one.crossings)
        assert crossing.pop(("from disk", "optimizer state")) == 12 * PSI // 8
        assert crossing.pop(("to disk", "optimizer state")) == 12 * PSI // 8
        assert crossing == by_way(two.crossings)
        rows = {row.role: row for row in one.memory}
        assert rows["optimizer state"].on_disk == 12 * PSI // 8
        assert rows["parameter"].on_host > 0
        assert "renewed parameter" not in rows
