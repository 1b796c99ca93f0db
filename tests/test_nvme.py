"""Optimizer state in files, updated tile by tile: the same training, on 1 to 8 devices, at every stage."""

import functools
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
import optimizers
import parity
import small
import test_optimizers
from optimizers import ENTRIES
from test_host_cpu import NEEDS_OTHER_DEVICES, ROUNDED, rounded
from test_offload import BATCH, SETTINGS, TX, make_step, new_state, optimizer_names, step_names

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:optax")
optax_promotions = test_optimizers.optax_promotions

HOST_BYTES = 2**16  # tiles of 8 KiB
NOT_ELEMENTWISE = NEEDS_OTHER_DEVICES | {"split_real_and_imaginary"}
STEPS_BY_DEFAULT = {"mixed_bf16", "ema", "microbatch_scan", "cond_on_gradients"}


def on_disk(folder: Any, **options: Any) -> jzero.NVMe:
    return jzero.NVMe(folder, **{"host_bytes": HOST_BYTES, **options})


def in_files(tree: Any) -> list[jzero.NVMeArray]:
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jzero.NVMeArray)]


def on(num: int, folder: Any, tx: Any = TX, policy: Any = None, **options: Any) -> Any:
    mesh = jax.make_mesh((num,), ("data",), devices=jax.devices()[:num])
    return small.shard_train_step(
        make_step(tx), mesh=mesh, offload=policy or on_disk(folder), **options
    )


def batches(num: int) -> list[np.ndarray]:
    return [np.roll(BATCH, i, 0) * (1 + i / 3) for i in range(num)]


def some(names: Iterable[Any], by_default: Collection[str]) -> Iterator[Any]:
    """The names, of which others than these are slow."""
    for (name,) in (param.values for param in names):
        yield pytest.param(name, marks=() if name in by_default else pytest.mark.slow)


# -- the same training -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "options"), SETTINGS, ids=lambda v: "-".join(f"{k}={x}" for k, x in v.items())
)
def test_settings_train_as_on_one_device(axes: Any, options: Any, tmp_path: Path):
    sharded = functools.partial(small.shard_train_step, offload=on_disk(tmp_path), **options)
    parity.check("mlp", axes, sharded, options)


@pytest.mark.parametrize("name", list(some(step_names(), STEPS_BY_DEFAULT)))
def test_steps_train_as_on_one_device(name: str, tmp_path: Path):
    parity.check(
        name, {"data": 4}, functools.partial(small.shard_train_step, offload=on_disk(tmp_path))
    )


@pytest.mark.parametrize("name", list(some(optimizer_names(), {"adamw", "adafactor", "lookahead"})))
@pytest.mark.usefixtures("optax_promotions")
def test_optimizers_train_as_on_one_device(name: str, tmp_path: Path):
    """Or are refused: what is not elementwise is never half in files."""
    entry, mesh = ENTRIES[name], jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    step_fn, batches = optimizers.make_step(entry), optimizers.make_batches(entry.poisoned)
    train_step = small.shard_train_step(step_fn, mesh=mesh, offload=on_disk(tmp_path))
    state: Any = optimizers.make_state(entry)
    if name in NOT_ELEMENTWISE:
        with pytest.raises(
            jzero.OptionError, match=r"between the devices|whole, by XLA|updated by XLA"
        ):
            train_step.plan(state, batches[0])
        return
    expected = rounded(name) if name in ROUNDED else test_optimizers.one_device(name)
    for i, (batch, wanted) in enumerate(zip(batches, expected, strict=True)):
        state, metrics = train_step(state, batch)
        test_optimizers.assert_same((state, metrics), wanted, f"{name}, step {i}")
    assert in_files(state["opt"])


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize(("num", "stage"), [(1, 3), (2, 1), (4, 2), (8, 3)])
def test_it_is_the_update_of_the_host_to_the_bit(
    masters: bool, num: int, stage: int, tmp_path: Path
):
    """Padded leaves, a clip by the norm of all gradients, masters: every leaf, after each step."""
    tx = jzero.master_weights(TX) if masters else TX
    start = new_state(tx, jnp.bfloat16 if masters else jnp.float32)
    one, other = on(num, tmp_path, tx, stage=stage), on(num, "", tx, jzero.HostCPU(), stage=stage)
    state, expected = one.shard(start, BATCH), other.shard(start, BATCH)
    assert len(in_files(state)) == 12 if masters else 8
    for x in batches(3):
        (state, metrics), (expected, wanted) = one(state, x), other(expected, x)
        for a, b in zip(
            jax.tree.leaves((state, metrics)), jax.tree.leaves((expected, wanted)), strict=True
        ):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    disk = [path.stat().st_size for path in tmp_path.rglob("*.tiles")]
    assert len(disk) == num
    assert sum(disk) >= 2 * sum(leaf.nbytes for leaf in in_files(state))
