"""The programs of a segment that runs part by part: of stretches, of a loop's turns, and between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero._memory_kinds import DEVICE, PINNED
from jzero.segments._segment import Segment, Var
from jzero.sharding.analysis._frames import variables
from jzero.sharding.cut._layers import HOSTED, LEAF, SLICES, STACK, LayerLoop, LayerPart, Stretch
from jzero.sharding.run._run import Runner
from jzero.sharding.run._values import Arrays
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Atom

Jitted = Callable[..., Any]


class ArrayForm(NamedTuple):
    """How the devices' values `[n, d]` of one variable are one array.

    Attributes:
      spec: how the array is split.
      stacked: it is `[devices, n, d]`, a value each, that nobody looks at as a whole.
    """

    spec: P
    stacked: bool = False

    def local(self, x: jax.Array) -> jax.Array:
        """A device's value, of its part of the array."""
        return x[0] if self.stacked else x

    def part(self, x: Any) -> jax.Array:
        """A device's part of the array, of its value."""
        return jnp.asarray(x)[None] if self.stacked else jnp.asarray(x)

    @property
    def of_slice(self) -> ArrayForm:
        """That of `[n, d]`, where this is one of `[turns, n, d]`."""
        return self if self.stacked else ArrayForm(P(*self.spec[1:]))


@dataclasses.dataclass(frozen=True)
class Locals:
    """What one device computes in a segment.

    Attributes:
      jaxpr: its equations; its last inputs are device indices.
      consts: of its own `constvars`.
      inputs: for each other input, what of the segment it takes, by index, or its value in a tuple.
      indices: the mesh axis of each device index.
      out_specs: of its outputs.
    """

    jaxpr: Any
    consts: list[Any]
    inputs: list[int | tuple[Any]]
    indices: dict[Var, str]
    out_specs: list[P]

    @classmethod
    def of(cls, segment: Segment) -> Locals:
        """Traces the segment."""
        body = _rewrite.body_of_shard_map(segment.run, *segment.avals())
        asked = body.jaxpr.invars[len(body.inputs) :]
        specs = jax.tree.leaves(segment.out_specs, is_leaf=lambda x: isinstance(x, P))
        indices = dict(zip(asked, body.axes, strict=True))
        return cls(body.jaxpr, body.consts, body.inputs, indices, specs)

    def known(self) -> dict[Var, Any]:
        """Constants."""
        pairs = zip(self.jaxpr.invars, self.inputs, strict=False)
        known = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        return known | {var: source[0] for var, source in pairs if isinstance(source, tuple)}

    def taken(self) -> dict[Var, int]:
        """What of the segment each input takes."""
        pairs = zip(self.jaxpr.invars, self.inputs, strict=False)
        return {var: source for var, source in pairs if not isinstance(source, tuple)}


class LayerPrograms:
    """Programs of parts; one serves all that are equal, as those of equal layers are."""

    def __init__(
        self, runner: Runner, inner: Locals, takes: Mapping[Var, P], parts: Sequence[LayerPart]
    ):
        """Decides the forms of all values.

        Args:
          runner: the step.
          inner: what one device computes.
          takes: how the inputs are split.
          parts: the cut of it.
        """
        self._runner, self._inner, self._mesh = runner, inner, runner.mesh
        self._default = ArrayForm(P(tuple(name for name, _ in runner.plan.axes)), stacked=True)
        self._forms = {var: ArrayForm(spec) for var, spec in takes.items()}
        self._forms |= dict.fromkeys([*inner.known(), *inner.indices], ArrayForm(P()))
        made = {var for part in parts for var in _made(part)}
        for var, spec in zip(inner.jaxpr.outvars, inner.out_specs, strict=True):
            if not _jaxpr.is_literal(var) and var in made:
                self._forms.setdefault(var, ArrayForm(spec))
        self._equal: dict[Any, Jitted] = {}
        self._of: dict[Any, Jitted] = {}

    def form(self, atom: Atom) -> ArrayForm:
        """How a variable's values are one array."""
        return ArrayForm(P()) if _jaxpr.is_literal(atom) else self._forms.get(atom, self._default)

    def home(self, var: Var, tier: str = DEVICE) -> NamedSharding:
        """Where a variable's array rests."""
        return NamedSharding(self._mesh, self.form(var).spec, memory_kind=tier)

    def positions(self, num: int) -> Arrays:
        """0, 1, ... as int32 on the devices; copied there once, for a guard may forbid steps to."""
        return self._once(("positions", num), lambda: self._placed(range(num)))

    def _placed(self, numbers: Iterable[int]) -> Any:
        place = NamedSharding(self._mesh, P())
        with jax.transfer_guard("allow"):  # JAX counts this as implicit.
            return [jax.device_put(np.asarray(i, np.int32), place) for i in numbers]

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._of:
            self._of[key] = make()
        return self._of[key]

    # -- stretches -------------------------------------------------------------------------------------

    def stretch(self, part: Stretch) -> Jitted:
        """`(leaves, reads) -> gives`."""
        return self._once(part, lambda: self._stretch(part))

    def _stretch(self, part: Stretch) -> Jitted:
        takes = [*part.leaves, *part.reads]
        jaxpr = _jaxpr.replaced(
            self._inner.jaxpr, constvars=[], invars=takes, outvars=[*part.gives], eqns=[*part.eqns]
        )
        text = _rewrite.whole_text(jaxpr)
        axes = tuple(self._inner.indices.get(var) for var in part.reads)
        key = (text, *map(self.form, takes), *map(self.form, part.gives), len(part.leaves), axes)

        def local(leaves: Arrays, reads: Arrays) -> Arrays:
            env = self._env(takes, [*leaves, *reads])
            return self._parts(part.gives, _jaxpr.evaluate(jaxpr, (), *(env[v] for v in takes)))

        program = self._jitted(local, ([part.leaves, part.reads]), part.gives)
        return program if text is None else self._equal.setdefault(key, program)

    def _env(self, takes: Sequence[Var], arrays: Iterable[Any]) -> dict[Var, Any]:
        """One device's values."""
        pairs = zip(takes, arrays, strict=True)
        indices = self._inner.indices
        return {
            v: lax.axis_index(indices[v]) if v in indices else self.form(v).local(x)
            for v, x in pairs
        }

    def _parts(self, atoms: Sequence[Atom], values: Sequence[Any]) -> Arrays:
        return [self.form(a).part(x) for a, x in zip(atoms, values, strict=True)]

    def _jitted(
        self, local: Callable[..., Any], ins: Sequence[Sequence[Atom]], outs: Sequence[Atom]
    ) -> Jitted:
        in_specs = tuple([self.form(v).spec for v in group] for group in ins)
        return jax.jit(self._runner.shard_map(local, in_specs, [self.form(v).spec for v in outs]))

    def finish(self, indices: tuple[int, ...], reads: Sequence[Var]) -> Jitted:
        """`reads -> outputs`, by index, as the segment gives them."""
        return self._once(("finish", indices), lambda: self._finish(indices, reads))

    def _finish(self, indices: Sequence[int], reads: Sequence[Var]) -> Jitted:
        atoms = [self._inner.jaxpr.outvars[i] for i in indices]

        def local(arrays: Arrays) -> Arrays:
            env = self._env(reads, arrays)
            return [
                jnp.asarray(_jaxpr.literal(a) if _jaxpr.is_literal(a) else env[a]) for a in atoms
            ]

        specs = [self._inner.out_specs[i] for i in indices]
        ins = [self.form(v).spec for v in reads]
        return jax.jit(self._runner.shard_map(local, (ins,), specs))

    # -- loops -----------------------------------------------------------------------------------------

    def enter(self, loop: LayerLoop) -> Jitted:
        """`variables of the first carry -> the first carry`, as turns take it."""
        return self._once(("enter", loop), lambda: self._enter(loop.operands[1]))

    def _enter(self, atoms: Sequence[Atom]) -> Jitted:
        reads = variables(atoms)

        def local(arrays: Arrays) -> Arrays:
            env = self._env(reads, arrays)
            values = [_jaxpr.literal(a) if _jaxpr.is_literal(a) else env[a] for a in atoms]
            return [self._default.part(x) for x in values]

        ins, outs = [self.form(v).spec for v in reads], [self._default.spec] * len(atoms)
        return jax.jit(self._runner.shard_map(local, (ins,), outs))

    def turn(self, loop: LayerLoop) -> Jitted:
        """`(consts, carry, leaves, slices, stacks, made, i) -> (carry, slices, hosted, made, done)`.

        `made`, stacks that the turn writes its slice into, is consumed; `i` is the turn's place in stacks,
        and `done` a number to wait for.
        """
        return self._once(("turn", loop), lambda: self._turn(loop))

    def _turn(self, loop: LayerLoop) -> Jitted:
        parts, (consts, init, xs) = loop.parts, loop.operands
        ys = loop.results[1]
        closed = variables(consts)
        by_kind = {
            kind: [a for a, k in zip(xs, loop.xs, strict=True) if k == kind] for kind in _KINDS
        }
        stacks = variables(by_kind[STACK])

        def local(
            closed_: Arrays, carry: Arrays, leaves: Arrays, slices: Arrays, stacks_: Arrays,
            made: Arrays, i: jax.Array,
        ) -> Any:  # fmt: skip
            env = self._env([*closed, *stacks], [*closed_, *stacks_])
            given = {
                LEAF: iter(leaves),
                SLICES: (
                    self.form(a).local(x) for a, x in zip(by_kind[SLICES], slices, strict=True)
                ),
                STACK: (_sliced(_value(a, env), i) for a in by_kind[STACK]),
            }
            outs = _jaxpr.evaluate(
                parts.body, parts.body_consts, *(_value(a, env) for a in consts),
                *map(self._default.local, carry), *(next(given[kind]) for kind in loop.xs),
            )  # fmt: skip
            of: dict[str, list[tuple[Var, Any]]] = {kind: [] for kind in (*_KINDS, HOSTED)}
            for y, kind, x in zip(ys, loop.ys, outs[parts.num_carry :], strict=True):
                of.setdefault(kind, []).append((y, x))
            new = [
                self.form(y).part(lax.dynamic_update_index_in_dim(self.form(y).local(old), x, i, 0))
                for (y, x), old in zip(of[STACK], made, strict=True)
            ]
            return (
                [self._default.part(x) for x in outs[: parts.num_carry]],
                [self._default.part(x) for _, x in of[SLICES]],
                [x for _, x in of[HOSTED]],
                new,
                i + 1,
            )

        ins = (
            [self.form(v).spec for v in closed],
            [self._default.spec] * len(init),
            [self.form(a).of_slice.spec for a in by_kind[LEAF]],
            [self._default.spec] * len(by_kind[SLICES]),
            [self.form(v).spec for v in stacks],
            [self.form(y).spec for y in _of_kind(loop, STACK)],
            P(),
        )
        outs = (
            ins[1],
            [self._default.spec] * len(_of_kind(loop, SLICES)),
            [self.form(y).of_slice.spec for y in _of_kind(loop, HOSTED)],
            ins[5],
            P(),
        )
        return jax.jit(self._runner.shard_map(local, ins, outs), donate_argnums=5)

    def fetch(self, loop: LayerLoop) -> Jitted:
        """`(stacks on the host, i) -> slices on the devices`."""
        return self._once(("fetch", loop), lambda: self._fetch(loop.leaves))

    def _fetch(self, leaves: Sequence[Var]) -> Jitted:
        def local(stacks: Arrays, i: jax.Array) -> Arrays:
            return [_sliced(x, i) for x in stacks]

        specs = [self.form(v).spec for v in leaves]
        slices = [self.form(v).of_slice.spec for v in leaves]
        run = self._runner.shard_map(local, (specs, P()), slices)
        places = [NamedSharding(self._mesh, spec, memory_kind=DEVICE) for spec in slices]
        fetch = lambda stacks, i: jax.device_put(run(stacks, i), places)  # noqa: E731
        return jax.jit(fetch, out_shardings=places)

    def store(self, loop: LayerLoop) -> Jitted:
        """`(stacks on the host, slices, i) -> (stacks, done)`: in their place."""
        return self._once(("store", loop), lambda: self._store(_of_kind(loop, HOSTED)))

    def _store(self, ys: Sequence[Var]) -> Jitted:
        def local(stacks: Arrays, new: Arrays, i: jax.Array) -> Arrays:
            pairs = zip(stacks, new, strict=True)
            return [lax.dynamic_update_index_in_dim(x, part, i, 0) for x, part in pairs]

        specs = [self.form(y).spec for y in ys]
        slices = [self.form(y).of_slice.spec for y in ys]
        there = [NamedSharding(self._mesh, spec, memory_kind=PINNED) for spec in slices]
        run = self._runner.shard_map(local, (specs, slices, P()), specs)

        def store(stacks: Arrays, new: Arrays, i: jax.Array) -> tuple[Arrays, jax.Array]:
            return run(stacks, jax.device_put(new, there), i), i + 1

        homes = [self.home(y, PINNED) for y in ys]
        return jax.jit(store, donate_argnums=0, out_shardings=(homes, None))

    def empty(self, loop: LayerLoop) -> tuple[Arrays, Arrays]:
        """Zeros for the stacks that a loop makes: on the devices, and on the host."""
        return self._once(("empty", loop), lambda: self._empty(loop))()

    def _empty(self, loop: LayerLoop) -> Jitted:
        groups = [_of_kind(loop, STACK), _of_kind(loop, HOSTED)]

        def local() -> tuple[Arrays, ...]:
            return tuple(
                [self.form(y).part(jnp.zeros(y.aval.shape, y.aval.dtype)) for y in ys]
                for ys in groups
            )

        specs = tuple([self.form(y).spec for y in ys] for ys in groups)
        tiers = (DEVICE, PINNED)
        places = tuple(
            [self.home(y, tier) for y in ys] for ys, tier in zip(groups, tiers, strict=True)
        )
        return jax.jit(self._runner.shard_map(local, (), specs), out_shardings=places)


_KINDS = (LEAF, SLICES, STACK)


def _of_kind(loop: LayerLoop, kind: str) -> list[Var]:
    """The stacks that a loop makes so."""
    return [y for y, k in zip(loop.results[1], loop.ys, strict=True) if k == kind]


def _made(part: LayerPart) -> Sequence[Var]:
    """What a part makes that may be an output as it is."""
    if isinstance(part, Stretch):
        return part.gives
    return [*_of_kind(part, STACK), *_of_kind(part, HOSTED)]


def _value(atom: Atom, env: Mapping[Var, Any]) -> Any:
    return _jaxpr.literal(atom) if _jaxpr.is_literal(atom) else env[atom]


def _sliced(stack: jax.Array, i: jax.Array) -> jax.Array:
    """`[turns, n, d] -> [n, d]`."""
    return lax.dynamic_index_in_dim(stack, i, 0, keepdims=False)
