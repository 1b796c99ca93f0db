# SPDX-License-Identifier: Apache-2.0
"""Elementwise primitives as LLVM instructions: one table from primitive to its lines.

An equation without an entry, or with a dtype that `TYPES` lacks, is left to XLA: a missing entry costs
speed and never a wrong result.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from jzero.offload.kernels._writer import TYPES, Writer, dtype_of
from jzero.tracing import _jaxpr

# Writes an equation's instructions for operands in registers; returns the register of its result.
KernelOp = Callable[..., str]


def op_for(eqn: _jaxpr.Eqn) -> KernelOp | None:
    """What computes `eqn` element by element; None if there is no entry."""
    if (
        not eqn.invars
        or len(eqn.outvars) != 1
        or not all(dtype_of(atom) in TYPES for atom in [*eqn.invars, *eqn.outvars])
    ):
        return None
    name, sizes = eqn.primitive.name, {size_of(atom) for atom in eqn.invars}
    if not sizes <= {1, size_of(eqn.outvars[0])}:
        return None
    if name == "select_n" and len(eqn.invars) != 3:
        return None
    return OPS.get((name, _kind(eqn))) or OPS.get((name, "any"))


def is_cheap(eqn: _jaxpr.Eqn) -> bool:
    """Whether a kernel may compute `eqn` even if its result is not used: memory is what takes the time."""
    scalars = all(size_of(atom) == 1 for atom in [*eqn.invars, *eqn.outvars])
    return op_for(eqn) is not None or (scalars and not _jaxpr.inner_jaxprs(eqn))


def size_of(atom: _jaxpr.Atom) -> int:
    return math.prod(atom.aval.shape)


def is_same(eqn: _jaxpr.Eqn) -> bool:
    """Whether the result is the operand, element by element."""
    return op_for(eqn) is _same


def write(writer: Writer, eqn: _jaxpr.Eqn, args: list[str]) -> str:
    """Adds the lines of an equation with an entry; returns the register of its result."""
    op = op_for(eqn)
    assert op is not None, eqn
    result, name = op(writer, eqn, *args), eqn.primitive.name
    if name in ROUNDED:
        return result
    return writer.rounded(result, dtype_of(eqn.outvars[0]), long=name == "convert_element_type")


def _dtype(eqn: _jaxpr.Eqn) -> str:
    # That of all operands; of `select_n`, of the cases.
    return dtype_of(eqn.invars[-1])


def _kind(eqn: _jaxpr.Eqn) -> str:
    return TYPES[_dtype(eqn)].kind


def _register(eqn: _jaxpr.Eqn) -> str:
    return TYPES[_dtype(eqn)].register


def _instruction(name: str) -> KernelOp:
    def op(writer: Writer, eqn: _jaxpr.Eqn, *args: str) -> str:
        return writer.let(f"{name} {writer.many(_register(eqn))} {', '.join(args)}")

    return op


def _intrinsic(name: str, flag: str = "") -> KernelOp:
    def op(writer: Writer, eqn: _jaxpr.Eqn, *args: str) -> str:
        return writer.intrinsic(name, _register(eqn), *args, flag=flag)

    return op


def _c_library(name: str) -> KernelOp:
    def op(writer: Writer, eqn: _jaxpr.Eqn, *args: str) -> str:
        return writer.each_lane(name, _register(eqn), *args)

    return op


def _same(writer: Writer, eqn: _jaxpr.Eqn, x: str, *_: str) -> str:
    return x


def _neg_int(writer: Writer, eqn: _jaxpr.Eqn, x: str) -> str:
    return writer.let(f"sub {writer.many(_register(eqn))} {writer.constant(0, _dtype(eqn))}, {x}")


def _not(writer: Writer, eqn: _jaxpr.Eqn, x: str) -> str:
    ones = writer.constant(True if _dtype(eqn) == "bool" else -1, _dtype(eqn))
    return writer.let(f"xor {writer.many(_register(eqn))} {x}, {ones}")


def _multiply(writer: Writer, eqn: _jaxpr.Eqn, x: str, y: str) -> str:
    return writer.rounded(OPS["mul", _kind(eqn)](writer, eqn, x, y), _dtype(eqn))


def _square(writer: Writer, eqn: _jaxpr.Eqn, x: str) -> str:
    return _multiply(writer, eqn, x, x)


def _integer_pow(writer: Writer, eqn: _jaxpr.Eqn, x: str) -> str:
    # By repeated squaring, in the order of JAX's own lowering.
    y, result = abs(eqn.params["y"]), None
    if y == 0:
        return writer.constant(1, _dtype(eqn))
    while y:
        if y & 1:
            result = x if result is None else _multiply(writer, eqn, result, x)
        y >>= 1
        x = _multiply(writer, eqn, x, x) if y else x
    assert result is not None
    if eqn.params["y"] > 0:
        return result
    return writer.rounded(_reciprocal(writer, eqn, result), _dtype(eqn))


def _reciprocal(writer: Writer, eqn: _jaxpr.Eqn, x: str) -> str:
    return writer.let(f"fdiv {writer.many(_register(eqn))} {writer.constant(1, _dtype(eqn))}, {x}")


def _rsqrt(writer: Writer, eqn: _jaxpr.Eqn, x: str) -> str:
    return _reciprocal(writer, eqn, writer.intrinsic("sqrt", _register(eqn), x))


def _sign(writer: Writer, eqn: _jaxpr.Eqn, x: str) -> str:
    # NaN and zeros of both signs stay what they are.
    register, one = _register(eqn), writer.constant(1, _dtype(eqn))
    zero = writer.constant(0, _dtype(eqn))
    signed = writer.intrinsic("copysign", register, one, x)
    moves = writer.let(f"fcmp one {writer.many(register)} {x}, {zero}")
    return writer.select(moves, signed, x, register)


def _is_finite(writer: Writer, eqn: _jaxpr.Eqn, x: str) -> str:
    size = writer.intrinsic("fabs", _register(eqn), x)
    infinity = writer.constant(math.inf, _dtype(eqn))
    return writer.let(f"fcmp olt {writer.many(_register(eqn))} {size}, {infinity}")


def _clamp(writer: Writer, eqn: _jaxpr.Eqn, low: str, x: str, high: str) -> str:
    at_least = OPS["max", _kind(eqn)](writer, eqn, x, low)
    return OPS["min", _kind(eqn)](writer, eqn, at_least, high)


def _select_n(writer: Writer, eqn: _jaxpr.Eqn, which: str, no: str, yes: str) -> str:
    if dtype_of(eqn.invars[0]) == "int32":
        which = writer.let(f"icmp sgt {writer.many('i32')} {which}, {writer.constant(0, 'int32')}")
    return writer.select(which, yes, no, _register(eqn))


def _convert(writer: Writer, eqn: _jaxpr.Eqn, x: str) -> str:
    old = TYPES[dtype_of(eqn.invars[0])]
    new = TYPES[dtype_of(eqn.outvars[0])]
    types = f"{writer.many(old.register)} {x} to {writer.many(new.register)}"
    if new.kind == "bool" and old.kind != "bool":
        zero = writer.constant(0, dtype_of(eqn.invars[0]))
        compare = "fcmp une" if old.kind == "float" else "icmp ne"
        return writer.let(f"{compare} {writer.many(old.register)} {x}, {zero}")
    if old.register == new.register:
        return x
    if old.kind == "float":
        # Out of range the nearest integer, of NaN zero, as XLA's.
        name = "fptosi.sat" if new.kind == "signed" else "fptoui.sat"
        return writer.intrinsic(name, old.register, x, result=new.register)
    if new.kind == "float":
        return writer.let(f"{'sitofp' if old.kind == 'signed' else 'uitofp'} {types}")
    if int(old.register[1:]) > int(new.register[1:]):
        return writer.let(f"trunc {types}")
    return writer.let(f"{'sext' if old.kind == 'signed' else 'zext'} {types}")


def _compare(name: str) -> dict[tuple[str, str], KernelOp]:
    ordered = "une" if name == "ne" else f"o{name}"
    sign = {"eq": ("", ""), "ne": ("", "")}.get(name, ("s", "u"))
    return {
        (name, "float"): _instruction(f"fcmp {ordered}"),
        (name, "signed"): _instruction(f"icmp {sign[0]}{name}"),
        (name, "unsigned"): _instruction(f"icmp {sign[1]}{name}"),
        (name, "bool"): _instruction(f"icmp {sign[1]}{name}"),
    }


def _integers(name: str, op: KernelOp) -> dict[tuple[str, str], KernelOp]:
    return {(name, "signed"): op, (name, "unsigned"): op}


# By primitive and kind of the operands (of `select_n`: of the cases).
OPS: dict[tuple[str, str], KernelOp] = {
    **{(name, "float"): _instruction(f"f{name}") for name in ("add", "sub", "mul", "div", "neg")},
    ("add_any", "float"): _instruction("fadd"),
    **{
        (name, "float"): _intrinsic(llvm)
        for name, llvm in {
            "abs": "fabs", "sqrt": "sqrt", "floor": "floor", "ceil": "ceil",
            # Of NaN and anything NaN, as XLA's; zeros are ordered by their sign.
            "max": "maximum", "min": "minimum",
        }.items()
    },
    # One call for each element: nothing here is worth a vector library of its own.
    **{
        (name, "float"): _c_library(name)
        for name in ("exp", "exp2", "expm1", "log", "log1p", "tanh", "cbrt", "pow")
    },
    ("rsqrt", "float"): _rsqrt,
    ("sign", "float"): _sign,
    ("is_finite", "float"): _is_finite,
    ("square", "float"): _square,
    ("integer_pow", "float"): _integer_pow,
    **{
        key: op
        for name in ("add", "sub", "mul", "and", "or", "xor")
        for key, op in _integers(name, _instruction(name)).items()
    },
    **_integers("neg", _neg_int),
    **_integers("not", _not),
    **_integers("square", _square),
    ("abs", "signed"): _intrinsic("abs", flag="false"),
    **{
        (name, kind): _intrinsic(f"{kind[0]}{name}")
        for name in ("max", "min")
        for kind in ("signed", "unsigned")
    },
    **{(name, "bool"): _instruction(name) for name in ("and", "or", "xor")},
    ("not", "bool"): _not,
    **{
        key: op
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
        for key, op in _compare(name).items()
    },
    **{("clamp", kind): _clamp for kind in ("float", "signed", "unsigned")},
    ("convert_element_type", "any"): _convert,
    ("select_n", "any"): _select_n,
    # The order of elements stays: nothing moves.
    **{
        (name, "any"): _same
        for name in ("reshape", "squeeze", "broadcast_in_dim", "copy", "stop_gradient")
    },
}  # fmt: skip

# Results that need no rounding to 16 bits: one of the operands, perhaps with another sign, or 1, or rounded
# already.
ROUNDED = {
    "neg", "abs", "sign", "max", "min", "clamp", "select_n", "reshape", "squeeze", "broadcast_in_dim",
    "copy", "stop_gradient", "square", "integer_pow",
}  # fmt: skip
