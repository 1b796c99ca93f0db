"""Derivatives of a sharded step that are taken from outside equal those of the plain step."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jzero
import small
from small import grouped

pytestmark = pytest.mark.usefixtures("float64")

ROWS, FEATURES, CLASSES = 16, 10, 9  # No devices divide what a parameter has: it is padded.


@jax.custom_vjp
def rounded(x):
    """Straight through."""
    return jnp.round(x)


rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, cotangent: (cotangent,))


def relu_at_zero(w, x):
    # A column of each is zeros.
    return jnp.sum(jnp.sin(jax.nn.relu(x @ w["a"]))) + jnp.sum(jnp.sin(jax.nn.relu(x)))


def straight_through(w, x):
    return jnp.sum(rounded(x @ w["a"]) ** 2)


def solve(w, x):
    gram = w["a"].T @ w["a"] + x[:CLASSES, :CLASSES].T @ x[:CLASSES, :CLASSES]
    return jnp.sum(jnp.linalg.solve(gram + jnp.eye(CLASSES), (x @ w["a"]).T) ** 2)


def max_over_rows(w, x):
    return jnp.sum(jnp.max(x @ w["a"], axis=0) ** 2) + jnp.sum(jnp.min(x**2 @ w["a"], axis=0))


def max_over_parameter(w, x):
    return jnp.max(w["a"]) ** 2 * jnp.mean(x @ w["a"]) + jnp.linalg.norm(w["b"], jnp.inf)


def checkpointed_scan(w, x):
    @jax.checkpoint
    def layer(h, v):
        return jax.nn.relu(h + jnp.max(h, axis=0, keepdims=True) @ v), None

    h, _ = jax.lax.scan(layer, x @ w["a"], jnp.stack([w["c"], 2 * w["c"]]))
    return jnp.mean(h**2)


LOSSES = [
    relu_at_zero, straight_through, solve, max_over_rows, max_over_parameter, checkpointed_scan,
]  # fmt: skip
Step = Callable[[Any, Any], Any]


def params_of():
    rng = np.random.default_rng(0)
    shapes = {"a": (FEATURES, CLASSES), "b": (CLASSES,), "c": (CLASSES, CLASSES)}
    params = {name: rng.normal(size=shape) / 3 for name, shape in shapes.items()}
    params["a"][:, 2] = 0
    return jax.tree.map(jnp.asarray, params)


def batch_of():
    x = np.random.default_rng(1).normal(size=(ROWS, FEATURES))
    x[:, 3] = 0
    return jnp.asarray(x)


def train_step_of(loss: Step) -> Step:
    def step(w, x):
        value, grads = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), {"loss": value}

    return step


def total(outs: Any) -> Any:
    """A number that all outputs of a step have a part in."""
    return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(outs))


def derivatives(step: Step, w: Any, x: Any, reverse_alone: bool = False) -> dict[str, Any]:
    def value(w, x):
        return total(step(w, x))

    found = {"reverse": jax.value_and_grad(value, (0, 1))(w, x)}
    if reverse_alone:  # A `jax.custom_vjp` has no forward mode.
        return found
    ones = jax.tree.map(jnp.ones_like, (w, x))
    found["forward"] = jax.jvp(value, (w, x), ones)
    found["of the batch alone"] = jax.jvp(lambda x: value(w, x), (x,), (ones[1],))
    # A column of the hessian.
    found["of the gradient"] = jax.jvp(jax.grad(value, (0, 1)), (w, x), ones)[1]
    return found


@functools.cache
def plain(loss: Step, trains: bool) -> Any:
    step = train_step_of(loss) if trains else loss
    with jax.enable_x64(True):
        return derivatives(step, params_of(), batch_of(), loss is straight_through)


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-9) -> None:
    pairs = zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    for (path, x), y in pairs:
        np.testing.assert_allclose(x, y, tolerance, tolerance, err_msg=jax.tree_util.keystr(path))


def sharded(step: Step, trains: bool, mesh: Any, **options: Any) -> Any:
    if trains:
        return jzero.shard_train_step(step, mesh=mesh, **grouped(min_shard_bytes=0, **options))
    like = jzero.shard_train_step(
        train_step_of(step), mesh=mesh, axes=jzero.Axes(min_shard_bytes=0)
    )
    return jzero.shard_eval_step(step, like=like, **grouped(**options))


@pytest.mark.slow(but=["solve-eval-8", "checkpointed_scan-eval-1"])
@pytest.mark.parametrize("num", [1, 8])
@pytest.mark.parametrize("trains", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("loss", LOSSES)
def test_equal_those_of_the_plain_step(loss, trains, num):
    step = sharded(train_step_of(loss) if trains else loss, trains, small.auto_mesh(data=num))
    state = step.shard(params_of())
    assert isinstance(state["a"], jzero.LeafArray) == (num > 2)
    take = jax.jit(lambda w, x: derivatives(step, w, x, loss is straight_through))
    found = take(state, batch_of())
    assert_close(found, plain(loss, trains))


def test_gradients_lie_as_what_they_are_of():
    mesh = small.auto_mesh(data=8)

    def loss(w, x):
        return jnp.sum(jnp.max(x @ w, axis=0) ** 2)

    w, x = jnp.ones((16, 8)).at[3].set(2), jnp.outer(batch_of()[:, 0], jnp.arange(16.0))
    step = sharded(loss, False, mesh)
    state = step.shard(w)
    rows = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
    alone = jax.device_put(x, jax.devices()[1])
    pinned = jax.device_put(w, state.sharding.with_memory_kind("pinned_host"))
    for given in ((state, rows), (state, alone), (pinned, rows)):
        found = jax.grad(lambda w, x: step(w, x), (0, 1))(*given)
        assert_close(jax.device_get(found), jax.grad(loss, (0, 1))(w, x))
        for gradient, value in zip(found, given, strict=True):
            assert gradient.sharding.is_equivalent_to(value.sharding, 2)


# What a step closes over is differentiated, too.
@pytest.mark.slow
def test_what_a_step_closes_over():
    mesh, w, x = small.auto_mesh(data=8), params_of(), batch_of()

    def made(scale, shard):
        def loss(w, x):
            h = jax.jit(lambda x: jnp.sin(scale) * x)(x)
            return straight_through(w, h) + jnp.sum(jnp.max(h @ w["a"], axis=0))

        return sharded(loss, False, mesh) if shard else loss

    uses = [
        lambda scale, shard: made(scale, shard)(w, x),
        lambda scale, shard: made(scale, shard)(w, scale * x),
        lambda scale, shard: jax.lax.scan(
            lambda c, _: (made(c, shard)(w, x * c) / 100, None), scale, None, length=2
        )[0],
    ]
    for use in uses:
        expected = jax.grad(use)(2.0, False)
        for take in (
            jax.grad(lambda scale: use(scale, True)),  # noqa: B023
            jax.jit(jax.grad(lambda scale: use(scale, True))),  # noqa: B023
            jax.grad(jax.jit(lambda scale: use(scale, True))),  # noqa: B023
        ):
            assert_close(take(2.0), expected)


def test_effects_and_callbacks():
    seen: list[Any] = []

    def loss(w, x):
        jax.debug.callback(lambda value: seen.append(value), jnp.sum(x))
        return max_over_rows(w, x)

    step, w, x = sharded(loss, False, small.auto_mesh(data=2)), params_of(), batch_of()
    assert_close(jax.grad(step, (0, 1))(w, x), jax.grad(max_over_rows, (0, 1))(w, x))
    jax.effects_barrier()
    assert seen


@pytest.mark.slow
def test_refused():
    w, x = params_of(), batch_of()
    hosted = small.shard_train_step(
        train_step_of(max_over_rows), mesh=small.auto_mesh(data=2), memory=jzero.HostCPU()
    )
    with pytest.raises(jzero.OptionError, match="jax.jit, or differentiated.* of jax.grad"):
        jax.grad(lambda x: hosted(w, x)[1]["loss"])(x)
    written = jzero.shard_eval_step(
        lambda w, x: jax.lax.pmean(x @ w["a"], "data"), mesh=small.auto_mesh(data=2)
    )
    for take in (jax.grad, lambda fn: jax.jit(jax.grad(fn)), lambda fn: jax.grad(jax.jit(fn))):
        with pytest.raises(jzero.StepError, match="shard_eval_step: .* collectives of its own"):
            take(lambda x: total(written(w, x)))(x)
    coded_step = jzero.shard_eval_step(
        lambda w, x: x @ w,
        mesh=small.auto_mesh(data=2),
        weight_dtype=jnp.int8,
        axes="data",
    )
    x = jnp.ones((8, 256), jnp.float32)
    coded = coded_step.shard(jnp.ones((256, 256), jnp.float32), x)
    for step in (
        coded_step,
        jzero.shard_eval_step(lambda w, x: x @ w, mesh=small.auto_mesh(data=2)),
    ):
        with pytest.raises(jzero.OptionError, match="state quantized .* or differentiated"):
            jax.grad(lambda x: total(step(coded, x)))(x)  # noqa: B023
    forward = sharded(straight_through, False, small.auto_mesh(data=2))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: forward(w, x), (batch_of(),), (batch_of(),))
