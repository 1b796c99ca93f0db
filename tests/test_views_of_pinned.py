# SPDX-License-Identifier: Apache-2.0
"""A state is read between steps, in every tier: the next step is the same, and views keep their values.

XLA refuses here to donate what somebody has a view of, as it does on a GPU.
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
import small
import zoo
from interrupting import failing
from jzero.offload.memory import _pinned_leaf
from jzero.offload.memory._pinned_leaf import is_pinned, pinned_zeros, renewed, view
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._stored_layout import Shard
from refuse_like_a_gpu import refusing
from test_offload_params import CLIPPED, batch, make_step, new_state

WINDOW = jzero.PinnedHost(device_bytes=2**14)
SLICES = jzero.PinnedHost(device_bytes=2**12)
# Of each tier its options, the devices, and whether a step takes leaves in pinned memory.
TIERS: dict[str, tuple[dict[str, Any], int, bool]] = {
    "HostCPU": (dict(offload=jzero.HostCPU()), 2, False),
    "delayed": (dict(offload=jzero.HostCPU(delayed_update=True, delay_after=0)), 2, False),
    "PinnedHost": (dict(offload=jzero.PinnedHost()), 2, False),
    "PinnedHost in slices": (dict(offload=SLICES), 2, True),
    "parameters and HostCPU": (dict(offload=jzero.HostCPU(), offload_params=WINDOW), 2, True),
    "parameters and HostCPU, one device": (
        dict(offload=jzero.HostCPU(), offload_params=WINDOW), 1, True,
    ),
    "NVMe": (dict(offload="nvme"), 1, False),
    "parameters and NVMe": (dict(offload="nvme", offload_params=WINDOW), 2, True),
    "all in NVMe": (dict(offload="nvme", offload_params="nvme"), 1, False),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _like_a_gpu():
    with refusing():
        yield


def make() -> Any:
    return new_state(True, 4, CLIPPED)


def options_of(tier: str, folder: Any) -> dict[str, Any]:
    files = dict(
        offload=jzero.NVMe(folder / "files", host_bytes=2**18),
        offload_params=jzero.NVMe(folder / "files", device_bytes=2**14, host_bytes=2**18),
    )
    return {key: files[key] if x == "nvme" else x for key, x in TIERS[tier][0].items()}


def evaluate(state: Any, x: jax.Array) -> jax.Array:
    return make_step(True, CLIPPED)(state, x)[1]["loss"]


def shards_of(state: Any) -> list[jax.Array]:
    leaves = [x.storage if isinstance(x, jzero.LeafArray) else x for x in jax.tree.leaves(state)]
    return [shard.data for x in leaves if is_pinned(x) for shard in x.addressable_shards]


def views(state: Any) -> list[np.ndarray]:
    """Of every leaf as a user reads it, and of every shard in pinned memory."""
    return [np.asarray(x) for x in [*jax.tree.leaves(state), *shards_of(state)]]


def readers(checkpointer: jzero.Checkpointer, eval_step: Any) -> dict[str, Any]:
    """What is done with a state; what it returns is held while the next step runs."""
    return {
        "print": lambda state: [f"{x} {x!r}" for x in jax.tree.leaves(state)],
        "device_get, dropped": lambda state: [jax.device_get(state)].clear(),
        "device_get, held": jax.device_get,
        "asarray, dropped": lambda state: [views(state)].clear(),
        "asarray, held": views,
        "copied to the host": lambda state: [
            x.copy_to_host_async() for x in jax.tree.leaves(state)
        ],
        "evaluated": lambda state: eval_step(state, batch(9)),
        "saved": lambda state: checkpointer.save(0, state),
        "saved and held": lambda state: (checkpointer.save(1, state), views(state)),
    }


@pytest.mark.slow(but=["parameters and NVMe"])  # `make test-like-a-gpu` runs all tiers.
@pytest.mark.parametrize("tier", TIERS)
def test_a_step_goes_on_after_its_state_was_read(tier, tmp_path):
    options, num, takes = options_of(tier, tmp_path), *TIERS[tier][1:]
    mesh = small.mesh(data=num)
    step = make_step(True, CLIPPED)
    train_step = small.shard_train_step(step, mesh=mesh, **options)
    eval_step = jzero.shard_eval_step(evaluate, like=train_step)
    alone, state, plain = train_step.init(make), train_step.init(make), make()
    with jzero.Checkpointer(tmp_path / "steps", train_step) as checkpointer:
        for i, (what, read) in enumerate(readers(checkpointer, eval_step).items()):
            alone = train_step.flush(train_step(alone, batch(i))[0])
            held = read(state)
            before = [np.array(x) for x in jax.tree.leaves(held)]
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                state = train_step.flush(train_step(state, batch(i))[0])
            small.assert_same(held, before, what)
            assert bool(warned) <= (takes and "held" in what), [str(x.message) for x in warned]
            assert bool(warned) >= (takes and what in ("asarray, held", "saved and held")), what
            assert all("has a view of state" in str(x.message) for x in warned)
            small.assert_same(shards_of(state), shards_of(alone), what)
            plain, _ = jax.jit(step)(plain, batch(i))
        restored = checkpointer.restore(jax.eval_shape(make), batch(0))
        again = train_step.flush(train_step(restored, batch(8))[0])
    small.assert_same(zoo.to_host(state), zoo.to_host(alone), "the last state")
    small.assert_same(zoo.to_host(again), zoo.to_host(alone), "restored")
    if tier != "delayed":
        zoo.assert_trees_close(zoo.to_host(state), jax.device_get(plain), zoo.FP32, "jax.jit")


# -- `renewed` itself ----------------------------------------------------------------------------------

PLANS = [
    LeafPlan(f"state[{i}]", (64,), "float32", 4, "parameter", Shard(0, ("data",))) for i in range(3)
]


@pytest.fixture
def leaves() -> list[jax.Array]:
    mesh = small.mesh(data=4)
    place = jax.NamedSharding(mesh, jax.P("data"), memory_kind="pinned_host")
    made = jax.jit(lambda: [i + jnp.arange(64.0) for i in range(3)], out_shardings=place)()
    return list(jax.block_until_ready(made))


def addresses(x: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]


def test_one_shard_with_a_view_is_all_that_is_copied(leaves):
    before = [addresses(x) for x in leaves]
    held = np.asarray(leaves[1].addressable_shards[2].data)
    told = r": 64 B of pinned memory were copied, since somebody has a view of state\[1\] float32\[64\]\. "
    with pytest.warns(UserWarning, match=told), jax.set_mesh(small.mesh(all=8)):
        new = renewed(leaves, [2, 1], PLANS)
    assert [x.is_deleted() for x in leaves] == [False, True, True]
    for i, x in new.items():  # What was taken back, as the refusal is emulated, is elsewhere.
        same = [a == b for a, b in zip(addresses(x), before[i], strict=True)]
        assert same == [True, True, False, True]
        np.testing.assert_array_equal(x, i + np.arange(64))
    for shard in new[1].addressable_shards:
        view(shard.data)[:] = 0  # As the host updates it.
    np.testing.assert_array_equal(held, 1 + np.arange(32, 48))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_zeros_are_donated_where_they_are(dtype):
    """On a CPU `device_put` may keep NumPy's memory, by chance, and its donation is a copy."""
    mesh = small.mesh(data=2)
    for _ in range(16):
        x = pinned_zeros((256, 4), jnp.dtype(dtype), jax.NamedSharding(mesh, jax.P("data")))
        before = addresses(x)
        (new,) = renewed([x], [0], PLANS).values()
        assert addresses(new) == before


def test_when_a_copy_fails_what_is_lost_says_so(leaves):
    held, no_room = np.asarray(leaves[1].addressable_shards[2].data), MemoryError("no room")
    with (
        failing(_pinned_leaf, "_own", error=no_room),
        pytest.raises(MemoryError, match="no room"),
    ):
        renewed(leaves, [0, 1], PLANS)
    assert [x.is_deleted() for x in leaves] == [True, True, False]
    np.testing.assert_array_equal(held, 1 + np.arange(32, 48))
