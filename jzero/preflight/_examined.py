# SPDX-License-Identifier: Apache-2.0
"""Memory and schedule of a step's compiled program, or of its several programs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jzero._errors import OptionError, message
from jzero._memory_kinds import DEVICE
from jzero.offload import _layer_programs
from jzero.preflight._dispatches import (
    DispatchedProgram,
    Dispatches,
    ProgramMemory,
    held_bytes,
    moments,
)
from jzero.preflight._hlo import ON_HOST, parse
from jzero.preflight._schedule import ScheduledProgram, Started

_Read = Callable[[str], ScheduledProgram]


class PartMemory(NamedTuple):
    """One of the different programs that a step starts."""

    # 'iteration' of a loop over layers, 'fetch' of an iteration's parameters, 'stretch' between loops, ...
    name: str
    times: int  # in a step
    argument_bytes: int  # of its arguments, on each device
    made_bytes: int  # of its outputs that do not alias donated arguments
    temporary_bytes: int  # of its temporaries
    # the most that a device holds while it runs, including the stored state
    peak_bytes: int
    # operations on pinned memory that are no copies, by XLA's names; there should be none
    host_operations: tuple[str, ...]


class Examined(NamedTuple):
    """Bytes on each device and, in pinned memory, on its host; and what the step starts, in order."""

    argument_bytes: int
    temporary_bytes: int
    peak_bytes: int
    compile_seconds: float
    host_bytes: int
    started: tuple[Started, ...]
    parts: tuple[PartMemory, ...] = ()


def examine(lowered: jax.stages.Lowered, options: Mapping[str, Any], read: _Read) -> Examined:
    """Compiles the one program of a step; `read` reads its text."""
    start = time.perf_counter()
    compiled = _compiled(lowered, options)
    seconds = time.perf_counter() - start
    memory: Any = compiled.memory_analysis()
    peak = memory.peak_memory_in_bytes
    here, there = ProgramMemory.of(compiled)
    if there.temporaries:
        # XLA reports the larger of the device's peak and the host's.
        peak = min(peak, sum(here))
    return Examined(
        here.arguments,
        here.temporaries,
        peak,
        seconds,
        there.arguments + there.temporaries,
        (Started(read(str(compiled.as_text()))),),
    )


def examine_programs(
    found: Dispatches, mesh: Mesh, options: Mapping[str, Any], read: _Read
) -> Examined:
    """Compiles each different program that a step starts; `read` reads their texts."""
    start = time.perf_counter()
    equal: dict[str, list[DispatchedProgram]] = {}
    programs: dict[str, jax.stages.Lowered] = {}
    for part in found.programs:
        program = part.lower(mesh)
        key = program.as_text()
        equal.setdefault(key, []).append(part)
        programs.setdefault(key, program)
    compiled = {
        key: _compiled(program, {**_layer_programs.options_of(equal[key][0].name, mesh), **options})
        for key, program in programs.items()
    }
    seconds = time.perf_counter() - start
    memory = {part: ProgramMemory.of(compiled[key]) for key, same in equal.items() for part in same}
    held = moments(found, memory)
    parts, programs_read = list[PartMemory](), dict[DispatchedProgram, ScheduledProgram]()
    for key, same in equal.items():
        text = str(compiled[key].as_text())
        times = sum(found.programs[part] for part in same)
        peak = max(moment.nbytes for moment in held if moment.program in same)
        here, _ = memory[same[0]]
        programs_read |= dict.fromkeys(same, read(text))
        parts.append(PartMemory(same[0].name, times, *here, peak, host_operations(text)))
    return Examined(
        held_bytes(found.args.values(), DEVICE),
        max(part.temporary_bytes for part in parts),
        max(moment.nbytes for moment in held),
        seconds,
        max(moment.host_nbytes for moment in held),
        tuple(
            Started(
                None if step.program is None else programs_read[step.program],
                step.reads,
                step.copies,
            )
            for step in found.steps
        ),
        tuple(parts),
    )


_BAD_OPTION = re.compile(r"No such compile option: '(.*)'|While setting option (.*?), .*")


def _compiled(lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> jax.stages.Compiled:
    try:
        return lowered.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        if not (found := _BAD_OPTION.search(str(error))):
            raise
        raise OptionError(message(
            "preflight", f"compiler_options has {found[1] or found[2]!r}",
            f"XLA says: {found[0].rstrip('.')}.", "Correct it, or drop it."))  from error  # fmt: skip


_ON_HOSTS_PROCESSORS = re.compile(r'_xla_compute_type\\?"?[=:]\s*\\?"host')
_COPIES = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "copy", "slice", "dynamic-slice",
    "dynamic-update-slice", "fusion", "call", "while", "conditional", "optimization-barrier",
}  # fmt: skip


def host_operations(text: str) -> tuple[str, ...]:
    """Operations on pinned memory that are no copies, or that the host's processors compute."""
    found: dict[str, None] = {}
    computations, _ = parse(text)
    for lines in computations.values():
        shapes = {line.name: line.shape for line in lines}
        for line in lines:
            touched = [line.shape, *(shapes.get(name, "") for name in line.operands)]
            # A fusion's operations are in its own computation; '-start' and '-done' are copies.
            copies = line.op in _COPIES or line.op.endswith(("-start", "-done"))
            allocates = '"AllocateBuffer"' in line.text
            computes = any(ON_HOST in shape for shape in touched) and not (copies or allocates)
            if computes or _ON_HOSTS_PROCESSORS.search(line.text):
                found[line.op] = None
    return tuple(found)
