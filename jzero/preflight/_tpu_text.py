# SPDX-License-Identifier: Apache-2.0
"""Loops and collectives of a compiled TPU program; the rest of its text does not determine times."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from jzero.preflight._hlo import Computations, Instruction, parse, sizes
from jzero.preflight._schedule import ScheduledProgram, program_of

_COLLECTIVE = re.compile(
    r"(all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute)(-start|-done)?"
)
# A semaphore beside an operand and a result.
_FLAG = re.compile(r", (/\*index=\d+\*/)?[su]32\[\d*\]\{[^}]*S\([24]\)\}")


def read_tpu_program(text: str) -> ScheduledProgram:
    """Loops, calls and collectives; each collective as if it were awaited where it starts.

    XLA's compiler for TPUs puts a collective into three or more fusions: one starts it, others compute while
    it runs, one awaits it. All have the collective in their body, with the number of its chain.
    """
    computations, entry = parse(text)
    found = {name: [*_kept(lines, computations)] for name, lines in computations.items()}
    return program_of(found, entry)


def _kept(lines: Sequence[Instruction], computations: Computations) -> Iterator[Instruction]:
    chains: set[str] = set()
    for line in lines:
        if line.op in ("while", "call", "conditional"):
            yield line._replace(text=line.text + _trips(line, computations))
        elif _COLLECTIVE.fullmatch(line.op):
            yield from _with_operands(line, lines)
        elif scattered := re.search(r"calls=%(all-reduce-scatter[\w.\-]*)", line.text):
            yield from _scatter(line, computations[scattered[1]])
        elif line.op == "fusion" and (inside := _inside(line, computations)):
            body, collective = inside
            chain = re.search(r'chain_id="(\d+)"', collective.text)
            if chain is None or chain[1] not in chains:
                yield from _with_operands(collective._replace(name=line.name), body)
            chains |= {chain[1]} if chain else set()


def _scatter(line: Instruction, body: Sequence[Instruction]) -> Iterator[Instruction]:
    """A reduce-scatter is written as a fusion: an all-reduce of the padded value, and its slice."""
    groups = next(x.text for x in body if x.op == "all-reduce")
    whole = max((x for x in body if x.op == "parameter"), key=lambda x: sum(sizes(x.shape)))
    made = Instruction(line.name, line.shape, "reduce-scatter", (whole.name,), groups)
    return _with_operands(made, body)


def _with_operands(line: Instruction, body: Sequence[Instruction]) -> Iterator[Instruction]:
    """A collective without its semaphores, preceded by its operands, of which only shapes count."""
    if not line.op.endswith("-done"):
        shapes = {x.name: x.shape for x in body}
        for name in line.operands:
            yield Instruction(name, shapes[name], "parameter", (), "")
    yield line._replace(shape=_FLAG.sub("", line.shape))


def _inside(
    line: Instruction, computations: Computations
) -> tuple[Sequence[Instruction], Instruction] | None:
    """The collective that a fusion starts or continues, and the computation that contains it."""
    for callee in re.findall(r"calls=%([\w.\-]+)", line.text):
        for inner in computations[callee]:
            if _COLLECTIVE.fullmatch(inner.op):
                return computations[callee], inner
            if inner.op == "fusion" and (found := _inside(inner, computations)):
                return found
    return None


def _trips(line: Instruction, computations: Computations) -> str:
    """The trip count, written as XLA writes it for GPUs: the constant that the counter is compared with."""
    condition = re.search(r"condition=%([\w.\-]+)", line.text)
    if condition is None or "known_trip_count" in line.text:
        return ""
    bounds = [
        x.text.split(")")[0]
        for x in computations[condition[1]]
        if x.op == "constant" and x.shape.startswith("s32[]")
    ]
    if len(bounds) != 1:
        return ""
    return f', backend_config={{"known_trip_count":{{"n":"{bounds[0]}"}}}}'
