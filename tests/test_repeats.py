"""A call like the one before takes a short way; what is unlike it takes the long one, to the same result."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
import small
import zoo
from jzero._placement import Placement

X = np.linspace(-1.0, 1.0, 16 * 53, dtype=np.float32).reshape(16, 53)


def step(state: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    def loss_fn(params: Any) -> jax.Array:
        return jnp.mean((x @ params["table"] @ params["w"][:7]) ** 2)

    params = {name: state[name] for name in ("table", "w")}
    loss, grads = jax.value_and_grad(loss_fn)(params)
    noise = 1e-3 * jax.random.normal(state["key"], params["w"].shape)
    new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    key = jax.random.fold_in(state["key"], 1)
    return {**new, "w": new["w"] + noise, "count": state["count"] + 1, "key": key}, loss


def make_state() -> dict[str, Any]:
    w, table = jnp.full((8, 8), 0.1), jnp.linspace(-1.0, 1.0, 53 * 7).reshape(53, 7)
    return {"w": w, "table": table, "count": jnp.zeros((), jnp.int32), "key": jax.random.key(3)}


def make_step() -> Any:
    return small.shard_train_step(step, stage=3, mesh=small.mesh(data=8))


def trained(train_step: Any, num_steps: int = 3) -> Any:
    """A state for which the next call is a repeated one."""
    state = make_state()
    for _ in range(num_steps):
        state, _ = train_step(state, X)
    return state


def values(tree: Any) -> Any:
    """All leaves as NumPy arrays, keys as their bits."""

    def value(x: Any) -> np.ndarray:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(value, tree)


@pytest.fixture
def long_ways(monkeypatch) -> list[Any]:
    """The calls that were looked up and placed leaf by leaf."""
    calls: list[Any] = []
    ready = Placement.ready

    def counted(*args: Any) -> Any:
        calls.append(args)
        return ready(*args)

    monkeypatch.setattr(Placement, "ready", counted)
    return calls


@pytest.mark.slow
def test_from_the_third_call_on_nothing_is_looked_up(long_ways):
    train_step = make_step()
    state = trained(train_step, 2)
    assert isinstance(state["table"], jzero.LeafArray)
    assert len(long_ways) == 2
    for x in (X, X + 1, jax.device_put(X), X):
        long_ways.clear()
        state, _ = train_step(state, x)
        state, _ = train_step(state, x)
        assert len(long_ways) <= 1  # where the batch is of another type than before
    zoo.assert_trees_close(
        {name: values(state)[name] for name in ("count", "key")},
        {"count": np.int32(10), "key": values(trained(make_step(), 10))["key"]},
        zoo.FP32, "state",
    )  # fmt: skip


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a NumPy array": lambda s: s | {"w": np.asarray(s["w"])},
    "on one device": lambda s: s | {"w": jax.device_put(np.asarray(s["w"]), jax.devices()[1])},
    "whole": lambda s: s | {"w": jax.device_put(s["w"], jax.NamedSharding(s["w"].sharding.mesh, jax.P()))},
    "along another dim": lambda s: s | {
        "w": jax.device_put(s["w"], jax.NamedSharding(s["w"].sharding.mesh, jax.P(None, "data")))},
    "without padding": lambda s: s | {"table": jnp.asarray(s["table"])},
    "a Python number": lambda s: s | {"count": int(s["count"])},
    "of another dtype": lambda s: s | {"count": s["count"].astype(jnp.float32)},
    "of another shape": lambda s: s | {"w": jnp.tile(s["w"], (1, 2))},
    "old keys": lambda s: s | {"key": jax.random.key_data(s["key"])},
    "another implementation's key": lambda s: s | {"key": jax.random.key(0, impl="rbg")},
}  # fmt: skip


@pytest.fixture(scope="module")
def train_step():
    return make_step()


@pytest.mark.slow(but=["whole", "along another dim", "without padding"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_unlike_the_call_before(change, train_step):
    state = CHANGES[change](trained(train_step))
    expected = jax.jit(step)(on_one_device(state), X)
    for _ in range(2):
        state, loss = train_step(state, X)
        zoo.assert_trees_close(
            (values(state), values(loss)), (values(expected[0]), values(expected[1])),
            zoo.FP32, change,
        )  # fmt: skip
        expected = jax.jit(step)(expected[0], X)


def on_one_device(state: Any) -> Any:
    """The same state, types of numbers and keys as they are."""

    def moved(x: Any) -> Any:
        if isinstance(x, int):
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(values(x), impl=jax.random.key_impl(x))
        return np.asarray(x)

    return {name: moved(x) for name, x in state.items()}


def test_leaves_padded_to_one_shape_are_unlike():
    """Of 5 rows and of 7, which four devices hold as 8: means are of the true ones."""

    def decay(w, x):
        return w - x * jax.grad(lambda w: jnp.mean(w**2))(w)

    train_step = small.shard_train_step(decay, mesh=small.mesh(data=4))
    found = {rows: jnp.ones((rows, 1)) for rows in (5, 7)}
    for i in range(3):
        for rows, w in found.items():
            found[rows] = train_step(w, 0.5)
            expected = np.full((rows, 1), (1 - 1 / rows) ** (i + 1))
            np.testing.assert_allclose(found[rows], expected, rtol=1e-6)


@pytest.mark.slow
def test_arguments_by_name_and_position_are_one_call(long_ways):
    train_step = make_step()
    state = trained(train_step)
    long_ways.clear()
    state, _ = train_step(x=X, state=state)
    state, _ = train_step(state, x=X)
    assert not long_ways
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        train_step(state)
    with pytest.raises(TypeError, match="too many positional arguments"):
        train_step(state, X, X)
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        train_step(state, X, y=X)
