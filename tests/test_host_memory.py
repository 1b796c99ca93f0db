"""Whether the host has room for what is offloaded, asked before anything of it is made."""

import contextlib
import functools
import gc
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
import small
from jzero.offload.memory import _available

ADAM = optax.adam(1e-2)
SIZE, ROWS = 512, 2**13
PARAMS: dict[str, Any] = {"offload_params": jzero.PinnedHost()}
ACTIVATIONS: dict[str, Any] = {"offload_activations": jzero.PinnedHost()}
PARAM_BYTES = 2 * SIZE * SIZE * 4  # of all devices together
ACTIVATION_BYTES = 2 * ROWS * SIZE * 4  # y, and 1 - y of tanh, of the first layer
OF_LAYERS, OF_MOMENTS = f"{PARAM_BYTES} pinned for", f"{2 * PARAM_BYTES}"


def new_state():
    w = [jnp.full((SIZE, SIZE), 0.01), jnp.full((SIZE, SIZE), 0.02)]
    return w, ADAM.init(w)


def step_fn(state, x):
    w, opt_state = state

    def loss(w):
        y = x
        for each in w:
            y = jnp.tanh(y @ each)
        return jnp.mean(y**2)

    value, grads = jax.value_and_grad(loss)(w)
    updates, opt_state = ADAM.update(grads, opt_state, w)
    return (optax.apply_updates(w, updates), opt_state), value


def batch(rows=64):
    return np.linspace(-1, 1, rows * SIZE, dtype=np.float32).reshape(rows, SIZE)


@pytest.fixture
def left(monkeypatch, tmp_path):
    """Has the host so many KiB left, as Linux says it."""
    (tmp_path / "proc").mkdir()

    @contextlib.contextmanager
    def left(kib):
        (tmp_path / "proc" / "meminfo").write_text(f"MemAvailable: {kib} kB\n")
        with monkeypatch.context() as patch:
            patch.setattr(_available, "ROOT", tmp_path)
            yield

    return left


def refused(*texts):
    """An error that says all of these, in this order."""
    return pytest.raises(jzero.OptionError, match=".*".join(map(re.escape, texts)))


TIERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "moments on the host": ({"offload": jzero.HostCPU()}, [f"{OF_MOMENTS} for optimizer state"]),
    "moments pinned": ({"offload": jzero.PinnedHost()}, [f"{OF_MOMENTS} pinned for optimizer state"]),
    "parameters": (PARAMS, [f"{OF_LAYERS} parameters"]),
    "both pinned": (
        {"offload": jzero.PinnedHost(), **PARAMS},
        [f"{OF_LAYERS} parameters", f"{OF_MOMENTS} pinned for optimizer state"],
    ),
    "both": (
        {"offload": jzero.HostCPU(), **PARAMS},
        [f"{OF_LAYERS} parameters", f"{OF_MOMENTS} for optimizer state"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TIERS)
def test_a_state_that_the_host_has_no_room_for(name, left):
    """Said before any of it is made, with what each tier needs; what is there already needs nothing."""
    options, texts = TIERS[name]
    train_step = small.shard_train_step(step_fn, **options)
    state = new_state()
    with left(1), refused("shard: this process needs", *texts, "and 1024 (1.0 KiB) are available"):
        train_step.shard(state, batch())
    placed = train_step.shard(state, batch())
    with left(1):
        train_step.shard(placed, batch())


@pytest.mark.parametrize("name", TIERS)
def test_init_and_restore_ask_too(name, left, tmp_path):
    """Roles are not known yet: all that may rest on the host shall fit."""
    train_step = small.shard_train_step(step_fn, **TIERS[name][0])
    if name == "parameters":
        with left(1):
            train_step.init(new_state)
        return
    with left(1), refused("init: this process needs", "for state", "are available"):
        train_step.init(new_state)
    with jzero.Checkpointer(tmp_path / "saved", train_step) as checkpointer:
        checkpointer.save(1, train_step.init(new_state))
    with left(1), refused("restore: this process needs", "for state", "are available"):
        jzero.restore(tmp_path / "saved" / "1", train_step, jax.eval_shape(new_state))


STEPS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gradients": (PARAMS, [f"{OF_LAYERS} gradients and parameters on their way)"]),

    "activations": (ACTIVATIONS, [f"{ACTIVATION_BYTES} pinned for activations)"]),
    "both": (
        {"offload": jzero.HostCPU(), **ACTIVATIONS},
        ["pinned for gradients and parameters on their way", "pinned for activations)"],
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_the_host_has_no_room_for(name, left):
    """Said before it runs: the state is as it was, and trains on when there is room."""
    options, texts = STEPS[name]
    x = batch(ROWS)
    expected, loss = jax.jit(step_fn)(new_state(), x)
    train_step = small.shard_train_step(step_fn, **options)
    state = train_step.shard(new_state(), x)
    with left(1), refused("shard_train_step: this process needs", *texts, "and 1024 (1.0 KiB) are"):
        train_step(state, x)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    state, found = train_step(state, x)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    for a, d in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, d, rtol=1e-4, atol=1e-6)
    with left(1):  # Programs of one step run one after the other, in the same memory.
        state, _ = train_step(state, batch(ROWS // 2))


@pytest.mark.slow
def test_a_larger_batch_needs_what_it_has_more(left):
    train_step = small.shard_train_step(step_fn, **ACTIVATIONS)
    state, _ = train_step(new_state(), batch(ROWS))
    with left(1), refused(f"{ACTIVATION_BYTES} pinned for activations"):
        train_step(state, batch(2 * ROWS))


@pytest.mark.slow(but=["None-None-64"])
@pytest.mark.parametrize(
    ("limit", "preallocated", "gib"), [(None, None, 64), (None, "true", 16), ("0", None, 0)]
)
def test_the_pool_of_pinned_memory(limit, preallocated, gib, monkeypatch):
    """XLA's client for GPUs pins only so much, however much the host has."""
    monkeypatch.setattr(_available, "POOLED", ("cpu",))
    for name, value in (("LIMIT_GB", limit), ("PREALLOCATE", preallocated)):
        if value is not None:
            monkeypatch.setenv(f"XLA_PJRT_GPU_HOST_MEMORY_{name}", value)
    gc.collect()  # What an earlier test was refused may be freed in between.
    before = _available.left_in_pool("cpu")
    assert before is not None
    assert gib * 2**30 - 2**30 <= before <= gib * 2**30
    train_step = small.shard_train_step(step_fn, memory=jzero.PinnedHost())
    if gib:
        placed = train_step.shard(new_state(), batch())
        assert _available.left_in_pool("cpu") == before - 2 * PARAM_BYTES
        del placed
        return
    with refused(
        "of pinned memory", "and 0 (0 B) are available",
        "no more than XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB GiB in a process, 0 here",
        "Set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=1 before JAX starts. Else: offload less",
    ):  # fmt: skip
        train_step.shard(new_state(), batch())
    # The host's ordinary memory is no part of it.
    small.shard_train_step(step_fn, memory=jzero.HostCPU()).shard(new_state(), batch())


def most_pinned(run):
    """What it returns, and the most bytes of pinned memory at any call of what is in jzero/offload."""
    found = [0]

    def called(frame, event, arg):
        if re.fullmatch(r".*/jzero/offload/(execute/)?_[a-z_]+\.py", frame.f_code.co_filename):
            found[0] = max(found[0], _available.pinned_bytes("cpu"))

    before = sys.gettrace()
    sys.settrace(called)
    try:
        return run(), found[0]
    finally:
        sys.settrace(before)


TAKEN: dict[str, dict[str, Any]] = {
    "parameters": PARAMS,
    "parameters, moments pinned": {"offload": jzero.PinnedHost(), **PARAMS},
    "parameters, moments on the host": {"offload": jzero.HostCPU(), **PARAMS},
    "moments on the host": {"offload": jzero.HostCPU()},
    "updates delayed": {"offload": jzero.HostCPU(delayed_update=True, delay_after=0)},
}


@pytest.mark.slow(but=["parameters"])
@pytest.mark.parametrize("name", TAKEN)
def test_steps_take_what_they_ask_for(name):
    train_step = small.shard_train_step(step_fn, **TAKEN[name])
    gc.collect()
    before = _available.pinned_bytes("cpu")
    state, x = train_step.shard(new_state(), batch()), batch()
    at_rest = _available.pinned_bytes("cpu")
    expected = (PARAM_BYTES if "parameters" in name else 0) + (
        2 * PARAM_BYTES if "pinned" in name else 0
    )
    assert at_rest - before == expected
    (program,) = [train_step._programs.of(train_step._programs.bind((state, x), {}))]
    asked = sum(need.nbytes for need in program.host_needs())
    taken = 0
    for _ in range(3):
        (state, _), most = most_pinned(functools.partial(train_step, state, x))
        taken = max(taken, most - at_rest)
    assert 0.9 * asked <= taken <= asked + 100  # a few scalars
