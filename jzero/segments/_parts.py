"""The programs of an offloaded step: the grad part, and one for each turn of the update part."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero._memory_kinds import DEVICE
from jzero.sharding.analysis import _traffic
from jzero.sharding.analysis._traffic import Collective
from jzero.sharding.cut._pieces import Piece, UpdatePart
from jzero.sharding.plan import _layout
from jzero.sharding.plan._layout import FULL, Layout, Shard
from jzero.sharding.run._interpret import Env, Interpreter
from jzero.sharding.run._run import Runner, placed
from jzero.sharding.run._values import FullValue, Value
from jzero.tracing import _jaxpr, _rewrite

Var = _jaxpr.Var


@dataclasses.dataclass(frozen=True)
class Part:
    """A program that runs some of a step's equations; its values are known by their variables.

    Attributes:
      consumes: what it takes and renews, and nobody reads after it; donated.
      reads: what else it takes.
      gives: what it makes for later parts.
      outs: which outputs of the step it makes, by index.
      run: `(consumed, read) -> (given, outputs)`, on whole arrays.
      jitted: the same, compiled.
    """

    consumes: tuple[Var, ...]
    reads: tuple[Var, ...]
    gives: tuple[Var, ...]
    outs: tuple[int, ...]
    run: Callable[..., Any]
    jitted: Callable[..., Any]

    @property
    def takes(self) -> tuple[Var, ...]:
        """Everything that it takes."""
        return (*self.consumes, *self.reads)

    def __call__(self, values: dict[Var, Any], run: Callable[..., Any]) -> dict[int, Any]:
        """Calls `run` on `values` and adds what it gives to them; returns outputs by index."""
        takes = [[values[var] for var in group] for group in (self.consumes, self.reads)]
        given, outs = run(*takes)
        values.update(zip(self.gives, given, strict=True))
        return dict(zip(self.outs, outs, strict=True))


class Compiled:
    """The compiled programs of turns; one serves all that are equal, as those of equal layers are."""

    def __init__(self, share: bool):
        self._share = share
        self._shared: dict[Any, Callable[..., Any]] = {}
        self._of: dict[Any, Callable[..., Any]] = {}

    def of(self, turn: Part, values: Mapping[Var, Any]) -> Callable[..., Any]:
        """The program of a turn that will take these values."""
        if (key := (turn.outs, turn.gives)) not in self._of:
            takes = [[values[var] for var in group] for group in (turn.consumes, turn.reads)]
            text = _rewrite.whole_text(jax.make_jaxpr(turn.run)(*takes))
            shared = self._share and text is not None
            # The text does not say how arguments and results are grouped.
            nums = tuple(map(len, (turn.consumes, turn.reads, turn.gives, turn.outs)))
            equal = (text, nums)
            self._of[key] = self._shared.setdefault(equal, turn.jitted) if shared else turn.jitted
        return self._of[key]

    @property
    def num(self) -> int:
        """How many different ones there are."""
        return len(set(self._of.values()))


class Parts:
    """Makes the programs of an offloaded step."""

    def __init__(
        self, runner: Runner, update: UpdatePart, packs: Sequence[Sequence[Piece]],
        shardings: Sequence[NamedSharding],
    ):  # fmt: skip
        self.runner, self._update, self.packs = runner, update, packs
        self._frame, self._shardings = runner.frame, shardings
        self._num_leaves = len(runner.leaves)
        invars = self._frame.jaxpr.invars
        self._inputs = {var: i for i, var in enumerate(invars)}
        self.leaf_of = {var: i for i, var in enumerate(invars[: self._num_leaves])}
        self._read = {var for piece in update.pieces for var in piece.reads}

    def grad_part(self) -> Part:
        """What is left of the step without its update part; a leaf that it hands through is no output."""
        jaxpr, leaves = self._frame.jaxpr, self.runner.leaves
        invars, outvars = jaxpr.invars, jaxpr.outvars
        outs = [i for i in range(len(outvars)) if i not in self._update.outs]
        outs = [i for i in outs if i >= len(leaves)
                or (leaves[i].tier == DEVICE and outvars[i] is not invars[i])]  # fmt: skip
        here = [v for i, v in enumerate(invars) if i >= len(leaves) or leaves[i].tier == DEVICE]
        own = {invars[i] for i in outs if i < len(leaves)}
        consumes = [var for var in here if var in own and var not in self._read]
        run = self.runner.grad_part()

        def compute(interp: Interpreter, values: dict[Var, Any]) -> Env:
            args = [values.get(var) for var in invars]
            return run(interp, args[: len(leaves)], args[len(leaves) :])

        reads = [var for var in here if var not in consumes]
        return self._part(consumes, reads, list(self._update.boundary), outs, compute)

    def turns(self) -> tuple[Part, ...]:
        """The programs of the update part, one for each pack of pieces."""
        last = {v: i for i, pack in enumerate(self.packs) for piece in pack for v in piece.reads}
        return tuple(self._turn(i, pack, last) for i, pack in enumerate(self.packs))

    def _turn(self, index: int, pack: Sequence[Piece], last: dict[Var, int]) -> Part:
        frame, invars = self._frame, self._frame.jaxpr.invars
        eqns = sorted({i for piece in pack for i in piece.eqns})
        outs = sorted(i for piece in pack for i in piece.outs)
        gives = [var for piece in pack for var in piece.gives]
        reads = list({var: None for piece in pack for var in piece.reads})
        renewed = [invars[i] for i in outs if i < self._num_leaves]
        hosted = {v for v in renewed if self._leaf(v).tier != DEVICE}
        taken = dict.fromkeys([*reads, *(v for v in renewed if v not in hosted)])
        # A later turn fetches an offloaded leaf for itself; what rests on the devices it needs as it was.
        consumes = [
            v for v in taken if v in renewed and (v in hosted or last.get(v, index) == index)
        ]

        def compute(interp: Interpreter, arrays: dict[Var, Any]) -> Env:
            env = Env({var: self._value(interp, var, x) for var, x in arrays.items()})
            constants = zip(frame.jaxpr.constvars, frame.consts, strict=True)
            env.values |= {var: FullValue(_jaxpr.constant(x)) for var, x in constants}
            interp.run_equations(frame, eqns, env)
            return env

        return self._part(consumes, [v for v in reads if v not in consumes], gives, outs, compute)

    def _part(
        self, consumes: Sequence[Var], reads: Sequence[Var], gives: Sequence[Var], outs: Sequence[int],
        compute: Callable[[Interpreter, dict[Var, Any]], Env],
    ) -> Part:  # fmt: skip
        runner, invars = self.runner, self._frame.jaxpr.invars

        def local(consumed: list[Any], read: list[Any]) -> tuple[list[Any], list[Any]]:
            interp = runner.interpreter()
            values = dict(zip([*consumes, *reads], [*consumed, *read], strict=True))
            env = compute(interp, values)
            given = [self._given(interp, env, var) for var in gives]
            olds = [values.get(invars[i]) if i < self._num_leaves else None for i in outs]
            return given, [
                runner.out(interp, env, i, old) for i, old in zip(outs, olds, strict=True)
            ]

        ins = [[self._spec(var) for var in group] for group in (consumes, reads)]
        out_specs = [_layout.partition_spec(runner.layouts[i]) for i in outs]
        run = runner.shard_map(local, tuple(ins), ([self._spec(var) for var in gives], out_specs))
        options: dict[str, Any] = {}
        if runner.setting.automatic:  # Else XLA would choose over these axes.
            places = [s.with_memory_kind(DEVICE) for s in self._shardings]
            kept = [places[i] if i < self._num_leaves else None for i in outs]
            options["out_shardings"] = ([None] * len(gives), kept)
        jitted = jax.jit(run, donate_argnums=0, **options)
        return Part(tuple(consumes), tuple(reads), tuple(gives), tuple(outs), run, jitted)

    def run(
        self, programs: Sequence[Part], state: Sequence[Any], arrays: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """A step on whole arrays, program after program; nothing is copied to or from the host."""
        values = dict(zip(self._frame.jaxpr.invars, [*state, *arrays], strict=True))
        outs: dict[int, Any] = {}
        for part in programs:
            outs |= part(values, part.run)
        return self.in_order(outs, state)

    def trace(self, programs: Sequence[Part], state: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """The trace of `run` as one program: what processes compare before they run it."""
        return jax.jit(functools.partial(self.run, programs)).trace(state, arrays)

    def in_order(
        self, outs: Mapping[int, Any], state: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """New state and outputs; a leaf that no program made keeps its value."""
        num = len(self._frame.jaxpr.outvars)
        found = [outs[i] if i in outs else state[i] for i in range(num)]
        return found[: len(state)], found[len(state) :]

    def collectives(self, part: Part) -> tuple[Collective, ...]:
        """What a program moves between the devices: nothing, if it could run where there are no others."""
        return tuple(_traffic.collectives(jax.make_jaxpr(part.run)(*self.avals(part))))

    def avals(self, part: Part) -> list[list[jax.ShapeDtypeStruct]]:
        """Of what a program takes."""
        return [[self.aval(var) for var in group] for group in (part.consumes, part.reads)]

    # -- values that cross between parts -------------------------------------------------------------

    def _leaf(self, var: Var) -> Any:
        return self.runner.leaves[self.leaf_of[var]]

    def layout(self, var: _jaxpr.Atom) -> Layout:
        """A gradient's, or that of what is combined with one."""
        runner = self.runner
        dim = runner.links.sharded_dim(self._frame, var) if runner.num_devices > 1 else None
        return FULL if dim is None else Shard(dim, runner.setting.sharding.shard_axes)

    def crossed_layout(self, var: Var) -> Layout:
        """Of a leaf that crosses like gradients: its own if an update reads it, else that of what renews it.

        They differ if nothing else ties a leaf to its new value: parameters that are only a cast of masters.
        """
        renewed = self._frame.jaxpr.outvars[self.leaf_of[var]]
        return self.layout(var if var in self._read else renewed)

    def _spec(self, var: Var) -> P:
        place = self._inputs.get(var)
        if place is None:
            return _layout.partition_spec(self.layout(var))
        num, runner = self._num_leaves, self.runner
        return runner.state_specs[place] if place < num else runner.specs[place - num]

    def entering(self, variables: Sequence[Var]) -> Callable[..., Any] | None:
        """`leaves -> shards`: leaves that rest on the devices, in shards like gradients; None if they are."""
        if all(map(self._rests_in_shards, variables)):
            return None
        leaves = [self._leaf(var) for var in variables]
        layouts = [self.crossed_layout(var) for var in variables]

        def local(xs: list[Any]) -> list[Any]:
            interp, frame = self.runner.interpreter(), self._frame
            return [
                interp.as_dim(frame, var, placed(x, leaf), _dim(layout))
                for var, x, leaf, layout in zip(variables, xs, leaves, layouts, strict=True)
            ]

        specs = [_layout.partition_spec(leaf.layout) for leaf in leaves]
        crossed = [_layout.partition_spec(layout) for layout in layouts]
        return self.runner.shard_map(local, (specs,), crossed)

    def leaving(self, outs: Sequence[int]) -> Callable[..., Any] | None:
        """`(old leaves, shards) -> leaves`: renewed shards like gradients, as they rest; None if they do."""
        variables = [self._frame.jaxpr.invars[i] for i in outs]
        if all(map(self._rests_in_shards, variables)):
            return None
        runner, frame = self.runner, self._frame
        layouts = [self.crossed_layout(var) for var in variables]

        def local(olds: list[Any], shards: list[Any]) -> list[Any]:
            interp, new = runner.interpreter(), []
            for i, layout, old, x in zip(outs, layouts, olds, shards, strict=True):
                atom, path = frame.jaxpr.outvars[i], runner.leaves[i].path
                value = interp.devices.value(x, _dim(layout), atom.aval.shape, path)
                new.append(runner.out(interp, Env({_jaxpr.variable(atom): value}), i, old))
            return new

        specs = [runner.state_specs[i] for i in outs]
        crossed = [_layout.partition_spec(layout) for layout in layouts]
        return runner.shard_map(local, (specs, crossed), specs)

    def _rests_in_shards(self, var: Var) -> bool:
        return var not in self.leaf_of or self._leaf(var).layout == self.crossed_layout(var)

    def aval(self, var: Var) -> jax.ShapeDtypeStruct:
        """Of a leaf of the state, or of what another part gives."""
        shape: tuple[int, ...] = var.aval.shape
        if var in self.leaf_of:
            shape = self._leaf(var).padded_shape
        elif isinstance(layout := self.layout(var), Shard):
            num = self.runner.links.num_shards
            padded = [_layout.padded_size(n, num) for n in shape]
            shape = (*shape[: layout.dim], padded[layout.dim], *shape[layout.dim + 1 :])
        sharding = NamedSharding(self.runner.setting.mesh, self._spec(var))
        return jax.ShapeDtypeStruct(shape, var.aval.dtype, sharding=sharding)

    def _value(self, interp: Interpreter, var: Var, x: Any) -> Value:
        if var in self.leaf_of:
            return placed(x, self._leaf(var))
        name = interp.links.leaf_of(self._frame, var)
        return interp.devices.value(x, interp.dim_of(self._frame, var), var.aval.shape, name)

    def _given(self, interp: Interpreter, env: Env, var: Var) -> Any:
        value = interp.read(self._frame, env, var)
        return interp.as_dim(self._frame, var, value, interp.dim_of(self._frame, var))


def _dim(layout: Layout) -> int | None:
    return layout.dim if isinstance(layout, Shard) else None
