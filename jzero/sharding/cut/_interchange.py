# SPDX-License-Identifier: Apache-2.0
"""Interchanges loops over microbatches and loops over layers.

A loop over microbatches runs all layers for each microbatch. Here it becomes a loop over microbatches inside
each layer, so that a layer's parameters are read once for all of them::

    for i in microbatches:                        for w in layers:
        for w in layers:                   ->         w = gather(w)
            x[i] = f(gather(w), x[i])                 for i in microbatches: x[i] = f(w, x[i])

That is *layered gradient accumulation* (Lamy-Poirier, "Layered gradient accumulation and modular pipeline
parallelism: fast and efficient training of large language models", 2021).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from jzero._errors import OptionError, message
from jzero.ir._loops import MICROBATCHES
from jzero.ir._regions import variables
from jzero.sharding.analysis._frames import split
from jzero.sharding.cut import _layers
from jzero.sharding.cut._all_microbatches import AllMicrobatches, Running
from jzero.sharding.cut._layer_parts import OuterLoop, ScannedLayers, StraightStage, read_later
from jzero.sharding.cut._param_derived import param_derived, without_barriers
from jzero.sharding.cut._term_by_term import term_by_term
from jzero.tracing import _call, _jaxpr, _lines
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var

WHO = _call.WHO


def layer_major(
    jaxpr: Jaxpr, leaves: Mapping[Var, int], batch: Collection[Var], device_bytes: int
) -> Jaxpr:
    """Moves each loop over microbatches that reads leaves into each part of its body.

    Sums over microbatches keep their order, except for weights with several uses, which are summed use by use
    (`_term_by_term.py`). All other values are equal to the bit, if the compiler rounds alike. `leaves` are
    inputs stored on the host, with their bytes on a device, `batch` are batch-sharded inputs. See
    `_layers.cut` for `device_bytes`.
    """
    jaxpr = without_barriers(jaxpr, leaves, batch)
    follows = param_derived(jaxpr.eqns, leaves, batch)
    eqns: list[Eqn] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan" and _jaxpr.in_scope(eqn, MICROBATCHES):
            loop = _reading_leaves(eqn, follows, leaves, batch)
            if loop.leaves:
                eqns += _LayerMajor(loop, device_bytes).equations()
                continue
        eqns.append(eqn)
    return _jaxpr.replaced(jaxpr, eqns=eqns)


class _MicrobatchLoop(NamedTuple):
    eqn: Eqn
    consts: dict[Var, Atom]  # Loop constants, by their names in the body.
    body: Jaxpr  # Without barriers around values derived from leaves.
    leaves: dict[Var, int]  # Inputs of the body that are leaves, with their bytes.
    batch: set[Var]  # Inputs of the body that are of the batch, or of a microbatch.


def _reading_leaves(
    eqn: Eqn, follows: Mapping[Var, Eqn], leaves: Mapping[Var, int], batch: Collection[Var]
) -> _MicrobatchLoop:
    """The loop with leaves as constants, in place of values that are derived only from leaves."""
    scan = _jaxpr.scan_parts(eqn)
    assert not scan.body_consts, "jzero traced it: what it closes over are operands"
    pairs = list(zip(eqn.invars, scan.body.invars[: scan.num_consts], strict=False))
    names = {atom: name for atom, name in pairs if not _jaxpr.is_literal(atom)}
    consts = {
        name: atom
        for atom, name in pairs
        if _jaxpr.is_literal(atom) or atom not in follows or names[atom] is not name
    }
    first: dict[int, Eqn] = {}

    def bring(var: Var) -> None:
        source = follows.get(var)
        if source is None:
            consts.setdefault(names.setdefault(var, _jaxpr.new_var(var)), var)
        elif id(source) not in first:
            for atom in variables(source.invars):
                bring(atom)
            ins = [a if _jaxpr.is_literal(a) else names[a] for a in source.invars]
            outs = [names.setdefault(out, _jaxpr.new_var(out)) for out in source.outvars]
            first[id(source)] = source.replace(invars=ins, outvars=outs)

    for atom, name in pairs:
        if name not in consts:
            bring(_jaxpr.variable(atom))
    fetched = {
        name: leaves[a] for name, a in consts.items() if not _jaxpr.is_literal(a) and a in leaves
    }
    invars = [*consts, *scan.body.invars[scan.num_consts :]]
    body = _jaxpr.replaced(scan.body, invars=invars, eqns=[*first.values(), *scan.body.eqns])
    of_batch = {name for name, a in consts.items() if not _jaxpr.is_literal(a) and a in batch}
    of_batch.update(scan.body.invars[scan.num_consts :])
    return _MicrobatchLoop(
        eqn, consts, without_barriers(body, fetched, of_batch), fetched, of_batch
    )


class _LayerMajor:
    def __init__(self, loop: _MicrobatchLoop, device_bytes: int):
        for eqn in filter(_jaxpr.has_side_effects, loop.body.eqns):
            raise OptionError(message(
                WHO, f"Microbatches(order='layer'), and a {eqn.primitive.name}{_lines.at_line(eqn)} for each "
                "microbatch",
                "All microbatches pass a layer before the next layer comes, so that they would not print, "
                "or call back, one after the other.", "Drop order, or the print or callback."
            ))  # fmt: skip
        scan = _jaxpr.scan_parts(loop.eqn)
        self._eqn = loop.eqn
        _, self._init, stacks = split(loop.eqn.invars, scan.num_consts, scan.num_carry)
        _, self._before, slices = split(loop.body.invars, len(loop.consts), scan.num_carry)
        body, self._steps = term_by_term(loop.body, self._before)
        parts = _layers.cut(body, loop.leaves, loop.batch, (), device_bytes, nests=())
        self._parts = [part for part in parts if not isinstance(part, OuterLoop)]
        self._reads = [set(part.reads) for part in self._parts]
        self._after, self._ys = split(body.outvars, scan.num_carry)
        self._outs, self._stacks = split(loop.eqn.outvars, scan.num_carry)
        self._all = AllMicrobatches(loop.eqn)
        self._all.shared |= loop.consts
        self._all.stacks |= zip(slices, stacks, strict=True)
        self._running: dict[Var, Running] = {}  # By the variable that a part reads.
        self._taken_over = set[Var]()  # Carries that parts update one after the other.
        self._check_carries()
        # Only the last microbatch returns the other carries.
        lasts = [
            x
            for var, x in zip(self._before, self._after, strict=True)
            if var not in self._taken_over
        ]
        self._wanted = read_later(self._reads, [*self._ys, *lasts])

    def equations(self) -> list[Eqn]:
        for part, read in zip(self._parts, self._wanted, strict=True):
            wanted = read - self._running.keys()
            if isinstance(part, StraightStage):
                self._stage(part, wanted)
            else:
                self._scanned_layers(part, wanted)
        self._results()
        return self._all.eqns

    # -- from one microbatch to the next ---------------------------------------------------------------

    def _check_carries(self) -> None:
        bad = []
        for each in map(Running, self._before, self._init, self._after, self._outs):
            if each.after is each.before:
                self._all.shared[each.before] = each.init
                continue
            returned = each.before in variables([*self._after, *self._ys])
            at = [
                p for p, read in zip(self._parts, self._reads, strict=True) if each.before in read
            ]
            if not at and not returned:
                continue
            links = [] if returned else self._links(each)
            if links:
                self._running |= {link.before: link for link in links}
                self._taken_over.add(each.before)
            else:
                where = [e for part in at for e in part.eqns if each.before in variables(e.invars)]
                bad.append(f"{_type_of(each.before)}{_lines.at_line(where[0]) if where else ''}")
        if bad:
            raise OptionError(message(
                WHO, bad, "With order='layer' all microbatches pass a layer before the next layer comes. "
                "What one of them takes of the one before must be made in the layer, or between the layers, "
                "where it is read.", "Drop order.", things="values"))  # fmt: skip

    def _links(self, whole: Running) -> list[Running]:
        """The updates of a carry, part by part; [] if a part reads it without updating it."""
        values = [*self._steps.get(whole.before, [])[:-1], whole.after]
        found: list[Running] = []
        before, init = whole.before, whole.init
        while before is not whole.after:
            readers = [
                p for p, read in zip(self._parts, self._reads, strict=True) if before in read
            ]
            made = [v for part in readers for v in values if _takes_over(part, before, v)]
            if len(readers) != 1 or not made:
                return []
            out = whole.out if made[-1] is whole.after else _jaxpr.new_var(whole.out)
            found.append(Running(before, init, made[-1], out))
            before, init = _jaxpr.variable(made[-1]), out
        return found

    def _results(self) -> None:
        every, scan = self._all, _jaxpr.scan_parts(self._eqn)
        last = 0 if scan.reverse else scan.length - 1
        for before, after, out in zip(self._before, self._after, self._outs, strict=True):
            if before in self._taken_over:
                continue
            if every.is_shared(after):
                every.copy(every.whole(after), out)
            else:
                every.row(every.stack(after), last, out)
        for atom, out in zip(self._ys, self._stacks, strict=True):
            every.copy(every.stack(atom), out)

    # -- parts -----------------------------------------------------------------------------------------

    def _stage(self, part: StraightStage, wanted: set[Var]) -> None:
        local = self._all.local(part.eqns)
        made = [v for v in part.outputs if v in wanted and not self._all.is_shared(v)]
        running = [self._running[v] for v in part.reads if v in self._running]
        self._all.run(local, running, made)

    def _scanned_layers(self, part: ScannedLayers, wanted: set[Var]) -> None:
        scan, inner = part.parts, AllMicrobatches(self._eqn)
        pairs, running = self._enter(part, inner)
        own = {*scan.body.invars}.difference(inner.shared)
        body = without_barriers(scan.body, inner.shared, own)
        local = inner.local(body.eqns)
        carry, slices = split(body.outvars, scan.num_carry)
        finals, stacks = part.results
        made = [(x, y) for x, y in zip(slices, stacks, strict=True) if y in wanted]
        here = {out for eqn in local for out in eqn.outvars}
        last = variables([*carry, *(x for x, _ in made)])
        inner.run(local, [each for each, _ in running], [v for v in last if v in here])
        outs = [
            (inner.stack(x), self._all.new_stack(out)) for x, out in zip(carry, finals, strict=True)
        ]
        outs += [(each.out, out) for each, out in running]
        for x, y in made:
            if inner.is_shared(x):
                outs.append((inner.whole(x), self._all.new_shared(y)))
            else:
                outs.append((inner.stack(x), self._all.new_by_iteration(y)))
        body = _jaxpr.replaced(
            body, invars=[v for _, v in pairs], eqns=inner.eqns, outvars=[x for x, _ in outs]
        )
        ins, results = [a for a, _ in pairs], [y for _, y in outs]
        nums = scan.num_consts, scan.num_carry, scan.length
        self._all.eqns.append(_jaxpr.scan_like(part.eqn, body, ins, results, *nums, scan.reverse))

    def _enter(
        self, part: ScannedLayers, inner: AllMicrobatches
    ) -> tuple[list[tuple[Atom, Var]], list[tuple[Running, Var]]]:
        """The operands of the layers' loop by their names in an iteration, and carries with their results."""
        scan, every, (consts, init, xs) = part.parts, self._all, part.operands
        inner.shared |= zip(scan.body.constvars, scan.body.constvars, strict=True)
        names = split(scan.body.invars, scan.num_consts, scan.num_carry)
        row_of = dict(zip(part.results[1], scan.body.outvars[scan.num_carry :], strict=True))
        pairs: list[tuple[Atom, Var]] = []
        running: list[tuple[Running, Var]] = []
        for atom, name in zip(consts, names[0], strict=True):
            shared = every.is_shared(atom)
            pairs.append(
                inner.take(every.whole(atom) if shared else every.stack(atom), name, shared)
            )
        for atom, name in zip(init, names[1], strict=True):
            pairs.append(inner.take(every.stack(atom), name, False))
        for atom, name in zip(xs, names[2], strict=True):
            found = None if _jaxpr.is_literal(atom) else self._running.get(atom)
            if found is None:
                shared = every.is_shared(atom)
                pairs.append(
                    inner.take(
                        every.whole(atom) if shared else every.by_iteration(atom), name, shared
                    )
                )
                continue
            first, last = _jaxpr.new_var(name), _jaxpr.new_var(name)
            pairs.append((found.init, first))
            running.append(
                (Running(name, first, row_of[_jaxpr.variable(found.after)], last), found.out)
            )
        return pairs, running


def _takes_over(part: StraightStage | ScannedLayers, before: Var, after: Atom) -> bool:
    """Whether a part that reads a carry computes its next value, in the same iteration."""
    if isinstance(part, StraightStage):
        return any(out is after for eqn in part.eqns for out in eqn.outvars)
    consts, init, xs = part.operands
    once = sum(atom is before for atom in [*consts, *init, *xs]) == 1
    return once and any(a is before for a in xs) and any(y is after for y in part.results[1])


def _type_of(var: Var) -> str:
    return f"{var.aval.dtype}[{','.join(map(str, var.aval.shape))}]"
