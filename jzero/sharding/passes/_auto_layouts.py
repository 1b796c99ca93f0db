# SPDX-License-Identifier: Apache-2.0
"""How XLA shards the values of a program over Auto axes, guessed from leaves and constraints.

A wrong guess costs traffic, and no more: it says only by which parts a value is moved.

[Note: parts]
A value that XLA shards is split into its shards, as dims of their own before all others: `[n, d]` in two
parts along d is `[2, n, d/2]`. What is made of each part alone, as quantized rows `[2, bytes]` are, is then
moved part by part, and no device needs another one's part.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jzero.ir import _dataflow, _rules
from jzero.ir._factors import FactorDims
from jzero.ir._layout import AxisCut, Dim, Layout
from jzero.ir._regions import Edge, EdgeKind, Region, ValueIn
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn

# For each dim, the axes over which XLA shards it; trailing dims may be missing.
AutoSpec: TypeAlias = tuple[tuple[str, ...], ...]
# How XLA shards the operand of an equation that moves it; () if it does not, or that is unknown.
SpecOf: TypeAlias = Callable[[Region, Eqn], AutoSpec]
# For each dim, the axes over which XLA may shard it: what several operands say, or readers. Trailing dims may
# be missing.
_Claims: TypeAlias = tuple[frozenset[tuple[str, ...]], ...]
_NONE: frozenset[tuple[str, ...]] = frozenset()
SUMS = frozenset({"psum", "reduce_scatter"})
# The dims of a collective that devices share: those of two axes would interleave there.
SHARED = {
    "all_gather": ("all_gather_dimension",),
    "reduce_scatter": ("scatter_dimension",),
    "all_to_all": ("split_axis", "concat_axis"),
}
_SCOPE = re.compile(r"jzero\.parts\[(.*)\]")


class AutoParts(NamedTuple):
    """The parts of a value, [Note: parts]."""

    cuts: tuple[tuple[int, int], ...] = ()  # the dims that are cut, and into how many parts each
    # For each of these, the mesh axes over which the parts are.
    axes: tuple[tuple[str, ...], ...] = ()

    def mark(self, eqn: Eqn) -> Eqn:
        """The equation, with a scope that names the axes that cut its operand's first dims."""
        said = "|".join(map(",".join, self.axes))
        return _jaxpr.within_scope(eqn, f"jzero.parts[{said}]") if self.cuts else eqn

    def split(self, x: jax.Array) -> jax.Array:
        """`[n, d]` as `[q, n, d/q]`, if d is cut into q parts."""
        nums, shape, places = dict(self.cuts), list[int](), list[int]()
        for d, size in enumerate(x.shape):
            if d in nums:
                places.append(len(shape))
                shape.append(nums[d])
            shape.append(size // nums.get(d, 1))
        return jnp.moveaxis(x.reshape(shape), places, range(len(places)))

    def join(self, x: jax.Array) -> jax.Array:
        nums, first = dict(self.cuts), len(self.cuts)
        shape = [size * nums.get(d, 1) for d, size in enumerate(x.shape[first:])]
        places = [d + i for i, (d, _) in enumerate(self.cuts)]
        return jnp.moveaxis(x, range(first), places).reshape(shape)


class AutoLayouts(NamedTuple):
    """How XLA shards what a program takes and returns."""

    sizes: Mapping[str, int] = {}  # of its axes; no axes, no shards
    ins: Mapping[int, AutoSpec] = {}  # for arguments, by number
    outs: Mapping[int, AutoSpec] = {}  # and for results

    def of(self, program: Region) -> SpecOf:
        if not self.sizes:
            return lambda region, eqn: ()
        made = _claims(program, self.sizes, program.jaxpr.invars, self.ins, False)
        read = _claims(program, self.sizes, program.jaxpr.outvars, self.outs, True)

        def spec_of(region: Region, eqn: Eqn) -> AutoSpec:
            for mark in filter(None, map(_SCOPE.fullmatch, _jaxpr.scopes(eqn))):
                return tuple(tuple(dim.split(",")) for dim in mark.group(1).split("|"))
            (x,) = eqn.invars
            # What is reduced goes to where its readers are; what is gathered comes from where it is stored.
            order = (read, made) if eqn.primitive.name in SUMS else (made, read)
            known = () if _jaxpr.is_literal(x) else (found.get((region, x), ()) for found in order)
            return _spec(eqn, next(filter(any, known), ()), self.sizes)

        return spec_of

    def parts_of(self, spec: AutoSpec) -> AutoParts:
        cuts = (
            (d, math.prod(self.sizes[a] for a in names)) for d, names in enumerate(spec) if names
        )
        return AutoParts(tuple(cuts), tuple(filter(None, spec)))


NO_SPECS = AutoLayouts()


def _spec(eqn: Eqn, claims: _Claims, sizes: Mapping[str, int]) -> AutoSpec:
    """The operand's sharding: replicated where claims differ, and along dims of the collective."""
    params, found, used = eqn.params, list[tuple[str, ...]](), set[str]()
    tiled = eqn.primitive.name != "all_gather" or params["tiled"]
    shared = [params[name] for name in SHARED.get(eqn.primitive.name, ())] if tiled else []
    for d, claim in enumerate(claims):
        (names,) = claim if len(claim) == 1 else ((),)
        parts = math.prod(sizes[axis] for axis in names)
        free = d not in shared and used.isdisjoint(names)
        names = names if free and eqn.invars[0].aval.shape[d] % parts == 0 else ()
        used |= {*names}
        found.append(names)
    return tuple(found) if used else ()


def _claims(
    program: Region,
    sizes: Mapping[str, int],
    ends: Sequence[Atom],
    known: Mapping[int, AutoSpec],
    backward: bool,
) -> Mapping[ValueIn, _Claims]:
    """The claims on each value by the values that it is made of, or (backward) by its readers."""
    start = dict[ValueIn, _Claims]()
    for i, spec in known.items():
        if not _jaxpr.is_literal(atom := ends[i]) and any(spec):
            claims = tuple(frozenset([dim]) if dim else _NONE for dim in spec)
            start[program, atom] = _join(start.get((program, atom), ()), claims)
    run = _dataflow.backward if backward else _dataflow.forward

    def step(region: Region, eqn: Eqn, given: Sequence[_Claims]) -> list[_Claims]:
        return _across_equation(eqn, given, sizes, backward)

    def across(eqn: Eqn, edge: Edge, claims: _Claims) -> _Claims:
        if edge.kind is EdgeKind.PREDICATE:
            return ()
        shift = -edge.shift if backward else edge.shift
        return claims[1:] if shift < 0 else (*[_NONE] * shift, *claims) if claims else ()

    return run(program, start, step, _join, (), across)


def _join(a: _Claims, b: _Claims) -> _Claims:
    return tuple(x | y for x, y in itertools.zip_longest(a, b, fillvalue=_NONE))


def _across_equation(
    eqn: Eqn, given: Sequence[_Claims], sizes: Mapping[str, int], backward: bool
) -> list[_Claims]:
    name = eqn.primitive.name
    sources: Sequence[Atom] = eqn.outvars if backward else eqn.invars
    targets: Sequence[Atom] = eqn.invars if backward else eqn.outvars
    if name in ("optimization_barrier", "all_to_all", "ppermute"):
        return [*given]
    if name == "sharding_constraint":
        return [_constraint(eqn, given[0], [*sizes])]
    if not any(map(any, given)):
        return [()] * len(targets)
    if name == "reshape":
        return [_reshaped(given[0], sources[0], targets[0], sizes)]
    found = [[_NONE] * len(x.aval.shape) for x in targets]
    for factor in _rules.factors_of(eqn):
        a: FactorDims = factor.outs if backward else factor.ins
        b: FactorDims = factor.ins if backward else factor.outs
        claimed = _NONE.union(
            *(x[d] for x, d in zip(given, a, strict=True) if d is not None and d < len(x))
        )
        for dims, d in zip(found, b, strict=True):
            if d is not None:
                dims[d] = claimed
    return [tuple(dims) if any(dims) else () for dims in found]


def _constraint(eqn: Eqn, claims: _Claims, names: Sequence[str]) -> _Claims:
    """The constraint's claims over these axes, and the given ones of other dims."""
    found = list[frozenset[tuple[str, ...]]]()
    for d, entry in enumerate(_jaxpr.constraint_spec(eqn, names)):
        if entry is PartitionSpec.UNCONSTRAINED:
            found.append(claims[d] if d < len(claims) else _NONE)
        else:
            found.append(
                frozenset([entry if isinstance(entry, tuple) else (entry,)] * (entry is not None))
            )
    return tuple(found)


def _reshaped(claims: _Claims, source: Atom, target: Atom, sizes: Mapping[str, int]) -> _Claims:
    found: _Claims = ()
    for d, claim in enumerate(claims):
        for names in claim:
            dims = [*map(Dim, source.aval.shape)]
            num = math.prod(sizes[axis] for axis in names)
            if dims[d].size % num:
                continue
            # As one axis: only what stays together is claimed.
            dims[d] = dims[d].put(AxisCut("auto", 1))
            layout = Layout(tuple(dims), (("auto", num),)).reshapable(target.aval.shape)
            place = layout.reshape(target.aval.shape).place("auto")
            if place is not None and place[1] == 1:
                found = _join(found, (*[_NONE] * place[0], frozenset([names])))
    return found
