# SPDX-License-Identifier: Apache-2.0
"""Linked dims: which dims are sharded together, because an operation lines them up.

A parameter's rows, its gradient's and its moments' form one class, and sharding a class shards all of them
the same way. This is how optimizer state finds its parameter, and a gradient its layout, with no names
involved. Classes are components of (frame, variable, dim), of values that are the same on all devices; loops
need no fixed point.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from jzero._components import Components
from jzero.ir import _rules
from jzero.sharding.analysis._frames import Frame, split
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Var

DimKey = tuple[int, Var, int]  # of a frame: its id


class Links:
    """Classes of dims that are sharded together, and the ones that must not be sharded."""

    def __init__(self, root: Frame, num_shards: int):
        self.num_shards = num_shards
        self._classes: Components[DimKey] = Components()
        self._looped: list[DimKey] = []
        self._sharded: dict[tuple[DimKey, int], int] = {}
        self._leaf: dict[DimKey, str] = {}
        self._full_leaf: dict[DimKey, str] = {}
        self._link_frame(root)

    @functools.cached_property
    def _looped_classes(self) -> frozenset[DimKey]:
        return frozenset(map(self._classes.of, self._looped))

    def link_returned(self, frame: Frame, num: int) -> None:
        """Links each leaf of the state, which come first, with what is returned of it: it rests alike.

        Masters follow their parameters so, which their update need not read.
        """
        jaxpr = frame.jaxpr
        for old, new in zip(jaxpr.invars[:num], jaxpr.outvars[:num], strict=True):
            self._link(frame, old, frame, new)

    def shard(self, frame: Frame, var: Var, dim: int, leaf: str) -> None:
        """Declares the class of this dim to be sharded, for `leaf`; earlier declarations rank higher."""
        root = self._classes.of((id(frame), var, dim))
        self._sharded.setdefault((root, self._uneven(var.aval.shape[dim])), len(self._sharded))
        self._leaf.setdefault(root, leaf)

    def name(self, frame: Frame, var: Var, leaf: str) -> None:
        """Says that `var` is a `leaf` that stays full: what a profile calls the reduction of its gradient."""
        for dim in range(len(var.aval.shape)):
            self._full_leaf.setdefault(self._classes.of((id(frame), var, dim)), leaf)

    def _uneven(self, size: int) -> int:
        # Shards line up if the devices divide both dims, or if both have the same size, and so the same
        # padding. A reshape links dims of other sizes.
        return size if size % self.num_shards else 0

    def leaf_of(self, frame: Frame, var: Var) -> str:
        """The parameter that a gradient is of: for which its dims were sharded, or else were not."""
        roots = [self._classes.of((id(frame), var, dim)) for dim in range(len(var.aval.shape))]
        known = [
            leaf[root] for leaf in (self._leaf, self._full_leaf) for root in roots if root in leaf
        ]
        return next(iter(known), "")

    def looped_dims(self, frame: Frame, var: Var) -> set[int]:
        """Dims of `var` that a scan slices one by one: sharding them would gather the whole stack."""
        keys = [(id(frame), var, dim) for dim in range(len(var.aval.shape))]
        return {key[2] for key in keys if self._classes.of(key) in self._looped_classes}

    def sharded_dim(self, frame: Frame, atom: Atom) -> int | None:
        """The dim along which `atom` is sharded if it is sharded at all."""
        if _jaxpr.is_literal(atom) or frame.varies(atom):
            return None
        ranks = {}
        for dim, size in enumerate(getattr(atom.aval, "shape", ())):
            rank = self._sharded.get((self._classes.of((id(frame), atom, dim)), self._uneven(size)))
            if rank is not None and size:
                ranks[dim] = rank
        return min(ranks, key=ranks.__getitem__, default=None)

    def _link(self, a: Frame, x: Atom, b: Frame, y: Atom, offset: int = 0) -> None:
        # Dim d of x is dim d + offset of y.
        if _jaxpr.is_literal(x) or _jaxpr.is_literal(y) or a.varies(x) or b.varies(y):
            return
        for dim in range(len(getattr(x.aval, "shape", ()))):
            self._classes.join((id(a), x, dim), (id(b), y, dim + offset))

    def _link_frame(self, frame: Frame) -> None:
        for index, eqn in enumerate(frame.jaxpr.eqns):
            name, children = eqn.primitive.name, frame.children.get(index, [])
            if name == "scan":
                self._link_scan(frame, eqn, children[0])
            elif name == "while":
                self._link_while(frame, eqn, *children)
            elif name == "cond":
                for child in children:
                    self._link_call(frame, eqn.invars[1:], eqn.outvars, child)
            elif children:
                self._link_call(frame, eqn.invars, eqn.outvars, children[0])
            elif name in _rules.IDENTITIES:
                for x, y in zip(eqn.invars, eqn.outvars, strict=True):
                    self._link(frame, x, frame, y)
            else:
                self._link_rule(frame, eqn)
            for child in children:
                self._link_frame(child)

    def _link_rule(self, frame: Frame, eqn: Eqn) -> None:
        maps = _rules.dims_of(eqn)
        if maps is None or any(frame.varies(out) for out in eqn.outvars):
            return
        for atom, dims in zip(eqn.invars, maps, strict=True):
            if _jaxpr.is_literal(atom) or frame.varies(atom):
                continue
            for out in eqn.outvars:
                for dim, out_dim in enumerate(dims):
                    if out_dim is not None:
                        self._classes.join((id(frame), atom, dim), (id(frame), out, out_dim))

    def _link_call(
        self, frame: Frame, ins: Sequence[Atom], outs: Sequence[Atom], child: Frame
    ) -> None:
        for outer, inner in zip(ins, child.jaxpr.invars, strict=True):
            self._link(child, inner, frame, outer)
        for outer, returned in zip(outs, child.jaxpr.outvars, strict=True):
            self._link(child, returned, frame, outer)

    def _link_scan(self, frame: Frame, eqn: Eqn, child: Frame) -> None:
        scan = _jaxpr.scan_parts(eqn)
        consts, carry, xs = split(eqn.invars, scan.num_consts, scan.num_carry)
        body_consts, body_carry, body_xs = split(
            child.jaxpr.invars, scan.num_consts, scan.num_carry
        )
        body_carry_out, body_ys = split(child.jaxpr.outvars, scan.num_carry)
        carry_out, ys = split(eqn.outvars, scan.num_carry)
        for outer, inner in zip([*consts, *carry], [*body_consts, *body_carry], strict=True):
            self._link(child, inner, frame, outer)
        for out, returned, before in zip(carry_out, body_carry_out, body_carry, strict=True):
            self._link(child, returned, frame, out)
            self._link(child, returned, child, before)
        for whole, piece in zip([*xs, *ys], [*body_xs, *body_ys], strict=True):
            self._link(child, piece, frame, whole, offset=1)
        self._looped += [(id(frame), x, 0) for x in [*xs, *ys] if not _jaxpr.is_literal(x)]

    def _link_while(self, frame: Frame, eqn: Eqn, cond: Frame, body: Frame) -> None:
        loop = _jaxpr.while_parts(eqn)
        cond_ins, body_ins, carry = split(eqn.invars, loop.num_cond_consts, loop.num_body_consts)
        for child, ins in ((cond, cond_ins), (body, body_ins)):
            for outer, inner in zip([*ins, *carry], child.jaxpr.invars, strict=True):
                self._link(child, inner, frame, outer)
        before = body.jaxpr.invars[loop.num_body_consts :]
        for out, returned, var in zip(eqn.outvars, body.jaxpr.outvars, before, strict=True):
            self._link(body, returned, frame, out)
            self._link(body, returned, body, var)
