"""HostUpdate: an optimizer's update of state that rests in host memory, at the speed of that memory.

    new_state, outputs = update(state, inputs)    # any function of flat arrays, as JAX traces it

runs in three parts, each of which ends before the next one starts:

1. XLA computes every value of one element (counts, schedules, bias corrections, norms), and the outputs that
   are not elementwise.
2. Kernels compute the elementwise outputs, in the place of the old state: one loop for a parameter with its
   moments, its gradient and its copy in 16 bits.
3. XLA's outputs are copied into their places.
"""

from __future__ import annotations

import concurrent.futures
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jzero import _jaxpr
from jzero.offload._kernel import NAME, kernel_text
from jzero.offload._loops import Loop, make_loop, run_loops
from jzero.offload._machine import X86, compiled
from jzero.offload._memory import (
    Arrays,
    addresses,
    check_given,
    check_state,
    host_empty,
    is_key,
    on_host,
)
from jzero.offload._ops import is_cheap
from jzero.offload._roads import KERNEL, XLA, Analysis, Group, groups
from jzero.offload._writer import dtype_of, itemsize

WHO = "HostUpdate"
_SHOWN = 4  # Names in a line of `describe`.


class HostUpdate:
    """Updates state in host memory, in place, by any function that JAX can trace.

    Behaves like

        state[:], outputs[:] = update(state, inputs)

    with every elementwise leaf read once and written once, and no second copy of it at any time. One call at
    a time, from Python and not from a callback of a running program: it waits for XLA's threads.

    Elementwise arithmetic is that of the equations one by one, each rounded to its dtype, with numbers below
    1.2e-38 as zero. `jax.jit` may round less often (fused multiply-adds), by an ULP or two.

    Attributes:
      state: the arrays given. Only a leaf of PRNG keys is replaced, since NumPy has none.
      outputs: shapes and dtypes of the outputs beside the new state.
      roads: of each leaf of the state, then of each output: by what it is computed, and why.
    """

    def __init__(
        self,
        update: Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[Arrays, Arrays]],
        state: Arrays,
        inputs: Arrays,
        *,
        names: Sequence[str] | None = None,
        threads: int | None = None,
    ):
        """Traces `update` and compiles its kernels; nothing is updated yet.

        Args:
          update: `(state, inputs) -> (new_state, outputs)`, all of them flat.
          state: writable NumPy arrays in C order, best made by `host_empty`; each call updates them.
          inputs: arrays, or shapes and dtypes, of what each call will be given.
          names: of the leaves of the state, then of the outputs, for messages and `describe`.
          threads: how many update; as many as this process may use processors by default.

        Raises:
          ImportError: `jzero[offload]` is not installed.
          StateError: a leaf cannot be updated in place.
        """
        self.state = list(state)
        self._inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
        avals = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in state)
        traced = _jaxpr.trace_here(update, avals, tuple(self._inputs))
        new_state, outputs = jax.tree.unflatten(traced.out_tree, traced.out_avals)
        self.outputs = tuple(outputs)
        names = names or _numbered("state", avals) + _numbered("outputs", outputs)
        check_state(WHO, names, self.state, new_state)
        calls = _jaxpr.flatten_calls(traced.jaxpr, traced.consts)
        flat, consts = _jaxpr.select_branches(*calls, is_cheap)
        analysis = Analysis(flat, len(avals))
        self.roads = tuple(analysis.road(i, name) for i, name in enumerate(names))
        self._consts = on_host(consts)
        self._fixed = addresses(self.state), addresses(self._consts)
        self._last_outputs: tuple[Arrays, list[int]] = ([], [])
        self._build(analysis, traced.jaxpr.replace(**flat._asdict()))
        self._threads = threads or _num_processors()
        self._pool = concurrent.futures.ThreadPoolExecutor(self._threads)

    def _build(self, analysis: Analysis, jaxpr: _jaxpr.Jaxpr) -> None:
        flat = (
            analysis.jaxpr
        )  # JAX 0.12 makes arguments of the constants of `jaxpr`, which is for `part`.
        by_kernel = [i for i, road in enumerate(self.roads) if road.by == KERNEL]
        found = groups(analysis, by_kernel)
        # Slots: the operands of `update` and its constants, scalars that XLA makes, then outputs.
        operands = [*flat.invars, *flat.constvars]
        scalars = dict.fromkeys(var for group in found for var in group.scalars)
        self._made = [var for var in scalars if var not in set(operands)]
        slots = {var: slot for slot, var in enumerate([*operands, *self._made])}
        self._loops = _make_loops(found, slots, len(self.state))
        self._by_xla = [i for i, road in enumerate(self.roads) if road.by == XLA]
        wanted = [*self._made, *(flat.outvars[i] for i in self._by_xla)]
        self._xla = _XlaPart(jaxpr, wanted, slots)

    def __call__(self, inputs: Arrays, outputs: Arrays = ()) -> None:
        """Updates the state, and writes the other outputs into `outputs`.

        Args:
          inputs: arrays of the shapes and dtypes given before. JAX arrays in host memory are read where they
            are.
          outputs: writable NumPy arrays in C order (`make_outputs`), with the shapes and dtypes of
            `self.outputs`. Memory that was written before is faster than fresh one.

        Raises:
          StateError: shapes or dtypes are others.
        """
        check_given(WHO, "inputs", inputs, self._inputs, write=False)
        inputs = on_host(inputs)
        results = self._xla([*self.state, *inputs, *self._consts])
        made, whole = results[: len(self._made)], results[len(self._made) :]
        state, consts = self._fixed
        written = self._addresses_of_outputs(outputs)
        every = [*state, *addresses(inputs), *consts, *addresses(made), *written]
        run_loops(self._loops, np.array(every, np.int64), self._pool, self._threads)
        targets = [*self.state, *outputs]
        for i, result in zip(self._by_xla, whole, strict=True):
            if is_key(result):
                self.state[i] = result
            else:
                np.copyto(targets[i], result)

    def _addresses_of_outputs(self, outputs: Arrays) -> list[int]:
        # NumPy takes a microsecond for an address, and most callers pass the same memory every time.
        last, _ = self._last_outputs
        if len(last) != len(outputs) or not last or any(map(operator.is_not, last, outputs)):
            check_given(WHO, "outputs", outputs, self.outputs, write=True)
            self._last_outputs = list(outputs), addresses(outputs)
        return self._last_outputs[1]

    def make_outputs(self) -> list[np.ndarray]:
        """Memory for the outputs of a call."""
        return [host_empty(x.shape, x.dtype) for x in self.outputs]

    def describe(self) -> str:
        """How many leaves kernels update, and which need XLA and why."""
        by = [road.by for road in self.roads]
        lines = [
            f"{by.count(KERNEL)} of {len(by)} leaves in one pass each ({len(self._loops)} kernels)"
        ]
        why: dict[str, list[str]] = {}
        for road in self.roads:
            if road.reason:
                how = "by XLA" if road.by == XLA else "by a kernel, after XLA"
                why.setdefault(f"{how} ({road.reason})", []).append(road.name)
        for reason, names in why.items():
            more = f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
            lines.append(f"{reason}: {', '.join(names[:_SHOWN])}{more}")
        return "\n".join(lines)


class _XlaPart:
    """What XLA computes of an update, on the CPU, before any of it is overwritten."""

    def __init__(
        self, jaxpr: _jaxpr.Jaxpr, wanted: Sequence[_jaxpr.Atom], slots: dict[_jaxpr.Var, int]
    ):
        part = _jaxpr.part(jaxpr, wanted)
        self._reads = [slots[var] for var in part.reads]
        self._run = jax.jit(part.run)
        # JAX returns an argument as it came: a view of memory that is about to change.
        self._returned = [atom in part.reads for atom in wanted]
        self._device = jax.local_devices(backend="cpu")[0]

    def __call__(self, operands: Arrays) -> list[Any]:
        args = [operands[slot] for slot in self._reads]
        args = jax.device_put(args, self._device, may_alias=True)
        results = jax.block_until_ready(self._run(*args))
        return [
            x.copy() if returned else x for x, returned in zip(results, self._returned, strict=True)
        ]


def _make_loops(found: Sequence[Group], slots: dict[_jaxpr.Var, int], num_state: int) -> list[Loop]:
    # Groups of one structure, hundreds of leaves of a model, are one loop.
    alike: dict[str, list[Group]] = {}
    for group in found:
        alike.setdefault(kernel_text(group, X86), []).append(group)

    def leaf(group: Group) -> tuple[int, list[int], list[int]]:
        # The state has the first slots, other outputs those that follow all values.
        writes = [i if i < num_state else len(slots) + i - num_state for i, _ in group.writes]
        values = [*group.reads, *(atom for _, atom in group.writes)]
        return (
            group.size,
            [*(slots[var] for var in group.reads), *writes, *(slots[var] for var in group.scalars)],
            [*(itemsize(dtype_of(x)) for x in values), *(0 for _ in group.scalars)],
        )

    return [
        make_loop(compiled(text, NAME, WHO), [leaf(group) for group in members])
        for text, members in alike.items()
    ]


def _numbered(name: str, values: Arrays) -> list[str]:
    return [f"{name}[{i}]" for i in range(len(values))]


def _num_processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
