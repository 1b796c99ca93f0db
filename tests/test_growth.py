"""Work grows with the leaves of a step and not with their square: counted in lines of jzero that run."""

import collections
import functools
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jzero
import small
from jzero.preflight._preflight import _dispatches_of

LIBRARY = os.path.dirname(jzero.__file__) + os.sep
WIDTH = 64
# Parameters: one for each device, where owners have them; also two and three times as many.
LEAST = 8


def square(num):
    return {f"w{i}": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for i in range(num)}


def stacked(num):
    """Of four layers, each with so many parameters."""
    return {f"w{i}": jax.ShapeDtypeStruct((4, WIDTH, WIDTH), jnp.float32) for i in range(num)}


def one_after_the_other(params, x):
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def rematerialized(params, x):
    for w in params.values():
        x = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w)
    return jnp.mean(x**2)


def within_a_layer(params, x):
    """A loop over layers, the body of which has all leaves."""

    def layer(x, weights):
        for w in weights.values():
            x = jnp.tanh(x @ w)
        return x, None

    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)


def loops(params, x):
    """A loop for each leaf, forwards and backwards."""

    def turn(w, x, _):
        return jnp.tanh(x @ w), None

    for w in params.values():
        x, _ = jax.lax.scan(functools.partial(turn, w), x, None, length=2)
    return jnp.mean(x**2)


def step_of(loss, tx=None, grad=jax.value_and_grad):
    tx = optax.adam(1e-3) if tx is None else tx

    def step(state, x):
        params, opt_state = state
        value, grads = grad(loss)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step, tx


def accumulating(loss):
    """The gradient of four microbatches, added up by a loop of the step's own."""

    def value_and_grad(params, x):
        def turn(sums, x):
            value, grads = jax.value_and_grad(loss)(params, x)
            return jax.tree.map(jnp.add, sums, (value, grads)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(turn, (0.0, zeros), x.reshape(4, -1, WIDTH))[0]

    return value_and_grad


STEPS: dict[str, Any] = {
    "clipped": (square, step_of(one_after_the_other, optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-3))), {}),
    "remat": (square, step_of(rematerialized), {}),
    "within a layer": (stacked, step_of(within_a_layer), {}),
    "loops": (square, step_of(loops), {}),
    "accumulating": (square, step_of(one_after_the_other, grad=accumulating), {}),
    "microbatches": (square, step_of(one_after_the_other), {"accumulate": 2}),
    "tiles": (square, step_of(one_after_the_other), {"tile_bytes": 2**12}),
    "codes": (square, step_of(one_after_the_other), {"gather_dtype": jnp.int8}),
    "on the hosts": (square, step_of(one_after_the_other), {"offload": jzero.HostCPU()}),
    "layers on the hosts": (
        stacked, step_of(within_a_layer),
        {"offload_params": jzero.PinnedHost(device_bytes=2**30)}),
}  # fmt: skip


def lines_of(fn):
    """How often each function of jzero runs one of its lines: loops on one line count each time, too."""
    found: collections.Counter[Any] = collections.Counter()

    def count(frame, event, _):
        if event == "line":
            found[frame.f_code] += 1
        return count

    def enter(frame, event, _):
        return count if frame.f_code.co_filename.startswith(LIBRARY) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        fn()
    finally:
        sys.settrace(before)
    return found


def lines_to_trace(name, num):
    """Lines that run to trace and lower a step with so many parameters."""
    make, (step, tx), options = STEPS[name]
    params, x = make(num), jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    state = params, jax.eval_shape(tx.init, params)
    train_step = small.shard_train_step(step, **options)
    if any(name.startswith("offload") for name in options):  # Many programs, and none of all.
        return lines_of(lambda: _dispatches_of(train_step, state, x))
    return lines_of(lambda: (train_step.lower(state, x), str(train_step.describe(state, x))))


def excess(counts):
    """Of three counts, at n, 2 n and 3 n: twice the part that grows with the square of n, at n."""
    a, b, c = counts
    return c - 2 * b + a


@pytest.mark.slow(but=["microbatches"])
@pytest.mark.parametrize("name", STEPS)
def test_lines_that_run_grow_with_the_leaves(name):
    """To no part with their square: 10,000 leaves take ten times as long as 1,000 (experiments/step_time)."""
    lines_to_trace(name, 2)  # what runs once in a process
    counts = [lines_to_trace(name, times * LEAST) for times in (1, 2, 3)]
    quadratic = {
        f"{code.co_filename.removeprefix(LIBRARY)}:{code.co_qualname}": more
        for code in counts[2]
        if (more := excess([found[code] for found in counts])) > LEAST**2 / 2
    }
    assert quadratic == {}
    whole = [sum(found.values()) for found in counts]
    assert abs(excess(whole)) < 0.002 * whole[2]


def test_a_part_that_grows_with_the_square_is_found():
    """As of a function that goes through all leaves for each of them."""
    squares = [100 * n + n * n for n in (LEAST, 2 * LEAST, 3 * LEAST)]
    assert excess(squares) == 2 * LEAST**2
    assert excess([100 * n + 7 for n in (LEAST, 2 * LEAST, 3 * LEAST)]) == 0
