# SPDX-License-Identifier: Apache-2.0
"""The programs of a segment that runs part by part: stages, iterations of loops, and what joins them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero._memory_kinds import DEVICE, PINNED
from jzero.ir._memory_spaces import empty_stack
from jzero.ir._regions import variables
from jzero.segments._planned import PlannedStep
from jzero.segments._segment import Arrays, Segment, SegmentFn, Var
from jzero.sharding.cut import _layer_parts
from jzero.sharding.cut._layer_parts import (
    LEAF,
    ON_HOST,
    RENEWED,
    SENT,
    SLICES,
    STACK,
    LayerBody,
    LayerPart,
    OuterLoop,
    ScannedLayers,
    StraightStage,
    evaluate_parts,
    read,
)
from jzero.sharding.plan import _stored_layout
from jzero.sharding.plan._host_memory import platform_of
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._stored_layout import Automatic
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Atom

Jitted = Callable[..., Any]
Made = TypeVar("Made")
ITERATION = "iteration_beside_copies"
# To XLA, slices that a GPU copies from the host's memory are asynchronous compute, of which few may run at a
# time: most copies of a layer's nine leaves would wait, behind its products (test_layers_on_gpus.py).
_OPTIONS: Mapping[str, Any] = {"xla_gpu_experimental_parallel_async_compute_limit": 64}


def _once(make: Callable[..., Made]) -> Callable[..., Made]:
    """A method whose results are kept in its object, by name and arguments."""

    @functools.wraps(make)
    def once(self: LayerPrograms, *args: Hashable) -> Made:
        key = make.__name__, *args
        if key not in self.made:
            self.made[key] = make(self, *args)
        return self.made[key]

    return once


class ArrayForm(NamedTuple):
    """How the devices' values `[n, d]` of one variable form one array."""

    spec: P
    stacked: bool = False  # it is `[devices, n, d]`, one value each, that nobody reads as a whole
    automatic: Automatic | None = ()  # Auto axes of each dim; None if XLA may choose

    def local(self, x: jax.Array) -> jax.Array:
        """A device's value, from its part of the array."""
        return x[0] if self.stacked else x

    def part(self, x: Any) -> jax.Array:
        """A device's part of the array, from its value."""
        return jnp.asarray(x)[None] if self.stacked else jnp.asarray(x)

    @property
    def of_slice(self) -> ArrayForm:
        """The form of a slice `[n, d]` of a stack `[iterations, n, d]` in this form."""
        if self.stacked:
            return self
        automatic = self.automatic if self.automatic is None else self.automatic[1:]
        return ArrayForm(P(*self.spec[1:]), automatic=automatic)

    def place(self, mesh: Any, tier: str = DEVICE) -> NamedSharding:
        return NamedSharding(
            mesh, _stored_layout.beside(self.spec, self.automatic or ()), memory_kind=tier
        )


@dataclasses.dataclass(frozen=True)
class Locals:
    """What one device computes in a segment."""

    jaxpr: Any  # its last inputs are device indices
    known: dict[Var, Any]  # constants
    taken: dict[Var, int]  # the index in `segment.takes` of each other input
    indices: dict[Var, str]  # the mesh axis of each device index
    outs: list[ArrayForm]  # the form of each output

    @classmethod
    def of(cls, segment: Segment, leaves: Sequence[LeafPlan]) -> Locals:
        body = _rewrite.body_of_shard_map(segment.run, *segment.avals())
        pairs = [*zip(body.jaxpr.invars, body.inputs, strict=False)]
        known = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
        known |= {var: source[0] for var, source in pairs if isinstance(source, tuple)}
        taken = {var: source for var, source in pairs if not isinstance(source, tuple)}
        asked = body.jaxpr.invars[len(body.inputs) :]
        specs = jax.tree.leaves(segment.out_specs, is_leaf=lambda x: isinstance(x, P))
        indices = dict(zip(asked, body.axes, strict=True))
        automatic: list[Automatic | None] = [segment.types[v].automatic for v in segment.gives]
        automatic += [leaves[i].automatic if i < len(leaves) else None for i in segment.outs]
        outs = [
            ArrayForm(spec, automatic=axes) for spec, axes in zip(specs, automatic, strict=True)
        ]
        return cls(body.jaxpr, known, taken, indices, outs)


class LayerPrograms:
    """Programs of parts; equal parts, as those of equal layers, share one."""

    def __init__(
        self,
        planned: PlannedStep,
        inner: Locals,
        takes: Mapping[Var, ArrayForm],
        parts: Sequence[LayerPart],
    ):
        """Decides the forms of all values; `takes` has those of inputs."""
        self._planned, self._inner, self._mesh = planned, inner, planned.mesh
        axes = tuple(name for name, _ in planned.plan.axes)
        self._default = ArrayForm(P(axes), stacked=True, automatic=None)
        self._forms = dict(takes)
        self.known = inner.known | dict.fromkeys(inner.indices, 0)
        for loop in _layer_parts.outer_loops(parts):
            self.known |= loop.loop.known
        self._forms |= dict.fromkeys(self.known, ArrayForm(P()))
        made = {var for part in parts for var in _made(part)}
        for var, form in zip(inner.jaxpr.outvars, inner.outs, strict=True):
            if not _jaxpr.is_literal(var) and var in made:
                self._forms.setdefault(var, form)
        self._equal: dict[Any, Jitted] = {}
        self.made: dict[Hashable, Any] = {}

    def form(self, atom: Atom) -> ArrayForm:
        return ArrayForm(P()) if _jaxpr.is_literal(atom) else self._forms.get(atom, self._default)

    def sharding(self, var: Var, tier: str = DEVICE) -> NamedSharding:
        return self.form(var).place(self._mesh, tier)

    def slice_sharding(self, var: Var) -> NamedSharding:
        return self.form(var).of_slice.place(self._mesh, PINNED)

    def _jit(self, run: Any, ins: Any, outs: Sequence[Any], donate: Any = ()) -> Jitted:
        """A program of one device's values; `outs` are forms, in lists and alone."""
        specs = jax.tree.map(lambda form: form.spec, outs, is_leaf=_is_form)
        program = self._planned.shard_map(run, ins, specs)
        if not self._planned.plan.automatic:
            return jax.jit(program, donate_argnums=donate)
        # Else XLA would choose shardings over Auto axes.
        kept = jax.tree.map(self._kept, outs, is_leaf=_is_form)
        return jax.jit(program, donate_argnums=donate, out_shardings=kept)

    def _kept(self, form: ArrayForm) -> NamedSharding | None:
        return None if form.automatic is None else form.place(self._mesh)

    @_once
    def positions(self, num: int) -> Arrays:
        """0, 1, ... as int32 on the devices; copied once, as a transfer guard may forbid it in steps."""
        place = NamedSharding(self._mesh, P())
        with jax.transfer_guard("allow"):  # JAX counts this as implicit.
            return [jax.device_put(np.asarray(i, np.int32), place) for i in range(num)]

    def whole(self, segment: Segment, parts: Sequence[LayerPart]) -> SegmentFn:
        inner = self._inner
        known = {var: _jaxpr.constant(x) for var, x in self.known.items()}

        def local(consumed: Arrays, kept: Arrays) -> tuple[Arrays, Arrays]:
            given = [*consumed, *kept]
            values = known | {var: given[i] for var, i in inner.taken.items()}
            values |= {var: lax.axis_index(axis) for var, axis in inner.indices.items()}
            outs = read(inner.jaxpr.outvars, evaluate_parts(parts, values))
            return outs[: len(segment.gives)], outs[len(segment.gives) :]

        specs = {var: segment.types[var].spec for var in segment.takes}
        return self._planned.shard_map(local, segment.taken(specs), segment.out_specs)

    # -- straight-line stages --------------------------------------------------------------------------

    @_once
    def stage(self, part: StraightStage) -> Jitted:
        """`(leaves, reads) -> (outputs, done)`; it donates what it reads for the last time, where it can."""
        renewed = self._renewed(part)
        reads = [v for v in part.reads if v not in renewed]
        takes = [*part.leaves, *reads, *renewed]
        jaxpr = _jaxpr.replaced(
            self._inner.jaxpr,
            constvars=[],
            invars=takes,
            outvars=[*part.outputs],
            eqns=[*part.eqns],
        )
        equations = _rewrite.program_key(jaxpr)
        axes = tuple(self._inner.indices.get(var) for var in reads)
        nums = len(part.leaves), len(reads)
        key = (equations, *map(self.form, takes), *map(self.form, part.outputs), nums, axes)

        def stretch(leaves: Arrays, reads: Arrays, renewed: Arrays) -> tuple[Arrays, jax.Array]:
            env = self._env(takes, [*leaves, *reads, *renewed])
            made = _jaxpr.evaluate(jaxpr, (), *(env[v] for v in takes))
            return self._parts(part.outputs, made), jnp.zeros((), np.int32)

        ins = tuple([self.form(v).spec for v in group] for group in (part.leaves, reads, renewed))
        outs = [*map(self.form, part.outputs)], ArrayForm(P())
        own = self._jit(stretch, ins, outs, donate=2)
        program = own if equations is None else self._equal.setdefault(key, own)

        def run(leaves: Arrays, env: Mapping[Var, Any]) -> tuple[Arrays, jax.Array]:
            return program(leaves, [env[v] for v in reads], [env[v] for v in renewed])

        return run

    def _renewed(self, part: StraightStage) -> list[Var]:
        """Inputs at their last use whose memory an output can take."""
        free = [self._type(v) for v in part.outputs]
        found = []
        for var in part.reads:
            if var in part.last_uses and self._type(var) in free:
                free.remove(self._type(var))
                found.append(var)
        return found

    def _type(self, var: Var) -> Any:
        return var.aval.shape, var.aval.dtype, self.form(var)

    def _env(self, takes: Sequence[Var], arrays: Iterable[Any]) -> dict[Var, Any]:
        pairs = zip(takes, arrays, strict=True)
        indices = self._inner.indices
        return {
            v: lax.axis_index(indices[v]) if v in indices else self.form(v).local(x)
            for v, x in pairs
        }

    def _parts(self, atoms: Sequence[Atom], values: Sequence[Any]) -> Arrays:
        return [self.form(a).part(x) for a, x in zip(atoms, values, strict=True)]

    @_once
    def finish(self, indices: tuple[int, ...], reads: tuple[Var, ...]) -> Jitted:
        """`reads -> outputs`, by index, as the segment returns them."""
        atoms = [self._inner.jaxpr.outvars[i] for i in indices]

        def finish(arrays: Arrays) -> Arrays:
            env = self._env(reads, arrays)
            return [jnp.asarray(_value(a, env)) for a in atoms]

        ins = [self.form(v).spec for v in reads]
        return self._jit(finish, (ins,), [self._inner.outs[i] for i in indices])

    # -- loops -----------------------------------------------------------------------------------------

    @_once
    def enter(self, loop: ScannedLayers | OuterLoop) -> Jitted:
        """`values -> the first carry`, in memory that iterations may consume."""
        return self._carried(loop.init, loop.last_uses)

    @_once
    def renew(self, loop: OuterLoop) -> Jitted:
        """`values -> the carry` after an iteration; what the iteration made is not copied."""
        own = {*loop.loop.carry, *(out for e in loop.loop.body.eqns for out in e.outvars)}
        atoms = loop.loop.body.outvars
        moved = [
            i for i, a in enumerate(atoms)
            if not _jaxpr.is_literal(a) and a in own and atoms.index(a) == i
        ]  # fmt: skip
        copied = [i for i in range(len(atoms)) if i not in moved]
        copy = self._carried([atoms[i] for i in copied], ())

        def renew(env: Mapping[Var, Any]) -> Arrays:
            made = dict(zip(copied, copy(env), strict=True)) if copied else {}
            return [made[i] if i in made else env[_jaxpr.variable(a)] for i, a in enumerate(atoms)]

        return renew

    def _carried(self, atoms: Sequence[Atom], last_uses: Collection[Var]) -> Jitted:
        """`values -> atoms`, in memory of their own: that of values at their last use, where it can be."""
        reads = variables(atoms)
        renewed = [v for v in reads if v in last_uses and self.form(v) == self._default]
        kept = [v for v in reads if v not in renewed]

        def enter(kept_: Arrays, renewed_: Arrays) -> Arrays:
            env = self._env([*kept, *renewed], [*kept_, *renewed_])
            return [self._default.part(_value(a, env)) for a in atoms]

        ins = tuple([self.form(v).spec for v in group] for group in (kept, renewed))
        outs = [self._default.spec] * len(atoms)
        program = jax.jit(self._planned.shard_map(enter, ins, outs), donate_argnums=1)
        return lambda env: program([env[v] for v in kept], [env[v] for v in renewed])

    @_once
    def goes_on(self, loop: OuterLoop) -> Jitted:
        """`values -> [whether the loop has another iteration]`: the same on all devices."""
        asked = loop.loop.goes_on
        assert asked is not None
        reads = asked.invars

        def goes_on(arrays: Arrays) -> jax.Array:
            env = self._env(reads, arrays)
            return jnp.asarray(*_jaxpr.evaluate(asked, (), *(env[v] for v in reads)))

        program = jax.jit(
            self._planned.shard_map(goes_on, ([self.form(v).spec for v in reads],), P())
        )
        return lambda env: [program([env[v] for v in reads])]

    @_once
    def gather(self, loop: ScannedLayers) -> Jitted:
        """`(slices of leaves, i) -> (gathered, done)` for the first iteration; each gathers for the next."""

        def gather(leaves: Arrays, i: jax.Array) -> tuple[Arrays, jax.Array]:
            return [self._default.part(x) for x in _gathered(loop.body, leaves)], i + 1

        ins = self._slice_specs(loop), P()
        outs = [self._default.spec] * len(loop.body.gathered), P()
        return jax.jit(self._planned.shard_map(gather, ins, outs))

    def _slice_specs(self, loop: ScannedLayers) -> list[P]:
        return [self.form(v).of_slice.spec for v in loop.leaves]

    @_once
    def iteration(self, loop: ScannedLayers, gathers: bool) -> Jitted:
        """`(consts, carry, gathered, kept, slices, stacks, made, i, following) -> ...`, an iteration.

        It returns `(carry, slices, leaving, made, done, gathered)`. `kept` are leaves that it reads as they
        are fetched. With `gathers`, it gathers `following`, the leaves of the next iteration. `made` are
        stacks that it writes its slice into; it donates these and the carry. `leaving` are slices for the
        host, `i` is the index of the iteration in stacks, and `done` a number to wait for.
        """
        parts, (consts, init, _) = loop.parts, loop.operands
        body, ys = loop.body, loop.results[1]
        closed = variables(consts)
        by_kind = {kind: loop.stacks_as(kind) for kind in _KINDS}
        stacks = variables(by_kind[STACK])
        xs = body.invars[len(body.invars) - len(loop.xs) :]

        def iteration(
            closed_: Arrays, carry: Arrays, gathered: Arrays, kept: Arrays, slices: Arrays,
            stacks_: Arrays, made: Arrays, i: jax.Array, following: Arrays,
        ) -> Any:  # fmt: skip
            env = self._env([*closed, *stacks], [*closed_, *stacks_])
            given = {
                SLICES: (
                    self.form(a).local(x) for a, x in zip(by_kind[SLICES], slices, strict=True)
                ),
                STACK: (_sliced(_value(a, env), i) for a in by_kind[STACK]),
                RENEWED: (
                    _sliced(self.form(x).local(made[loop.renewed.index(x)]), i)
                    for x in by_kind[RENEWED]
                ),
            }
            known = dict(body.consts)
            ins = [*(_value(a, env) for a in consts), *map(self._default.local, carry)]
            known |= zip(body.invars, ins, strict=False)
            known |= {
                var: next(given[kind])
                for var, kind in zip(xs, loop.xs, strict=True)
                if kind != LEAF
            }
            known |= zip([body.slices[j] for j in body.used_sharded], kept, strict=True)
            known |= zip(body.gathered, map(self._default.local, gathered), strict=True)
            outs = body.compute.run(*(known[var] for var in body.compute.reads))
            of: dict[str, list[tuple[Var, Any]]] = {kind: [] for kind in (*_KINDS, ON_HOST, SENT)}
            for y, kind, x in zip(ys, loop.ys, outs[parts.num_carry :], strict=True):
                of.setdefault(kind, []).append((y, x))
            new = [
                self.form(y).part(lax.dynamic_update_index_in_dim(self.form(y).local(old), x, i, 0))
                for (y, x), old in zip(of[STACK], made, strict=True)
            ]
            return (
                [self._default.part(x) for x in outs[: parts.num_carry]],
                [self._default.part(x) for _, x in of[SLICES]],
                [x for kind in (ON_HOST, SENT) for _, x in of[kind]],
                new,
                i + 1,
                [self._default.part(x) for x in (_gathered(body, following) if gathers else [])],
            )

        leaves = self._slice_specs(loop)
        gathered = [self._default.spec] * len(body.gathered)
        ins = (
            [self.form(v).spec for v in closed],
            [self._default.spec] * len(init),
            gathered,
            [leaves[j] for j in body.used_sharded],
            [self._default.spec] * len(by_kind[SLICES]),
            [self.form(v).spec for v in stacks],
            [self.form(y).spec for y in loop.made(STACK)],
            P(),
            leaves if gathers else [],
        )
        outs = (
            [self._default] * len(init),
            [self._default] * len(loop.made(SLICES)),
            [self.form(y).of_slice for y in loop.leaving],
            [self.form(y) for y in loop.made(STACK)],
            ArrayForm(P()),
            [self._default] * (len(gathered) if gathers else 0),
        )
        return self._jit(iteration, ins, outs, donate=(1, 6))

    @_once
    def iteration_beside_copies(self, loop: ScannedLayers, gathers: bool) -> Jitted:
        """An iteration that also fetches the leaves of a later one, and stores what an earlier one made.

        `(stacks on the host, slices, renewed stacks on the host, j, k, *what an iteration takes) ->
        (what an iteration makes, [*slices at j on the devices, *stacks with slices at k])`. Without stacks it
        fetches nothing, and without renewed ones it stores nothing.
        """
        iteration, fetch, store = (
            self.iteration(loop, gathers),
            self.fetch(loop),
            self.store(loop, False),
        )

        def run(
            stacks: Arrays, slices: Arrays, renewed: Arrays, j: jax.Array, k: jax.Array, *args: Any
        ) -> Any:  # fmt: skip
            fetched = fetch(stacks, j) if stacks else []
            stored, _ = store(renewed, slices, k) if renewed else ([], None)
            return iteration(*args), [*fetched, *stored]

        return _with_options(run, ITERATION, self._mesh, donate=(2, 6, 11))

    @_once
    def fetch(self, loop: ScannedLayers) -> Jitted:
        """`(stacks on the host, i) -> slices on the devices`."""

        def local(stacks: Arrays, i: jax.Array) -> Arrays:
            return [_sliced(x, i) for x in stacks]

        specs = [self.form(v).spec for v in loop.leaves]
        run = self._planned.shard_map(local, (specs, P()), self._slice_specs(loop))
        places = [self.form(v).of_slice.place(self._mesh) for v in loop.leaves]

        def fetch(stacks: Arrays, i: jax.Array) -> Any:
            return jax.device_put(run(stacks, i), places)

        return jax.jit(fetch, out_shardings=places)

    @_once
    def store(self, loop: ScannedLayers, begins: bool) -> Jitted:
        """`(stacks on the host, slices, i) -> (stacks, done)`, in place; None for stacks if it `begins`."""
        ys = loop.made(ON_HOST)

        def local(stacks: Arrays | None, new: Arrays, i: jax.Array) -> Arrays:
            lengths = [y.aval.shape[0] for y in ys]
            # Zeros would be made on the devices, whole, and copied; XLA allocates these on the host.
            made = [empty_stack(n, jax.typeof(x)) for n, x in zip(lengths, new, strict=True)]
            pairs = zip(made if stacks is None else stacks, new, strict=True)
            return [lax.dynamic_update_index_in_dim(x, part, i, 0) for x, part in pairs]

        specs = [self.form(y).spec for y in ys]
        slices = [self.form(y).of_slice.spec for y in ys]
        there = [self.slice_sharding(y) for y in ys]
        run = self._planned.shard_map(local, (None if begins else specs, slices, P()), specs)

        def store(stacks: Arrays | None, new: Arrays, i: jax.Array) -> tuple[Arrays, jax.Array]:
            return run(stacks, jax.device_put(new, there), i), i + 1

        pinned = [self.sharding(y, PINNED) for y in ys]
        donated = () if begins else 0
        return jax.jit(store, donate_argnums=donated, out_shardings=(pinned, None))

    @_once
    def empty(self, loop: ScannedLayers) -> Jitted:
        """`() -> zeros` on the devices, for the stacks that a loop makes there."""
        ys = [y for y, old in zip(loop.made(STACK), loop.renewed, strict=True) if old is None]

        def empty() -> Arrays:
            return [self.form(y).part(jnp.zeros(y.aval.shape, y.aval.dtype)) for y in ys]

        return self._jit(empty, (), [*map(self.form, ys)])


_KINDS = (SLICES, STACK, RENEWED)


def _is_form(x: Any) -> bool:
    return isinstance(x, ArrayForm)


def _made(part: LayerPart) -> Sequence[Var]:
    """What a part makes that may be an output as it is."""
    if isinstance(part, StraightStage):
        return part.outputs
    return [*part.made(STACK), *part.made(ON_HOST)] if isinstance(part, ScannedLayers) else []


def _value(atom: Atom, env: Mapping[Var, Any]) -> Any:
    return _jaxpr.literal(atom) if _jaxpr.is_literal(atom) else env[atom]


def _gathered(body: LayerBody, slices: Arrays) -> Arrays:
    """What an iteration gathers from slices of its leaves on this device."""
    known = dict(zip(body.slices, slices, strict=True))
    return body.gathers.run(*(known[var] for var in body.gathers.reads))


def _sliced(stack: jax.Array, i: jax.Array) -> jax.Array:
    """`[iterations, n, d] -> [n, d]`."""
    return lax.dynamic_index_in_dim(stack, i, 0, keepdims=False)


def options_of(program: str, mesh: Any) -> dict[str, Any]:
    return dict(_OPTIONS) if program == ITERATION and platform_of(mesh) == "gpu" else {}


def _with_options(
    run: Callable[..., Any], name: str, mesh: Any, donate: tuple[int, ...]
) -> Callable[..., Any]:
    run.__name__ = name
    plain = jax.jit(run, donate_argnums=donate)
    if not (options := options_of(name, mesh)):
        return plain
    compiled = jax.jit(run, donate_argnums=donate, compiler_options=options)

    def call(*args: Any) -> Any:
        # In a trace of a step nothing is compiled, and JAX refuses options there.
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args))
        return (plain if traced else compiled)(*args)

    return call
