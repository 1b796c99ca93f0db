# SPDX-License-Identifier: Apache-2.0
"""Cuts one device's equations into parts whose leaves, stored off the device, fit in a memory budget.

A *straight-line stage* is a program of some equations. *Scanned layers* are a `scan` over stacks of leaves,
each iteration of which is a program. An *outer loop* reads more leaves than the budget allows, so that each
of its iterations runs in parts. Values derived only from leaves (by a gather, a cast) are recomputed by every
stage that reads them, and never passed on.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence

from jzero.ir import _rules
from jzero.ir._regions import variables
from jzero.sharding.analysis import _residuals
from jzero.sharding.cut._fused_loops import fused
from jzero.sharding.cut._growing_loop import stacks_made
from jzero.sharding.cut._layer_parts import (
    LEAF,
    ON_HOST,
    RENEWED,
    SLICES,
    STACK,
    UNREAD,
    LayerBody,
    LayerPart,
    OuterLoop,
    ScannedLayers,
    StraightStage,
    gathered_of,
    read_later,
)
from jzero.sharding.cut._open_loop import opened
from jzero.sharding.cut._param_derived import (
    ParamDerived,
    gathered_bytes,
    repeats,
    without_barriers,
)
from jzero.sharding.cut._transfers import is_scalar
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn, Jaxpr, Var


def cut(
    jaxpr: Jaxpr, leaves: Mapping[Var, int], batch: Collection[Var], to_host: Collection[Var],
    device_bytes: int, nests: Collection[str], inside: bool = False,
) -> tuple[LayerPart, ...]:  # fmt: skip
    """The parts of one device's program, in the order in which they run.

    Args:
      jaxpr: the program, without calls.
      leaves: values stored on the host, with their bytes on a device.
      batch: values of the batch, or of an iteration.
      to_host: outputs that go to the host.
      device_bytes: the budget. A part has up to half of it, because the next one is fetched meanwhile, but a
        single equation or iteration may need more.
      nests: primitives of loops whose iterations may run in parts.
      inside: whether it is a loop's body, and so the only reader of its carry.
    """
    whole = fused(without_barriers(jaxpr, leaves, batch), leaves)
    return _LayerCutter(whole, leaves, batch, to_host, device_bytes, nests, inside).parts()


@dataclasses.dataclass
class _Group:
    """Equations of a part, the leaves that they fetch, and the residuals that they send or fetch."""

    eqns: list[Eqn] = dataclasses.field(default_factory=list)
    leaves: set[Var] = dataclasses.field(default_factory=set)
    moved: set[Var] = dataclasses.field(default_factory=set)
    is_loop: bool = False


class _LayerCutter:
    def __init__(
        self, jaxpr: Jaxpr, leaves: Mapping[Var, int], batch: Collection[Var], to_host: Collection[Var],
        device_bytes: int, nests: Collection[str], inside: bool,
    ):  # fmt: skip
        self._jaxpr, self._leaves, self._to_host = jaxpr, leaves, to_host
        self._batch = set(batch)
        self._device_bytes, self._nests, self._inside = device_bytes, nests, inside
        self._outer_loops: dict[int, OuterLoop] = {}
        self._recomputed = self._derived(with_repeats=False)
        for eqn in jaxpr.eqns:
            if (loop := self._outer_loop(eqn)) is not None:
                self._outer_loops[id(eqn)] = loop
        first = {key: loop.loop.first for key, loop in self._outer_loops.items()}
        eqns = [e for eqn in jaxpr.eqns for e in (*first.get(id(eqn), ()), eqn)]
        self._jaxpr = jaxpr = _jaxpr.replaced(jaxpr, eqns=eqns)
        self._loops = {
            id(eqn) for eqn in eqns if self._takes_slices(eqn)
        } - self._outer_loops.keys()
        read_by_loops = {
            atom for eqn in jaxpr.eqns if id(eqn) in self._loops for atom in variables(eqn.invars)
        }
        read_by_loops.update(v for loop in self._outer_loops.values() for v in loop.reads)
        passed = {*read_by_loops, *variables(jaxpr.outvars)}
        # Values that are recomputed where they are read.
        self._recomputed = {
            out: eqn
            for out, eqn in self._derived(with_repeats=True).items()
            if passed.isdisjoint(eqn.outvars)
        }
        self._offloaded = _residuals.marks(jaxpr.eqns) - self._recomputed.keys()

    def _derived(self, with_repeats: bool) -> dict[Var, Eqn]:
        derived: dict[Var, Eqn] = {}
        follows, cheap = ParamDerived(self._leaves, self._batch), set[Var]()
        for eqn in self._jaxpr.eqns:
            derives = follows.takes(eqn)
            again = with_repeats and repeats(eqn, cheap)
            if all(map(is_scalar, eqn.outvars)) or not (derives or again):
                continue
            cheap.update(eqn.outvars if again and not derives else ())
            derived |= dict.fromkeys(eqn.outvars, eqn)
        self._batch = follows.batch
        return derived

    def _takes_slices(self, eqn: Eqn) -> bool:
        if eqn.primitive.name != "scan":
            return False
        return any(var in self._leaves for var in variables(_jaxpr.scan_stacks(eqn)))

    def _outer_loop(self, eqn: Eqn) -> OuterLoop | None:
        """The loop in parts, if its leaves exceed the budget, and those of its largest part are fewer."""
        if eqn.primitive.name not in self._nests or _moves_memory(eqn):
            return None
        sliced = self._takes_slices(eqn)
        nbytes = self._loop_nbytes(eqn) if sliced else self._nbytes([eqn])
        # Parts would fetch whole stacks in each iteration, which does not help if a slice is too large.
        if nbytes <= self._device_bytes or (sliced and not self._held(eqn)):
            return None
        derived: dict[Var, Eqn | None] = dict.fromkeys(self._leaves)
        derived.update(self._recomputed)
        loop = opened(eqn, self._jaxpr, derived)
        if loop is None:
            return None
        batch = {*self._batch, *loop.carry}
        loop = dataclasses.replace(loop, body=without_barriers(loop.body, self._leaves, batch))
        parts = cut(
            loop.body, self._leaves, batch, (), self._device_bytes, self._nests, inside=True
        )
        outer = OuterLoop(eqn, loop, parts, frozenset(self._leaves))
        return outer if outer.nbytes < nbytes else None

    # -- what runs where ---------------------------------------------------------------------------

    def parts(self) -> tuple[LayerPart, ...]:
        """Fills stages until the next equation's leaves do not fit; a loop is a part of its own."""
        groups, made = [_Group()], dict[Var, int]()
        for eqn in self._jaxpr.eqns:
            if any(out in self._recomputed for out in eqn.outvars):
                continue
            if id(eqn) in self._loops or id(eqn) in self._outer_loops:
                at = len(groups)
                groups += [_Group([eqn], is_loop=True), _Group()]
            else:
                reads = {v for a in variables(eqn.invars) for v in self._inputs_of(a)}
                leaves = {v for v in reads if v in self._leaves}
                at = last = len(groups) - 1
                # Updates run as early as they can, so that gradients are reduced where they are made.
                in_pass = _jaxpr.autodiff_pass(eqn) is not None
                if not (leaves or in_pass or _jaxpr.has_side_effects(eqn)):
                    at = max((made[v] for v in reads if v in made), default=0)
                    at += groups[at].is_loop
                group = groups[at]
                has_leaves = leaves and group.leaves
                full = has_leaves and self._nbytes([*group.eqns, eqn]) > self._device_bytes // 2
                if full or (at == last and self._must_end_stage(eqn, at, made, group.moved)):
                    group, at = _Group(), len(groups)
                    groups.append(group)
                group.eqns.append(eqn)
                group.leaves |= leaves
                group.moved |= self._offloaded.intersection([*variables(eqn.invars), *eqn.outvars])
            made |= dict.fromkeys(eqn.outvars, at)
        order = {id(eqn): i for i, eqn in enumerate(self._jaxpr.eqns)}
        for group in groups:
            group.eqns.sort(key=lambda eqn: order[id(eqn)])
        return self._typed([group for group in groups if group.eqns])

    def _must_end_stage(
        self, eqn: Eqn, at: int, made: Mapping[Var, int], moved: Collection[Var]
    ) -> bool:
        """Whether an equation reads a residual that this stage makes, or it would move too many of them."""
        read = self._offloaded.intersection(variables(eqn.invars))
        sizes = [_rules.size_in_bytes(v.aval) for v in {*moved, *read}]
        return any(made.get(v) == at for v in read) or (
            bool(moved) and sum(sizes) > _residuals.ON_THEIR_WAY
        )

    def _inputs_of(self, var: Var) -> set[Var]:
        """The values from which a value is recomputed; itself if it is not."""
        if var not in self._recomputed:
            return {var}
        return {v for a in variables(self._recomputed[var].invars) for v in self._inputs_of(a)}

    def _with_recomputed(self, eqns: Sequence[Eqn]) -> list[Eqn]:
        """The equations, each behind those that it recomputes."""
        found: dict[int, Eqn] = {}

        def bring(var: Var) -> None:
            eqn = self._recomputed.get(var)
            if eqn is not None and id(eqn) not in found:
                for atom in variables(eqn.invars):
                    bring(atom)
                found[id(eqn)] = eqn

        for eqn in eqns:
            for atom in variables(eqn.invars):
                bring(atom)
            found[id(eqn)] = eqn
        return [*found.values()]

    def _nbytes(self, eqns: Sequence[Eqn]) -> int:
        """Bytes on a device of the leaves that equations read, as they are fetched, and gathered."""
        everything = self._with_recomputed(eqns)
        fetched = {v for eqn in everything for v in variables(eqn.invars) if v in self._leaves}
        return sum(self._leaves[v] for v in fetched) + gathered_bytes(everything, self._leaves)

    def _loop_nbytes(self, eqn: Eqn) -> int:
        """`_nbytes` of an iteration of a loop that slices leaves."""
        length, stacks = _jaxpr.scan_parts(eqn).length, variables(_jaxpr.scan_stacks(eqn))
        slices = sum(self._leaves.get(v, 0) // length for v in stacks)
        held = sum(self._leaves[v] for v in self._held(eqn))
        return slices + held + gathered_bytes([eqn], self._leaves)

    def _held(self, eqn: Eqn) -> list[Var]:
        """Leaves that a loop reads whole."""
        whole = eqn.invars[: len(eqn.invars) - len(_jaxpr.scan_stacks(eqn))]
        return [v for v in variables(whole) if v in self._leaves]

    # -- the parts, typed --------------------------------------------------------------------------

    def _typed(self, groups: Sequence[_Group]) -> tuple[LayerPart, ...]:
        eqns = [
            group.eqns if group.is_loop else self._with_recomputed(group.eqns) for group in groups
        ]
        reads = [*map(self._reads, eqns)]
        outvars = set(variables(self._jaxpr.outvars))
        later = read_later(reads, self._jaxpr.outvars)
        modes = self._modes(groups)
        # Values that may be donated: those that parts make, and the carry of a loop around them.
        made_here = {out for own in eqns for eqn in own for out in eqn.outvars}
        ours = made_here.union(self._jaxpr.invars if self._inside else ()) - outvars
        parts: list[LayerPart] = []
        for group, everything, read, wanted in zip(groups, eqns, reads, later, strict=True):
            last_uses = frozenset(v for v in read if v in ours and v not in wanted)
            if group.is_loop:
                parts.append(self._loop(group.eqns[0], modes, last_uses))
                continue
            made = dict.fromkeys(out for eqn in everything for out in eqn.outvars)
            outputs = tuple(v for v in made if v in wanted and v not in self._recomputed)
            leaves = tuple(v for v in self._leaves if v in read)
            parts.append(StraightStage(
                tuple(everything), leaves, tuple(v for v in read if v not in self._leaves), outputs,
                self._nbytes(group.eqns), last_uses))  # fmt: skip
        return tuple(parts)

    def _reads(self, eqns: Sequence[Eqn]) -> dict[Var, None]:
        """The inputs of equations, in order."""
        made = {out for eqn in eqns for out in eqn.outvars}
        return {v: None for eqn in eqns for v in self._read_by(eqn) if v not in made}

    def _read_by(self, eqn: Eqn) -> Sequence[Var]:
        outer = self._outer_loops.get(id(eqn))
        return variables(eqn.invars) if outer is None else outer.loop.reads

    def _modes(self, groups: Sequence[_Group]) -> dict[Var, str]:
        """How each stack that a loop makes is stored: as slices, if only loops read it, slice by slice."""
        made, sliced, whole = set[Var](), set[Var](), set[Var]()
        for eqn in (eqn for group in groups for eqn in group.eqns):
            if id(eqn) in self._loops:
                stacks = _jaxpr.scan_stacks(eqn)
                made.update(stacks_made(eqn))
                sliced.update(variables(stacks))
                whole.update(variables(eqn.invars[: len(eqn.invars) - len(stacks)]))
            else:
                whole.update(self._read_by(eqn))
        for eqn in self._recomputed.values():
            whole.update(variables(eqn.invars))
        returned = set(variables(self._jaxpr.outvars))
        on_host = {v for v in made & returned - whole - sliced if v in self._to_host}
        stacked = (made & returned - on_host) | (made & whole)
        return (
            dict.fromkeys(made, UNREAD)
            | dict.fromkeys(made & sliced, SLICES)
            | dict.fromkeys(on_host, ON_HOST)
            | dict.fromkeys(stacked, STACK)
        )

    def _loop(self, eqn: Eqn, modes: Mapping[Var, str], last_uses: frozenset[Var]) -> LayerPart:
        if (outer := self._outer_loops.get(id(eqn))) is not None:
            return dataclasses.replace(
                outer, last_uses=last_uses.difference(outer.loop.reads_each_iteration)
            )
        xs, known = _jaxpr.scan_stacks(eqn), {**modes, **dict.fromkeys(self._leaves, LEAF)}
        kinds = [STACK if _jaxpr.is_literal(atom) else known.get(atom, STACK) for atom in xs]
        ys = tuple(modes[out] for out in stacks_made(eqn))
        stacks = [y for y, kind in zip(stacks_made(eqn), ys, strict=True) if kind == STACK]
        read = [x for x, kind in zip(xs, kinds, strict=True) if kind == STACK]
        counts = collections.Counter(_jaxpr.variables_read(eqn))
        alone = {v for v in last_uses if counts[v] == 1}
        renewed = self._renewed(stacks, [x for x in variables(read) if x in alone])
        kinds = [
            RENEWED if not _jaxpr.is_literal(x) and x in renewed else kind
            for x, kind in zip(xs, kinds, strict=True)
        ]
        body = self._body(eqn, kinds)
        nbytes = self._loop_nbytes(eqn) + body.sharded_bytes
        return ScannedLayers(eqn, tuple(kinds), ys, body, nbytes, frozenset(alone), renewed)

    def _body(self, eqn: Eqn, kinds: Sequence[str]) -> LayerBody:
        """An iteration's equations. It gathers for the next one, if both fit in the budget.

        That takes gathered leaves of two iterations, and shards of two iterations: of the next one, and of
        the one after it, which are being fetched.
        """
        scan = _jaxpr.scan_parts(eqn)
        inputs = scan.body.invars[len(scan.body.invars) - len(kinds) :]
        leaves = [var for var, kind in zip(inputs, kinds, strict=True) if kind == LEAF]
        free = without_barriers(scan.body, leaves, {*scan.body.invars}.difference(leaves))
        ahead = LayerBody.of(free, scan.body_consts, leaves, gathered_of(free, leaves))
        if (
            ahead.gathered
            and self._loop_nbytes(eqn) + ahead.sharded_bytes <= self._device_bytes // 2
        ):
            return ahead
        return LayerBody.of(scan.body, scan.body_consts, leaves, [])

    def _renewed(self, made: Sequence[Var], free: Sequence[Var]) -> tuple[Var | None, ...]:
        """For each stack that a loop makes, one of its type that it slices, in whose place it is written."""
        found: list[Var | None] = []
        returned = set(variables(self._jaxpr.outvars))
        for y in made:
            # A step's outputs are global arrays in their own layouts, unlike values between parts.
            fits = [x for x in free if _alike(x, y)] if self._inside or y not in returned else []
            found.append(fits[0] if fits else None)
            free = [x for x in free if x not in found]
        return tuple(found)


def _moves_memory(eqn: Eqn) -> bool:
    """Whether the equation copies between memories, also inside, which must happen within one program."""
    bodies = [_jaxpr.open_jaxpr(inner)[0] for inner in _jaxpr.inner_jaxprs(eqn)]
    return _jaxpr.changes_memory(eqn) or any(_moves_memory(e) for body in bodies for e in body.eqns)


def _alike(x: Var, y: Var) -> bool:
    return (x.aval.shape, x.aval.dtype) == (y.aval.shape, y.aval.dtype)
