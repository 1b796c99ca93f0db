"""Passes on one device's explicit program: the same to the bit, in another order that the jaxpr shows."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.passes import explicit
from jzero.sharding.passes._after_loops import after_loops
from jzero.sharding.passes._inputs_first import inputs_first
from jzero.sharding.passes._order import order
from jzero.sharding.passes._prefetch import prefetch

NUM, LAYERS, WIDTH, ROWS, VOCAB = 8, 5, 16, 2, 64
UP, DOWN = 4 * WIDTH * 2 * WIDTH, 4 * WIDTH * 2 * WIDTH  # bytes of a layer's two matrices


def layer(gather: Any, x: jax.Array, w: Any) -> jax.Array:
    w = gather(w)
    return x + jnp.tanh(x * w["scale"][None] @ w["up"]) @ w["down"]


def loss_of(params: Any, x: jax.Array, gather: Any, remat: bool, scanned: bool) -> jax.Array:
    block: Callable[..., jax.Array] = functools.partial(layer, gather)
    if remat:
        block = jax.checkpoint(block, prevent_cse=not scanned)
    x = x @ gather(params["embed"])
    if scanned:
        x, _ = lax.scan(lambda x, w: (block(x, w), None), x, params["layers"])
    else:
        for i in range(LAYERS):
            x = block(x, jax.tree.map(lambda w, i=i: w[i], params["layers"]))
    return jnp.mean((x @ gather(params["head"])) ** 2)


SHARDS: dict[tuple[int, ...], int] = {
    (VOCAB // NUM, WIDTH): 0, (WIDTH // NUM, VOCAB): 0,
    (WIDTH // NUM, 2 * WIDTH): 0, (2 * WIDTH, WIDTH // NUM): 1,
}  # fmt: skip


def make_params(key: int = 0) -> Any:
    keys = iter(jax.random.split(jax.random.key(key), 5))
    normal = lambda *shape: jax.random.normal(next(keys), shape) / 4  # noqa: E731
    layers = {"up": normal(LAYERS, WIDTH, 2 * WIDTH), "down": normal(LAYERS, 2 * WIDTH, WIDTH)}
    layers["scale"] = 1 + normal(LAYERS, WIDTH)
    return {"embed": normal(VOCAB, WIDTH), "layers": layers, "head": normal(WIDTH, VOCAB)}


SPECS = {
    "embed": P("data"), "head": P("data"),
    "layers": {"up": P(None, "data"), "down": P(None, None, "data"), "scale": P()},
}  # fmt: skip


def step(remat: bool, scanned: bool, params: Any, x: jax.Array) -> Any:
    hooks = explicit.Explicit(SHARDS, NUM)
    loss = functools.partial(loss_of, gather=hooks.weights, remat=remat, scanned=scanned)
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g / NUM, params, grads), explicit.mean(value)


MESH = jax.make_mesh((NUM,), (explicit.AXIS,), (jax.sharding.AxisType.Auto,))
LEAVES = jax.tree.leaves(SPECS, is_leaf=lambda x: isinstance(x, P))


def arguments() -> list[jax.Array]:
    x = jax.random.normal(jax.random.key(1), (NUM * ROWS, VOCAB))
    return [*jax.tree.leaves(make_params()), x]


@functools.cache
def program(remat: bool = True, scanned: bool = True) -> explicit.Program:
    tree = jax.tree.structure(SPECS, is_leaf=lambda x: isinstance(x, P))
    run = lambda *args: step(remat, scanned, jax.tree.unflatten(tree, args[:-1]), args[-1])  # noqa: E731
    return explicit.program(run, arguments(), MESH, [*LEAVES, P(explicit.AXIS)], [*LEAVES, P()])


def outputs(made: explicit.Program) -> list[np.ndarray[Any, Any]]:
    return [*map(np.asarray, made.run()(*arguments()))]


FORMS = [(False, True), (True, True), (False, False), (True, False)]
forms = pytest.mark.parametrize(("remat", "scanned"), FORMS)
Pass = Callable[[Any], Any]
PASSES: dict[str, Pass] = {
    "prefetch": lambda jaxpr: prefetch(jaxpr, 2**28),
    "prefetch one matrix": lambda jaxpr: prefetch(jaxpr, UP),
    "prefetch 1": lambda jaxpr: prefetch(jaxpr, 1),
    "prefetch 0": lambda jaxpr: prefetch(jaxpr, 0),
    "order": lambda jaxpr: order(jaxpr, UP),
    "order 0": lambda jaxpr: order(jaxpr, 0),
    "after_loops": after_loops,
    "inputs_first": lambda jaxpr: inputs_first(jaxpr, UP),
}
ALL: list[Pass] = [
    PASSES["inputs_first"], PASSES["prefetch one matrix"], PASSES["order 0"], after_loops,
]  # fmt: skip


@forms
def test_all_passes_change_no_bit(remat: bool, scanned: bool):
    plain = program(remat, scanned)
    for was, now in zip(outputs(plain), outputs(plain.through(*ALL)), strict=True):
        np.testing.assert_array_equal(was, now)


@forms
@pytest.mark.parametrize("name", PASSES)
def test_a_pass_changes_no_bit(name: str, remat: bool, scanned: bool):
    plain = program(remat, scanned)
    for was, now in zip(outputs(plain), outputs(plain.through(PASSES[name])), strict=True):
        np.testing.assert_array_equal(was, now)


@forms
@pytest.mark.parametrize("name", PASSES)
def test_a_pass_is_idempotent(name: str, remat: bool, scanned: bool):
    once = program(remat, scanned).through(PASSES[name])
    assert str(once.through(PASSES[name]).jaxpr) == str(once.jaxpr)


@forms
def test_all_passes_are_idempotent_together(remat: bool, scanned: bool):
    once = program(remat, scanned).through(*ALL)
    assert str(once.through(*ALL).jaxpr) == str(once.jaxpr)
