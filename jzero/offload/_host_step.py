# SPDX-License-Identifier: Apache-2.0
"""`HostStep`: a step whose optimizer state is stored on the hosts and is updated by their processors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
from jax.sharding import NamedSharding

from jzero._errors import StateError, message
from jzero._memory_kinds import HOST, NVME, PINNED, HostNeed
from jzero._quantities import readable_bytes
from jzero.offload._early_plan import EarlyBucket, EarlyPlan, plan_early
from jzero.offload._early_run import EarlyRun, EarlyUpdates
from jzero.offload._early_tiles import TileRun
from jzero.offload._host_bucket import HostBucket
from jzero.offload._host_engine import HostEngine
from jzero.offload._layered import LayeredSegment
from jzero.offload.execute._executor import NOBODY, Arrivals
from jzero.offload.kernels._code_paths import code_paths_text
from jzero.offload.kernels._host_update import HostUpdate
from jzero.offload.memory._pinned_leaf import LeafMemory, renewed
from jzero.offload.schedule._ops import Fetch, Op, Ref, Run, Send, Slice, Update, Value
from jzero.offload.schedule._schedule import Schedule
from jzero.segments import _conversions
from jzero.segments._builder import Builder
from jzero.segments._planned import PlannedStep
from jzero.segments._segment import SegmentFn, Values, Var, shard_of
from jzero.segments._segmented import SegmentedStep
from jzero.sharding.plan._backend import Shared, Window, waits
from jzero.tracing import _call

WHO = _call.WHO
# Of what is on its way to the host from the start.
Knows = Callable[[Mapping[Var, jax.Array]], None]
# An engine is one call's at a time, and the processors are everybody's. Reentrant: a signal's handler that
# calls in the middle of an update is refused (`HostUpdate.prepare`), and does not wait for ever.
# [Note: locks and comprehensions] No comprehension is written where a lock is held, but in functions called
# from there: in Python 3.13.0 Ctrl-C in one leaves the `with` or `try` around it without its end.
UPDATING = threading.RLock()

# [Note: how the host comes to update] Three other ways were rejected. State as JAX arrays in pinned memory:
# the allocator bounds it, and JAX may share or copy what kernels overwrite. A callback for each leaf from
# the running program: it stops the device's stream. A thread that updates beside the calls: XLA says only
# of a whole program that its outputs are there, so nothing is gained, unless layers are programs of their
# own.


@dataclasses.dataclass(eq=False)
class Pending:
    """What the host has still to apply: gradients of one step, and what else belongs to them."""

    step: HostStep
    # Values of the forward-backward program, on their way to pinned memory.
    reads: dict[Var, jax.Array]


class HostStep:
    """A step in two parts: gradients on the devices, their update on the host.

        gradients = forward_backward(parameters, batch)  # each travels to the host when it is reduced
        for chunk in chunks:                            # in place, on the host
            moments, parameters = update(moments, gradients)
            send parameters to the devices              # while the next chunk is updated

    A delayed step updates with the gradients of the step before, which the host has, while the devices
    compute new ones. What can fail is done before anything of the old state is overwritten, but for copies to
    devices that have no room.

    Of parameters that are stored on the hosts the update begins layer by layer, as gradients come: with the
    second step, when all programs are compiled. See `plan_early`.

    Attributes:
      leaves: where the state is stored.
      shardings: the same, for JAX.
      grad: the forward-backward program.
      buckets: of the optimizer program, each on the devices: what the host does, then what is stored on them.
      host: what the host does.
    """

    # How much of what the host renews may be there twice, for updates on an assumption; 0: there are none.
    _old_share: ClassVar[float] = 0.25
    _store: ClassVar[str] = HOST  # where the hosts update leaves
    # Whether new leaves on the devices take the memory of old ones.
    _consumes: ClassVar[bool] = True

    def __init__(
        self, planned: PlannedStep, shardings: Sequence[NamedSharding], threads: int | None,
        delay_after: int | None, shared: Shared, window: Window,
    ):  # fmt: skip
        """Builds the programs.

        Args:
          planned: the step.
          shardings: where the state is stored, for JAX.
          threads: how many update; None for all processors.
          delay_after: how many steps are not delayed; None if none ever is.
          shared: engines in use by steps on batches of other shapes; they share what is the same.
          window: how much of parameters that are stored away from the devices may be on them at a time.
        """
        self.leaves, self.shardings = planned.plan.leaves, shardings
        self._planned, self._threads, self._delay_after = planned, threads, delay_after
        # A delayed update writes while the step before may still send.
        self._num_sets = 1 if delay_after is None else 2
        self._hosted = [i for i, leaf in enumerate(self.leaves) if leaf.tier == self._store]
        self._streamed = [i for i, leaf in enumerate(self.leaves) if leaf.is_streamed]
        builder = Builder(planned, shardings)
        self._segments = SegmentedStep(builder)
        self.grad, self.buckets = self._segments.grad, self._segments.buckets
        self.run, self.trace = self._segments.run, self._segments.trace
        self.found = self._segments.found
        subgraphs = planned.plan.buckets[0].subgraphs
        self.host = HostBucket(builder, subgraphs)
        reads = dict(zip(self.host.reads, self.host.read_avals(), strict=True))
        # What the host renews it reads as it is then; all else, a loss scale, as it was for the gradients.
        leaf_of, renewed = self._segments.leaf_of, set(self.host.outs)
        self._entered = [var for var in reads if leaf_of.get(var) in renewed]
        self._sent = [var for var in reads if leaf_of.get(var) not in renewed]
        self._stays = [
            v for bucket in self.buckets[1:] for v in bucket.takes if v in self.grad.gives
        ]
        self._known = [v for v in self._sent if v not in self.grad.gives]
        kept = builder.kept(self.grad.outs)
        places = [reads[var].sharding for var in self._sent]
        self._grad = _to_host(self._grad_part, places, kept and (None, kept))
        self._send = _to_host(self._known_part, [reads[var].sharding for var in self._known])
        self._layered: LayeredSegment | None = None
        self._early_plan = EarlyPlan((), {})
        if self._streamed:
            gradients = [v for v in self._sent if v in self.grad.gives]
            self._layered = LayeredSegment(planned, self.grad, gradients, window)
            self.grad = self._segments.grad = self._layered.as_segment()
            known = [*self._known, *self._layered.literals]
            if self._begins_early:
                self._early_plan = plan_early(
                    planned, self._layered, subgraphs, known, self._stays, self._assumes,
                    self._in_tiles(),
                )  # fmt: skip
            self._layered.send_slices(self._early_plan.slices)
            self._tell()
        self._late: HostBucket | None = self.host  # what the host begins when it has all gradients
        if self._early_plan.buckets and self._store == HOST:
            late = list(self._early_plan.late)
            self._late = HostBucket(builder, late) if late else None
        self._early: EarlyUpdates | None = None
        self._has_run = False
        self._enter = _to_host(self._enter_part, [reads[var].sharding for var in self._entered])
        # Not donated: their old values are freed when the step cannot fail any more.
        self._renewed = [i for i in self.grad.outs if i < len(self.leaves)]
        self._renewed_here = {
            *self._renewed,
            *(i for bucket in self.buckets[1:] for i in bucket.outs),
        }
        self._engine: HostEngine | None = None
        self._engines = shared
        self._leaving: dict[tuple[int, ...], Callable[..., Any]] = {}

    @property
    def _begins_early(self) -> bool:
        """Whether updates begin while layers compute, where parameters are stored on the hosts."""
        return True

    @property
    def _assumes(self) -> bool:
        """Whether some of them begin on an assumption."""
        return self._old_share > 0

    def _in_tiles(self) -> Collection[Var] | None:
        """Of what the host reads, what it reads in tiles; None where it updates whole leaves."""
        return None

    def _tell(self) -> None:
        """Says what becomes of gradients that layers send, and which updates begin with them."""
        assert self._layered is not None
        gradients, begins = self._layered.gradients, dict[int, list[tuple[Update, bool]]]()
        moved = frozenset(self._moved)
        for bucket in self._early_plan.buckets:
            sliced = bucket.num_slices > 0
            leaves = [self._values[i] for i in bucket.leaves if i in moved]
            takes: list[Ref] = [
                Slice(gradients[v]) if sliced and v.aval.shape else gradients[v]
                for v in self._takes(bucket)
            ]
            refs: list[Ref] = [Slice(x) for x in leaves] if sliced else [*leaves]
            update = Update(self._store, tuple(refs), tuple(takes), begin=bucket)
            begins.setdefault(bucket.part, []).append((update, sliced))
        self._layered.tell(self._goes_to, self._num_sets, begins)

    def _takes(self, bucket: EarlyBucket) -> list[Var]:
        """What an early update takes of what the forward-backward program sends."""
        assert self._layered is not None
        return bucket.arriving({*self._known, *self._layered.literals})

    def _goes_to(self, var: Var) -> str:
        return PINNED

    @functools.cached_property
    def _values(self) -> list[Value]:
        return [*map(Value.of_leaf, self.leaves)]

    def _grad_part(self, consumed: list[Any], read: list[Any]) -> tuple[list[Any], Any]:
        values = dict(zip(self.grad.takes, [*consumed, *read], strict=True))
        known, _ = self._known_part([values[v] for v in self._known])
        return self._handed(known, *self.grad.run(consumed, read))

    def _known_part(self, arrays: list[Any]) -> tuple[list[Any], None]:
        """What the update reads that no gradient is: leaves on the devices, and arguments."""
        return self._as_shards(self._known, arrays), None

    def _handed(self, known: list[Any], given: list[Any], outs: list[Any]) -> tuple[list[Any], Any]:
        values = dict(zip(self._known, known, strict=True))
        values |= zip(self.grad.gives, given, strict=True)
        return [values[v] for v in self._sent], ([values[v] for v in self._stays], outs)

    def _enter_part(self, leaves: list[Any]) -> tuple[list[Any], None]:
        return self._as_shards(self._entered, leaves), None

    def _as_shards(self, variables: Sequence[Var], leaves: list[Any]) -> list[Any]:
        enter = _conversions.entering(self._planned, variables)
        return leaves if enter is None else enter(leaves)

    def _compile_leaving(self, state: Sequence[Any], chunks: Sequence[Sequence[int]]) -> None:
        """The programs that bring what chunks make into the form in which it is stored, if it has another."""
        sent = dict(zip(self.host.outs, self.host.out_avals(), strict=True))
        for chunk in chunks:
            outs = tuple(i for i in chunk if i < len(state))
            if (leave := _conversions.leaving(self._planned, outs)) is not None:
                arguments = [state[i] for i in outs], [sent[i] for i in outs]
                places = [self.shardings[i] for i in outs]
                run = jax.jit(leave, donate_argnums=(0,) * self._consumes, out_shardings=places)
                self._leaving[outs] = run.lower(*arguments).compile()

    def dispatched(self, state: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """See `StepProgram`; what the host sends back, a chunk at a time, is not in it."""

        def on_devices(state: Sequence[Any], arrays: Sequence[Any]) -> Any:
            values = self._segments.values(state, arrays)
            # Until the first backward pass is over no update begins, and all gradients stay.
            slices: list[jax.Array] = []

            def keep(_: Any, arrays: Sequence[Any]) -> None:
                slices.extend(arrays)

            def begin(update: Update, at: int | None, arrays: Sequence[Any]) -> dict[Any, Any]:
                keep(update, arrays)
                return {}

            sent, (stays, outs) = self._gradients(values, Arrivals(begin, keep))
            made = dict(zip(self.grad.outs, outs, strict=True))
            made |= self._update_on_devices(values, stays)
            return sent, slices, *self._segments.in_order(made, state)

        return jax.make_jaxpr(on_devices)(state, arrays)

    def _update_on_devices(self, values: Values, stays: Sequence[Any]) -> dict[int, jax.Array]:
        """Buckets of what is stored on the devices; outputs by index."""
        made: dict[int, jax.Array] = {}
        for bucket, run in zip(self.buckets[1:], self._on_devices, strict=True):
            values.update(zip(self._stays, stays, strict=True))
            made |= bucket(values, run)
        return made

    @functools.cached_property
    def _on_devices(self) -> list[SegmentFn]:
        return [
            bucket.jitted if self._consumes else jax.jit(bucket.run) for bucket in self.buckets[1:]
        ]

    def schedule(self) -> Schedule:
        """Gradients go down, the hosts update, and what they make comes up."""
        return Schedule(self._ops(), self._buffers())

    @property
    def _moved(self) -> Sequence[int]:
        """The leaves that are updated where optimizer state is stored, by index."""
        return self.host.leaves

    def _ops(self) -> tuple[Op, ...]:

        def sent(value: Value, var: Var) -> Send:
            # What a delayed update reads is there beside the next step's; but not leaves as they are then.
            copies = 1 if var in self._entered else self._num_sets
            return Send((value,), self._goes_to(var), copies=copies)

        layered, values = self._layered, self._values
        gradients = layered.gradients if layered else {}
        reads, gives = {**self._reads(), **gradients}, self._gives()
        grads = layered.ops if layered else (Run("gradients"),)
        ops: list[Op] = [*waits(self._segments.plan), *grads]
        ops += (sent(value, var) for var, value in reads.items() if var not in gradients)
        if len(self.buckets) > 1:
            ops.append(Run("the update of what is stored on the devices"))
        gone = {i for bucket in self._early_plan.buckets for i in bucket.leaves}
        late = tuple(values[i] for i in self._moved if i not in gone)
        if late or gives:
            delayed, read = self._delay_after is not None, tuple(reads.values())
            ops.append(Update(self._store, late, read, gives, self._num_sets, delayed))
        return *ops, *([Fetch(gives, PINNED)] if gives else [])

    def _reads(self) -> dict[Var, Value]:
        """What the hosts read besides their leaves, as one device has it."""
        host, leaf_of, found = self.host, self._segments.leaf_of, dict[Var, Value]()
        for var, shard in zip(host.reads, map(shard_of, host.read_avals()), strict=True):
            role = self.leaves[leaf_of[var]].role if var in leaf_of else None
            found[var] = Value.of(role, shard) if role else Value.of_gradient(shard)
        return found

    def _gives(self) -> tuple[Value, ...]:
        host, num = self.host, len(self.leaves)
        whats = [self.leaves[i].role if i < num else "output" for i in host.outs]
        return tuple(map(Value.of, whats, map(shard_of, host.out_avals())))

    def _buffers(self) -> tuple[HostNeed, ...]:
        old = HostNeed("old values of updates that may be undone", HOST, self._old_bytes)
        return (*(self._layered.buffers() if self._layered else ()), *[old] * (old.nbytes > 0))

    @property
    def _old_bytes(self) -> int:
        """Of one device's old values, the most that are kept in a step."""
        renewed = sum(self.leaves[i].nbytes_per_device for i in self.host.leaves)
        kept = self._early_plan.assumed.intersection(self._overwritten())
        return min(
            int(self._old_share * renewed), sum(self.leaves[i].nbytes_per_device for i in kept)
        )

    def _overwritten(self) -> Collection[int]:
        """The leaves that the hosts renew in their place, by index."""
        return self.host.leaves

    def code_paths(self) -> str:
        """How the host updates each leaf, and sends what it makes."""
        begins = self._streamed and self._begins_early
        early = self._early_plan.text(self._planned.plan) if begins else []
        if self._old_bytes:
            early.append(
                f"of what is undone, old values: {readable_bytes(self._old_bytes)} for each device at most"
            )
        return "\n".join([code_paths_text(self.host.traced.code_paths), *early])

    def __call__(
        self, state: Sequence[Any], arrays: Sequence[jax.Array]
    ) -> tuple[list[Any], list[jax.Array]]:
        """Runs one step; the state is consumed, unless it fails before the host overwrites any."""
        # Early updates take turns with those of other threads, from the first part on.
        with UPDATING if self._early_plan.buckets else contextlib.nullcontext():
            made = self._step(state, arrays)
        self._has_run = True
        return made

    def _step(
        self, state: Sequence[Any], arrays: Sequence[jax.Array]
    ) -> tuple[list[Any], list[jax.Array]]:
        pending, num_steps = self._history(state)
        delays = self._delay_after is not None and num_steps >= self._delay_after
        # Another step's gradients may be of leaves that the devices renew in this one.
        if pending and not (delays and self._renewed_here.isdisjoint(pending.step.host.outs)):
            state, pending = pending.step.flush(state), None
        read: dict[Var, jax.Array] = {}
        if pending is not None or not delays:  # first in line: the host may already wait for it
            read = (pending.step if pending else self).read_leaves(state)
        values = self._segments.values(state, arrays)
        early = self._early_run(state, num_steps + 1)
        sent, (stays, outs) = self._gradients(values, *self._told_of(early))
        made = dict(zip(self.grad.outs, outs, strict=True))
        now = Pending(self, dict(zip(self._sent, sent, strict=True)))
        job = pending if delays else now
        reads = job.reads | read if job else {}
        if job:
            job.step.wait(state, reads)
        with UPDATING:
            if job:
                job.step.prepare(state, reads)
            made |= self._update_on_devices(values, stays)  # while the host works
            hosted = self._taken(state, now if delays else None, num_steps + 1)
            if job and self._streamed:  # JAX copies what is not its own, as NumPy's memory.
                job.step.place(hosted)
            if early:
                early.finish(reads)
                hosted |= early.made
            for chunk in job.step.updating(state) if job else ():
                made |= chunk
        for i in self._renewed:
            state[i].delete()
        return self._segments.in_order(made | hosted, state)

    def _gradients(
        self, values: Values, arrivals: Arrivals = NOBODY, knows: Knows | None = None
    ) -> tuple[list[Any], Any]:
        """Runs forward and backward: what goes to the host; what stays, and outputs."""
        if self._layered is None:
            found: tuple[list[Any], Any] = self._grad(*self.grad.taken(values))
            return found
        known, _ = self._send([values[v] for v in self._known]) if self._known else ([], None)
        if knows is not None:
            knows(self._layered.numbers | dict(zip(self._known, known, strict=True)))
        return self._handed(known, *self._layered(values, arrivals))

    def _early_run(self, state: Sequence[Any], num_steps: int) -> EarlyRun | None:
        if not self._early_plan.buckets:
            return None
        if self._early is None:
            devices = state[self._hosted[0]].placement.devices
            self._early = EarlyUpdates(
                self._planned, self._early_plan, devices, self._threads, self._old_bytes
            )
        return EarlyRun(self._early, state, num_steps, waits=not self._has_run)

    def _told_of(self, early: EarlyRun | TileRun | None) -> tuple[Arrivals, Knows | None]:
        layered = self._layered
        if early is None or layered is None:
            return NOBODY, None
        begin = early.begin
        return Arrivals(lambda *arrived: layered.named(begin(*arrived))), early.knows

    def flush(self, state: Sequence[Any]) -> list[Any]:
        """The state with what is pending, of this step, applied; it is consumed."""
        pending, num_steps = self._history(state)
        assert pending is not None
        made: dict[int, jax.Array] = {}
        reads = pending.reads | self.read_leaves(state)
        self.wait(state, reads)
        with UPDATING:
            self.prepare(state, reads)
            hosted = self._taken(state, None, num_steps)
            for chunk in self.updating(state):
                made |= chunk
        return with_new(state, made | hosted)

    def _history(self, state: Sequence[Any]) -> tuple[Pending | None, int]:
        """What is pending, and how many steps the state has behind it since it was placed."""
        found = {state[i].pending for i in self._hosted}
        for pending in found:
            other = pending.step if pending else self
            if len(found) > 1 or (other.leaves, other.shardings) != (self.leaves, self.shardings):
                raise StateError(message(
                    WHO, "leaves on the host come from different steps, and some wait for gradients",
                    "Gradients are applied to the state that they were computed with.",
                    "Flush a state with the train_step that returned it, before you change it."))  # fmt: skip
        return found.pop(), max(state[i].num_steps for i in self._hosted)

    def read_leaves(self, state: Sequence[Any]) -> dict[Var, jax.Array]:
        """Parameters that the update reads, on their way to the host."""
        if not self._entered:
            return {}
        down, _ = self._enter([state[self._segments.leaf_of[var]] for var in self._entered])
        return dict(zip(self._entered, down, strict=True))

    def wait(self, state: Sequence[Any], reads: dict[Var, jax.Array]) -> None:
        """Waits for what the devices make; other threads may update meanwhile."""
        # Nobody can wait for them when they are deleted; a copy to them may read memory that is written next.
        olds = [state[i] for i in self.host.outs if i < len(state)]
        # Of all devices, those that are replicas too: parameters are freed after this.
        with jax.profiler.TraceAnnotation("jzero: wait for gradients"):
            jax.block_until_ready([*reads.values(), *olds])

    def prepare(self, state: Sequence[Any], reads: Mapping[Var, jax.Array]) -> None:
        """Does what can fail of the host's part, and overwrites nothing; `reads` are there."""
        if self._late is not None:
            engine = self._engine_of(state)
            leaves = {
                k: LeafMemory.of(state[i], engine.devices)
                for k, i in enumerate(self._late.leaves)
                if self.leaves[i].tier != NVME
            }
            engine.prepare(leaves, [reads[var] for var in self._late.reads])

    def place(self, taken: Mapping[int, Any]) -> None:
        """After `prepare`: these leaves have been taken, and JAX may have copied some to other memory."""
        if self._engine is not None and self._late is not None:
            for k, i in enumerate(self._late.leaves):
                if i in taken and i in self._streamed:
                    self._engine.place(k, LeafMemory.of(taken[i], self._engine.devices))

    def _engine_of(self, state: Sequence[Any]) -> HostEngine:
        if self._engine is None:
            engine = self._new_engine(state[self._hosted[0]].placement.devices)
            self._compile_leaving(state, engine.chunks)
            self._engine = engine
        return self._engine

    def updating(self, state: Sequence[Any]) -> Iterator[dict[int, jax.Array]]:
        """Runs what is prepared; each chunk of what it makes, on its way to the devices."""
        if self._engine is None:  # All of it is done.
            return
        for chunk in self._engine.run():
            stored = self._stored(state, chunk)
            # Not the chunk, which a program may have consumed that has yet to run.
            self._engine.sent(stored.values())
            yield stored

    def _new_engine(self, devices: Sequence[jax.Device]) -> HostEngine:
        bucket, num_sets = self._late, self._num_sets
        assert bucket is not None
        leaves = [self.leaves[i] for i in bucket.leaves]
        identity = bucket.identity()
        key = (identity, tuple(leaves), tuple(devices), self._threads, num_sets)
        engine = self._engines.get(key) if identity else None
        if engine is None:
            update = HostUpdate(bucket.traced, threads=self._threads)
            engine = HostEngine(bucket, leaves, devices, update, num_sets)
            if identity:
                self._engines[key] = engine
        return engine

    def _stored(self, state: Sequence[Any], chunk: dict[int, jax.Array]) -> dict[int, jax.Array]:
        """What the host made, as it is stored on the devices, in or beside the place of the old leaves."""
        outs = tuple(i for i in chunk if i < len(state))
        olds = [state[i] for i in outs]
        if (leave := self._leaving.get(outs)) is not None:
            return chunk | dict(zip(outs, leave(olds, [chunk[i] for i in outs]), strict=True))
        if self._consumes:
            for old in olds:
                old.delete()
        return chunk

    def _taken(
        self, state: Sequence[Any], pending: Pending | None, num_steps: int
    ) -> dict[int, Any]:
        """The leaves on the host as the new state has them, in the same memory.

        Before any is overwritten, so that an interruption leaves no state that is half a step old.
        """
        early = self._early.leaves if self._early else ()
        hosted = {i: state[i].renewed(pending, num_steps) for i in self._hosted if i not in early}
        streamed = [i for i in self._streamed if i not in early]
        return hosted | renewed(state, streamed, self.leaves)


def with_new(state: Sequence[Any], new: Mapping[int, Any]) -> list[Any]:
    """The leaves, with the new ones in their places; see [Note: locks and comprehensions]."""
    return [new.get(i, x) for i, x in enumerate(state)]


def _to_host(
    run: Callable[..., Any], places: Sequence[NamedSharding], rest: Any = None
) -> Callable[..., Any]:
    """A program whose first results go to pinned memory, each as soon as it is there."""
    places = [place.with_memory_kind(PINNED) for place in places]
    return jax.jit(run, out_shardings=(places, rest))
