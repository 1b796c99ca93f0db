"""Frames: what a step's jaxpr says before anything runs, and first of all which values vary.

A frame is one place a jaxpr is called from, so that a function called twice is judged twice. Three facts
are found about its variables:

* **varying** (here): the mesh axes over which the value differs between devices. jzero's own dataflow.
* **linked dims** (`_links.py`): dims that are sharded together.
* **needs** (`_needs.py`): who needs the whole value, and what feeds the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from jzero.sharding.analysis import _rules
from jzero.tracing import _jaxpr

Axes = frozenset[str]
NOWHERE: Axes = frozenset()
DimKey = tuple[int, _jaxpr.Var, int]

# The result is the same on all devices of the axes it names.
REDUCTIONS = frozenset({"psum", "psum_invariant"})
AGREEING = REDUCTIONS | {"pmax", "pmin", "all_gather", "all_gather_invariant"}
# The result differs between devices of the axes it names.
SPREADING = frozenset(
    {"axis_index", "ppermute", "pshuffle", "all_to_all", "reduce_scatter", "psum_scatter"}
)
COLLECTIVES = AGREEING | SPREADING


@dataclasses.dataclass(eq=False)
class Frame:
    """One place in the step where a jaxpr runs, and what was found about its variables."""

    jaxpr: _jaxpr.Jaxpr
    consts: list
    varying: dict[_jaxpr.Var, Axes]
    autodiff: str | None = None  # the AD pass around it
    children: dict[int, list[Frame]] = dataclasses.field(default_factory=dict)
    unreduced: set[_jaxpr.Var] = dataclasses.field(default_factory=set)
    local_gradients: set[_jaxpr.Var] = dataclasses.field(default_factory=set)
    needs_full: set[_jaxpr.Var] = dataclasses.field(default_factory=set)
    feeds_batch: set[_jaxpr.Var] = dataclasses.field(default_factory=set)
    _last_uses: dict[_jaxpr.Var, int] = dataclasses.field(default_factory=dict)

    def last_use(self, var: _jaxpr.Var) -> int:
        """Where `var` is read last: an equation's index, or the number of equations if it is returned."""
        if not self._last_uses:
            reads = [(i, atom) for i, eqn in enumerate(self.jaxpr.eqns) for atom in eqn.invars]
            reads += [(len(self.jaxpr.eqns), atom) for atom in self.jaxpr.outvars]
            self._last_uses |= {atom: i for i, atom in reads if not _jaxpr.is_literal(atom)}
        return self._last_uses.get(var, -1)

    def varies(self, atom: _jaxpr.Atom) -> Axes:
        """The axes over which `atom` differs between devices."""
        return NOWHERE if _jaxpr.is_literal(atom) else self.varying[atom]

    def pass_of(self, eqn: _jaxpr.Eqn) -> str | None:
        """'forward' or 'backward' if JAX's AD made the equation, or the loop or call around it."""
        return self.autodiff or _jaxpr.autodiff_pass(eqn)

    def reads(self, eqn: _jaxpr.Eqn) -> list[Axes]:
        """Variance of the operands."""
        return [self.varies(atom) for atom in eqn.invars]

    @property
    def out_varying(self) -> list[Axes]:
        """Variance of the outputs."""
        return [self.varies(atom) for atom in self.jaxpr.outvars]

    def walk(self) -> Iterator[tuple[Frame, int, _jaxpr.Eqn]]:
        """Every equation of this frame and the frames below it."""
        for index, eqn in enumerate(self.jaxpr.eqns):
            yield self, index, eqn
            for child in self.children.get(index, ()):
                yield from child.walk()


def axes_of(eqn: _jaxpr.Eqn) -> tuple[str, ...]:
    """The mesh axes that a collective equation names."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    return axes if isinstance(axes, tuple) else (axes,)


# --------------------------------------------------------------------------------------------------
# Variance: forward over the equations, to a fixed point in loops.


def build_frames(
    jaxpr: _jaxpr.Jaxpr, consts: list, in_varying: Sequence[Axes], autodiff: str | None = None
) -> Frame:
    """The tree of frames of `jaxpr`, with the variance of every variable."""
    varying = dict(zip(jaxpr.invars, in_varying, strict=True))
    varying |= dict.fromkeys(jaxpr.constvars, NOWHERE)
    frame = Frame(jaxpr, consts, varying, autodiff)
    for index, eqn in enumerate(jaxpr.eqns):
        flow = _FLOW.get(eqn.primitive.name, _flow_default)
        outs = flow(frame, index, eqn, frame.reads(eqn))
        frame.varying |= dict(zip(eqn.outvars, outs, strict=True))
        _note_unreduced(frame, index, eqn)
        _note_local_gradients(frame, index, eqn)
    return frame


def _note_local_gradients(frame: Frame, index: int, eqn: _jaxpr.Eqn) -> None:
    """Notes what comes out of a backward pass and still differs between devices."""
    made = frame.pass_of(eqn) == "backward"
    made = made or any(not _jaxpr.is_literal(a) and a in frame.local_gradients for a in eqn.invars)
    inner: set[_jaxpr.Var] = set()
    for child in frame.children.get(index, []):
        pairs = zip(eqn.outvars, child.jaxpr.outvars, strict=False)
        inner |= {
            out
            for out, atom in pairs
            if not _jaxpr.is_literal(atom) and atom in child.local_gradients
        }
    frame.local_gradients |= {
        out for out in eqn.outvars if frame.varies(out) and (made or out in inner)
    }


def _child(
    frame: Frame, eqn: _jaxpr.Eqn, jaxpr: _jaxpr.Jaxpr, consts: list, ins: Sequence[Axes]
) -> Frame:
    return build_frames(jaxpr, consts, ins, frame.pass_of(eqn))


def _union(ins: Sequence[Axes]) -> Axes:
    return NOWHERE.union(*ins)


def _flow_default(frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Axes]) -> list[Axes]:
    call = _jaxpr.call_parts(eqn)
    if call is not None:
        child = _child(frame, eqn, *call, ins)
        frame.children[index] = [child]
        return child.out_varying
    out = _union(ins)
    if eqn.primitive.name in AGREEING and not eqn.params.get("axis_index_groups"):
        return [axes - set(axes_of(eqn)) for axes in ins]
    if eqn.primitive.name in COLLECTIVES:
        out |= set(axes_of(eqn))
    return [out] * len(eqn.outvars)


def _flow_scan(frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Axes]) -> list[Axes]:
    scan = _jaxpr.scan_parts(eqn)
    consts, carry, xs = split(ins, scan.num_consts, scan.num_carry)
    while True:
        child = _child(frame, eqn, scan.body, scan.body_consts, [*consts, *carry, *xs])
        new = [a | b for a, b in zip(carry, child.out_varying, strict=False)]
        if new == carry:
            break
        carry = new
    frame.children[index] = [child]
    return [*carry, *child.out_varying[scan.num_carry :]]


def _flow_while(frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Axes]) -> list[Axes]:
    loop = _jaxpr.while_parts(eqn)
    cond_ins, body_ins, carry = split(ins, loop.num_cond_consts, loop.num_body_consts)
    while True:
        cond = _child(frame, eqn, loop.cond, loop.cond_consts, [*cond_ins, *carry])
        body = _child(frame, eqn, loop.body, loop.body_consts, [*body_ins, *carry])
        # Devices that leave the loop at different times carry different values out of it.
        trips = _union(cond.out_varying)
        new = [a | b | trips for a, b in zip(carry, body.out_varying, strict=True)]
        if new == carry:
            break
        carry = new
    frame.children[index] = [cond, body]
    return carry


def _flow_cond(frame: Frame, index: int, eqn: _jaxpr.Eqn, ins: list[Axes]) -> list[Axes]:
    choice, *operands = ins
    branches = [_child(frame, eqn, *branch, operands) for branch in _jaxpr.cond_parts(eqn)]
    frame.children[index] = branches
    outs = []
    for i, axes in enumerate(zip(*(branch.out_varying for branch in branches), strict=True)):
        pending = choice and any(is_unreduced(b, b.jaxpr.outvars[i]) for b in branches)
        # Each device adds the gradient of its own branch to a reduction that all take part in later.
        outs.append(_union(axes) if pending else _union(axes) | choice)
    return outs


_FLOW: dict[str, Callable[[Frame, int, _jaxpr.Eqn, list[Axes]], list[Axes]]] = {
    "scan": _flow_scan,
    "while": _flow_while,
    "cond": _flow_cond,
}


def split(items: Sequence, *sizes: int) -> list[list]:
    """Cuts `items` after `sizes`; the last piece is the rest."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(list(items[start : start + size]))
        start += size
    return [*pieces, list(items[start:])]


# --------------------------------------------------------------------------------------------------
# Unreduced values: results of reductions, and of linear operations on them, that may wait.


def is_unreduced(frame: Frame, atom: _jaxpr.Atom) -> bool:
    """Whether `atom` may reach the interpreter as a reduction that has not run yet."""
    return not _jaxpr.is_literal(atom) and atom in frame.unreduced


def _note_unreduced(frame: Frame, index: int, eqn: _jaxpr.Eqn) -> None:
    name = eqn.primitive.name
    if name in REDUCTIONS:
        for out, axes in zip(eqn.outvars, frame.reads(eqn), strict=False):
            if axes and not frame.varies(out):
                frame.unreduced.add(out)
    elif name == "cond" and frame.reads(eqn)[0]:
        frame.unreduced |= {out for out in eqn.outvars if not frame.varies(out)} & {
            out
            for child in frame.children[index]
            for out, atom in zip(eqn.outvars, child.jaxpr.outvars, strict=True)
            if is_unreduced(child, atom)
        }
    elif _jaxpr.call_parts(eqn) is not None:
        (child,) = frame.children[index]
        frame.unreduced |= {
            out
            for out, atom in zip(eqn.outvars, child.jaxpr.outvars, strict=True)
            if is_unreduced(child, atom)
        }
    elif _rules.is_linear(eqn):
        if all(is_unreduced(frame, atom) for atom in eqn.invars):
            frame.unreduced.update(eqn.outvars)


def running_sums(frame: Frame, num_consts: int, num_carry: int) -> frozenset[int]:
    """Carries of a scan body that only collect reductions: `carry + psum(x)`, used nowhere else.

    Summing is linear, so they can be summed on each device and reduced once after the loop: the gradient
    of what a time loop closes over (an RNN's weights) then costs one reduction, not one per time step.
    """
    jaxpr, uses = frame.jaxpr, _uses(frame.jaxpr)
    sums = set()
    for i, var in enumerate(jaxpr.invars[num_consts : num_consts + num_carry]):
        start = var
        while uses.get(var, 0) == 1 and var is not jaxpr.outvars[i]:
            eqn = next((e for e in jaxpr.eqns if any(a is var for a in e.invars)), None)
            if eqn is None or eqn.primitive.name not in ("add_any", "add"):
                break
            others = [atom for atom in eqn.invars if atom is not var]
            if not others or not is_unreduced(frame, others[0]):
                break
            var = eqn.outvars[0]
        if var is jaxpr.outvars[i] and var is not start and uses.get(var, 0) == 1:
            sums.add(i)
    return frozenset(sums)


def _uses(jaxpr: _jaxpr.Jaxpr) -> dict[_jaxpr.Var, int]:
    uses: dict[_jaxpr.Var, int] = {}
    for atoms in [*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars]:
        for atom in atoms:
            if not _jaxpr.is_literal(atom):
                uses[atom] = uses.get(atom, 0) + 1
    return uses
