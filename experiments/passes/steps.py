"""The train steps of `experiments/rivals` with every collective written, by hand or by the partitioner."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from experiments.passes import explicit
from experiments.rivals import zoo
from jzero.ir._layout import from_spec
from jzero.ir._starts import in_bounds
from jzero.sharding.partition._partition import DeviceInput, partition
from jzero.tracing import _rewrite, _traces

ADAM = optax.adamw(1e-4)  # the second half of `models.training.tx`


@dataclasses.dataclass(frozen=True)
class Step:
    """A step and what it is lowered with.

    Attributes:
      program: of one device, on the leaves of the state and of the batch.
      arguments: types of whole leaves.
      num_state: how many of them are the state's, which is donated.
    """

    program: explicit.Program
    arguments: list[Any]
    num_state: int

    def lower(self, program: explicit.Program) -> jax.stages.Lowered:
        donated = tuple(range(self.num_state))
        lowered: jax.stages.Lowered = program.run(donate_argnums=donated).lower(*self.arguments)
        return lowered


def explicit_step(model: Any, mesh: Mesh, given: zoo.Rival) -> Step:
    """The step of a model of the zoo; its state rests as jzero would have it."""
    state, batch = given.state, given.batch
    shardings = given.step.state_shardings(state, batch)
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    devices = mesh.size
    hooks = explicit.Explicit(_shard_dims(state["params"], specs["params"], devices))
    loss_of = dataclasses.replace(model, annotate=hooks).loss
    sharded = jax.tree.map(lambda spec: any(spec), specs["params"], is_leaf=_is_spec)

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        # A vector by itself is no layer's: models leave it to XLA.
        whole = lambda w: hooks.weights(w) if w.ndim == 1 else w  # noqa: E731
        return loss_of(jax.tree.map(whole, params), batch)

    def step(*leaves: jax.Array) -> Any:
        here = jax.tree.unflatten(tree, leaves[:-1])
        loss, grads = jax.value_and_grad(loss_fn)(here["params"], leaves[-1])
        grads = _clipped(_mean(grads, sharded, devices), sharded)
        clip, adam = here["opt_state"]
        updates, adam = ADAM.update(grads, adam, here["params"])
        params = optax.apply_updates(here["params"], updates)
        return {"params": params, "opt_state": (clip, adam)}, lax.psum(
            loss, explicit.AXIS
        ) / devices

    tree = jax.tree.structure(state)
    leaf_specs = jax.tree.leaves(specs, is_leaf=_is_spec)
    arguments = [*jax.tree.leaves(state), batch]
    program = explicit.program(
        step, arguments, mesh, [*leaf_specs, P(explicit.AXIS)], [*leaf_specs, P()]
    )
    return Step(program, arguments, len(leaf_specs))


def partitioned_step(model: Any, mesh: Mesh, given: zoo.Rival) -> Step:
    """The same, with the collectives that the partitioner writes."""
    leaves, tree = jax.tree.flatten((given.state, given.batch))
    shardings = jax.tree.leaves(given.step.state_shardings(given.state, given.batch))
    specs = [*(sharding.spec for sharding in shardings), P(explicit.AXIS)]
    layouts = [
        from_spec(leaf.shape, dict(mesh.shape), spec)
        for leaf, spec in zip(leaves, specs, strict=True)
    ]

    def step(*leaves: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(model.step(*jax.tree.unflatten(tree, leaves)))

    traced = _traces.trace_whole(step, leaves, {})
    flat, consts = _rewrite.flatten_calls(in_bounds(traced.jaxpr), traced.consts)
    ins = [
        *map(DeviceInput, layouts[:-1]),
        DeviceInput(layouts[-1], rows=frozenset({explicit.AXIS})),
    ]
    made = partition(flat, consts, dict(mesh.shape), ins, [*layouts[:-1], None])
    assert not made.consts, "constants have no place among the arguments"
    program = explicit.Program(made.jaxpr, mesh, tuple(specs), [*specs[:-1], P()])
    return Step(program, leaves, len(leaves) - 1)


PROGRAMS = {"by hand": explicit_step, "partitioned": partitioned_step}


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def _shard_dims(params: Any, specs: Any, devices: int) -> dict[tuple[int, ...], int]:
    """Along which dim a parameter is sharded, by its shape on one device; of a slice of a stack, too."""
    found: dict[tuple[int, ...], int] = {}
    leaves = zip(jax.tree.leaves(params), jax.tree.leaves(specs, is_leaf=_is_spec), strict=True)
    for leaf, spec in leaves:
        dims = [dim for dim, axes in enumerate(spec) if axes]
        if dims:
            (dim,) = dims
            shape = tuple(n // devices if d == dim else n for d, n in enumerate(leaf.shape))
            for sizes, at in ((shape, dim), (shape[1:], dim - 1)):
                assert at < 0 or found.setdefault(sizes, at) == at, f"two dims of {sizes}"
    return found


def _mean(grads: Any, sharded: Any, devices: int) -> Any:
    def mean(grad: jax.Array, is_sharded: bool) -> jax.Array:
        return (grad if is_sharded else lax.psum(grad, explicit.AXIS)) / devices

    return jax.tree.map(mean, grads, sharded)


def _clipped(grads: Any, sharded: Any) -> Any:
    """`optax.clip_by_global_norm(1.0)` of gradients in shards."""
    squares = jax.tree.map(lambda g: jnp.sum(g.astype(jnp.float32) ** 2), grads)
    parts = list(zip(jax.tree.leaves(squares), jax.tree.leaves(sharded), strict=True))
    zero = jnp.float32(0)
    total = lax.psum(sum((x for x, here in parts if here), zero), explicit.AXIS)
    norm = jnp.sqrt(total + sum((x for x, here in parts if not here), zero))
    return jax.tree.map(lambda g: jnp.where(norm < 1, g, g / norm.astype(g.dtype)), grads)
