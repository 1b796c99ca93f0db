"""What jzero's analyses find of a step, found again on `jzero.ir`: edges and dataflow, and nothing else.

Facts are mappings from (region, variable). None of these functions knows a loop, a branch or a call.
"""

import functools
import operator
from typing import Any

from jzero.ir import _rules
from jzero.ir._dataflow import backward, forward, union
from jzero.ir._regions import EdgeKind, Region, ValueIn, edges, turns
from jzero.sharding.analysis import _frames, _own_gradients, _product_reads
from jzero.sharding.analysis._frames import NOWHERE
from jzero.tracing import _jaxpr


def varying(program, arguments):
    """The axes over which each value differs between devices, and which sums over them may wait.

    A branch that each device chooses for itself makes what differs, unless the sum over all is yet due: which
    values differ decides which sums there are, and these, which results of such branches differ.
    """
    pending = set[Any]()
    while True:
        found = _varying(program, arguments, pending)
        sums = unreduced(program, found)
        chosen = {
            (edge.target[0], edge.target[1])
            for edge in choices(program) if fact(found, *edge.source)
            if any(e.source in sums for e in into(edge.target) if not is_literal(e.source))
        }  # fmt: skip
        if chosen == pending:
            return found, sums
        pending = chosen


def fact(found, region, atom, nothing=NOWHERE):
    return nothing if _jaxpr.is_literal(atom) else found.get((region, atom), nothing)


def is_literal(value):
    return _jaxpr.is_literal(value[1])


def choices(program):
    """Edges from operands that choose between programs."""
    return [
        edge
        for region in program.regions() for eqn in region.jaxpr.eqns for edge in edges(region, eqn)
        if edge.kind is EdgeKind.PREDICATE and edge.source[0] is region
    ]  # fmt: skip


def into(value):
    """What the programs inside an equation return as its result."""
    region, var = value
    eqn = region.jaxpr.eqns[region.makers[var]]
    return [e for e in edges(region, eqn) if e.kind is EdgeKind.OUT and e.target[1] is var]


def _varying(program, arguments, pending):
    def step(region, eqn, ins):
        if eqn.primitive.name == "optimization_barrier":
            return ins
        out = NOWHERE.union(*ins)
        if eqn.primitive.name in _frames.AGREEING and not eqn.params.get("axis_index_groups"):
            return [axes - set(_jaxpr.axes_of(eqn)) for axes in ins]
        if eqn.primitive.name in _frames.COLLECTIVES:
            out |= set(_jaxpr.axes_of(eqn))
        return [out] * len(eqn.outvars)

    def across(eqn, edge, axes):
        return NOWHERE if edge.kind is EdgeKind.PREDICATE and edge.target in pending else axes

    start = {(program, v): x for v, x in zip(program.jaxpr.invars, arguments, strict=True) if x}
    return forward(program, start, step, operator.or_, NOWHERE, across)


def unreduced(program, differ):
    """Sums over devices, and what linear equations make of nothing else."""

    def step(region, eqn, ins):
        if eqn.primitive.name in _frames.REDUCTIONS:
            pairs = zip(eqn.invars, eqn.outvars, strict=True)
            return [bool(fact(differ, region, x)) and not differ.get((region, y)) for x, y in pairs]
        return [_rules.sum_waits(eqn) and all(ins)] * len(eqn.outvars)

    def across(eqn, edge, waits):
        # Into no program, out of no loop; out of a branch that devices choose, if it is the same on all.
        region, atom = edge.target
        if edge.kind is not EdgeKind.OUT or not waits or loops(region, eqn):
            return False
        choice = [e for e in edges(region, eqn) if e.kind is EdgeKind.PREDICATE]
        if not choice:
            return True
        return bool(fact(differ, *choice[0].source)) and not differ.get((region, atom))

    return forward(program, {}, step, operator.or_, False, across)


def loops(region, eqn):
    return any(
        edge.kind in (EdgeKind.BACK, EdgeKind.PAST) or edge.shift for edge in edges(region, eqn)
    )


def classes(program, differ):
    """Components of dims that are sharded together."""

    def dims(region, atom):
        takes = not _jaxpr.is_literal(atom) and not differ.get((region, atom))
        return range(len(getattr(atom.aval, "shape", ()))) if takes else ()

    def related(region, eqn):
        if eqn.primitive.name in _rules.IDENTITIES:
            for x, y in zip(eqn.invars, eqn.outvars, strict=True):
                if dims(region, y):
                    yield from (((region, x, d), (region, y, d)) for d in dims(region, x))
            return
        maps = _rules.dims_of(eqn)
        if maps is None or any(differ.get((region, out)) for out in eqn.outvars):
            return
        for atom, to in zip(eqn.invars, maps, strict=True):
            if not _jaxpr.is_literal(atom):
                for out in eqn.outvars:
                    for d, o in enumerate(to):
                        if o is not None:
                            yield (region, atom, d), (region, out, o)

    def across(eqn, edge):
        (a, x), (b, y) = edge.source, edge.target
        if edge.kind is EdgeKind.PREDICATE or _jaxpr.is_literal(x) or _jaxpr.is_literal(y):
            return
        if differ.get((a, x)) or differ.get((b, y)):
            return
        for d in range(len(getattr(x.aval, "shape", ()))):
            if d + edge.shift >= 0:
                yield (a, x, d), (b, y, d + edge.shift)

    return union(program, related, across)


def needs(program, forces, differ, owned=()):
    """Values that the equations which `forces` says, or what is asked itself, are made of."""

    def step(region, eqn, outs):
        if eqn.primitive.name in _rules.IDENTITIES or eqn.primitive.name == "optimization_barrier":
            return outs
        return [forces(region, eqn) or any(outs)] * len(eqn.invars)

    def across(eqn, edge, asked):
        (holder, _), (region, _) = edge.source, edge.target
        if edge.kind is EdgeKind.PREDICATE:
            outer = holder.around[0] if is_inside(holder, eqn) else holder
            # Whether a turn or a branch runs is no part of what it computes (sampled seed 480).
            return (asked and region is outer) or forces(outer, eqn)
        if edge.kind is EdgeKind.PAST:  # A loop of so many turns has one.
            return asked and turns(eqn) is None
        if edge.kind is EdgeKind.IN:
            if owned and eqn.outvars[0] in owned:
                return False
            choice = [e for e in edges(holder, eqn) if e.kind is EdgeKind.PREDICATE]
            return asked or any(e.source[0] is holder and fact(differ, *e.source) for e in choice)
        return asked

    found = backward(program, {}, step, operator.or_, False, across)
    return {value for value, asked in found.items() if asked}


def needs_full(program, differ, owned=()):
    def forces(region, eqn):
        return not _rules.keeps_dims(eqn) or spreads(differ, region, eqn)

    return needs(program, forces, differ, owned)


def feeds_batch(program, differ):
    def forces(region, eqn):
        return spreads(differ, region, eqn) or region.pass_of(eqn) is not None

    return needs(program, forces, differ)


def own_gradients(program):
    """Sums over devices of which nothing else is computed in a pass, but along views and casts."""

    def step(region, eqn, mixed):
        if eqn.primitive.name in _frames.REDUCTIONS:
            return [False] * len(eqn.invars)
        mixes = any(mixed) or (region.pass_of(eqn) and not _own_gradients._is_plain(eqn))
        return [bool(mixes)] * len(eqn.invars)

    def across(eqn, edge, mixed):
        holder = edge.source[0].around[0] if is_inside(edge.source[0], eqn) else edge.source[0]
        if any(each.kind is EdgeKind.PREDICATE for each in edges(holder, eqn)):
            return True
        return mixed and edge.kind is not EdgeKind.PAST

    mixed = backward(program, {}, step, operator.or_, False, across)
    return {
        (region, out)
        for region in program.regions() for eqn in region.jaxpr.eqns
        if eqn.primitive.name in _frames.REDUCTIONS
        for out in eqn.outvars if not mixed.get((region, out))
    }  # fmt: skip


def read_through_views(program, names):
    """Which of some variables products read, as they are, cast, rearranged, or slices of them."""
    found = set[Any]()

    def step(region, eqn, ins):
        if _rules.costs(eqn, _rules.Cost.PRODUCT):
            found.update(filter(None, ins))
        is_view = _rules.costs(eqn, *_product_reads._VIEWS)
        return [ins[0] if is_view else ""] * len(eqn.outvars)

    def across(eqn, edge, name):
        inside = is_inside(edge.target[0], eqn)
        over = edges(edge.target[0].around[0] if inside else edge.target[0], eqn)
        if not inside:  # Out of calls alone.
            return name if {each.kind for each in over} == {EdgeKind.IN, EdgeKind.OUT} and not any(
                each.shift for each in over
            ) else ""  # fmt: skip
        carried = any(e.kind is EdgeKind.BACK and e.target == edge.target for e in over)
        return "" if carried or edge.kind is EdgeKind.PREDICATE else name

    start = {(program, var): name for var, name in names.items()}
    forward(program, start, step, lambda a, b: a or b, "", across)
    return found


def is_inside(region, eqn):
    return region.around is not None and region.around[1] is eqn


def stacked(program, sums):
    """What loops put together of sums over devices, a turn each, and what only rearranges that."""

    def step(region, eqn, ins):
        return [_frames._rearranges(eqn) and any(ins)] * len(eqn.outvars)

    def across(eqn, edge, is_stack):
        if edge.kind is not EdgeKind.OUT:
            return False
        region, (inside, returned) = edge.target[0], edge.source
        if loops(region, eqn):
            return edge.shift == 1 and fact(sums, inside, returned, False)
        return is_stack and not decides(region, eqn)

    return forward(program, {}, step, operator.or_, False, across)


def running_sums(program, sums, stacks):
    """What turns of loops return that is what they are given, and sums over devices, and is used for nothing
    else; with the equation of the loop."""

    def collects(edge):
        (region, out), (_, var) = edge.source, edge.target
        uses, eqns = _frames.num_reads(region.jaxpr), region.jaxpr.eqns
        start = var
        while uses.get(var) == 1 and var is not out:
            reader = region.readers[var][0]
            if reader == len(eqns) or eqns[reader].primitive.name not in ("add", "add_any"):
                return False
            terms = [x for x in eqns[reader].invars if x is not var]
            if not any(fact(found, region, x, False) for x in terms for found in (sums, stacks)):
                return False
            var = eqns[reader].outvars[0]
        return var is out and var is not start and uses.get(var) == 1

    return {
        edge.source
        for region in program.regions() for eqn in region.jaxpr.eqns if turns(eqn) is not None
        for edge in edges(region, eqn) if edge.kind is EdgeKind.BACK and collects(edge)
    }  # fmt: skip


def lone_products(program, differ, sums, reduce_once):
    """Products that one sum over devices reads, unless turns of a loop add it up first; with that sum."""
    collected = running_sums(program, sums, stacked(program, sums))

    def step(region, eqn, asked):
        alone = _rules.sum_waits(eqn) and len(eqn.invars) == 1
        return [any(asked) and (eqn.primitive.name in _rules.ADDS or alone)] * len(eqn.invars)

    def across(eqn, edge, is_added):
        if edge.kind is EdgeKind.OUT and not loops(edge.target[0], eqn):
            return is_added and not decides(edge.target[0], eqn)
        if edge.kind not in (EdgeKind.OUT, EdgeKind.BACK) or is_literal(edge.source):
            return False
        inside = edge.source[0]
        waits = reduce_once or inside.around[0].pass_of(eqn) is not None
        return waits and edge.source in collected

    added = backward(program, {}, step, operator.or_, False, across)
    found = {}
    for region in program.regions():
        reads = _frames.num_reads(region.jaxpr)
        for eqn in region.jaxpr.eqns:
            if eqn.primitive.name not in _frames.REDUCTIONS or len(eqn.invars) > 1:
                continue
            (var,), (out,) = eqn.invars, eqn.outvars
            made = None if _jaxpr.is_literal(var) else region.makers.get(var)
            if made is None or reads[var] > 1 or added.get((region, out)):
                continue
            if region.jaxpr.eqns[made].primitive.name == "dot_general":
                found[region, var] = eqn
    return found


class OpenCalls(Region):
    """A program whose loops are equations like others: of them nobody looks inside."""

    def inner(self, eqn):
        return () if self.closes(eqn) else super().inner(eqn)

    def closes(self, eqn):
        return loops(self.opened, eqn)

    @functools.cached_property
    def opened(self):
        return Region(self.jaxpr, self.consts, self.autodiff)


def new_leaves(frame, num, stops):
    """Of variables, which of the first results they become, along operations that pass on their dims."""
    program = OpenCalls(frame.jaxpr, frame.consts, frame.autodiff)
    stopped = {id(frame.jaxpr.eqns[i]) for i in stops}

    def step(region, eqn, outs):
        if id(eqn) in stopped or region.pass_of(eqn) is not None:
            return [0] * len(eqn.invars)
        shapes = dict[Any, int]()
        for out, leaves in zip(eqn.outvars, outs, strict=True):
            shape = getattr(out.aval, "shape", ())
            shapes[shape] = shapes.get(shape, 0) | leaves
        maps = _rules.dims_of(eqn)
        if maps is not None:
            every = functools.reduce(operator.or_, shapes.values())
            passed = [any(d is not None for d in dims) for dims in maps]
            return [every * has_dims(x) * p for x, p in zip(eqn.invars, passed, strict=True)]
        same = region.closes(eqn) or eqn.primitive.name in _rules.IDENTITIES
        of = [shapes.get(getattr(x.aval, "shape", ()), 0) for x in eqn.invars]
        return [leaves * has_dims(x) * same for x, leaves in zip(eqn.invars, of, strict=True)]

    def across(eqn, edge, leaves):
        region = edge.source[0].around[0] if is_inside(edge.source[0], eqn) else edge.source[0]
        stays = id(eqn) in stopped or region.pass_of(eqn) is not None
        return 0 if stays or edge.kind is EdgeKind.PREDICATE else leaves * has_dims(edge.source[1])

    start = dict[ValueIn, int]()
    for i, atom in enumerate(frame.jaxpr.outvars[:num]):
        if not _jaxpr.is_literal(atom) and has_dims(atom):
            start[program, atom] = start.get((program, atom), 0) | 1 << i
    found = backward(program, start, step, operator.or_, 0, across)
    return {var: leaves for (region, var), leaves in found.items() if leaves and region is program}


def has_dims(atom):
    return getattr(atom.aval, "ndim", 0) > 1


def decides(region, eqn):
    return any(edge.kind is EdgeKind.PREDICATE for edge in edges(region, eqn))


def spreads(differ, region, eqn):
    return any(differ.get((region, out)) for out in eqn.outvars)
