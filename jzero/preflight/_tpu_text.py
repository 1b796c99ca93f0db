# SPDX-License-Identifier: Apache-2.0
"""A compiled TPU program, reduced to its loops and collectives: the rest of its text says no times."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from jzero.preflight._hlo import Instruction, parse, sizes
from jzero.preflight._schedule import ScheduledProgram, read_program

_COLLECTIVE = re.compile(
    r"(all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute)(-start|-done)?"
)
# A semaphore beside an operand and a result.
_FLAG = re.compile(r", (/\*index=\d+\*/)?[su]32\[\d*\]\{[^}]*S\([24]\)\}")
_CONTROL = ("while", "call", "conditional")


def read_tpu_program(text: str) -> ScheduledProgram:
    """Its collectives, as if each were awaited where it starts, and nothing else."""
    return read_program(collectives_alone(text))


def collectives_alone(text: str) -> str:
    """The program with nothing in it but loops, calls and collectives, each of them where it starts.

    XLA's compiler for TPUs puts a collective into three fusions or more: one starts it, others compute while
    it moves, one awaits it. All have the collective in their body, with the number of its chain.
    """
    computations, entry = parse(text)
    found = []
    for name, lines in computations.items():
        kept = "\n".join(_kept(lines, computations))
        found.append(f"{'ENTRY ' if name == entry else ''}%{name} () -> () {{\n{kept}\n}}\n")
    return "\n".join(found)


def _kept(
    lines: Sequence[Instruction], computations: Mapping[str, Sequence[Instruction]]
) -> Iterator[str]:
    shapes = {line.name: line.shape for line in lines}
    chains: set[str] = set()
    for line in lines:
        if line.op in _CONTROL:
            yield _written(line) + _trips(line, computations)
        elif _COLLECTIVE.fullmatch(line.op):
            yield from _with_operands(line, shapes)
        elif scattered := re.search(r"calls=%(all-reduce-scatter[\w.\-]*)", line.text):
            yield from _scatter(line, computations[scattered[1]])
        elif line.op == "fusion" and (inside := _inside(line, computations)):
            body, collective = inside
            chain = re.search(r'chain_id="(\d+)"', collective.text)
            if chain is None or chain[1] not in chains:
                own = {x.name: x.shape for x in body}
                yield from _with_operands(collective._replace(name=line.name), own)
            chains |= {chain[1]} if chain else set()


def _scatter(line: Instruction, body: Sequence[Instruction]) -> Iterator[str]:
    """A reduce-scatter, which is written as a fusion: an all-reduce of the padded value, and its slice."""
    groups = next(x.text for x in body if x.op == "all-reduce")
    whole = max((x for x in body if x.op == "parameter"), key=lambda x: sum(sizes(x.shape)))
    text = f"%{whole.name}){groups.partition(')')[2]}"
    made = Instruction(line.name, line.shape, "reduce-scatter", (whole.name,), text)
    return _with_operands(made, {whole.name: whole.shape})


def _written(line: Instruction) -> str:
    return f"  %{line.name} = {_FLAG.sub('', line.shape)} {line.op}({line.text}"


def _with_operands(line: Instruction, shapes: Mapping[str, str]) -> Iterator[str]:
    if not line.op.endswith("-done"):
        for name in line.operands:
            yield f"  %{name} = {shapes[name]} parameter(0)"
    yield _written(line)


def _inside(
    line: Instruction, computations: Mapping[str, Sequence[Instruction]]
) -> tuple[Sequence[Instruction], Instruction] | None:
    """The collective that a fusion starts or goes on with, and the computation it is in."""
    for callee in re.findall(r"calls=%([\w.\-]+)", line.text):
        for inner in computations[callee]:
            if _COLLECTIVE.fullmatch(inner.op):
                return computations[callee], inner
            if inner.op == "fusion" and (found := _inside(inner, computations)):
                return found
    return None


def _trips(line: Instruction, computations: Mapping[str, Sequence[Instruction]]) -> str:
    """A loop's iterations, as XLA writes them for GPUs: the constant that its counter is compared with."""
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
