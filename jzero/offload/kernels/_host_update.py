# SPDX-License-Identifier: Apache-2.0
"""`HostUpdate`: an optimizer's update of state in host memory, at the speed of that memory."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jzero._errors import StateError, message
from jzero._in_turn import groups as in_groups
from jzero.offload.kernels import _machine
from jzero.offload.kernels._code_paths import (
    XLA,
    Group,
    TracedUpdate,
    UpdateFn,
    numbered,
)
from jzero.offload.kernels._kernel import kernel_text
from jzero.offload.kernels._loops import BlockLoop, BlockLoops, Calls, KernelLoops
from jzero.offload.kernels._machine import X86, processor
from jzero.offload.kernels._writer import dtype_of
from jzero.offload.kernels._xla_loops import XlaLoops
from jzero.offload.memory._addresses import (
    WHO,
    Addresses,
    HostMemory,
    address,
    check_given,
    check_kept,
    host_empty,
    is_key,
    on_host,
)
from jzero.offload.nvme._job_threads import NO_BUFFER, Asked, JobThreads
from jzero.tracing import _jaxpr, _rewrite

IN_ITS_MIDDLE = message(
    WHO, "it is called in the middle of its own update, as by a signal's handler",
    "The host updates one state at a time.",
    "Set a flag there, and look at it after the step.",
)  # fmt: skip


class HostUpdate:
    """Updates state in host memory, in place, by any function that JAX can trace.

    Behaves like

        for state, inputs, outputs in shards:
            state[:], outputs[:] = update(state, inputs)

    with every elementwise leaf read once and written once, and never a second copy of it. One call at a time,
    from Python and not from a callback of a running program: it waits for XLA's threads.

        engine.prepare(states, inputs)      # XLA: values of one element, and leaves that are not elementwise
        for done in engine.run(outputs):    # kernels: a loop for a parameter, its moments, gradient and copy
            ...    # outputs[shard][i] for i in done are there; the next ones are being made

    Elementwise arithmetic is that of the equations one by one, each rounded to its dtype, with numbers below
    1.2e-38 as zero. `jax.jit` may round less often (fused multiply-adds), by an ULP or two.
    """

    def __init__(
        self,
        update: UpdateFn | TracedUpdate,
        state: HostMemory = (),
        inputs: HostMemory = (),
        *,
        names: Sequence[str] | None = None,
        threads: int | None = None,
        portion_bytes: int = 2**26,
        helpers: JobThreads | None = None,
        by: type[BlockLoops] | None = None,
    ):
        """Traces `update`, unless it is traced, and compiles its kernels; no memory is known yet.

        `state` and `inputs` are shapes and dtypes of one shard; `names` are of the leaves of the state, then
        of the outputs. About `portion_bytes` of each shard are read and written until `run` reports outputs.
        """
        if not isinstance(update, TracedUpdate):
            update = TracedUpdate(update, state, inputs, names)
        self._traced = update
        self._state, self._inputs, self.outputs = update.state, update.inputs, update.outputs
        self._names, self._input_names = update.names, numbered("inputs", update.inputs)
        check_kept(self._names, self._state, update.new_state)
        self.code_paths = update.code_paths
        self._consts = on_host(update.consts)
        self._by: type[BlockLoops] = by or (XlaLoops if _machine.llvm() is None else KernelLoops)
        self._build(portion_bytes)
        self._threads = threads or default_threads()
        self._helpers = helpers or helping_threads(self._threads)
        self._loops: dict[int, BlockLoops] = {}  # By the number of shards.
        self._known_state, self._known_outputs = Addresses(), Addresses()
        self._prepared: _Prepared | None = None
        self._running = False
        self._calls: Calls | None = None  # of an update that is not complete

    def _build(self, portion_bytes: int) -> None:
        flat, num_state = self._traced.flat, len(self._state)
        # Groups without outputs come last: nothing waits for them.
        found = sorted(
            self._traced.groups, key=lambda group: all(i < num_state for i, _ in group.writes)
        )
        portions = list(in_groups(found, portion_bytes, Group.nbytes))
        # Slots: operands of `update`, its constants, scalars that XLA makes, then outputs.
        operands = [*flat.invars, *flat.constvars]
        scalars = dict.fromkeys(var for group in found for var in group.scalars)
        made = [var for var in scalars if var not in set(operands)]
        slots = {var: slot for slot, var in enumerate([*operands, *made])}
        read = {slots[var] for group in found for var in [*group.reads, *group.scalars]}
        # Addresses are needed only of inputs that kernels read; keys have none.
        self._read_inputs = [
            i + num_state for i in range(len(self._inputs)) if i + num_state in read
        ]
        self._num_operands, self._num_made = len(operands), len(made)
        self._num_slots = len(operands) + len(made) + len(self.outputs)
        self._portions = [self._make_loops(portion, slots) for portion in portions]
        self._done = [
            [i - num_state for group in portion for i, _ in group.writes if i >= num_state]
            for portion in portions
        ]
        by_xla = [i for i, code_path in enumerate(self.code_paths) if code_path.by == XLA]
        self._xla = _XlaPart(self._traced.jaxpr, [*made, *(flat.outvars[i] for i in by_xla)], slots)
        results = list(enumerate(by_xla, start=len(made)))
        self._xla_state = [(k, i) for k, i in results if i < num_state]
        self._xla_outputs = [(k, i - num_state) for k, i in results if i >= num_state]

    def _make_loops(self, found: Sequence[Group], slots: dict[_jaxpr.Var, int]) -> list[BlockLoop]:
        # Groups of one structure, hundreds of leaves of a model, are one loop.
        alike: dict[tuple[str, tuple[str, ...]], list[Group]] = {}
        for group in found:
            values = [*group.reads, *(atom for _, atom in group.writes), *group.scalars]
            key = kernel_text(group, X86), tuple(map(dtype_of, values))
            alike.setdefault(key, []).append(group)
        num_state = len(self._state)

        def operands(group: Group) -> list[int]:
            # The state has the first slots, other outputs those that follow all values.
            writes = [i if i < num_state else len(slots) + i - num_state for i, _ in group.writes]
            return [
                *(slots[var] for var in group.reads), *writes, *(slots[var] for var in group.scalars),
            ]  # fmt: skip

        return [
            BlockLoop(
                self._by.program(*key, members[0]),
                [group.size for group in members],
                [operands(group) for group in members],
            )
            for key, members in alike.items()
        ]

    def prepare(self, states: Sequence[HostMemory], inputs: Sequence[HostMemory]) -> None:
        """Does everything of a call that can fail, before anything is overwritten: checks, and XLA's part.

        `states` are, for each shard, writable NumPy arrays in C order, best made by `host_empty`; of
        `inputs`, JAX arrays in host memory are read in place.
        """
        self._check_idle()
        self._prepared = self._known(states, inputs)

    def place(self, leaf: int, shards: HostMemory) -> None:
        """After `prepare`: says where a leaf is from now on; its values are what they were."""
        prepared = self._prepared
        assert prepared is not None, "prepare() comes first"
        for state, x in zip(prepared.states, shards, strict=True):
            state[leaf] = x
        prepared.addresses[:, leaf] = [*map(address, shards)]

    def _check_idle(self) -> None:
        if self._running:
            raise StateError(IN_ITS_MIDDLE)
        if self._calls is not None:  # Its end was interrupted, too: threads still run.
            self._calls.complete()
        self._calls = self._prepared = None

    def _known(
        self,
        states: Sequence[HostMemory],
        inputs: Sequence[HostMemory],
        at: np.ndarray | None = None,
    ) -> _Prepared:
        """A call of this state, each leaf of which starts at the address `at`."""
        if at is None:
            at = self._known_state(
                [x for state in states for x in state],
                lambda: check_given(self._names, states, self._state, write=True),
            ).reshape(len(states), len(self._state))
        inputs = self._ready(inputs)
        self._loops_of(len(states))  # XLA compiles here.
        results = self._xla(
            [[*state, *own, *self._consts] for state, own in zip(states, inputs, strict=True)]
        )
        num_state, num_slots = len(self._state), self._num_operands + self._num_made
        addresses = np.zeros((len(states), self._num_slots), np.int64)
        addresses[:, :num_state] = at
        for row, own, made in zip(addresses, inputs, results, strict=True):
            given = [own[i - num_state] for i in self._read_inputs]
            row[self._read_inputs] = [0 if x is None else address(x) for x in given]
            row[self._num_operands : num_slots] = [address(x) for x in made[: self._num_made]]
        consts = slice(num_state + len(self._inputs), self._num_operands)
        addresses[:, consts] = [0 if is_key(x) else address(x) for x in self._consts]
        return _Prepared([[*state] for state in states], inputs, results, addresses)

    def _ready(self, inputs: Sequence[HostMemory]) -> list[list[Any]]:
        check_given(self._input_names, inputs, self._inputs, write=False)
        return [on_host(shard) for shard in inputs]

    def start(
        self,
        states: Sequence[HostMemory],
        inputs: Sequence[HostMemory],
        outputs: Sequence[HostMemory] = (),
    ) -> UnderWay:
        """Starts an update, which other threads make while the caller goes on; else like `prepare` and `run`.

        Any number of them, of different memory, may run at a time, also beside `run`.
        """
        prepared = self._known(states, inputs)
        if self.outputs:
            self._with_outputs(prepared, outputs)
        loops = self._loops_of(len(states))
        calls = loops.start(prepared.addresses, (prepared, outputs), self._helpers)
        asked = calls.share(self._threads, alone=True)
        by_xla = [(states, self._xla_state), (outputs, self._xla_outputs)]
        return UnderWay(self._helpers, asked, prepared, by_xla)

    def _loops_of(self, num_shards: int) -> BlockLoops:
        if num_shards not in self._loops:
            loops = self._by(self._portions, num_shards, self._num_slots)
            self._loops[num_shards] = loops
        return self._loops[num_shards]

    def run(self, outputs: Sequence[HostMemory]) -> Generator[list[int], None, None]:
        """Updates the state that was prepared; yields the indices of outputs that are complete everywhere.

        `outputs` are, for each shard, writable NumPy arrays in C order (`make_outputs`), best written before.
        Nothing happens before the first request; from then on the whole update is made, even if the caller
        stops.
        """
        prepared = self._with_outputs(self._prepared, outputs)
        self._prepared = None
        return self._run(prepared, outputs)

    def _with_outputs(self, prepared: _Prepared | None, outputs: Sequence[HostMemory]) -> _Prepared:
        assert prepared is not None, "prepare() comes first"
        names = self._names[len(self._state) :]
        at = self._known_outputs(
            [x for shard in outputs for x in shard],
            lambda: check_given(names, outputs, self.outputs, write=True),
        )
        first = self._num_operands + self._num_made
        prepared.addresses[:, first:] = at.reshape(len(outputs), -1)
        return prepared

    def _copy_xla_outputs(self, prepared: _Prepared, outputs: Sequence[HostMemory]) -> list[int]:
        _copy(prepared.results, outputs, self._xla_outputs)
        return [i for _, i in self._xla_outputs]

    def _run(
        self, prepared: _Prepared, outputs: Sequence[HostMemory]
    ) -> Generator[list[int], None, None]:
        loops = self._loops_of(len(prepared.states))
        self._calls = calls = loops.start(prepared.addresses, (prepared, outputs), self._helpers)
        portions = iter(enumerate(self._done))
        try:
            self._running = True
            calls.share(self._threads, alone=False)
            if made := self._copy_xla_outputs(prepared, outputs):
                yield made
            for portion, done in portions:
                calls.finish(portion)
                if done:
                    yield done
        finally:
            self._running = False
            calls.complete()
            self._calls = None
            # Last: kernels read the old state.
            _copy(prepared.results, prepared.states, self._xla_state)

    @property
    def portions(self) -> list[list[int]]:
        """The outputs that are complete, each time that `run` yields."""
        by_xla = [i for _, i in self._xla_outputs]
        return [done for done in (by_xla, *self._done) if done]

    def make_outputs(self) -> list[np.ndarray]:
        return [host_empty(x.shape, x.dtype) for x in self.outputs]


class _Prepared(NamedTuple):
    """A call that is ready: what it reads and writes, XLA's results, the address of every slot."""

    states: list[list[Any]]
    inputs: Sequence[HostMemory]
    results: Sequence[HostMemory]
    addresses: np.ndarray


class UnderWay(NamedTuple):
    """An update that other threads make."""

    helpers: JobThreads
    asked: Asked
    prepared: _Prepared  # what it reads and writes
    # Arrays of each shard, and which of them each result of XLA becomes at the end.
    by_xla: list[tuple[Sequence[HostMemory], list[tuple[int, int]]]]

    @property
    def is_over(self) -> bool:
        return self.asked.is_done

    def finish(self) -> None:
        """Waits for the threads, without helping them: there are as many as may update."""
        self.helpers.wait(self.asked)
        for arrays, places in self.by_xla:
            _copy(self.prepared.results, arrays, places)


class _XlaPart:
    """What XLA computes of an update, on the CPU, before any of it is overwritten."""

    def __init__(
        self, jaxpr: _jaxpr.Jaxpr, wanted: Sequence[_jaxpr.Atom], slots: dict[_jaxpr.Var, int]
    ):
        part = _rewrite.excerpt(jaxpr, wanted)
        self.reads = [slots[var] for var in part.reads]
        self._device = processor()
        there = jax.sharding.SingleDeviceSharding(self._device)
        self._run = jax.jit(part.run, in_shardings=there, out_shardings=there)
        # JAX returns an argument as it is, in memory that will be overwritten.
        self._returned = [atom in part.reads for atom in wanted]

    def __call__(self, shards: Sequence[HostMemory]) -> list[HostMemory]:
        """The wanted values for the operands of each shard."""
        # A mesh around the call has other devices; NumPy's scalars are implicit transfers to JAX.
        with jax.set_mesh(None), jax.transfer_guard("allow"):
            started = [
                self._run(*(self._given(shard[slot]) for slot in self.reads)) for shard in shards
            ]
        return [
            [
                np.array(x) if back and not is_key(x) else x
                for x, back in zip(results, self._returned, strict=True)
            ]
            for results in jax.block_until_ready(started)
        ]

    def _given(self, x: Any) -> Any:
        # Scalars stay NumPy's: `device_put` takes longer than all else. It does not copy others.
        if not is_key(x):
            x = np.asarray(x)
            if x.size == 1:
                return x
        return jax.device_put(x, self._device, may_alias=True)


def _copy(
    results: Sequence[HostMemory], targets: Sequence[HostMemory], places: Sequence[tuple[int, int]]
) -> None:
    for result, target in places:
        for made, arrays in zip(results, targets, strict=True):
            np.copyto(arrays[target], made[result])


def helping_threads(num: int) -> JobThreads:
    # Not `concurrent.futures`, whose `submit` holds locks in Python: Ctrl-C in it leaves them locked, and the
    # next `submit`, or the end of the process, waits for ever. See [Note: interrupts].
    return JobThreads([NO_BUFFER] * num)


def default_threads() -> int:
    """The processors that this process may use, but for two where more than four are there."""
    affinity = getattr(os, "sched_getaffinity", None)
    num = len(affinity(0)) if affinity else os.cpu_count() or 1
    # Two are left to Python, which starts programs and copies meanwhile, and to the devices' runtime.
    return num - 2 if num > 4 else num
