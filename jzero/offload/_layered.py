"""`LayeredSegment`: a segment whose parameters rest on the hosts, run so many bytes of them at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from jzero._errors import OptionError, message
from jzero._folded import folded
from jzero._memory_kinds import PINNED
from jzero.offload._layer_programs import LayerPrograms, Locals
from jzero.offload._pinned import Visit, stream
from jzero.segments._segment import Segment, Values, Var, shard_of
from jzero.sharding.analysis._frames import variables
from jzero.sharding.analysis._traffic import Crossing
from jzero.sharding.cut import _layers
from jzero.sharding.cut._layers import HOSTED, SLICES, STACK, LayerPart, Stretch
from jzero.sharding.run._run import Runner
from jzero.sharding.run._values import Arrays
from jzero.tracing import _call, _jaxpr

WHO = _call.WHO


class LayeredSegment:
    """A segment, part by part.

    One part's leaves are fetched while the part before runs::

        fetch 1, fetch 2, run 1, fetch 3 (when 1 is over), run 2, ...

    Attributes:
      parts: in the order in which they run.
      sent: what it gives that goes to pinned memory.
    """

    def __init__(self, runner: Runner, segment: Segment, sent: Sequence[Var], device_bytes: int):
        """Cuts the segment.

        Args:
          runner: the step.
          segment: takes parameters that rest on the hosts, as they rest.
          sent: what it gives that goes to pinned memory.
          device_bytes: the most bytes of these parameters on each device, gathered ones included.

        Raises:
          OptionError: what one part needs of them is more.
        """
        self._segment, self.sent, self._device_bytes = segment, tuple(sent), device_bytes
        self._inner = inner = Locals.of(segment)
        self._mesh = runner.mesh
        leaf_of = dict(zip(runner.frame.jaxpr.invars, runner.plan.leaves, strict=False))
        taken = {var: segment.takes[i] for var, i in inner.taken().items()}
        self._leaf_of = {
            var: leaf_of[of]
            for var, of in taken.items()
            if of in leaf_of and leaf_of[of].is_streamed
        }
        outvars = inner.jaxpr.outvars
        sends = [i for i, var in enumerate(segment.gives) if var in self.sent]
        fresh = set(variables(outvars)) - set(inner.jaxpr.invars)
        self._hosted = {outvars[i] for i in sends if outvars[i] in fresh}
        # A stack that is sharded along its turns has no slices.
        in_slices = {outvars[i] for i in sends if not any(inner.out_specs[i][:1])} & self._hosted
        self._home = {
            i: NamedSharding(runner.mesh, inner.out_specs[i], memory_kind=PINNED) for i in sends
        }
        nbytes = {var: leaf.nbytes_per_device for var, leaf in self._leaf_of.items()}
        self.parts = _layers.cut(inner.jaxpr, nbytes, in_slices, device_bytes // 2)
        self._check_room()
        specs = {var: segment.types[of].spec for var, of in taken.items()}
        self._programs = LayerPrograms(runner, inner, specs, self.parts)
        reads = [(v, i) for i, part in enumerate(self.parts) for v in part.reads]
        self._last = dict(reads) | dict.fromkeys(variables(outvars), len(self.parts))

    def _check_room(self) -> None:
        bad = [
            f"{', '.join(name.text for name in folded(self._leaf_of[v].path for v in part.leaves))}: "
            f"{part.nbytes} bytes"
            for part in self.parts
            if part.nbytes > self._device_bytes
        ]
        if bad:
            most = max(part.nbytes for part in self.parts)
            raise OptionError(message(
                WHO, bad, "What one part of the step reads of parameters is on a device at a time, gathered, "
                f"and offload_params.device_bytes={self._device_bytes} is the most that may be there.",
                f"Use PinnedHost(device_bytes={most}) or more; from {2 * most} one part is fetched while "
                "another runs.", things="parts", shown=6))  # fmt: skip

    def fetches(self) -> list[Crossing]:
        """What each device copies of its host's parameters in a run, part by part."""
        return [
            Crossing("to device", leaf.role, leaf.dtype, nbytes // leaf.itemsize, nbytes)
            for part in self.parts
            for leaf in (self._leaf_of[var] for var in self._taken_of(part))
            for nbytes in [leaf.nbytes_per_device]
        ]

    def _taken_of(self, part: LayerPart) -> list[Var]:
        """The leaves that a part fetches, whole or slice by slice."""
        return [*part.leaves, *(var for var in part.reads if var in self._leaf_of)]

    def sends(self) -> list[Crossing]:
        """The gradients that each device copies to its host in a run."""
        types, mesh = self._segment.types, self._mesh
        shards = [shard_of(types[var].aval(mesh)) for var in self.sent]
        return [
            Crossing("to host", "gradient", str(x.dtype), x.size, x.size * x.dtype.itemsize)
            for x in shards
        ]

    def __call__(self, values: Values) -> tuple[Arrays, Arrays]:
        """As `segment.run`: what it gives, of which `sent` is in pinned memory, and outputs."""
        env: dict[Var, Any] = dict(self._known)
        env |= {var: values[self._segment.takes[i]] for var, i in self._inner.taken().items()}
        there: dict[Var, jax.Array] = {}
        stream(self._visits(env, there), self._device_bytes)
        outs, num = self._finish(env, there), len(self._segment.gives)
        return outs[:num], outs[num:]

    @functools.cached_property
    def _known(self) -> dict[Var, Any]:
        """Constants, and zeros for indices, which programs know themselves; on the devices."""
        known = self._inner.known() | dict.fromkeys(self._inner.indices, 0)
        with jax.transfer_guard("allow"):
            return {
                var: jax.device_put(_jaxpr.constant(x), self._programs.home(var))
                for var, x in known.items()
            }

    def _visits(self, env: dict[Var, Any], there: dict[Var, jax.Array]) -> Iterator[Visit]:
        for index, part in enumerate(self.parts):
            if isinstance(part, Stretch):
                fetch = functools.partial(self._fetch, part.leaves, env)
                yield Visit(
                    part.nbytes, fetch, functools.partial(self._run, index, part, env, there)
                )
            else:
                yield from self._turns(index, env, there)

    def _fetch(self, leaves: Sequence[Var], env: Mapping[Var, Any]) -> Arrays:
        """Whole leaves, on their way to the devices."""
        places = [self._programs.home(var) for var in leaves]
        return jax.device_put([env[var] for var in leaves], places) if leaves else []

    def _run(
        self, index: int, part: Stretch, env: dict[Var, Any], there: dict[Var, jax.Array],
        leaves: Arrays,
    ) -> Arrays:  # fmt: skip
        made = self._programs.stretch(part)(leaves, [env[var] for var in part.reads])
        env.update(zip(part.gives, made, strict=True))
        copies = self._send([v for v in part.gives if v in self._hosted], env, there)
        self._drop(index, env)
        return copies or sorted(made, key=lambda x: x.size)[:1]

    def _send(
        self, mine: Sequence[Var], env: dict[Var, Any], there: dict[Var, jax.Array]
    ) -> Arrays:
        """Gradients, on their way to the host."""
        places = [self._programs.home(var, PINNED) for var in mine]
        copies = jax.device_put([env[var] for var in mine], places) if mine else []
        there.update(zip(mine, copies, strict=True))
        return copies

    def _drop(self, index: int, env: dict[Var, Any]) -> None:
        """Forgets what nobody reads after this part, and what is on the host, if that is all it is for."""
        last, part = self._last, self.parts[index]
        made = part.gives if isinstance(part, Stretch) else part.eqn.outvars
        for var in [*part.reads, *made]:
            unread = var not in self._read_after(index)
            if var in env and unread and (last.get(var, -1) <= index or var in self._hosted):
                del env[var]

    @functools.cache  # noqa: B019
    def _read_after(self, index: int) -> frozenset[Var]:
        return frozenset(v for part in self.parts[index + 1 :] for v in part.reads)

    def _finish(self, env: dict[Var, Any], there: dict[Var, jax.Array]) -> Arrays:
        """The outputs; those that no part makes as they are wanted are made now."""
        atoms, programs = self._inner.jaxpr.outvars, self._programs
        found = [self._made(i, env, there) for i in range(len(atoms))]
        rest = tuple(i for i, x in enumerate(found) if x is None)
        if rest:
            reads = variables([atoms[i] for i in rest])
            hosted = [var for var in reads if var in self._leaf_of]
            env = env | dict(zip(hosted, self._fetch(hosted, env), strict=True))
            made = programs.finish(rest, tuple(reads))([env[var] for var in reads])
            for i, x in zip(rest, made, strict=True):
                found[i] = jax.device_put(x, self._home[i]) if i in self._home else x
        return found

    def _made(self, index: int, env: Mapping[Var, Any], there: Mapping[Var, jax.Array]) -> Any:
        """An output that a part has made as it is wanted, else None."""
        atoms = self._inner.jaxpr.outvars
        atom = atoms[index]
        if _jaxpr.is_literal(atom) or atoms.index(atom) != index:
            return None
        if atom in there:
            return there[atom]
        as_wanted = atom not in self._inner.jaxpr.invars and not self._programs.form(atom).stacked
        return env[atom] if as_wanted and index not in self._home else None

    # -- loops -----------------------------------------------------------------------------------------

    def _turns(
        self, index: int, env: dict[Var, Any], there: dict[Var, jax.Array]
    ) -> Iterator[Visit]:
        """A visit for each turn of a loop."""
        loop: Any = self.parts[index]
        run = _Run(self, index, env, there)
        stacks = [env[var] for var in loop.leaves]
        fetch, positions = self._programs.fetch(loop), self._programs.positions(loop.parts.length)
        order = range(loop.parts.length)[:: -1 if loop.parts.reverse else 1]
        for at in order:
            get = functools.partial(fetch, stacks, positions[at])
            yield Visit(loop.nbytes, get, functools.partial(run.turn, at, at == order[-1]))


class _Run:
    """One run of a loop: what its turns have made."""

    def __init__(
        self, layered: LayeredSegment, index: int, env: dict[Var, Any], there: dict[Var, jax.Array]
    ):
        self._layered, self._index, self._env, self._there = layered, index, env, there
        self._loop: Any = layered.parts[index]
        self._begun = False

    def _begin(self) -> None:
        loop, env, layered = self._loop, self._env, self._layered
        consts, init, xs = loop.operands
        held = [v for v in loop.reads if v in layered._leaf_of]
        env = env | dict(zip(held, layered._fetch(held, env), strict=True))
        self._consts = [env[v] for v in variables(consts)]
        self._carry = layered._programs.enter(loop)([env[v] for v in variables(init)])
        pairs = [*zip(xs, loop.xs, strict=True)]
        self._stacks = [env[v] for v in variables(a for a, kind in pairs if kind == STACK)]
        sliced = [a for a, kind in pairs if kind == SLICES]
        self._slices = [env[a] for a in sliced]
        # What a forward loop kept for this turn, nobody reads after it.
        self._frees = [env[a] for a in sliced if layered._last[a] == self._index]
        self._made, self._hosted = layered._programs.empty(loop)
        self._ys = [[None] * loop.parts.length for kind in loop.ys if kind == SLICES]
        self._begun = True

    def turn(self, at: int, is_last: bool, leaves: Arrays) -> Arrays:
        """Runs a turn; after the last one, the loop's results are there."""
        if not self._begun:
            self._begin()
        loop, programs = self._loop, self._layered._programs
        i = programs.positions(loop.parts.length)[at]
        slices = [stack[at] for stack in self._slices]
        self._carry, new, hosted, self._made, done = programs.turn(loop)(
            self._consts, self._carry, leaves, slices, self._stacks, self._made, i
        )
        for stack, x in zip(self._ys, new, strict=True):
            stack[at] = x
        if hosted:
            self._hosted, done = programs.store(loop)(self._hosted, hosted, i)
        for stack in self._frees:
            stack[at] = None
        if is_last:
            self._end()
        return [done]

    def _end(self) -> None:
        loop, env, layered = self._loop, self._env, self._layered
        carry, ys = loop.results
        env.update(zip(carry, self._carry, strict=True))
        for kind, found in ((SLICES, self._ys), (STACK, self._made)):
            env.update(
                zip([y for y, k in zip(ys, loop.ys, strict=True) if k == kind], found, strict=True)
            )
        hosted = [y for y, k in zip(ys, loop.ys, strict=True) if k == HOSTED]
        self._there.update(zip(hosted, self._hosted, strict=True))
        layered._send([y for y in ys if y in layered._hosted and y not in hosted], env, self._there)
        layered._drop(self._index, env)
        self.__dict__.clear()
