# SPDX-License-Identifier: Apache-2.0
"""Prefetches gathers: loops over layers gather one iteration ahead, other equations `nbytes` ahead.

Of a loop, too, no more than `nbytes` are gathered ahead.

`prefetch(jaxpr, nbytes)` makes of `for x in xs: carry = body(carry, gather(x))`::

    ahead = gather(xs[0])
    for i in range(length - 1):
        ahead, carry = gather(xs[i + 1]), body(carry, ahead)
    carry = body(carry, ahead)

and has each gather stand behind the product from which on it may start. It waits for that product, by a
barrier. No gather is added or taken away, and none is of other values.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jzero.ir._loops import Scan, makes_keys, pipelined
from jzero.ir._memory_spaces import is_fetch
from jzero.ir._regions import variables
from jzero.ir._writer import JaxprWriter
from jzero.sharding.analysis import _frames, _residuals
from jzero.sharding.passes import _waits
from jzero.sharding.passes._inputs_first import COTANGENT
from jzero.sharding.passes._late_gathers import latest_use
from jzero.sharding.passes._waits import AFTER_LOOP, LAST_ITERATION
from jzero.sharding.passes._waits import PREFETCH as SCOPE
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var

# [Note: when a gather may start]
# A gather that starts too early is the gather of the pass before: the compiler lets one serve both, and
# every parameter is alive in between. One that starts too late has nothing to hide behind. It waits for the
# product before the first use of an earlier gather: the earliest for which all gathers from that one on fit
# in `nbytes` together; and for one product before its own use, whatever its size. In a loop the gathers of
# the iteration before count as earlier ones. None starts before the pass that reads it (it waits for the last
# value of the pass before), or before a loop that gathers and is over before its use.

# [Note: a backward loop begins with its carry]
# With remat, XLA else computes the first iteration's forward part, with all that it gathers, while the logits
# and the gathered table are still there: nothing in it reads a cotangent.


def prefetch(jaxpr: Jaxpr, nbytes: int, balance: float = 0.0) -> Jaxpr:
    """One device's program with its gathers ahead of their uses.

    `nbytes`: the most gathered bytes that are not read yet, or those of one product if these are more. With 0
      nothing is gathered ahead.
    `balance`: multiplications in the time in which a byte is gathered, [Note: late gathers] in
      `_late_gathers.py`.
    """
    return _placed(_nested(jaxpr, nbytes, balance, None), nbytes, _Scope())


@dataclasses.dataclass(frozen=True)
class _Scope:
    autodiff: str | None = None  # the pass around it
    # Arguments that the iteration before has computed.
    late: frozenset[Var] = frozenset()
    # In a loop of one pass, what the next iteration reads its results as; None elsewhere.
    following: Mapping[Var, Var] | None = None
    awaited: Sequence[Var] = ()  # what gathers for the next iteration wait for


def _nested(jaxpr: Jaxpr, limit: int, balance: float, autodiff: str | None) -> Jaxpr:
    eqns: list[Eqn] = []
    for eqn in jaxpr.eqns:
        inside = autodiff or _jaxpr.autodiff_pass(eqn)
        if eqn.primitive.name == "scan":
            eqns += _loop(eqn, limit, balance, inside)
            continue

        def inner(body: Jaxpr, inside: str | None = inside) -> Jaxpr:
            return _placed(_nested(body, limit, balance, inside), limit, _Scope(inside))

        eqns.append(_jaxpr.with_inner(eqn, inner))
    return _waits.with_equations(jaxpr, eqns)


def _loop(eqn: Eqn, limit: int, balance: float, autodiff: str | None) -> list[Eqn]:
    eqn = _jaxpr.with_inner(eqn, lambda body: _nested(body, limit, balance, autodiff))
    scan = Scan.of(eqn)
    of_one_pass = autodiff is not None or not any(map(_jaxpr.autodiff_pass, _jaxpr.walk(scan.body)))
    before, after, awaited = list[Eqn](), list[Eqn](), list[Var]()
    if ahead := _ahead(scan, limit if of_one_pass else 0):
        new = pipelined(scan, ahead)
        before = [_jaxpr.within_scope(e, outer=eqn) for e in new.before]
        after = [_jaxpr.within_scope(e, LAST_ITERATION, outer=eqn) for e in new.after]
        if any(map(_waits.reduces, _jaxpr.walk(scan.body))):
            before = _with_carry(before, [p.init for p in scan.carries])
        scan, eqn = new, new.equation()
        made = {out for e in scan.eqns if _moves(e) for out in e.outvars}
        gathered_before = [p.before for p in scan.carries if p.after in made]
        awaited = latest_use(scan.body, gathered_before, balance)
    following = {p.after: p.before for p in scan.carries if not _jaxpr.is_literal(p.after)}
    place = _Scope(autodiff, _late(scan), following if of_one_pass else None, awaited)
    return [*before, _jaxpr.with_inner(eqn, lambda body: _placed(body, limit, place)), *after]


def _late(scan: Scan) -> frozenset[Var]:
    return frozenset(p.before for p in scan.carries if _waits.is_float(p.before))


def _ahead(scan: Scan, limit: int) -> list[Var]:
    """What an iteration gathers for the next one: of slices, and of nothing that an iteration computes.

    Gathers that fit in `limit` together, and all before the first product, which has none to hide behind.
    And all that it fetches from the host.
    """
    parts = _jaxpr.scan_parts(scan.eqn)
    if scan.length < 2 or parts.unroll != 1 or parts.body_consts or makes_keys(scan):
        return []
    slices, carried = {p.row for p in scan.xs}, {p.before for p in scan.carries}
    fetched = [e.outvars[0] for e in scan.eqns if is_fetch(e) and e.invars[0] in slices]
    return [*(_gathered_ahead(scan, limit, slices, carried) if limit else ()), *fetched]


def _gathered_ahead(scan: Scan, limit: int, slices: set[Var], carried: set[Var]) -> list[Var]:
    level = _Level(scan.body, _Scope(late=_late(scan)))
    found, held = list[Var](), 0
    for gather in level.gathers:
        # A barrier of the program's own may hold what the iteration computes, and stands before the loop with
        # it.
        alone = not gather.others and not gather.names
        free = gather.moves and alone and carried.isdisjoint(gather.reads)
        if not free or slices.isdisjoint(gather.reads):
            continue
        found.append(gather.out)
        held += _waits.nbytes([gather.out])
        if held > limit and gather.use > min(level.products, default=gather.use):
            return found[:-1]
    return found


def _with_carry(eqns: Sequence[Eqn], carry: Sequence[Atom]) -> list[Eqn]:
    """Gathers before a loop depend on its initial carry, [Note: a backward loop begins with its carry]."""
    ready, found = [x for x in variables(carry) if _waits.is_float(x)], list[Eqn]()
    for eqn in eqns:
        if _waits.is_gather(eqn) and ready:
            barriers, eqn = _waits.waiting(eqn, ready, SCOPE)
            found += barriers
        found.append(eqn)
    return found


class _Gather(NamedTuple):
    """A gather of a program's arguments, or what a loop has gathered for its last iteration."""

    eqn: Eqn  # the gather, or the loop
    out: Var  # what is gathered
    # The index of the equation that first reads it; one of the next iteration comes after all of this one's.
    use: int
    cone: dict[int, Eqn]  # equations that make its operand, by index
    # What they read in the place of what is behind a barrier of the program's own.
    names: dict[Var, Atom]
    reads: set[Var]  # arguments of the program that these read
    others: set[Var]  # what it waits for by a barrier of another pass

    @property
    def moves(self) -> bool:
        return _moves(self.eqn)


class _Level:
    """The equations of a program that gather, take time, or begin a pass."""

    def __init__(self, jaxpr: Jaxpr, place: _Scope):
        self.jaxpr, self.place, self.num = jaxpr, place, len(jaxpr.eqns)
        self.index = {out: i for i, eqn in enumerate(jaxpr.eqns) for out in eqn.outvars}
        self.makers: _waits.Makers = {out: jaxpr.eqns[i] for out, i in self.index.items()}
        self.first: dict[Var, int] = {}
        for i, eqn in reversed([*enumerate(jaxpr.eqns)]):
            self.first |= dict.fromkeys(variables(eqn.invars), i)
        long = [i for i, eqn in enumerate(jaxpr.eqns) if _waits.takes_time(eqn)]
        self.products = [i for i in long if _waits.done(jaxpr.eqns[i]) is not None]
        self.loops = [i for i in self.products if _waits.gathers_inside(jaxpr.eqns[i])]
        found = [self._gather(eqn, out) for eqn in jaxpr.eqns for out in _gathered(eqn)]
        self.gathers = sorted(filter(None, found), key=self._position)
        # In a loop they are ahead, or have nothing to wait for.
        fetches = [e for e in jaxpr.eqns if is_fetch(e) and place.following is None]
        found = [self._fetch(eqn, eqn.outvars[0]) for eqn in fetches]
        self.fetches = sorted(filter(None, found), key=self._position)

    def _position(self, gather: _Gather) -> int:
        return gather.use % self.num

    def _gather(self, eqn: Eqn, out: Var) -> _Gather | None:
        use = self.first.get(out)
        if use is None and self.place.following is not None and out in self.place.following:
            use = self.num + self.first.get(self.place.following[out], self.num - 1)
        if use is None or (use < self.num and _waits.is_gather(self.jaxpr.eqns[use])):
            return None  # Nobody reads it, or it is half of another one.
        gather = _Gather(eqn, out, use, {}, {}, set(), set())
        return gather if self._follow(gather, eqn.invars if gather.moves else []) else None

    def _fetch(self, eqn: Eqn, out: Var) -> _Gather | None:
        """A fetch depends on its copy to the host, which is not moved."""
        use, copy = self.first.get(out), eqn.invars[0]
        if use is None or _jaxpr.is_literal(copy) or copy not in self.index:
            return None
        return _Gather(eqn, out, use, {}, {}, set(), {copy})

    def _follow(self, gather: _Gather, atoms: Sequence[Atom]) -> bool:
        """Notes the equations that make these; False if one of them takes time itself."""
        due, seen = variables(atoms), set[Var]()
        while due:
            if (var := due.pop()) in seen:
                continue
            seen.add(var)
            if (i := self.index.get(var)) is None:
                gather.reads.add(var)
                if var in self.place.late:
                    return False
                continue
            eqn = gather.cone[i] = self.jaxpr.eqns[i]
            if eqn.primitive.name == "optimization_barrier":
                held = eqn.invars[_waits.place_of(eqn, var)]
                if any(_jaxpr.in_scope(eqn, scope) for scope in (SCOPE, AFTER_LOOP)):
                    gather.others.update(x for x in variables(eqn.invars) if x is not held)
                else:
                    gather.names[var] = held
                due += variables([held])
                continue
            if (
                eqn.primitive.name in _MEETING or _waits.takes_time(eqn)
                or _jaxpr.inner_jaxprs(eqn) or _jaxpr.has_side_effects(eqn)
            ):  # fmt: skip
                return False
            due += variables(eqn.invars)
        return True

    def ready(self, gather: _Gather) -> int:
        return max((self.index.get(var, -1) for var in gather.others), default=-1)

    def starts(self, limit: int) -> list[tuple[_Gather, int]]:
        """For each gather the equation behind which it may start, or -1, [Note: when a gather may start]."""
        if self.place.following is None:
            fetched = self._starts(self.fetches, _residuals.ON_THEIR_WAY)
            return [*self._starts(self.gathers, limit), *fetched]
        return self._starts(self.gathers, limit)

    def _starts(self, gathers: Sequence[_Gather], limit: int) -> list[tuple[_Gather, int]]:
        sizes = [_waits.nbytes([gather.out]) for gather in gathers]
        uses = [*map(self._position, gathers)]
        if self.place.following is not None:
            iterations = [k * self.num for k in range(3)]
            found = _queue(sizes * 3, [t + use for t in iterations for use in uses],
                           [t + i for t in iterations for i in self.products], limit)  # fmt: skip
            # Relative to the iteration that gathers, for the next one or for itself.
            pairs = zip(gathers, found[2 * len(uses) :], strict=True)
            awaited = max((self.index[var] for var in self.place.awaited), default=-1)
            each = list[tuple[_Gather, int]]()
            for g, at in pairs:
                start = self._in_own_iteration(g, at)
                start = max(start, awaited) if g.use >= self.num else start
                each.append((g, self._behind_loop(g, start)))
            return each
        result = list[tuple[_Gather, int]]()
        begins = [self.begins[use] for use in uses]
        for begin in dict.fromkeys(begins):
            mine = [k for k, own in enumerate(begins) if own == begin]
            products = [i for i in self.products if i > begin]
            found = _queue([sizes[k] for k in mine], [uses[k] for k in mine], products, limit)
            for k, at in zip(mine, found, strict=True):
                start = begin if at is None else max(begin, at)
                result.append((gathers[k], self._behind_loop(gathers[k], start)))
        return result

    def _in_own_iteration(self, gather: _Gather, at: int | None) -> int:
        """A position in the third iteration, relative to the iteration that gathers."""
        if at is None:
            return -1
        last = max(self.products, default=-1)
        return min(at - self.num, last) if gather.use >= self.num else at - 2 * self.num

    def _behind_loop(self, gather: _Gather, start: int) -> int:
        return max([start, -1, *(i for i in self.loops if i < gather.use)])

    @functools.cached_property
    def begins(self) -> list[int]:
        """For each equation the last one of the pass before its own, or -1."""
        begins, begin, latest, seen = list[int](), -1, -1, None
        computed, products = set(self.place.late), set(self.products)
        for i, eqn in enumerate(self.jaxpr.eqns):
            current = None if self.place.autodiff else _jaxpr.autodiff_pass(eqn)
            if current is not None and current != seen:
                begin, seen = (begin if seen is None else latest), current
            begins.append(begin)
            pairs = zip(eqn.invars, eqn.outvars, strict=False)
            if eqn.primitive.name == "optimization_barrier":
                computed |= {out for x, out in pairs if not _jaxpr.is_literal(x) and x in computed}
            elif i in products or not computed.isdisjoint(variables(eqn.invars)):
                computed.update(eqn.outvars)
                latest = latest if _waits.done(eqn) is None else i
            if _jaxpr.is_named(eqn, COTANGENT):
                begin = i
        return begins


def _moves(eqn: Eqn) -> bool:
    return _waits.is_gather(eqn) or is_fetch(eqn)


def _gathered(eqn: Eqn) -> list[Var]:
    """What the equation gathers; of a loop, for the iteration behind it."""
    if eqn.primitive.name != "scan":
        return eqn.outvars if _waits.is_gather(eqn) else []
    scan = Scan.of(eqn)
    made = {out for e in scan.eqns if _waits.is_gather(e) for out in e.outvars}
    return [p.out for p in scan.carries if not _jaxpr.is_literal(p.after) and p.after in made]


_MEETING = _frames.COLLECTIVES - {"axis_index", "all_gather", "all_gather_invariant"}


def _queue(
    sizes: Sequence[int], uses: Sequence[int], products: Sequence[int], limit: int
) -> list[int | None]:
    """For each gather the product behind which it may start, or None, [Note: when a gather may start]."""
    found, ahead, total, all_ahead = list[int | None](), deque[tuple[int, int | None]](), 0, True
    for nbytes, use in zip(sizes, uses, strict=True):
        place = bisect.bisect_left(products, use)
        before = products[place - 1] if place else None
        ahead.append((nbytes, before))
        total += nbytes
        while limit and total > limit and len(ahead) > 1 and ahead[1][1] != before:
            total -= ahead.popleft()[0]
            all_ahead = False
        found.append(before if not limit else None if all_ahead else ahead[0][1])
    return found


def _placed(jaxpr: Jaxpr, limit: int, place: _Scope) -> Jaxpr:
    """The program with each gather behind the equation from which on it may start."""
    level, at = _Level(jaxpr, place), dict[int, list[_Gather]]()
    for gather, start in level.starts(limit):
        if not gather.moves or _waits.waits_by(level.makers, gather.eqn.invars[0], SCOPE):
            continue
        at.setdefault(max(start, level.ready(gather)), []).append(gather)
    if not at:
        return jaxpr
    moved = {id(gather.eqn) for each in at.values() for gather in each}
    writer, written = JaxprWriter(jaxpr.eqns[0]), set[int]()

    def write(eqn: Eqn) -> None:
        if id(eqn) not in written:
            written.add(id(eqn))
            writer.eqns.append(eqn)

    for i in range(-1, level.num):
        if i >= 0 and id(jaxpr.eqns[i]) not in moved:
            write(jaxpr.eqns[i])
        for gather in at.get(i, ()):
            writer.names = dict[Var, Atom]()
            for _, eqn in sorted(gather.cone.items()):
                if opened := [out for out in gather.names if level.makers[out] is eqn]:
                    writer.names |= {out: writer.read(gather.names[out]) for out in opened}
                elif writer.names.keys().isdisjoint(variables(eqn.invars)):
                    write(eqn)
                else:
                    writer.copy([eqn])
            eqn = gather.eqn.replace(invars=[*map(writer.read, gather.eqn.invars)])
            token = _waits.done(jaxpr.eqns[i]) if i > level.ready(gather) else None
            barriers, eqn = _waits.waiting(eqn, [token], SCOPE) if token else ([], eqn)
            writer.eqns += [*barriers, eqn]
    return _waits.with_equations(jaxpr, writer.eqns)
