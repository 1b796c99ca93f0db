"""Bytes on the device, between steps and at their peak, against what the plan says must be there."""

import pytest

from gpu import memory_worker
from gpu.memory_worker import DEVICE_BYTES, POLICIES

SMALL = 2**20  # counts, batch and metrics
# What XLA keeps beside the arrays of a program: workspaces of its matrix products, in the main.
WORKSPACE = 2**26


def measured(tier: str) -> dict[str, int]:
    if tier in ("host", "delayed"):
        pytest.importorskip("llvmlite")
    return memory_worker.measured(tier)


def counted(tier: str) -> dict[str, int]:
    found = measured(tier)
    if found["peak"] is None:
        pytest.skip("this backend does not count bytes in use")
    return found


@pytest.mark.parametrize("tier", POLICIES)
def test_arrays_at_rest(tier: str):
    """bfloat16 parameters, and masters and moments where they are not offloaded."""
    found = measured(tier)
    per_param = 14 if tier == "device" else 2
    assert 0 <= found["at_rest"] - per_param * found["params"] < SMALL


@pytest.mark.parametrize("tier", POLICIES)
def test_bytes_in_use_at_rest(tier: str):
    """The allocator agrees: nothing is held that no array shows."""
    found = counted(tier)
    assert found["in_use"] - found["at_rest"] < WORKSPACE


@pytest.mark.parametrize(
    ("tier", "per_param", "room"),
    [
        ("device", 14 + 2, 2**27),  # and gradients; the new state is made in the old one's place
        # Parameters and gradients; leaves in turns, and as much for the temporaries of their updates.
        ("pinned_host", 2 + 2, 2 * DEVICE_BYTES),
        (
            "host",
            2 + 2,
            DEVICE_BYTES,
        ),  # a portion of new parameters is there before the old ones go
        (
            "delayed",
            2 + 2 + 2,
            DEVICE_BYTES,
        ),  # new parameters come while gradients need the old ones
    ],
)
def test_peak(tier: str, per_param: int, room: int):
    found = counted(tier)
    assert found["peak"] <= per_param * found["params"] + room + WORKSPACE


@pytest.mark.parametrize("tier", [tier for tier in POLICIES if tier != "device"])
def test_offload_lowers_the_peak(tier: str):
    """By the state that is elsewhere, but for what is on its way."""
    whole = counted("device")
    assert counted(tier)["peak"] <= whole["peak"] - 9 * whole["params"]
