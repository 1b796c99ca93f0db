# SPDX-License-Identifier: Apache-2.0
"""`DeviceFrame`: the values of one jaxpr (the step's, a body, a branch) while its equations are written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jzero.ir import _rules
from jzero.ir._errors import NeedsAllMicrobatchesError, cannot, cannot_in_time
from jzero.ir._layout import Dim, Layout, Partial, Prices, price_of, replicated, times_along
from jzero.ir._regions import Region, ValueIn
from jzero.sharding.analysis._frames import NOWHERE, Frame
from jzero.sharding.partition._loops_in_time import is_stacked, is_sum
from jzero.sharding.partition._matrix_buckets import NOT_DISTRIBUTED, DistributedUpdates
from jzero.sharding.partition._time_axis import TimeAxis, step_over_time
from jzero.sharding.partition._values import DeviceValue, Hint, joined
from jzero.sharding.partition._writer import OF_STATE, OF_SUM, OUTPUT, DeviceMove, DeviceWriter
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Atom, Eqn, Jaxpr, Literal, Var


class WrittenStep(NamedTuple):
    """Facts about a step with collectives of its own."""

    frame: Frame  # knows which values are device-varying
    axis_names: Mapping[str, tuple[str, ...]]  # the mesh axes behind each axis name of the step

    def own(self, region: Region, atom: Atom) -> frozenset[str]:
        if _jaxpr.is_literal(atom) or not isinstance(region, Frame):
            return NOWHERE
        return frozenset(self.axes(region.varying.get(atom, NOWHERE)))

    def axes(self, names: Sequence[str] | frozenset[str]) -> tuple[str, ...]:
        return tuple(axis for name in names for axis in self.axis_names[name])


@dataclasses.dataclass
class Partitioning:
    """What all frames of a program share: the mesh, hints, and the collectives written so far."""

    mesh: Mapping[str, int]
    hints: Mapping[ValueIn, Hint | None]
    leaves: Sequence[str]  # the names of the inputs
    # Gradients that a loop of the step accumulates are reduced behind it, not in each iteration.
    once: bool = True
    prices: Prices = ()  # of collectives along each axis
    # An argument is batch-sharded, or a constraint asks for it; if not, every device gathers the state and
    # computes everything.
    has_rows: bool = True
    time: TimeAxis | None = None  # the axis of microbatches, if there are several
    # Inputs that XLA shards over Auto axes; None without Auto axes.
    automatic: frozenset[str] | None = None
    distributed: DistributedUpdates = NOT_DISTRIBUTED
    written: WrittenStep | None = None
    moves: dict[Var, DeviceMove] = dataclasses.field(default_factory=dict)
    layouts: dict[Any, Layout] = dataclasses.field(default_factory=dict)
    layouts_before: dict[tuple[Sequence[int], Sequence[int]], Layout] = dataclasses.field(
        default_factory=dict
    )


LOOKED_UP = "rows of other devices are looked up"


class DeviceFrame(DeviceWriter):
    def __init__(
        self, source: Eqn, shared: Partitioning, region: Region, outer: DeviceFrame | None = None,
        hoists: bool = True,
    ):  # fmt: skip
        still = "" if shared.time is None else shared.time.name
        super().__init__(source, shared.mesh, shared.moves, shared.prices, still)
        self.region = region  # whose equations are being written
        self.shared, self.outer = shared, outer
        # Conversions of a body's operands are written outside, once for all iterations.
        self.hoists = hoists
        self.is_loop = source.primitive.name in ("scan", "while")
        self.imports: dict[Var, Var] = {}  # variables of the enclosing frame, and their names here
        self.diverges: bool = outer is not None and outer.diverges  # only some devices may run it
        self.values: Mapping[Var, DeviceValue] = {}  # of the region's variables, as far as computed
        self.reason = ""  # for the report, why the current equation needs rows of other devices
        self.leaf = ""  # of all that the current equation moves; '' if each value has its own
        self.returns: int | None = None  # the number of the step's result that is being written
        # Results of a loop body that the loop only adds up: partial sums, reduced behind the loop.
        self.accumulated: frozenset[Atom] = frozenset()
        # The next ordered effect depends on it, [Note: the order of effects].
        self.effect_token: Atom = _jaxpr.scalar(0, np.int32)
        # Each pass of `jax.grad` gathers state for itself, after the last activations of the pass before.
        self._pass: str | None = None
        self._scope = 0
        self._latest: Atom | None = None
        self._token: Atom | None = None

    def replicated(self, shape: Sequence[int]) -> Layout:
        return self.sharded(shape, {})

    def sharded(
        self, shape: Sequence[int], dims: Mapping[int, Dim], partial: tuple[Partial, ...] = ()
    ) -> Layout:
        """Cached, since most layouts recur."""
        key = tuple(shape), tuple(dims.items()), partial
        if key not in self.shared.layouts:
            layout = replicated(shape, self.mesh).with_dims(dims)
            self.shared.layouts[key] = dataclasses.replace(layout, partial=partial)
        return self.shared.layouts[key]

    # -- values from outside --------------------------------------------------------------------------------
    def value(self, x: Atom, own: frozenset[str] = NOWHERE) -> DeviceValue:
        """A replicated value; or one that is device-varying over the axes `own`."""
        layout = self.replicated(x.aval.shape)
        return DeviceValue(x.aval, layout, {layout: x}, own=own)

    def literal(self, atom: Literal) -> DeviceValue:
        value = self.value(atom)
        value.fill = None if isinstance(atom.val, jax.core.Tracer) else np.asarray(atom.val)
        return value

    def constant(self, var: Var, const: Any) -> DeviceValue:
        if self.outer is not None:
            (x,) = self.outer.constant(var, const).atoms.values()
            return self.value(self.brought(x))
        own = _jaxpr.new_var(var)
        self.constvars.append(own)
        self.consts.append(const)
        return self.value(own)

    def brought(self, atom: Atom) -> Atom:
        """An atom of the enclosing frame, as an argument of this body."""
        if _jaxpr.is_literal(atom):
            return atom
        if atom not in self.imports:
            self.imports[atom] = _jaxpr.new_var(atom)
        return self.imports[atom]

    def entered(self, value: DeviceValue) -> DeviceValue:
        assert self.outer is not None
        self.outer.reduce(value)
        make = None if value.make is None else _imported
        return dataclasses.replace(
            value, atoms={}, scopes={}, casts={}, outer=value, make=make, view=None, sum=None
        )

    # -- layouts ---------------------------------------------------------------------------------------------
    def at(self, value: DeviceValue, layout: Layout) -> Atom:
        """The value in a layout; its conversion is written on first use."""
        if layout in value.atoms and value.scopes.get(layout, self._scope) == self._scope:
            return value.atoms[layout]
        lazy = value.make is not None
        if value.outer is not None and (lazy or self.hoists or self._is_outside(value, layout)):
            value.atoms[layout] = self._from_outer(value, layout)
        elif lazy:
            value.atoms[layout] = self._made(value, layout)
        else:
            if not value.atoms:
                value.atoms[value.layout] = self._from_outer(value, value.layout)
            value.atoms[layout] = self._converted(value, layout)
        return value.atoms[layout]

    def replica(self, value: DeviceValue) -> Atom:
        return self.at(value, self.replicated(value.aval.shape))

    def _is_outside(self, value: DeviceValue, layout: Layout) -> bool:
        """Whether the conversion is written outside. Each iteration gathers and frees state."""
        assert value.outer is not None
        time = self.shared.time
        if time is not None and step_over_time(value.layout, layout, time) is not None:
            return True
        rows = bool(value.rows) and (self.is_loop or layout in value.outer.atoms)
        return rows or layout == value.layout

    def _from_outer(self, value: DeviceValue, layout: Layout) -> Atom:
        assert self.outer is not None
        assert value.outer is not None
        outer, self.outer.source = self.outer.source, self.source
        found = self.brought(self.outer.at(value.outer, layout))
        self.outer.source = outer
        return found

    def _line(self) -> str:
        if self.returns is not None:
            return str(self.returns)
        return super()._line() or (self.outer._line() if self.outer is not None else "")

    def _operation(self) -> str:
        return super()._operation() if self.returns is None else OUTPUT

    def _made(self, value: DeviceValue, layout: Layout) -> Atom:
        assert value.make is not None
        partial = [p.axis for p in layout.partial]
        if not partial:
            return value.make(self, layout)
        terms = layout.reduced(partial)
        made = value.make(self, terms)
        return made if value.is_zero else self.convert(made, terms, layout)

    def _converted(self, value: DeviceValue, layout: Layout) -> Atom:
        if value.own:
            raise cannot("it shares out what each device has for itself", self.source, self.region)
        if value.view is not None and layout.is_replicated and value.is_state:
            eqn, origin = value.view
            (out,) = self.clone(eqn, [self.replica(origin)])
            value.scopes[layout] = self._scope
            return out
        there = [x for x in value.atoms if value.scopes.get(x, self._scope) == self._scope]
        source = min(there, key=lambda x: self.price_from(value, x, layout))
        x = value.atoms[source]
        if value.is_state and self.price_from(value, source, layout):
            if self._token is not None and _jaxpr.autodiff_pass(self.source) is not None:
                x = self.barrier([x, self._token])[0]
            if self.outer is None:
                value.scopes[layout] = self._scope
        leaf = self.leaf or self.name(value)
        return self.convert(x, source, layout, value.origin, self._why(value), leaf)

    def name(self, value: DeviceValue) -> str:
        """The leaf that it is a view of, or becomes."""
        return value.leaf if value.origin is None else self.shared.leaves[value.origin]

    def _why(self, value: DeviceValue) -> str:
        if value.layout.partial:
            return LOOKED_UP if value.looked_up else OF_SUM
        if not value.rows or value.leaf and self.returns is not None:
            return OF_STATE
        return self.reason if self.returns is None else "it is returned"

    def price_from(self, value: DeviceValue, source: Layout, target: Layout) -> int:
        if source == target:
            return 0
        time = self.shared.time
        if time is not None and (step := step_over_time(source, target, time)) is not None:
            ends = (source, step.before), (step.after, target)
            size = _rules.size_in_bytes(value.aval) * (step.kind == "gather")
            return sum(self.price_from(value, *pair) for pair in ends) + self.wire(
                time.name, step.kind, size
            )
        return price_of(self.steps(value.aval, source, target), self.prices)

    def price(self, value: DeviceValue, axis: str, dim: int | None, outer: int = 0) -> int:
        """The estimated price of sharding a value over an axis along `dim`, or of replicating it (None)."""
        if value.make is not None:
            return 0
        found, n = [], self.mesh[axis]
        for layout in [*value.atoms, value.layout]:
            here = layout.place(axis)
            size = _rules.size_in_bytes(value.aval) / layout.num(layout.axes - {axis})
            part = size * (n - 1) / n
            if any(p.axis == axis for p in layout.partial):
                found.append(self.wire(axis, "reduce", part * (2 if dim is None else 1)))
            elif here is None or here == (dim, outer):
                found.append(0)
            elif dim is None or here[0] == dim:
                found.append(self.wire(axis, "gather", part))
            else:
                found.append(self.wire(axis, "exchange", part / n))
        return min(found)

    def wire(self, axis: str, kind: str, nbytes: float) -> int:
        """The price of the bytes of a collective along an axis.

        Latency does not count: XLA combines gathers, and partial sums are combined before they are reduced.
        With it, a small step would gather a table to save one collective.
        """
        return times_along(self.prices, axis).wire(kind, nbytes)

    def reduce(
        self, value: DeviceValue, towards: Layout | None = None, keeps: frozenset[str] = frozenset()
    ) -> None:
        """Reduces a partial value, except over axes in `keeps`; scatters it by its hint or `towards`."""
        axes = value.partial_axes - keeps
        if not axes:
            return
        new, hint = value.layout.reduced(axes), value.hint
        devices = axes - self.over_time
        wants = [None if hint is None else hint.layout, towards]
        if hint is not None and not hint.is_direct:
            wants.reverse()
        for want in wants:
            if want is not None:
                new = joined(new, want, devices)
        if value.scatter_to is not None:
            new = joined(new, value.scatter_to, devices)
            value.rows |= new.axes & value.scatter_to.axes & devices
        self.at(value, new)
        value.layout = new

    def reduce_at_exit(self, value: DeviceValue, opened: bool = False) -> None:
        """`reduce` at the end of a body or branch; over time if `opened`, [Note: conversions over time]."""
        time = self.shared.time
        if self.outer is None or opened or time is None or time.name not in value.partial_axes:
            self.reduce(value)
        elif not time.once:
            self.scatter(value)

    def scatter(self, value: DeviceValue) -> None:
        """Reduce-scatters over the axes that shard the hint; stays partial over other axes and over time."""
        shards = frozenset() if value.hint is None else value.hint.layout.axes
        self.reduce(value, keeps=value.partial_axes - shards)

    def own(self, region: Region, atom: Atom) -> frozenset[str]:
        written = self.shared.written
        return NOWHERE if written is None else written.own(region, atom)

    def as_replicated(self, value: DeviceValue) -> DeviceValue:
        """The value in its replicated layout only, so that no conversion is left to write."""
        layout = self.replicated(value.aval.shape)
        atoms = {layout: self.at(value, layout)}
        return DeviceValue(value.aval, layout, atoms, own=value.own, fill=value.fill)

    def is_opened(self) -> bool:
        stacked = (is_stacked(e, a) or is_sum(e, a) for a in self.over_time for e in self.eqns)
        return any(stacked)

    @property
    def over_time(self) -> frozenset[str]:
        return frozenset() if self.shared.time is None else frozenset([self.shared.time.name])

    def convert(
        self, x: Atom, source: Layout, target: Layout, of: int | None = None, why: str = "",
        leaf: str = "",
    ) -> Atom:  # fmt: skip
        time = self.shared.time
        step = None if time is None else step_over_time(source, target, time)
        if step is None:
            return super().convert(x, source, target, of, why, leaf)
        if self.outer is not None and time is not None and not time.opens:
            needs = "a sum" if step.kind == "reduce" else "rows"
            why = f"it needs {needs} of all microbatches inside a loop or branch"
            raise NeedsAllMicrobatchesError(f"{cannot_in_time(why, self.source, self.region)}")
        x = self.step(super().convert(x, source, step.before, of, why, leaf), step)
        return super().convert(x, step.after, target, of, why, leaf)

    def index(self, axes: Sequence[str]) -> Atom:
        """This device's index along the axes. The index in time is an argument of each body."""
        key = tuple(axes)
        if self.outer is not None and self.over_time == {*key} and key not in self._index:
            self._index[key] = self.brought(self.outer.index(axes))
        return super().index(axes)

    def end_effects_of(self, token: Atom) -> None:
        """Sets the token behind a loop or branch; at the top level, reduced over microbatches."""
        axes = self.over_time if self.outer is None else frozenset[str]()
        replicated = self.replicated(())
        self.effect_token = self.convert(
            token, replicated.with_partial(*map(Partial, axes)), replicated
        )

    def hint_of(self, var: Var) -> Hint | None:
        hint = self.shared.hints.get((self.region, var))
        return hint if hint is not None and hint.layout.axes else None

    def leaf_of(self, var: Var) -> str:
        hint = self.shared.hints.get((self.region, var))
        return "" if hint is None else hint.leaf

    def function(self, like: Jaxpr, ins: Sequence[Var], outs: Sequence[Atom]) -> Jaxpr:
        """The live equations, as a function of the `imports` that are left and of `ins`."""
        assert self.outer is None or not self.constvars, "constants of a body have no place"
        self.eqns, needed = _rewrite.behind(self.eqns, outs)
        self.imports = {outside: own for outside, own in self.imports.items() if own in needed}
        found = self.close(like, [*self.imports.values(), *ins], outs)
        info: Any = found
        return _jaxpr.replaced(found, debug_info=info.debug_info.with_unknown_names())

    # -- passes ---------------------------------------------------------------------------------------------
    def enter_pass(self, now: str | None) -> None:
        """Begins another pass of `jax.grad`, which gathers state for itself."""
        if self.outer is not None or now is None or now == self._pass:
            return
        if self._pass is not None and self._latest is not None:
            self._scope += 1
            self._token = self.first_element(self._latest)
        self._pass = now

    def note(self, values: Sequence[DeviceValue]) -> None:
        """Notes the latest activations of a pass; the next pass's gathers depend on them."""
        if self._pass is None:
            return
        for value in values:
            if (value.rows or value.own) and jnp.issubdtype(value.aval.dtype, jnp.floating):
                # Lazy values have no atom here, nor arguments with gathered padded dims.
                self._latest = value.atoms.get(value.layout, self._latest)


def _imported(frame: DeviceFrame, layout: Layout) -> Atom:
    raise AssertionError("a lazy value of the enclosing frame")
