# SPDX-License-Identifier: Apache-2.0
"""Operations of the kernels of a compiled program, and the bytes that they read and write."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jzero.preflight._hlo import ON_HOST, Computations, Instruction, arrays, sizes
from jzero.targets._target import Target

# No kernels: names of values, calls whose bodies count by themselves, and ends of asynchronous operations.
_NONE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "while", "call",
    "conditional", "opt-barrier", "optimization-barrier", "partition-id", "replica-id", "domain",
}  # fmt: skip
_SLICES = ("dynamic-slice", "slice", "gather")
_SAME_BYTES = ("bitcast", "reshape")


class Flops(NamedTuple):
    """Operations of matrix products, convolutions and fused attention."""

    # on tensor cores, as bfloat16 operations of the same time: one of TF32, in which XLA computes products
    # of float32 by default, counts as two, and one of 8 bits as a half
    tensor: float
    f32: float  # without tensor cores: float32 at the highest precision, and wider


class KernelWork(NamedTuple):
    flops: Flops | None  # None without a product, convolution or attention; then only bytes count
    nbytes: int  # read and written in the device's memory
    from_host: int  # bytes read from pinned memory
    to_host: int  # bytes written there

    def seconds(self, target: Target) -> float:
        """By a roofline of the device's peaks and memory bandwidth; transfers to the host do not count."""
        tensor, f32 = self.flops or (0.0, 0.0)
        computing = tensor / target.bf16_flops + f32 / target.f32_flops
        return max(computing, self.nbytes / target.memory_bandwidth)


def work_of(line: Instruction, shapes: Mapping[str, str], computations: Computations) -> KernelWork:
    """What one instruction does. A slice of a buffer counts its own bytes, not the buffer's."""
    if line.op in _NONE or line.op.endswith("-done") or '"AllocateBuffer"' in line.text:
        return KernelWork(None, 0, 0, 0)
    inner = _inside(line, shapes, computations)
    read = [
        (p.shape, _read(p.name, sum(sizes(p.shape)), inner)) for p in inner if p.op == "parameter"
    ]
    written = list(_writes(line, inner))
    from_host = sum(nbytes for shape, nbytes in read if ON_HOST in shape)
    to_host = sum(nbytes for shape, nbytes in written if ON_HOST in shape)
    nbytes = sum(nbytes for _, nbytes in [*read, *written]) - from_host - to_host
    return KernelWork(_flops(line, shapes, computations), nbytes, from_host, to_host)


# -- bytes -----------------------------------------------------------------------------------------------


def _called(line: Instruction, computations: Computations) -> Sequence[Instruction]:
    callee = re.search(r"calls=%([\w.\-]+)", line.text)
    return computations.get(callee[1], ()) if callee else ()


def _inside(
    line: Instruction, shapes: Mapping[str, str], computations: Computations
) -> Sequence[Instruction]:
    """The computation that a fusion runs; for other instructions, one of its operands and itself."""
    names = [name for name in dict.fromkeys(line.operands) if name in shapes]
    alone = [*(Instruction(name, shapes[name], "parameter", (), "") for name in names), line]
    return _called(line, computations) or alone


def _read(name: str, nbytes: int, lines: Sequence[Instruction]) -> int:
    """Bytes that are read of a value: all, or those of the slices that are taken."""
    found = 0
    for user in lines:
        if name not in user.operands:
            continue
        first = user.operands[0] == name
        if user.op in _SAME_BYTES:
            found += _read(user.name, nbytes, lines)
        elif user.op in _SLICES and first:
            found += sum(sizes(user.shape))
        elif not (user.op == "dynamic-update-slice" and first):  # It is updated in place.
            return nbytes
    return min(found, nbytes)


def _writes(line: Instruction, inner: Sequence[Instruction]) -> Iterator[tuple[str, int]]:
    """Each result's shape, and the bytes that are written of it."""
    if line.op == "copy-start":  # Its shape is (result, operand, context).
        yield from list(_parts(line.shape))[:1]
    elif line.op == "custom-call":  # The last of several results may be its workspace.
        yield from _parts(re.sub(r", [us]8\[\d+\](\{[^{}]*\})?\)$", "", line.shape))
    else:
        yield from _written(inner[-1], {x.name: x for x in inner})


def _written(root: Instruction, lines: Mapping[str, Instruction]) -> Iterator[tuple[str, int]]:
    """Bytes that are written of a result: all, or those of slices that are updated in place."""
    if root.op in ("tuple", *_SAME_BYTES) and all(name in lines for name in root.operands):
        for name in root.operands:
            yield from _written(lines[name], lines)
    elif root.op == "dynamic-update-slice" and root.operands[1] in lines:
        yield root.shape, sum(sizes(lines[root.operands[1]].shape))
    elif root.op != "parameter":
        yield from _parts(root.shape)


def _parts(shape: str) -> Iterator[tuple[str, int]]:
    """The arrays of a shape, each with its layout, and their bytes."""
    for part in re.findall(r"\w+\[[\d,]*\](?:\{[^{}]*\})?", shape):
        yield part, sum(sizes(part))


# -- operations ------------------------------------------------------------------------------------------


def _flops(
    line: Instruction, shapes: Mapping[str, str], computations: Computations
) -> Flops | None:
    """Operations of a matrix product or the like, or of a fusion that has some; else None."""
    called = re.search(r'custom_call_target="__[\w$]+', line.text)
    target = called[0] if called and line.op == "custom-call" else ""
    if line.op == "dot":
        return _dot(line, shapes, r"lhs_contracting_dims=\{([\d,]*)\}")
    if re.search("gemm|matmul", target):
        return _dot(line, shapes, r'"lhs_contracting_dimensions":\[([\d,"]*)\]')
    if line.op == "convolution" or "$conv" in target:
        return _convolution(line, shapes, target)
    if "$fmha" in target:
        return _attention(line, shapes, target)
    inner = _called(line, computations)
    named = {x.name: x.shape for x in inner}
    found = [flops for x in inner if (flops := _flops(x, named, computations)) is not None]
    return Flops(*map(sum, zip(*found, strict=True))) if found else None


def _dot(line: Instruction, shapes: Mapping[str, str], contracted: str) -> Flops:
    match = re.search(contracted, line.text)
    if match is None or line.operands[0] not in shapes:
        return Flops(0.0, 0.0)
    operand = shapes[line.operands[0]]
    (_, lhs), *_ = arrays(operand)
    (_, out), *_ = arrays(line.shape)
    dims = [int(n) for n in re.findall(r"\d+", match[1])]
    return _at_peak(2.0 * math.prod(out) * math.prod(lhs[dim] for dim in dims), operand, line.text)


def _convolution(line: Instruction, shapes: Mapping[str, str], target: str) -> Flops:
    """Two operations per element of the output and of one output feature's kernel, forward and backward."""
    labels = re.search(r"dim_labels=\w+_(\w+)->", line.text)
    values = [*(shapes.get(name, "") for name in line.operands[:2]), line.shape]
    found = [next(iter(arrays(shape)), None) for shape in values]
    lhs, rhs, result = found
    if labels is None or lhs is None or rhs is None or result is None:
        return Flops(0.0, 0.0)
    # XLA's calls have the labels of the forward convolution, whichever of its arrays they compute.
    kernel, out = rhs[1], result[1]
    if "convBackwardFilter" in target:
        kernel, out = result[1], rhs[1]
    elif "convBackwardInput" in target:
        out = lhs[1]
    of_one = math.prod(kernel) / kernel[labels[1].index("o")]
    dilated = re.search(
        r"lhs_dilate=([\dx]+)", line.text
    )  # Of so many elements all but one are zeros.
    zeros = math.prod(map(int, dilated[1].split("x"))) if dilated else 1
    return _at_peak(2.0 * math.prod(out) * of_one / zeros, values[0], line.text)


def _attention(line: Instruction, shapes: Mapping[str, str], target: str) -> Flops:
    """Two products forward, five backward, each with as many results as scores; half with a causal mask."""
    scores = re.search(r'"intermediate_tensor_shape":\{[^}]*?"dimensions":\[([\d,"]*)\]', line.text)
    if scores is None or line.operands[0] not in shapes:
        return Flops(0.0, 0.0)
    operand = shapes[line.operands[0]]
    (_, query), *_ = arrays(operand)
    num_products = 5 if "Backward" in target else 2
    each = 2.0 * query[-1] * math.prod(int(n) for n in re.findall(r"\d+", scores[1]))
    share = 0.5 if "CAUSAL" in line.text else 1.0
    return _at_peak(num_products * each * share, operand, line.text)


_HIGHEST = re.compile(r'operand_precision"?[=:][\[{][^\]}]*highest', re.I)
# A named algorithm: the dtype it multiplies, and the number of passes: `dot_bf16_bf16_f32_x3`.
_ALGORITHM = re.compile(r"\b(?:alg_)?dot_(bf|tf|f)(\d+)_\w+?(?:_x(\d))?\b", re.I)


def _at_peak(operations: float, operand: str, text: str) -> Flops:
    """Attributes operations to the units that do them for the operand's dtype; complex products are four."""
    (bits, _), *_ = arrays(operand)
    if re.match(r"\(?c\d", operand):
        operations, bits = 4 * operations, bits // 2
    exact = bits > 32 or (bits == 32 and _HIGHEST.search(text))
    if algorithm := _ALGORITHM.search(text):
        kind, digits, passes = algorithm.groups()
        bits, operations = int(digits), operations * int(passes or 1)
        exact = kind.lower() == "f" and bits >= 32
    return Flops(0.0, operations) if exact else Flops(operations * max(bits, 8) / 16, 0.0)
