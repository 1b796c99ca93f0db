# SPDX-License-Identifier: Apache-2.0
"""`HostUpdates`: how the hosts' processors update leaves where these are stored; and when they begin."""

from __future__ import annotations

import abc
import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self

import jax

from jzero._memory_kinds import HOST, NVME, PINNED, HostNeed
from jzero._quantities import readable_bytes
from jzero.offload._early_plan import EarlyBucket, EarlyPlan, plan_early
from jzero.offload._host_bucket import HostBucket
from jzero.offload._host_engine import HostEngine
from jzero.offload._layered import LayeredSegment
from jzero.offload._listed_step import ListedStep
from jzero.offload.execute._executor import HostSide
from jzero.offload.kernels._code_paths import code_paths_text
from jzero.offload.memory._pinned_leaf import LeafMemory
from jzero.offload.schedule._ops import Ref, Slice, Update, Value
from jzero.segments import _conversions
from jzero.segments._segment import Var

# An engine is one call's at a time, and the processors are everybody's. Reentrant: a signal's handler that
# calls in the middle of an update is refused (`HostEngine.claim`), and does not wait for ever.
# [Note: locks and comprehensions] No comprehension is written where a lock is held, but in functions called
# from there: in Python 3.13.0 Ctrl-C in one leaves the `with` or `try` around it without its end.
UPDATING = threading.RLock()
NO_LOCK = contextlib.nullcontext()


def is_updating() -> bool:
    """Whether this thread is in the middle of an update, and calls from a signal's handler."""
    return bool(UPDATING._is_owned())  # type: ignore[attr-defined]  # As conditions ask their lock.


class Hosted(NamedTuple):
    """What the hosts' processors make of a step, and by which names they know it.

    Attributes:
      step: the step.
      host: what they make.
      reads: by which name each is known, of one device, that they read besides their leaves.
      gives: the same of what they make for the devices, by index among the outputs of the step.
      known: of what they read, all that is there before gradients are.
      stays: gradients that devices read, too.
    """

    step: ListedStep
    host: HostBucket
    reads: Mapping[Var, Value]
    gives: Mapping[int, Value]
    known: Collection[Var]
    stays: Collection[Var]


class HostRun(HostSide):
    """The hosts' side of one step; a context: however it is left, nothing of it is under way any more.

    Attributes:
      is_over: whether it is left.
      is_nested: whether its step is called while another one of the same thread updates.
      pending: what new leaves wait for (`Pending`), of a delayed step.
    """

    is_over = is_nested = False
    pending: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        """Stops what is under way, if the step has failed."""
        self.is_over = True

    def end_gradients(self) -> None:
        """Waits for what goes into files of gradients."""

    def take(self) -> dict[int, Any]:
        """The leaves on the hosts as the new state has them, by index, if no late update does it."""
        raise NotImplementedError


class HostUpdates(abc.ABC):
    """The part of a step that the hosts' processors make.

    Attributes:
      hosted: indices of the leaves that are stored where they update.
      streamed: of parameters that are stored away from the devices.
      leaves: by which names these are known, by index.
      names: the same, and of what they make for the devices.
      step, host, reads, gives, known, stays: as of `Hosted`.
      early: what they begin while layers compute.
      late: what they begin with all gradients; None if nothing is left.
      buffers: what is locked besides `UPDATING` while they update.
    """

    store: ClassVar[str]  # where they update leaves
    # Whether new leaves on the devices take the memory of old ones.
    consumes: ClassVar[bool]
    # How much of what they renew may be there twice, for updates on an assumption; 0: there are none.
    old_share: ClassVar[float] = 0.25
    # How many steps are not delayed; None if none ever is.
    delay_after: int | None = None
    buffers: contextlib.AbstractContextManager[Any] = NO_LOCK

    def __init__(self, hosted: Hosted):
        self.step, self.host, self.reads, self.gives, self.known, self.stays = hosted
        step, leaves = self.step, self.step.leaves
        self.hosted = [i for i, leaf in enumerate(leaves) if leaf.tier == self.store]
        self.streamed = [i for i, leaf in enumerate(leaves) if leaf.is_streamed]
        away = dict.fromkeys([*self.hosted, *self.streamed])
        self.leaves = dict(zip(away, step.named_leaves(away), strict=True))
        self.names = {**self.leaves, **self.gives}
        self.early = EarlyPlan((), {})
        self.late: HostBucket | None = self.host
        self._engine: HostEngine | None = None
        self._leaving: dict[tuple[int, ...], Any] = {}
        if step.layered is not None:
            if self.begins_early:
                self.early = self._planned_early(step.layered)
                self.late = self._left([*self.early.late]) if self.early.buckets else self.host
            step.layered.send_slices(self.early.slices)
            self.tell()

    # -- what begins when ------------------------------------------------------------------------------

    @property
    def begins_early(self) -> bool:
        """Whether updates begin while layers compute, where parameters are stored on the hosts."""
        return True

    @property
    def assumes(self) -> bool:
        """Whether some of them begin on an assumption."""
        return self.old_share > 0

    def in_tiles(self) -> Collection[Var] | None:
        """Of what the host reads, what it reads in tiles; None where it updates whole leaves."""
        return None

    @abc.abstractmethod
    def _left(self, subgraphs: Sequence[int]) -> HostBucket | None:
        """What is updated with all gradients, if these subgraphs wait for them, by index."""

    def _planned_early(self, layered: LayeredSegment) -> EarlyPlan:
        planned, known = self.step.planned, [*self.known, *layered.literals]
        subgraphs = planned.plan.buckets[0].subgraphs
        return plan_early(
            planned, layered, subgraphs, known, self.stays, self.assumes, self.in_tiles()
        )

    def tell(self) -> None:
        """Tells what becomes of gradients that layers send, and which updates begin with them."""
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
        step.layered.tell(self.goes_to, self.num_sets, begins)

    def takes(self, bucket: EarlyBucket) -> list[Var]:
        """What an early update begins with."""
        return bucket.begins_with

    def goes_to(self, var: Var) -> str:
        """The store that gradients are sent to."""
        return PINNED

    @property
    def num_sets(self) -> int:
        """How many of each gradient are on the hosts at a time: of a delayed step two steps'."""
        return 1 if self.delay_after is None else 2

    # -- what is said of it ----------------------------------------------------------------------------

    @property
    def moved(self) -> Sequence[int]:
        """The leaves that are updated where optimizer state is stored, by index."""
        return self.host.leaves

    @property
    def overwritten(self) -> Collection[int]:
        """The leaves that the hosts renew in their place, by index."""
        return self.host.leaves

    @functools.cached_property
    def late_reads(self) -> list[Var]:
        """What an update takes that ends when all gradients are there, and numbers that others assumed."""
        late = self.late.reads if self.late else []
        assumed = (bucket.assumption for bucket in self.early.buckets)
        return [*dict.fromkeys([*late, *(v for each in assumed if each for v in each.numbers)])]

    @functools.cached_property
    def old_bytes(self) -> int:
        """Of one device's old values, the most that are kept in a step."""
        leaves = self.step.leaves
        renewed = sum(leaves[i].nbytes_per_device for i in self.host.leaves)
        kept = self.early.assumed.intersection(self.overwritten)
        return min(int(self.old_share * renewed), sum(leaves[i].nbytes_per_device for i in kept))

    def needs(self) -> tuple[HostNeed, ...]:
        """Memory of each device's host, beside that of what is under way."""
        old = HostNeed("old values of updates that may be undone", HOST, self.old_bytes)
        layered = self.step.layered
        return (*(layered.buffers() if layered else ()), *[old] * (old.nbytes > 0))

    def code_paths(self) -> str:
        """How the host updates each leaf, and sends what it makes."""
        begins = self.streamed and self.begins_early
        early = self.early.text(self.step.planned.plan) if begins else []
        if self.old_bytes:
            early.append(
                f"of what is undone, old values: {readable_bytes(self.old_bytes)} for each device at most"
            )
        return "\n".join([code_paths_text(self.host.traced.code_paths), *early])

    def named(self, made: Mapping[int, Any]) -> dict[Value, Any]:
        """Leaves that the hosts renew, or what is on its way to the devices; `made` has it by index."""
        return {self.names[i]: x for i, x in made.items()}

    # -- a step ----------------------------------------------------------------------------------------

    def pending(self, state: Sequence[Any]) -> tuple[Any, int]:
        """What is `Pending`, and how many steps the state has behind it since it was placed."""
        return None, 0

    @abc.abstractmethod
    def run(self, state: Sequence[Any], num_steps: int = 0) -> HostRun:
        """The hosts' side of a step of this state, after which it has so many behind it."""

    @abc.abstractmethod
    def _new_engine(self, devices: Sequence[jax.Device]) -> HostEngine:
        """Of what is updated late."""

    def engine_of(self, state: Sequence[Any]) -> HostEngine:
        if self._engine is None:
            engine = self._new_engine(state[self.hosted[0]].placement.devices)
            self._compile_leaving(state, engine.chunks)
            self._engine = engine
        return self._engine

    def _compile_leaving(self, state: Sequence[Any], chunks: Sequence[Sequence[int]]) -> None:
        """The programs that bring what chunks make into the form in which it is stored, if it has another."""
        step, sent = self.step, dict(zip(self.host.outs, self.host.out_avals(), strict=True))
        for chunk in chunks:
            outs = tuple(i for i in chunk if i < len(state))
            if (leave := _conversions.leaving(step.planned, outs)) is not None:
                arguments = [state[i] for i in outs], [sent[i] for i in outs]
                places = [step.shardings[i] for i in outs]
                run = jax.jit(leave, donate_argnums=(0,) * self.consumes, out_shardings=places)
                self._leaving[outs] = run.lower(*arguments).compile()

    def stored(self, state: Sequence[Any], chunk: dict[int, jax.Array]) -> dict[int, jax.Array]:
        """What the host made, as it is stored on the devices, in or beside the place of the old leaves."""
        outs = tuple(i for i in chunk if i < len(state))
        olds = [state[i] for i in outs]
        if (leave := self._leaving.get(outs)) is not None:
            return chunk | dict(zip(outs, leave(olds, [chunk[i] for i in outs]), strict=True))
        if self.consumes:
            for old in olds:
                old.delete()
        return chunk

    def sent(
        self, state: Sequence[Any], run: Callable[[], Iterable[dict[int, jax.Array]]]
    ) -> dict[Value, jax.Array]:
        """What an update makes for the devices, as it is stored there, sent as soon as a chunk is done."""
        made = dict[int, jax.Array]()
        # No name has the generator: it ends with this loop, also where somebody holds an exception's frames.
        for chunk in run():
            stored = self.stored(state, chunk)
            # Not the chunk, which a program may have consumed that has yet to run.
            self.engine_of(state).sent(stored.values())
            made |= stored
        return self.named(made)

    def prepare(self, run: HostRun, state: Sequence[Any], reads: Mapping[Var, jax.Array]) -> None:
        """Does what can fail of the late update of a run, and overwrites nothing; `reads` are there.

        Raises:
          StateError: it is in the middle of another run, as in a signal's handler.
        """
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
        """After `prepare`: these leaves have been taken, and JAX may have copied some to other memory."""
        if self._engine is not None and self.late is not None:
            for k, i in enumerate(self.late.leaves):
                if i in taken and i in self.streamed:
                    self._engine.place(k, LeafMemory.of(taken[i], self._engine.devices))


def with_new(state: Sequence[Any], new: Mapping[int, Any]) -> list[Any]:
    """The leaves, with the new ones in their places; see [Note: locks and comprehensions]."""
    return [new.get(i, x) for i, x in enumerate(state)]
