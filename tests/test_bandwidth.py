"""bandwidth(): what is copied, gathered and updated, how rates follow from it, and what is printed."""

import json
from typing import Any

import jax
import pytest

import jzero
from jzero.offload import _bandwidth
from jzero.offload.kernels import _machine
from jzero.reports._bandwidth import LinkRate
from test_cli import output

pytest.importorskip("llvmlite")
SIZE = 2**16


@pytest.fixture
def clock(monkeypatch):
    """Everything runs once, and takes half a second."""
    ran: list[Any] = []

    def seconds(run):
        ran.append(run())
        return 0.5

    monkeypatch.setattr(_bandwidth, "seconds", seconds)
    return ran


@pytest.fixture(scope="module")
def measured():
    return jzero.bandwidth(nbytes=SIZE)


def test_all_of_it_is_measured(measured):
    num = len(jax.local_devices())
    assert (measured.num_devices, measured.nbytes, measured.kind) == (num, SIZE, "cpu")
    everyone = tuple(range(num))
    alone = [((i,), False) for i in everyone]
    assert [(x.devices, x.both_ways) for x in measured.links] == [
        *alone,
        (everyone, False),
        (everyone, True),
    ]
    assert list(measured.collectives) == ["all-gather", "reduce-scatter"]
    rates = [rate for x in measured.links for rate in (x.to_host, x.to_device)]
    rates += [*measured.collectives.values(), measured.host_update, measured.device_update]
    assert min(rates) > 0
    assert measured.pcie == int(measured.links[-1].to_host)
    assert measured.interconnect == int(min(measured.collectives.values()))


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("both_ways", [False, True])
def test_copies_go_to_pinned_memory_and_back(num, both_ways, clock):
    """Bytes of one device's copies in one direction, whatever others copy at the same time."""
    devices = jax.devices()[:num]
    assert _bandwidth.copied(devices, SIZE, both_ways) == (2 * SIZE, 2 * SIZE)
    arrived = [x for arrays in clock for x in arrays]
    assert len(clock) == (1 if both_ways else 2)
    assert [x.nbytes for x in arrived] == [SIZE] * 2 * num
    expected = [(d, kind) for kind in ("pinned_host", "device") for d in devices]
    assert [(*x.devices(), x.sharding.memory_kind) for x in arrived] == expected


@pytest.mark.parametrize("op", _bandwidth.COLLECTIVES)
@pytest.mark.parametrize("num", [2, 8])
def test_rates_of_collectives_are_of_the_whole_value(op, num, clock):
    assert _bandwidth.collective(op, jax.devices()[:num], SIZE) == 2 * SIZE
    (found,) = clock
    # Every device has all of it, or a part.
    assert found.nbytes == SIZE * (num if op == "all-gather" else 1)


def test_the_least_of_some_runs_counts(monkeypatch):
    times = iter([0.0, 5.0, 10.0, 12.0, 20.0, 23.0])
    monkeypatch.setattr(_bandwidth.time, "perf_counter", lambda: next(times))
    runs: list[int] = []
    assert _bandwidth.seconds(lambda: runs.append(1)) == 2.0
    assert len(runs) == 4  # one is not counted


def test_one_device(monkeypatch, clock):
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: jax.devices(backend)[:1])
    found = jzero.bandwidth(nbytes=SIZE)
    assert found.links == (
        LinkRate((0,), False, 2 * SIZE, 2 * SIZE),
        LinkRate((0,), True, 2 * SIZE, 2 * SIZE),
    )
    assert (found.collectives, found.interconnect) == ({}, None)
    text = str(found)
    assert "bandwidth of 1 device (cpu)" in text
    assert "device 0, both directions at once" in text
    assert "--interconnect" not in text


def test_without_the_host_s_kernels(monkeypatch, clock):
    monkeypatch.setattr(_machine, "llvm", lambda: None)
    found = jzero.bandwidth(nbytes=SIZE)
    assert found.host_update > 0
    text = " ".join(str(found).split())
    assert (
        "The host's update was XLA's, as llvmlite is not installed: pip install 'jzero[offload]'"
        in text
    )
    assert "update on the host" in text


def test_what_is_printed_fits_and_is_in_the_dict(measured):
    lines = str(measured).splitlines()
    assert max(map(len, lines)) <= 80
    rows = [" ".join(line.split()) for line in lines]
    for start in ("pinned memory of the host to host to device", "device 0 alone",
                  "all 8 at once, both directions",
                  "all-gather, bytes of the whole value", "update on the host, bytes of optimizer state",
                  "For jzero estimate: --pcie", "These devices are the host"):  # fmt: skip
        assert any(row.startswith(start) for row in rows), start
    numbers = json.loads(json.dumps(measured.to_dict()))
    assert numbers["links"][-1] == {
        "devices": list(range(8)), "both_ways": True, "to_host": measured.links[-1].to_host,
        "to_device": measured.links[-1].to_device,
    }  # fmt: skip
    assert numbers["pcie"] == measured.pcie
    assert numbers["collectives"] == measured.collectives


@pytest.mark.parametrize("nbytes", [0, "128M", None, 1.5])
def test_a_size_that_is_none(nbytes):
    with pytest.raises(
        jzero.OptionError, match=r"bandwidth: nbytes=.*\. The size of a copy is a whole"
    ):
        jzero.bandwidth(nbytes=nbytes)


@pytest.mark.parametrize("threads", [0, -1, True, 1.5, "2"])
def test_threads_that_are_none(threads):
    with pytest.raises(jzero.OptionError, match=r"bandwidth: threads=.*\. It is how many threads"):
        jzero.bandwidth(nbytes=64, threads=threads)


def test_the_command(monkeypatch, clock):
    monkeypatch.setenv("COLUMNS", "80")
    text = output("bandwidth", "--size", "64KiB")
    assert "by copies of 64.0 KiB" in text
    assert max(map(len, text.splitlines())) <= 80
    (flags,) = [line for line in text.splitlines() if line.startswith("For jzero estimate: ")]
    # Taken as it is said.
    found = output("estimate", "--params", "1B", "--devices", "8", "--stage", "3", "--offload", "host",
                   "--tokens", "8K", "--peak", "1TFLOP/s", *flags.split(": ")[1].split())  # fmt: skip
    assert "Rates: 131 KB/s in each direction between a device and its host" in " ".join(
        found.split()
    )
    numbers = json.loads(output("bandwidth", "--size", "64KiB", "--json"))
    assert numbers["pcie"] == 2 * SIZE
    # Of two float32 moments; the devices of a host share its processors.
    moved = 2 * 2 * 4 * _bandwidth._SIZE
    assert (numbers["host_update"], numbers["device_update"]) == (moved / 8, moved)


def test_the_command_uses_the_devices_that_are_there(monkeypatch):
    """The other commands ask for none."""
    asked = []
    monkeypatch.setattr(jax.config, "update", lambda name, value: asked.append((name, value)))
    output("estimate", "--params", "1B", "--devices", "8", "--json")
    assert asked == [("jax_platforms", "cpu")]
    monkeypatch.setattr("jzero.cli._bandwidth.bandwidth", lambda **_: jzero.bandwidth(nbytes=64))
    output("bandwidth", "--json")
    assert ("jax_platforms", "cpu") not in asked[1:]
