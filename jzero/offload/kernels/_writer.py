# SPDX-License-Identifier: Apache-2.0
"""Lines of LLVM IR for values of several lanes: types, constants, loads, stores, rounding.

Floats of 16 bits are float32 in registers, with values that 16 bits can hold: each operation is done in
float32 and rounded where its equation says so. Types of 64 bits are left to XLA.
"""

from __future__ import annotations

import functools
import struct
from typing import Any, NamedTuple

import numpy as np


class Type(NamedTuple):
    register: str  # in LLVM IR, as `memory`
    memory: str
    kind: str  # of instructions: 'float', 'signed', 'unsigned' or 'bool'


TYPES = {
    "float32": Type("float", "float", "float"),
    "bfloat16": Type("float", "i16", "float"),
    "float16": Type("float", "half", "float"),
    "bool": Type("i1", "i8", "bool"),
    **{f"int{bits}": Type(f"i{bits}", f"i{bits}", "signed") for bits in (8, 16, 32)},
    **{f"uint{bits}": Type(f"i{bits}", f"i{bits}", "unsigned") for bits in (8, 16, 32)},
}


class Writer:
    """A sequence of instructions on values of `lanes` elements; of 1 for remaining elements."""

    def __init__(self, lanes: int, prefix: str):
        self.lanes = lanes
        self.lines: list[str] = []
        self.declared: set[str] = set()  # functions that they call
        self._prefix = prefix
        self._count = 0

    def many(self, register: str) -> str:
        """The type of `lanes` values: `<16 x float>`."""
        return register if self.lanes == 1 else f"<{self.lanes} x {register}>"

    def let(self, instruction: str) -> str:
        self._count += 1
        name = f"%{self._prefix}{self._count}"
        self.lines.append(f"  {name} = {instruction}")
        return name

    def constant(self, value: Any, dtype: str) -> str:
        register = TYPES[dtype].register
        text = _number(value, register)
        return text if self.lanes == 1 else f"splat ({register} {text})"

    def splat(self, scalar: str, register: str) -> str:
        """A scalar in every lane."""
        if self.lanes == 1:
            return scalar
        many = self.many(register)
        one = self.let(f"insertelement {many} poison, {register} {scalar}, i64 0")
        zeros = f"<{self.lanes} x i32> zeroinitializer"
        return self.let(f"shufflevector {many} {one}, {many} poison, {zeros}")

    def intrinsic(
        self, name: str, register: str, *args: str, flag: str = "", result: str = ""
    ) -> str:
        """Calls an intrinsic of LLVM, which works on lanes."""
        for of in filter(None, (result, register)):
            name += (
                f".{'' if self.lanes == 1 else f'v{self.lanes}'}{'f32' if of == 'float' else of}"
            )
        many, returned = self.many(register), self.many(result or register)
        types = ", ".join([many] * len(args) + ["i1"] * bool(flag))
        self.declared.add(f"declare {returned} @llvm.{name}({types})")
        given = ", ".join([f"{many} {arg}" for arg in args] + [f"i1 {flag}"] * bool(flag))
        return self.let(f"call {returned} @llvm.{name}({given})")

    def each_lane(self, function: str, register: str, *args: str) -> str:
        """Calls a function of the C library for one lane after the other."""
        function += "f"  # The float32 variant.
        self.declared.add(f"declare {register} @{function}({', '.join([register] * len(args))})")
        if self.lanes == 1:
            given = ", ".join(f"{register} {arg}" for arg in args)
            return self.let(f"call {register} @{function}({given})")
        many, result = self.many(register), "poison"
        for lane in range(self.lanes):
            ones = [self.let(f"extractelement {many} {arg}, i64 {lane}") for arg in args]
            given = ", ".join(f"{register} {one}" for one in ones)
            one = self.let(f"call {register} @{function}({given})")
            result = self.let(f"insertelement {many} {result}, {register} {one}, i64 {lane}")
        return result

    def select(self, chosen: str, yes: str, no: str, register: str) -> str:
        many = self.many(register)
        return self.let(f"select {self.many('i1')} {chosen}, {many} {yes}, {many} {no}")

    def load(self, pointer: str, dtype: str) -> str:
        memory = self.many(TYPES[dtype].memory)
        x = self.let(f"load {memory}, ptr {pointer}, align {itemsize(dtype)}")
        if dtype == "bool":
            return self.let(f"trunc {memory} {x} to {self.many('i1')}")
        if dtype == "float16":
            return self.let(f"fpext {memory} {x} to {self.many('float')}")
        if dtype == "bfloat16":
            return self._wide_bfloat16(x)
        return x

    def prefetch(self, pointer: str, distance: int) -> None:
        """Prefetches memory so many bytes behind a pointer; it need not exist."""
        self.declared.add("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
        ahead = self.let(f"getelementptr i8, ptr {pointer}, i64 {distance}")
        # To be read, into the nearest cache, data: asking for the right to write cost what this gains.
        self.lines.append(f"  call void @llvm.prefetch.p0(ptr {ahead}, i32 0, i32 3, i32 1)")

    def store(self, x: str, pointer: str, dtype: str) -> None:
        register, memory = (self.many(name) for name in TYPES[dtype][:2])
        if dtype == "bool":
            x = self.let(f"zext {register} {x} to {memory}")
        if dtype == "float16":
            x = self.let(f"fptrunc {register} {x} to {memory}")
        if dtype == "bfloat16":
            bits = self.let(f"bitcast {register} {x} to {self.many('i32')}")
            high = self.let(f"lshr {self.many('i32')} {bits}, {self.constant(16, 'int32')}")
            x = self.let(f"trunc {self.many('i32')} {high} to {memory}")
        self.lines.append(f"  store {memory} {x}, ptr {pointer}, align {itemsize(dtype)}")

    def rounded(self, x: str, dtype: str, long: bool = False) -> str:
        """Rounds to a 16-bit dtype, ties to even; a `long` value may be a NaN of more bits."""
        many = self.many("float")
        if dtype == "float16":
            half = self.let(f"fptrunc {many} {x} to {self.many('half')}")
            return self.let(f"fpext {self.many('half')} {half} to {many}")
        if dtype != "bfloat16":
            return x
        return self._wide_bfloat16(self._bfloat16(x, long))

    def _bfloat16(self, x: str, long: bool) -> str:
        """The bits of the nearest bfloat16, ties to even, as 16-bit integers."""
        many, short = self.many("float"), self.many("i16")
        ints = self.many("i32")

        def bit(op: str, a: str, b: int | str) -> str:
            return self.let(
                f"{op} {ints} {a}, {self.constant(b, 'int32') if isinstance(b, int) else b}"
            )

        bits = self.let(f"bitcast {many} {x} to {ints}")
        odd = bit("and", bit("lshr", bits, 16), 1)
        up = bit("add", bit("add", bits, 0x7FFF), odd)
        if long:  # The sum would carry its bits into the sign.
            nan = self.let(f"fcmp uno {many} {x}, {x}")
            up = self.select(nan, bit("or", bits, 0x400000), up, "i32")
        return self.let(f"trunc {ints} {bit('lshr', up, 16)} to {short}")

    def _wide_bfloat16(self, x: str) -> str:
        """bfloat16, as 16-bit integers, in float32."""
        ints = self.many("i32")
        wide = self.let(f"zext {self.many('i16')} {x} to {ints}")
        bits = self.let(f"shl {ints} {wide}, {self.constant(16, 'int32')}")
        return self.let(f"bitcast {ints} {bits} to {self.many('float')}")


def dtype_of(atom: Any) -> str:
    return _name(atom.aval.dtype)


# NumPy takes 10 us for a name, and an update of many leaves asks a hundred thousand times.
_name = functools.cache(str)


def itemsize(dtype: str) -> int:
    memory = TYPES[dtype].memory
    return {"float": 4, "half": 2}.get(memory) or int(memory[1:]) // 8


def _number(value: Any, register: str) -> str:
    if register == "i1":
        return "true" if value else "false"
    if register.startswith("i"):
        return str(int(value))
    # LLVM writes a float as the bits of the double of the same value.
    return f"0x{struct.pack('>d', float(np.asarray(value, np.float64))).hex().upper()}"
