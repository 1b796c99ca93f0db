"""Passes that say how values travel between devices: the same, to the bit, as a step that says so by hand."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import engines
import small
import test_passes as by_hand
from experiments.passes import explicit
from jzero.segments import _partitioned
from jzero.sharding.passes._reduce_dtype import reduce_dtype
from jzero.tracing import _jaxpr


@dataclasses.dataclass(frozen=True)
class Wire:
    """How values travel: weights are gathered, and gradients reduced."""

    dtype: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class ByHand(explicit.Explicit):
    """Weights are gathered, and their gradients reduced, as a wire has it."""

    wire: Wire = Wire()

    def _gathered(self, w: jax.Array, dtype: Any) -> jax.Array:
        dim = self.shards.get(w.shape)
        return w if dim is None else gathered(self.wire, dim, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gathered(wire: Wire, dim: int, w: jax.Array) -> jax.Array:
    whole: jax.Array = lax.all_gather(w, explicit.AXIS, axis=dim, tiled=True)
    return whole


def scattered(wire: Wire, dim: int, g: jax.Array) -> jax.Array:
    x = g if wire.dtype is None else g.astype(wire.dtype)
    shard = lax.psum_scatter(x, explicit.AXIS, scatter_dimension=dim, tiled=True)
    return shard.astype(g.dtype)


gathered.defvjp(
    lambda wire, dim, w: (gathered(wire, dim, w), None),
    lambda wire, dim, _, g: (scattered(wire, dim, g),),
)


def step(wire: Wire, remat: bool, loops: int, params: Any, x: jax.Array) -> Any:
    weights = ByHand(by_hand.SHARDS, wire).weights
    loss = functools.partial(by_hand.loss_of, gather=weights, remat=remat, loops=loops)
    value, grads = jax.value_and_grad(loss)(params, x)
    grads["layers"]["scale"] = lax.psum(grads["layers"]["scale"], explicit.AXIS)
    new = jax.tree.map(lambda p, g: p - 0.1 * g / by_hand.NUM, params, grads)
    return new, explicit.mean(value)


@functools.cache
def program(wire: Wire = Wire(), remat: bool = True, loops: int = 1) -> explicit.Program:
    tree = jax.tree.structure(by_hand.SPECS, is_leaf=lambda x: isinstance(x, P))

    def run(*args):
        return step(wire, remat, loops, jax.tree.unflatten(tree, args[:-1]), args[-1])

    ins = [*by_hand.LEAVES, P(explicit.AXIS)]
    return explicit.program(run, by_hand.arguments(), by_hand.MESH, ins, [*by_hand.LEAVES, P()])


ROWS = [frozenset[str]()] * len(by_hand.LEAVES) + [frozenset([explicit.AXIS])]


def assert_equal(found: explicit.Program, wanted: explicit.Program) -> None:
    for x, y in zip(by_hand.outputs(found), by_hand.outputs(wanted), strict=True):
        np.testing.assert_array_equal(x, y)


def dtypes(jaxpr: Any, name: str) -> list[str]:
    """Of what each equation of this primitive reads, those in loops, too."""
    found = []
    for eqn in jaxpr.eqns:
        found += [str(eqn.invars[0].aval.dtype)] * (eqn.primitive.name == name)
        for inner in _jaxpr.inner_jaxprs(eqn):
            found += dtypes(_jaxpr.open_jaxpr(inner)[0], name)
    return found


FORMS = [(remat, loops) for remat in (False, True) for loops in (0, 1, 2)]
forms = pytest.mark.parametrize(("remat", "loops"), FORMS)


@forms
def test_gradients_are_reduced_in_another_dtype(remat, loops):
    plain, wanted = program(Wire(), remat, loops), program(Wire(jnp.bfloat16), remat, loops)
    found = plain.through(lambda jaxpr: reduce_dtype(jaxpr, jnp.bfloat16, ROWS))
    assert {*dtypes(found.jaxpr, "reduce_scatter")} == {"bfloat16"}
    # That of the scales of layers, which nothing scatters, and that of the loss.
    assert dtypes(found.jaxpr, "psum") == ["bfloat16", "float32"]
    assert dtypes(wanted.jaxpr, "psum") == ["float32", "float32"]
    scales = [str(path) for path, _ in jax.tree.leaves_with_path(by_hand.make_params())]
    place = next(i for i, path in enumerate(scales) if "scale" in path)
    pairs = zip(by_hand.outputs(found), by_hand.outputs(wanted), strict=True)
    for i, (x, y) in enumerate(pairs):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-3 if i == place else 0)
    again = found.through(lambda jaxpr: reduce_dtype(jaxpr, jnp.bfloat16, ROWS))
    assert again.jaxpr is found.jaxpr
    assert plain.through(lambda jaxpr: reduce_dtype(jaxpr, jnp.float32, ROWS)).jaxpr is plain.jaxpr


# -- by the partitioner ------------------------------------------------------------------------------------


@pytest.fixture
def partitions(monkeypatch):
    monkeypatch.setenv(_partitioned.SWITCH, "1")
    with jax.numpy_rank_promotion("allow"):
        yield


def mesh(**sizes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes))


MESHES = [{"data": 8}, {"node": 2, "local": 4}]
meshes = pytest.mark.parametrize("axes", MESHES, ids=str)


def by_both(step, monkeypatch, state, batch, num=2, **options):
    """What the partitioner and the interpreter train, and the former's step."""
    found = []
    for on in "10":
        monkeypatch.setenv(_partitioned.SWITCH, on)
        train_step = small.shard_train_step(step, **options)
        new = state
        for _ in range(num):
            new, _ = train_step(new, batch)
        found.append([*map(np.asarray, jax.tree.leaves(train_step.unshard(new)))])
        if on == "1":
            assert engines.why_not(train_step) == []
            partitioned = train_step
    monkeypatch.setenv(_partitioned.SWITCH, "1")
    return *found, partitioned


def mlp(params, x):
    grads = jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2))(params)
    return jax.tree.map(lambda w, g: w - g, params, grads), jnp.sum(x)


def mlp_arguments(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (16, 32), (32, 24), (16, 16)
    a, b, x = (jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True))
    return {"a": a, "b": b}, x


@meshes
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_both_engines_reduce_in_another_dtype_to_the_bit(axes, stage, partitions, monkeypatch):
    options = dict(mesh=mesh(**axes), stage=stage, reduce_dtype=jnp.bfloat16)
    found, wanted, train_step = by_both(mlp, monkeypatch, *mlp_arguments(), 1, **options)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(x, y)
    text = str(train_step.program(*mlp_arguments(), after="reduce_dtype"))
    assert "bf16" in text
    assert "bf16" not in str(train_step.program(*mlp_arguments(), after="inputs_first"))
