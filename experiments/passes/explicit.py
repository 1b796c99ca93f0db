"""Steps as one device runs them, with every collective written: what the passes are given."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.rivals.annotations import Unannotated
from jzero.ir._writer import JaxprWriter
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Jaxpr

AXIS = "data"


@dataclasses.dataclass(frozen=True, eq=False)
class Explicit(Unannotated):
    """Weights are gathered in the layer, and their gradients reduced there; a loss is one device's.

    Attributes:
      shards: along which dim a parameter is sharded, by its shape on one device; else it is whole.
    """

    shards: Mapping[tuple[int, ...], int]

    def weights(self, params: Any, dtype: Any = None) -> Any:
        return jax.tree.map(lambda w: self._gathered(w, dtype), params)

    def _gathered(self, w: jax.Array, dtype: Any) -> jax.Array:
        if dtype is not None and w.ndim > 1:
            w = w.astype(dtype)
        dim = self.shards.get(w.shape)
        return w if dim is None else _gather(dim, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(dim: int, w: jax.Array) -> jax.Array:
    whole: jax.Array = lax.all_gather(w, AXIS, axis=dim, tiled=True)
    return whole


def _scattered(dim: int, g: jax.Array) -> jax.Array:
    shard = lax.psum_scatter(g, AXIS, scatter_dimension=dim, tiled=True)
    laid_out: jax.Array = with_layout_constraint(shard, Layout(tuple(range(g.ndim))))
    return laid_out


_gather.defvjp(lambda dim, w: (_gather(dim, w), None), lambda dim, _, g: (_scattered(dim, g),))


@dataclasses.dataclass(frozen=True)
class Program:
    """One device's program.

    Attributes:
      jaxpr: with every call opened, and no constants.
      mesh: on which it runs.
      in_specs, out_specs: of its arguments and results.
      consts: values of its `constvars`.
    """

    jaxpr: Jaxpr
    mesh: Mesh
    in_specs: tuple[P, ...]
    out_specs: list[P]
    consts: Sequence[Any] = ()

    def through(self, *passes: Callable[[Jaxpr], Jaxpr]) -> "Program":
        """The program after these."""
        jaxpr = self.jaxpr
        for each in passes:
            jaxpr = each(jaxpr)
        return dataclasses.replace(self, jaxpr=jaxpr)

    def run(self, **options: Any) -> Any:
        """The function of whole arrays, compiled by `jax.jit`."""
        mapped = jax.shard_map(
            lambda *args: _jaxpr.evaluate(self.jaxpr, self.consts, *args),
            mesh=self.mesh, in_specs=self.in_specs, out_specs=self.out_specs, check_vma=False,
        )  # fmt: skip
        ins, outs = (
            [NamedSharding(self.mesh, spec) for spec in specs]
            for specs in (self.in_specs, self.out_specs)
        )
        return jax.jit(mapped, in_shardings=tuple(ins), out_shardings=outs, **options)


def program(
    fn: Callable[..., Any], args: Sequence[Any], mesh: Mesh, in_specs: Sequence[P],
    out_specs: Sequence[P],
) -> Program:  # fmt: skip
    """What a function of one device's parts does; `args` are types of whole arrays."""
    mapped = jax.shard_map(
        lambda *args: jax.tree.leaves(fn(*args)),
        mesh=mesh, in_specs=tuple(in_specs), out_specs=[*out_specs], check_vma=False,
    )  # fmt: skip
    outer, _ = _jaxpr.open_jaxpr(jax.make_jaxpr(mapped)(*args))
    (eqn,) = outer.eqns
    assert eqn.invars == outer.invars, "constants have no place among the arguments"
    inner, _ = _jaxpr.open_jaxpr(eqn.params["jaxpr"])
    return Program(opened(inner), mesh, tuple(in_specs), [*out_specs])


def opened(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with the equations of its calls; of a checkpoint that is to stay apart, behind a barrier."""
    flat, consts = _rewrite.flatten_calls(jaxpr, [], lambda eqn: not _jaxpr.prevents_cse(eqn))
    assert not consts, "constants have no place among the arguments"
    if not flat.eqns:
        return jaxpr
    writer = JaxprWriter(flat.eqns[0])
    for eqn in flat.eqns:
        if not _jaxpr.is_rematted(eqn):
            writer.source = eqn
            writer.clone(_jaxpr.with_inner(eqn, opened), outs=eqn.outvars)
            continue
        writer.source = eqn
        ins = [*map(writer.read, eqn.invars)]
        fresh = writer.add(lax.optimization_barrier_p, ins, [*map(_jaxpr.new_var, ins)])
        body, _ = _jaxpr.open_jaxpr(eqn.params["jaxpr"])
        inner = opened(body)
        here = [_jaxpr.within_scope(e, outer=eqn) for e in inner.eqns]
        outs = writer.write(_jaxpr.replaced(inner, eqns=here), [], fresh)
        writer.names |= zip(eqn.outvars, outs, strict=True)
    outvars = [*map(writer.read, flat.outvars)]
    return _jaxpr.replaced(jaxpr, constvars=[], eqns=writer.eqns, outvars=outvars)


def mean(x: jax.Array) -> jax.Array:
    """Of all devices."""
    return lax.psum(x, AXIS) / lax.axis_size(AXIS)
