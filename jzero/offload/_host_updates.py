# SPDX-License-Identifier: Apache-2.0
"""`HostUpdates`: how the hosts' processors update leaves where these are stored, and when they start."""

from __future__ import annotations

import abc
import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax

from jzero._memory_kinds import HOST, NVME, PINNED, HostNeed
from jzero._quantities import readable_bytes
from jzero.offload._early_plan import EarlyBucket, EarlyPlan, plan_early
from jzero.offload._host_bucket import HostBucket
from jzero.offload._host_engine import HostEngine
from jzero.offload._layered import LayeredSegment
from jzero.offload.execute._executor import HostSide
from jzero.offload.kernels._code_paths import code_paths_text
from jzero.offload.memory._pinned_leaf import LeafMemory
from jzero.offload.schedule._ops import Ref, Slice, Update, Value
from jzero.segments import _conversions
from jzero.segments._segment import Var

if TYPE_CHECKING:
    from jzero.offload._host_step import HostStep

# Engines serve one call at a time, and all share the processors. Reentrant: a signal's handler that calls in
# the middle of an update is refused (`HostEngine.claim`), and does not wait for ever.
# [Note: locks and comprehensions] Where a lock is held, comprehensions are in functions that are called: in
# Python 3.13.0, Ctrl-C in a comprehension leaves the `with` or `try` around it without its end.
UPDATING = threading.RLock()
NO_LOCK = contextlib.nullcontext()


def is_updating() -> bool:
    """Whether this thread is in the middle of an update: then a signal's handler has called."""
    return bool(UPDATING._is_owned())  # type: ignore[attr-defined]  # As conditions ask their lock.


class HostRun(HostSide):
    """The hosts' side of one step; a context: however it is left, none of its work runs any more."""

    is_over = is_nested = False
    pending: Any = None  # what new leaves of a delayed step wait for (`Pending`)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Stops what is running, if the step has failed."""
        self.is_over = True

    def end_gradients(self) -> None:
        pass

    def take(self) -> dict[int, Any]:
        """The leaves on the hosts as the new state has them, by index, if there is no late update."""
        raise NotImplementedError


class HostUpdates(abc.ABC):
    store: ClassVar[str]  # where they update leaves
    consumes: ClassVar[bool]  # whether new leaves on the devices take the memory of old ones
    # The share of what they update that may exist twice, for updates on an assumption; 0 forbids these.
    old_share: ClassVar[float] = 0.25
    delay_after: int | None = None  # how many steps are not delayed; None if none ever is
    # Locked with `UPDATING` while they update.
    buffers: contextlib.AbstractContextManager[Any] = NO_LOCK

    def __init__(self, step: HostStep):
        self.step, self.host, self.reads, leaves = step, step.host, step.reads, step.leaves
        # The indices of leaves that are stored where they are updated, and of parameters off the devices.
        self.hosted = [i for i, leaf in enumerate(leaves) if leaf.tier == self.store]
        self.streamed = [i for i, leaf in enumerate(leaves) if leaf.is_streamed]
        offloaded = dict.fromkeys([*self.hosted, *self.streamed])
        self.leaves = dict(zip(offloaded, step.named_leaves(offloaded), strict=True))
        self.names = {**self.leaves, **step.gives}
        # What starts while layers compute; and with all gradients, None if nothing is left.
        self.early = EarlyPlan((), {})
        self.late: HostBucket | None = self.host
        self._engine: HostEngine | None = None
        self._leaving: dict[tuple[int, ...], Any] = {}
        if step.layered is not None:
            if self.begins_early:
                self.early = self._planned_early(step.layered)
                self.late = self._left([*self.early.late]) if self.early.buckets else self.host
            step.layered.send_slices(self.early.slices)
            self.set_sends()

    @property
    def begins_early(self) -> bool:
        """Whether updates start while layers compute, where parameters are stored on the hosts."""
        return True

    @property
    def assumes(self) -> bool:
        return self.old_share > 0

    def in_tiles(self) -> Collection[Var] | None:
        """The inputs that the host reads in tiles; None where it updates whole leaves."""
        return None

    @abc.abstractmethod
    def _left(self, subgraphs: Sequence[int]) -> HostBucket | None:
        """What is updated with all gradients, if these subgraphs (by index) wait for them."""

    def _planned_early(self, layered: LayeredSegment) -> EarlyPlan:
        step = self.step
        planned, known = step.planned, [*step.known, *layered.literals]
        subgraphs = planned.plan.buckets[0].subgraphs
        return plan_early(
            planned, layered, subgraphs, known, step.stays, self.assumes, self.in_tiles()
        )

    def set_sends(self) -> None:
        """Sets where layers send gradients, and which updates start with them."""
        step, begins = self.step, dict[int, list[tuple[Update, bool]]]()
        assert step.layered is not None
        gradients, moved = step.layered.gradients, frozenset(self.moved)
        for bucket in self.early.buckets:
            sliced = bucket.num_slices > 0
            leaves = step.named_leaves(i for i in bucket.leaves if i in moved)
            takes: list[Ref] = [
                Slice(self.reads[v])
                if sliced and v.aval.shape and v in gradients
                else self.reads[v]
                for v in self.takes(bucket)
            ]
            refs = tuple(map(Slice, leaves)) if sliced else leaves
            update = Update(self.store, refs, tuple(takes), bucket=bucket)
            begins.setdefault(bucket.part, []).append((update, sliced))
        step.layered.set_sends(self.goes_to, self.num_sets, begins)

    def takes(self, bucket: EarlyBucket) -> list[Var]:
        return bucket.begins_with

    def goes_to(self, var: Var) -> str:
        return PINNED

    @property
    def num_sets(self) -> int:
        """How many of each gradient are on the hosts at a time: two if the update is delayed."""
        return 1 if self.delay_after is None else 2

    @property
    def moved(self) -> Sequence[int]:
        """The indices of leaves that are updated where optimizer state is stored."""
        return self.host.leaves

    @property
    def overwritten(self) -> Collection[int]:
        """The indices of leaves that the hosts update in place."""
        return self.host.leaves

    @functools.cached_property
    def late_reads(self) -> list[Var]:
        """What the update after all gradients takes, and the numbers that early ones assumed."""
        late = self.late.reads if self.late else []
        assumed = (bucket.assumption for bucket in self.early.buckets)
        return [*dict.fromkeys([*late, *(v for each in assumed if each for v in each.numbers)])]

    @functools.cached_property
    def old_bytes(self) -> int:
        """The most bytes of old values that are kept in a step for one device."""
        leaves = self.step.leaves
        renewed = sum(leaves[i].nbytes_per_device for i in self.host.leaves)
        kept = self.early.assumed.intersection(self.overwritten)
        return min(int(self.old_share * renewed), sum(leaves[i].nbytes_per_device for i in kept))

    def needs(self) -> tuple[HostNeed, ...]:
        old = HostNeed("old values of updates that may be undone", HOST, self.old_bytes)
        layered = self.step.layered
        return (*(layered.buffers() if layered else ()), *[old] * (old.nbytes > 0))

    def code_paths(self) -> str:
        begins = self.streamed and self.begins_early
        early = self.early.text(self.step.planned.plan) if begins else []
        if self.old_bytes:
            early.append(
                f"of what is undone, old values: {readable_bytes(self.old_bytes)} for each device at most"
            )
        return "\n".join([code_paths_text(self.host.traced.code_paths), *early])

    def named(self, made: Mapping[int, Any]) -> dict[Value, Any]:
        return {self.names[i]: x for i, x in made.items()}

    def pending(self, state: Sequence[Any]) -> tuple[Any, int]:
        """What is `Pending`, and the number of steps since the state was placed."""
        return None, 0

    @abc.abstractmethod
    def run(self, state: Sequence[Any], num_steps: int = 0) -> HostRun:
        """The hosts' side of a step of this state, after which it has `num_steps` steps."""

    @abc.abstractmethod
    def _new_engine(self, devices: Sequence[jax.Device]) -> HostEngine:
        pass

    def engine_of(self, state: Sequence[Any]) -> HostEngine:
        if self._engine is None:
            engine = self._new_engine(state[self.hosted[0]].placement.devices)
            self._compile_leaving(state, engine.portions)
            self._engine = engine
        return self._engine

    def _compile_leaving(self, state: Sequence[Any], portions: Sequence[Sequence[int]]) -> None:
        """Compiles the programs that convert what portions make to its stored layout, if that differs."""
        step, sent = self.step, dict(zip(self.host.outs, self.host.out_avals(), strict=True))
        for portion in portions:
            outs = tuple(i for i in portion if i < len(state))
            if (leave := _conversions.leaving(step.planned, outs)) is not None:
                arguments = [state[i] for i in outs], [sent[i] for i in outs]
                places = [step.shardings[i] for i in outs]
                run = jax.jit(leave, donate_argnums=(0,) * self.consumes, out_shardings=places)
                self._leaving[outs] = run.lower(*arguments).compile()

    def stored(self, state: Sequence[Any], portion: dict[int, jax.Array]) -> dict[int, jax.Array]:
        """What the host made in its stored layout, in or beside the memory of the old leaves."""
        outs = tuple(i for i in portion if i < len(state))
        olds = [state[i] for i in outs]
        if (leave := self._leaving.get(outs)) is not None:
            return portion | dict(zip(outs, leave(olds, [portion[i] for i in outs]), strict=True))
        if self.consumes:
            for old in olds:
                old.delete()
        return portion

    def sent(
        self, state: Sequence[Any], run: Callable[[], Iterable[dict[int, jax.Array]]]
    ) -> dict[Value, jax.Array]:
        """What an update makes for the devices, in its stored layout, sent as soon as a portion is done."""
        made = dict[int, jax.Array]()
        # The generator has no name: it ends with this loop, even where an exception's frames are kept.
        for portion in run():
            stored = self.stored(state, portion)
            # Not the portion, which a program that has not run yet may donate.
            self.engine_of(state).sent(stored.values())
            made |= stored
        return self.named(made)

    def prepare(self, run: HostRun, state: Sequence[Any], reads: Mapping[Var, jax.Array]) -> None:
        """Does what can fail of the late update of a run, and overwrites nothing; `reads` are there."""
        if self.late is None:
            return
        engine = self.engine_of(state)
        engine.claim(run)
        leaves = {
            k: LeafMemory.of(state[i], engine.devices)
            for k, i in enumerate(self.late.leaves)
            if self.step.leaves[i].tier != NVME
        }
        engine.prepare(leaves, [reads[var] for var in self.late.reads])

    def place(self, taken: Mapping[int, Any]) -> None:
        """After `prepare`: these leaves were taken, and JAX may have copied some to other memory."""
        if self._engine is not None and self.late is not None:
            for k, i in enumerate(self.late.leaves):
                if i in taken and i in self.streamed:
                    self._engine.place(k, LeafMemory.of(taken[i], self._engine.devices))


def with_new(state: Sequence[Any], new: Mapping[int, Any]) -> list[Any]:
    """The leaves, with new ones in place; see [Note: locks and comprehensions]."""
    return [new.get(i, x) for i, x in enumerate(state)]
