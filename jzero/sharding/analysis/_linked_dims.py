# SPDX-License-Identifier: Apache-2.0
"""Linked dims: classes of dims that are sharded together, because operations line them up.

The dims of a parameter, its gradient and its moments form one class, which is sharded as a whole. So
optimizer state finds its parameter, and a gradient its layout, without names. Classes are components of
(frame, variable, dim), for values that are replicated over the data axes. Union-find needs no fixed point in
loops.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from jzero._components import Components
from jzero.ir import _rules
from jzero.ir._dataflow import union
from jzero.ir._regions import Edge, EdgeKind, Region, ValueIn
from jzero.sharding.analysis._frames import Frame
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Var

DimKey = tuple[Region, Atom, int]


class Links:
    def __init__(self, root: Frame, num_shards: int):
        self.num_shards = num_shards
        self._looped = set[DimKey]()
        self._classes: Components[DimKey] = union(root, _of_equation, self._across)
        self._sharded: dict[tuple[DimKey, int], int] = {}
        self._leaf: dict[DimKey, str] = {}
        self._replicated_leaf: dict[DimKey, str] = {}

    @functools.cached_property
    def _looped_classes(self) -> frozenset[DimKey]:
        return frozenset(map(self._classes.of, self._looped))

    def link_returned(self, frame: Frame, num: int) -> None:
        """Links each of the `num` leaves of the state with its new value, which has the same layout.

        This links masters with their parameters, which an update need not read.
        """
        jaxpr = frame.jaxpr
        for old, new in zip(jaxpr.invars[:num], jaxpr.outvars[:num], strict=True):
            for a, b in _same_dims((frame, old), (frame, new)):
                self._classes.join(a, b)

    def shard(self, frame: Frame, var: Var, dim: int, leaf: str) -> None:
        """Declares that the class of this dim is sharded, for `leaf`; earlier declarations rank higher."""
        root = self._classes.of((frame, var, dim))
        self._sharded.setdefault((root, self._uneven(var.aval.shape[dim])), len(self._sharded))
        self._leaf.setdefault(root, leaf)

    def name(self, frame: Frame, var: Var, leaf: str) -> None:
        """Declares that `var` is a replicated `leaf`, to name its gradient's reduction."""
        for root in self._roots(frame, var):
            self._replicated_leaf.setdefault(root, leaf)

    def _roots(self, frame: Frame, var: Var) -> list[DimKey]:
        return [self._classes.of((frame, var, dim)) for dim in range(len(var.aval.shape))]

    def _uneven(self, size: int) -> int:
        # A reshape links dims of different sizes. Their shards line up if the devices divide both; padded
        # dims must have the same size.
        return size if size % self.num_shards else 0

    def leaf_of(self, frame: Frame, var: Var) -> str:
        """The parameter whose gradient `var` is, by the classes of its dims; sharded parameters first."""
        roots = self._roots(frame, var)
        names = (each.get(root) for each in (self._leaf, self._replicated_leaf) for root in roots)
        return next((name for name in names if name is not None), "")

    def looped_dims(self, frame: Frame, var: Var) -> set[int]:
        """Dims of `var` that a scan slices; if they were sharded, each slice would gather the stack."""
        return {d for d, key in enumerate(self._roots(frame, var)) if key in self._looped_classes}

    def sharded_dim(self, frame: Frame, atom: Atom) -> int | None:
        """The dim along which `atom` is sharded, if it is."""
        if _jaxpr.is_literal(atom) or frame.varies(atom):
            return None
        ranks = {}
        for dim, size in enumerate(getattr(atom.aval, "shape", ())):
            rank = self._sharded.get((self._classes.of((frame, atom, dim)), self._uneven(size)))
            if rank is not None and size:
                ranks[dim] = rank
        return min(ranks, key=ranks.__getitem__, default=None)

    def _across(self, eqn: Eqn, edge: Edge) -> Iterator[tuple[DimKey, DimKey]]:
        if edge.shift:
            frame, stack = edge.source if edge.shift < 0 else edge.target
            if not _jaxpr.is_literal(stack):
                self._looped.add((frame, stack, 0))
        if edge.kind is not EdgeKind.PREDICATE:
            yield from _same_dims(edge.source, edge.target, edge.shift)


def _is_linked(value: ValueIn) -> bool:
    frame, atom = value
    assert isinstance(frame, Frame)
    return not _jaxpr.is_literal(atom) and not frame.varies(atom)


def _same_dims(a: ValueIn, b: ValueIn, shift: int = 0) -> Iterator[tuple[DimKey, DimKey]]:
    """Pairs of dims d of one value and `d + shift` of another."""
    if _is_linked(a) and _is_linked(b):
        for dim in range(max(0, -shift), len(getattr(a[1].aval, "shape", ()))):
            yield (*a, dim), (*b, dim + shift)


def _of_equation(frame: Region, eqn: Eqn) -> Iterator[tuple[DimKey, DimKey]]:
    if eqn.primitive.name in _rules.IDENTITIES:
        for x, y in zip(eqn.invars, eqn.outvars, strict=True):
            yield from _same_dims((frame, x), (frame, y))
        return
    maps = _rules.dims_of(eqn)
    if maps is None or not all(_is_linked((frame, out)) for out in eqn.outvars):
        return
    for atom, dims in zip(eqn.invars, maps, strict=True):
        if _is_linked((frame, atom)):
            for out in eqn.outvars:
                for dim, to in enumerate(dims):
                    if to is not None:
                        yield (frame, atom, dim), (frame, out, to)
