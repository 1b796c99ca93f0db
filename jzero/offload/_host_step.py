# SPDX-License-Identifier: Apache-2.0
"""`HostStep`: a step whose optimizer state is stored, and updated, on the hosts or in files."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from jzero._memory_kinds import DEVICE, NVME, PINNED
from jzero.offload._host_bucket import HostBucket
from jzero.offload._host_updates import (
    NO_LOCK,
    UPDATING,
    HostRun,
    HostUpdates,
    is_updating,
    with_new,
)
from jzero.offload._listed_step import ListedStep, called
from jzero.offload.execute._executor import Executable, Execution, HostSide, New, Section
from jzero.offload.schedule._ops import (
    Commit,
    Fetch,
    Op,
    Run,
    Send,
    Update,
    Value,
    Wanted,
    of_list,
    value_of,
)
from jzero.offload.schedule._schedule import Schedule
from jzero.segments import _conversions
from jzero.segments._planned import PlannedStep
from jzero.segments._segment import Var, shard_of
from jzero.sharding.plan._backend import Window, waits

# [Note: how the host comes to update] Three other ways were rejected. State as JAX arrays in pinned memory:
# the allocator limits it, and JAX may share or copy what kernels overwrite. A callback for each leaf from
# the running program: it stops the device's stream. A thread that updates beside the calls: XLA reports
# outputs only when a whole program ends, so nothing is gained, unless layers are programs of their own.


@dataclasses.dataclass(eq=False)
class Pending:
    """What the host has still to apply: the gradients of one step, and other inputs of its update."""

    step: HostStep
    reads: dict[Any, jax.Array]  # by name in the list


class Sections(NamedTuple):
    """The list, in the order in which its sections end."""

    entering: Section  # sends parameters that the hosts read and update, as they are then
    gradients: Section  # forward and backward; sends gradients
    on_devices: Section  # updates what is stored on the devices, while the hosts work
    update: Section  # by the hosts; of a delayed step, the update of the step before
    commit: Section  # of files

    @property
    def ops(self) -> tuple[Op, ...]:
        return tuple(op for section in self for op in section.ops)


class HostStep(ListedStep):
    """A step in two parts: gradients on the devices, their update on the host.

        gradients = forward_backward(parameters, batch)  # each is sent to the host when it is reduced
        for portion in portions:                        # in place, on the host; of files, tile by tile
            moments, parameters = update(moments, gradients)
            send parameters to the devices              # while the next portion is updated
        commit                                          # of files: now the new state counts

    A delayed step updates with the gradients of the step before, which the host has, while the devices
    compute new ones. What can fail is done before anything of the old state is overwritten, but for copies to
    devices that have no room.
    """

    def __init__(
        self, planned: PlannedStep, shardings: Sequence[NamedSharding], window: Window,
        updates: Callable[[HostStep], HostUpdates],
    ):  # fmt: skip
        """`window` limits parameters on the devices that are stored elsewhere."""
        super().__init__(planned, shardings)
        self.host = HostBucket(self.builder, self.plan.buckets[0].subgraphs)
        # What the host renews it reads as it is then; all else, a loss scale, as it was for the gradients.
        renewed, reads = {*self.host.outs}, self.host.reads
        self._entered = [var for var in reads if self.leaf_of.get(var) in renewed]
        self._sent = [var for var in reads if self.leaf_of.get(var) not in renewed]
        # Of what is sent, what exists before gradients do; and gradients that devices read, too.
        self.known = [var for var in self._sent if var not in self.grad.gives]
        takes = (var for bucket in self.buckets[1:] for var in bucket.takes)
        self.stays = [var for var in takes if var in self.grad.gives]
        self.cut(window, {*self._sent}.__contains__)
        # Names of what the hosts read besides their leaves, and (by output) of what they make for devices.
        self.reads = self._named_reads()
        roles = {i: leaf.role for i, leaf in enumerate(self.leaves)}
        made = zip(self.host.outs, map(shard_of, self.host.out_avals()), strict=True)
        self.gives = {i: Value.of(roles.get(i, "output"), shard) for i, shard in made}
        self.updates = updates(self)
        self._renewed_here = {i for part in (self.grad, *self.buckets[1:]) for i in part.outs}

    def _named_reads(self) -> dict[Var, Value]:
        found = dict[Var, Value]()
        for var, aval in zip(self.host.reads, self.host.read_avals(), strict=True):
            role = self.leaves[self.leaf_of[var]].role if var in self.leaf_of else None
            shard = shard_of(aval)
            found[var] = Value.of(role, shard) if role else Value.of_gradient(shard)
        return found | (self.layered.gradients if self.layered else {})

    def schedule(self) -> Schedule:
        return Schedule((*waits(self.plan), *self._sections.ops), self.updates.needs())

    @functools.cached_property
    def _program(self) -> Executable:
        here, there = self._new.values(), self.updates.leaves.values()
        return Executable(self._sections.ops, [*here], [*there])

    @functools.cached_property
    def _new(self) -> dict[int, Value]:
        return self.named_outs(self.buckets[1:]) | self.gives

    @functools.cached_property
    def _sections(self) -> Sections:
        commit = (Commit(NVME),) if self.updates.store == NVME else ()
        return Sections(
            Section(self._sending(self._entered, copies=1)), self._gradients(),
            Section(tuple(self._on_devices())), Section((self._update,)), Section(commit),
        )  # fmt: skip

    def _sending(self, variables: Sequence[Var], copies: int) -> tuple[Op, ...]:
        """Sends leaves and arguments to the host, in shards; no operation if there are none."""
        if not variables:
            return ()
        enter = _conversions.entering(self.planned, variables)

        def enter_part(leaves: list[Any]) -> list[Any]:  # The program's name.
            return leaves if enter is None else enter(leaves)

        run = of_list(_to_host(enter_part, self._places(variables)))
        made = tuple(self.reads[var] for var in variables)
        return Run("", tuple(map(self.name, variables)), made, run), *_sent(made, copies)

    def _places(self, variables: Sequence[Var]) -> list[NamedSharding]:
        avals = dict(zip(self.host.reads, self.host.read_avals(), strict=True))
        return [avals[var].sharding for var in variables]

    def _gradients(self) -> Section:
        # The inputs of a delayed update exist beside the next step's; parameters are sent when it runs.
        copies, grad = self.updates.num_sets, self.grad
        if self.layered is not None:
            section = self.layered.section
            return section._replace(ops=(*self._sending(self.known, copies), *section.ops))
        sent = tuple(self.reads[var] for var in self._sent)
        gives = (*sent, *map(self.name, self.stays), *(self._new[i] for i in grad.outs))
        run = Run("gradients", tuple(map(self.name, grad.takes)), gives, of_list(self._whole()))
        return Section((run, *_sent(sent, copies)))

    def _whole(self) -> Callable[[list[Any]], list[Any]]:
        """Forward and backward as one program: what goes to the host, what stays, and outputs."""
        kept = self.builder.kept(self.grad.outs)
        enter = _conversions.entering(self.planned, self.known)
        num = len(self.grad.consumes)

        def grad_part(consumed: list[Any], read: list[Any]) -> tuple[list[Any], Any]:
            here = dict(zip(self.grad.takes, [*consumed, *read], strict=True))
            leaves = [here[v] for v in self.known]
            known = leaves if enter is None else enter(leaves)
            given, outs = self.grad.run(consumed, read)
            made = dict(zip((*self.known, *self.grad.gives), (*known, *given), strict=True))
            return [made[v] for v in self._sent], ([made[v] for v in self.stays], outs)

        run = _to_host(grad_part, self._places(self._sent), kept and (None, kept))

        def call(arrays: list[Any]) -> list[Any]:
            sent, (stays, outs) = run(arrays[:num], arrays[num:])
            return [*sent, *stays, *outs]

        return call

    @functools.cached_property
    def _update(self) -> Update:
        updates, gone = self.updates, {i for x in self.updates.early.buckets for i in x.leaves}
        leaves = self.named_leaves(i for i in updates.moved if i not in gone)
        gives = tuple(self.gives.values())
        back = (Fetch(gives, PINNED),) if gives else ()
        return Update(
            updates.store, leaves, tuple(map(self._arrived, updates.late_reads)), gives,
            updates.num_sets, updates.delay_after is not None, transfers=back,
        )  # fmt: skip

    def _arrived(self, var: Var) -> Value:
        """An input of the hosts in pinned memory; of parts that return one value twice, the first."""
        return self.name(var) if self.given(var) else self.reads[var]

    def _on_devices(self) -> Iterator[Op]:
        pinned = [v for v in self.stays if (output := self.given(v)) and output.pinned]
        if pinned:
            places = [self.grad.types[v].aval(self.planned.mesh).sharding for v in pinned]
            here = tuple(place.with_memory_kind(DEVICE) for place in places)
            yield Fetch(tuple(map(self.name, pinned)), PINNED, here)
        for bucket in self.buckets[1:]:
            gives = (*map(self.name, bucket.gives), *(self._new[i] for i in bucket.outs))
            call = called(bucket, bucket.jitted if self.updates.consumes else jax.jit(bucket.run))
            name = "the update of what is stored on the devices"
            yield Run(name, tuple(map(self.name, bucket.takes)), gives, call)

    def code_paths(self) -> str:
        return self.updates.code_paths()

    def dispatched(self, state: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """See `StepProgram`; without what the host sends back, a portion at a time."""

        def on_devices(state: Sequence[Any], arrays: Sequence[Any]) -> Any:
            # Until the first backward pass is over no update begins, and all gradients stay.
            host = _Kept()
            run = self.execution(self._program, state, arrays, host)
            run.run(self._sections.gradients)
            sent = [run.there.get(self._arrived(var)) for var in self._sent]
            run.run(self._sections.on_devices)
            return sent, host.arrays, *self.in_order(self._made(run), state)

        return jax.make_jaxpr(on_devices)(state, arrays)

    def __call__(
        self, state: Sequence[Any], arrays: Sequence[jax.Array]
    ) -> tuple[list[Any], list[jax.Array]]:
        """Runs one step; the state is consumed, unless it fails before the host overwrites any."""
        updates, early, is_nested = self.updates, bool(self.updates.early.buckets), is_updating()
        # Early updates take turns with those of other threads, from the first part on.
        with UPDATING if early else NO_LOCK, updates.buffers if early else NO_LOCK:
            return self._step(state, arrays, is_nested)

    def _step(
        self, state: Sequence[Any], arrays: Sequence[jax.Array], is_nested: bool
    ) -> tuple[list[Any], list[jax.Array]]:
        pending, num_steps = self.updates.pending(state)
        after = self.updates.delay_after
        delays = after is not None and num_steps >= after
        # Another step's gradients may belong to leaves that the devices update in this one.
        if pending and not (delays and self._renewed_here.isdisjoint(pending.step.host.outs)):
            state, pending = pending.step.flush(state), None
        of = pending.step if pending else self  # whose update is made
        with of.updates.run(state, num_steps + 1) as host:
            host.is_nested = is_nested
            run = self._begun(state, arrays, host)
            update = of.resumed(pending, state, host) if pending else None if delays else run
            made = self._run(state, run, host, of, update)
        for i in self._new:
            if i in made and i < len(state):
                state[i].delete()
        return self.in_order(made, state)

    def _begun(self, state: Sequence[Any], arrays: Sequence[Any], host: HostRun) -> Execution:
        run = self.execution(self._program, state, arrays, host)
        if self.layered:
            run.there |= {self.reads[var]: x for var, x in self.layered.numbers.items()}
        return run

    def _run(
        self, state: Sequence[Any], run: Execution, host: HostRun, of: HostStep, update: Execution | None
    ) -> dict[int, Any]:  # fmt: skip
        """Runs all sections, and the pending `update` of step `of`; returns what they make, by index."""
        sections, theirs = self._sections, of._sections
        if update:  # First, as the host may already wait for it.
            update.run(theirs.entering)
        self.run_gradients(run, sections.gradients)
        host.end_gradients()
        if update is not run:
            host.pending = Pending(self, {x: run.there[x] for x in map(self._arrived, self._sent)})
        if update:
            of.wait(update, state)
        beside = update.slots(theirs.update.ops) if update else ()
        with UPDATING, self.updates.buffers:
            run.run(sections.on_devices, beside=beside)
            run.run(sections.commit)
            return self._made(run) | (of.made(update) if update else host.take())

    def _made(self, run: Execution) -> dict[int, Any]:
        """What the devices have made, or have been sent, by index."""
        return {i: run.here[x] for i, x in self._new.items() if x in run.here}

    def made(self, run: Execution) -> dict[int, Any]:
        """What the hosts have made, by index: their leaves, and what was sent to the devices."""
        leaves = {i: run.there[x] for i, x in self.updates.leaves.items()}
        return leaves | {i: run.here[x] for i, x in self.gives.items()}

    def wait(self, run: Execution, state: Sequence[Any]) -> None:
        """Waits for what an update needs from the devices; other threads may update meanwhile."""
        reads = [run.there[x] for x in map(value_of, self._update.takes) if x in run.there]
        # Deleted arrays cannot be awaited, and a copy to them may read memory that is written next.
        olds = [state[i] for i in self.host.outs if i < len(state)]
        # On all devices, replicas too: parameters are freed after this.
        with jax.profiler.TraceAnnotation("jzero: wait for gradients"):
            jax.block_until_ready([*reads, *olds])

    def resumed(self, pending: Pending, state: Sequence[Any], host: HostRun) -> Execution:
        """The run of this step whose update is pending, with the state as it is now."""
        names = self.named_leaves(range(len(self.leaves)))
        leaves: dict[Any, Any] = dict(zip(names, state, strict=True))
        return Execution(self._program, leaves, {**leaves, **pending.reads}, host)

    def flush(self, state: Sequence[Any]) -> list[Any]:
        pending, num_steps = self.updates.pending(state)
        assert pending is not None
        with self.updates.run(state, num_steps) as host:
            host.is_nested = is_updating()
            run = self.resumed(pending, state, host)
            run.run(self._sections.entering)
            self.wait(run, state)
            with UPDATING:
                run.run(self._sections.update)
        return with_new(state, self.made(run))


class _Kept(HostSide):
    def __init__(self) -> None:
        self.arrays: list[Any] = []

    def update(self, update: Update, place: int | None, takes: Sequence[Any]) -> New:
        self.arrays += [x for x in takes if x is not None]
        return New({})

    def write(self, gradients: Sequence[Wanted], arrays: Sequence[Any]) -> None:
        self.arrays += arrays


def _sent(values: Sequence[Value], copies: int) -> Iterator[Send]:
    """What a program itself has sent to pinned memory; nothing waits for it."""
    if values:
        yield Send(tuple(values), PINNED, by=lambda _, arrays, __: (arrays, ()), copies=copies)


def _to_host(
    run: Callable[..., Any], places: Sequence[NamedSharding], rest: Any = ()
) -> Callable[..., Any]:
    """A program whose first results go to pinned memory, each as soon as it is there."""
    places = [place.with_memory_kind(PINNED) for place in places]
    return jax.jit(run, out_shardings=(places, rest) if rest != () else places)
