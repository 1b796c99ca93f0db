# SPDX-License-Identifier: Apache-2.0
"""Bytes that the kernels of a compiled program read and write in a device's memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from jzero.preflight._hlo import Instruction, sizes

# No kernel: names of what is there, bodies that count by themselves, and ends of what has begun.
_NONE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "while", "call",
    "conditional", "opt-barrier", "optimization-barrier", "partition-id", "replica-id", "domain",
}  # fmt: skip
_SLICES = ("dynamic-slice", "slice", "gather")
_SAME_BYTES = ("bitcast", "reshape")


def bytes_of(
    line: Instruction, shapes: Mapping[str, str], computations: Mapping[str, Sequence[Instruction]]
) -> int:
    """Bytes that one instruction reads and writes; of slices of a buffer, not those of all of it."""
    if line.op in _NONE or line.op.endswith("-done") or '"AllocateBuffer"' in line.text:
        return 0
    if line.op == "copy-start":  # Its shape has the operand's, too.
        return 2 * sum(sizes(shapes.get(line.operands[0], "")))
    callee = re.search(r"calls=%([\w.\-]+)", line.text)
    inner = computations.get(callee[1]) if callee else None
    if not inner:
        parameters = [
            Instruction(name, shapes[name], "parameter", (), "")
            for name in dict.fromkeys(line.operands)
            if name in shapes
        ]
        inner = [*parameters, line]
    read = sum(_read(p.name, sum(sizes(p.shape)), inner) for p in inner if p.op == "parameter")
    return read + _written(inner[-1], {x.name: x for x in inner})


def _read(name: str, nbytes: int, lines: Sequence[Instruction]) -> int:
    """Of a value, what is read of it: all, or the slices that are taken of it."""
    found = 0
    for user in lines:
        if name not in user.operands:
            continue
        first = user.operands[0] == name
        if user.op in _SAME_BYTES:
            found += _read(user.name, nbytes, lines)
        elif user.op in _SLICES and first:
            found += sum(sizes(user.shape))
        elif not (user.op == "dynamic-update-slice" and first):  # written in its place
            return nbytes
    return min(found, nbytes)


def _written(root: Instruction, lines: Mapping[str, Instruction]) -> int:
    """Of a result, what is written of it: all, or the slices that are updated in their place."""
    if root.op in ("tuple", *_SAME_BYTES) and all(name in lines for name in root.operands):
        return sum(_written(lines[name], lines) for name in root.operands)
    if root.op == "dynamic-update-slice" and root.operands[1] in lines:
        return sum(sizes(lines[root.operands[1]].shape))
    return 0 if root.op == "parameter" else sum(sizes(root.shape))
