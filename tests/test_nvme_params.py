"""Parameters in files: read layer by layer, ahead of their use; the same training as with `HostCPU`."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jzero
import parity
import small
import zoo
from test_nvme import in_files
from test_offload_params import CLIPPED, batch, make_step, new_state, one_device

pytest.importorskip("llvmlite")

DEVICE_BYTES, HOST_BYTES = 2**14, 2**17


def policies(folder: Any, **options: Any) -> dict[str, Any]:
    """Optimizer state and parameters in the same files."""
    bounds = {"device_bytes": DEVICE_BYTES, "host_bytes": HOST_BYTES}
    own = {name: options.pop(name) for name in bounds if name in options}
    return {
        "offload": jzero.NVMe(folder, host_bytes=2**16, **options),
        "offload_params": jzero.NVMe(folder, **{**bounds, **own}, **options),
    }


def mesh_of(axes: dict[str, int]) -> Any:
    num = parity.num_devices(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[:num])


def on(axes: dict[str, int], step: Any, folder: Any, **options: Any) -> Any:
    own = {k: options.pop(k) for k in ("device_bytes", "host_bytes") if k in options}
    return small.shard_train_step(step, mesh=mesh_of(axes), **policies(folder, **own), **options)


def assert_same(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# -- the same training -----------------------------------------------------------------------------

ACTIVATIONS = {"offload_activations": jzero.PinnedHost()}


@pytest.mark.parametrize(
    ("axes", "scan", "options"),
    [
        ({"data": 1}, True, {}),
        ({"data": 1}, False, {}),
        ({"data": 2}, True, {}),
        ({"data": 4}, False, {}),
        ({"data": 8}, True, {}),
        ({"data": 8}, False, {}),
        ({"node": 2, "local": 2}, True, dict(param_axes="local", optimizer_axes="local")),
        ({"data": 4}, True, dict(accumulate=2, layer_major=True)),
        ({"data": 2}, False, dict(accumulate=2)),
        ({"data": 2}, True, dict(accumulate=2, device_bytes=2**13)),
        ({"data": 2}, True, ACTIVATIONS),
    ],
    ids=str,
)
def test_it_trains_what_one_device_trains(
    axes: Any, scan: bool, options: dict[str, Any], tmp_path: Path
):
    """And what `HostCPU` trains with parameters in pinned memory, to the bit, in every leaf."""
    step = make_step(scan, CLIPPED)
    options = dict(options)
    one = on(axes, step, tmp_path, **options)
    window = jzero.PinnedHost(device_bytes=options.pop("device_bytes", DEVICE_BYTES))
    other = small.shard_train_step(
        step, mesh=mesh_of(axes), offload=jzero.HostCPU(), offload_params=window, **options
    )
    start = new_state(scan, 4, CLIPPED)
    state, same = one.shard(start, batch(0)), other.shard(start, batch(0))
    assert len(in_files(state)) == len(jax.tree.leaves(start))
    for i, wanted in enumerate(one_device(scan, clipped=True)):
        state, metrics = one(state, batch(i))
        same, _ = other(same, batch(i))
        assert_same(state, same)
        zoo.assert_trees_close(zoo.to_host((state, metrics)), wanted, zoo.FP32, f"step {i}")
    assert len(in_files(state)) == len(jax.tree.leaves(start))
