# SPDX-License-Identifier: Apache-2.0
"""A group of elementwise equations as one loop of LLVM IR: every leaf is read once and written once.

The function takes blocks of leaves, each a row of three numbers: a row of operands, the first element, and
the number of elements. A row of operands has the address of each leaf that is read, of each that is written,
and of each scalar. Threads that call it at the same time take blocks from one counter, and count finished
blocks in another, which it returns. Groups of one structure have the same text, and so the same machine code.
"""

from __future__ import annotations

import itertools

from jzero.offload.kernels._code_paths import Group
from jzero.offload.kernels._loops import FINISHED, UPDATE_FUNCTION
from jzero.offload.kernels._ops import is_same, write
from jzero.offload.kernels._writer import TYPES, Writer, dtype_of
from jzero.tracing import _jaxpr

# Elements at a time: a whole cache line of float32. LLVM splits it for processors with narrower registers.
LANES = 16

# Between these sizes, a divisor is replaced by its reciprocal.
USUAL = (2.0**-100, 2.0**100)

# Bytes that are prefetched. A processor follows as many streams as AdamW has only within a page of 4 KB; 512
# and 2048 gain as much, 6 % of AdamW's time on 32M parameters.
_AHEAD = 1024

_TEXT = """\
{declarations}

define i64 @{name}(ptr %operands, ptr %blocks, i64 %num_blocks, ptr %counter) {{
entry:
  %finished = getelementptr i64, ptr %counter, i64 {finished}
{prologue}
  br label %next
next:
  %index = atomicrmw add ptr %counter, i64 1 monotonic
  %more = icmp slt i64 %index, %num_blocks
  br i1 %more, label %block, label %done
block:
  %block.at = getelementptr [3 x i64], ptr %blocks, i64 %index
  %row = load i64, ptr %block.at
  %first.at = getelementptr i64, ptr %block.at, i64 1
  %first = load i64, ptr %first.at
  %size.at = getelementptr i64, ptr %block.at, i64 2
  %size = load i64, ptr %size.at
  %at = getelementptr [{columns} x ptr], ptr %operands, i64 %row
{pointers}
{scalars}
  %vectors = and i64 %size, -{lanes}
  %whole = select i1 {usual}, i64 %vectors, i64 0
  br label %lanes
lanes:
  %i = phi i64 [ 0, %block ], [ %i.next, %lanes.body ]
  %lanes.more = icmp slt i64 %i, %whole
  br i1 %lanes.more, label %lanes.body, label %rest
lanes.body:
{body}
  %i.next = add i64 %i, {lanes}
  br label %lanes
rest:
  %j = phi i64 [ %whole, %lanes ], [ %j.next, %rest.body ]
  %rest.more = icmp slt i64 %j, %size
  br i1 %rest.more, label %rest.body, label %end
rest.body:
{rest}
  %j.next = add i64 %j, 1
  br label %rest
end:
  atomicrmw add ptr %finished, i64 1 release
  br label %next
done:
{epilogue}
  %finished.now = load atomic i64, ptr %finished acquire, align 8
  ret i64 %finished.now
}}
"""

# Numbers below 1.2e-38 are zero, as they are to XLA: each costs a hundred cycles otherwise, and moments
# that decay end there. Only x86 keeps this in a register of its own.
_FLUSH = """\
  %saved = alloca i32
  %flushing = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %saved)
  %control = load i32, ptr %saved
  %flush = or i32 %control, 32832
  store i32 %flush, ptr %flushing
  call void @llvm.x86.sse.ldmxcsr(ptr %flushing)"""
_RESTORE = "  call void @llvm.x86.sse.ldmxcsr(ptr %saved)"
_FLUSH_DECLARED = {
    "declare void @llvm.x86.sse.stmxcsr(ptr)",
    "declare void @llvm.x86.sse.ldmxcsr(ptr)",
}


def kernel_text(group: Group, x86: bool) -> str:
    names = [f"read{i}" for i in range(len(group.reads))]
    names += [f"write{i}" for i in range(len(group.writes))]
    dtypes = [dtype_of(x) for x in [*group.reads, *(atom for _, atom in group.writes)]]
    names += [f"scalar{i}" for i in range(len(group.scalars))]
    scalars, splats = Writer(1, "s"), Writer(LANES, "b")
    many, one = Writer(LANES, "v"), Writer(1, "x")
    loaded = {
        var: scalars.load(f"%scalar{i}", dtype_of(var)) for i, var in enumerate(group.scalars)
    }
    spread = {var: splats.splat(x, TYPES[dtype_of(var)].register) for var, x in loaded.items()}
    divisors = divisors_of(group)
    usual, inverse = _reciprocals(scalars, {var: loaded[x] for var, x in divisors.items()})
    wide = {var: splats.splat(x, "float") for var, x in inverse.items()}
    _body(group, many, "%i", spread, wide)
    _body(group, one, "%j", loaded, inverse, usual)
    declared = scalars.declared | many.declared | one.declared | (_FLUSH_DECLARED if x86 else set())
    return _TEXT.format(
        name=UPDATE_FUNCTION,
        declarations="\n".join(sorted(declared)),
        prologue=_FLUSH if x86 else "",
        epilogue=_RESTORE if x86 else "",
        finished=FINISHED,
        columns=len(names),
        lanes=LANES,
        pointers="\n".join(
            _pointer(name, column, dtype)
            for column, (name, dtype) in enumerate(itertools.zip_longest(names, dtypes))
        ),
        scalars="\n".join(scalars.lines + splats.lines),
        usual=usual,
        body="\n".join(many.lines),
        rest="\n".join(one.lines),
    )


def divisor_of(eqn: _jaxpr.Eqn) -> _jaxpr.Var | None:
    """What the equation divides by in float32, if it does."""
    divides = eqn.primitive.name == "div" and dtype_of(eqn.outvars[0]) == "float32"
    return None if not divides or _jaxpr.is_literal(eqn.invars[1]) else eqn.invars[1]


def divisors_of(group: Group) -> dict[_jaxpr.Var, _jaxpr.Var]:
    """Divisors of leaves that have one value: the scalar that each is, or is a broadcast of."""
    spread = {var: var for var in group.scalars}
    for eqn in group.eqns:
        if is_same(eqn) and not _jaxpr.is_literal(eqn.invars[0]) and eqn.invars[0] in spread:
            spread[eqn.outvars[0]] = spread[eqn.invars[0]]
    found = [divisor_of(eqn) for eqn in group.eqns]
    return {var: spread[var] for var in found if var in spread}


def _reciprocals(
    writer: Writer, divisors: dict[_jaxpr.Var, str]
) -> tuple[str, dict[_jaxpr.Var, str]]:
    """One over each scalar, and whether all reciprocals are normal numbers.

    XLA multiplies by the reciprocal, too: a division takes as long as ten other operations, and AdamW has two
    of them for its bias corrections. By a scalar that is too large or too small, elements are divided one by
    one.
    """
    usual, found = "true", {}
    low, high = (writer.constant(size, "float32") for size in USUAL)
    for var, x in divisors.items():
        found[var] = writer.let(f"fdiv float {writer.constant(1, 'float32')}, {x}")
        size = writer.intrinsic("fabs", "float", x)
        for compare in (f"oge float {size}, {low}", f"ole float {size}, {high}"):
            usual = writer.let(f"and i1 {usual}, {writer.let(f'fcmp {compare}')}")
    return usual, found


def _body(
    group: Group,
    writer: Writer,
    index: str,
    scalars: dict[_jaxpr.Var, str],
    reciprocals: dict[_jaxpr.Var, str],
    usual: str = "true",
) -> None:
    # All loads stand before all stores: leaves may change places.
    values = dict(scalars)

    def read(atom: _jaxpr.Atom) -> str:
        if _jaxpr.is_literal(atom):
            return writer.constant(_jaxpr.literal(atom), dtype_of(atom))
        return values[atom]

    def element(pointer: str, dtype: str) -> str:
        return writer.let(f"getelementptr {TYPES[dtype].memory}, ptr {pointer}, i64 {index}")

    for i, var in enumerate(group.reads):
        dtype = dtype_of(var)
        at = element(f"%read{i}", dtype)
        values[var] = writer.load(at, dtype)
        if writer.lanes > 1:
            writer.prefetch(at, _AHEAD)
    for eqn in group.eqns:
        args, divisor = [read(atom) for atom in eqn.invars], divisor_of(eqn)
        if divisor not in reciprocals:
            result = write(writer, eqn, args)
        else:
            result = writer.let(f"fmul {writer.many('float')} {args[0]}, {reciprocals[divisor]}")
            if usual != "true":
                result = writer.select(usual, result, write(writer, eqn, args), "float")
        values[eqn.outvars[0]] = result
    for i, (_, atom) in enumerate(group.writes):
        dtype = dtype_of(atom)
        writer.store(read(atom), element(f"%write{i}", dtype), dtype)


def _pointer(name: str, column: int, dtype: str | None) -> str:
    # A leaf's, at the block; a scalar, without a dtype here, is where it is for every block.
    lines = [
        f"  %{name}.at = getelementptr ptr, ptr %at, i64 {column}",
        f"  %{name}{'.leaf' if dtype else ''} = load ptr, ptr %{name}.at",
    ]
    if dtype:
        memory = TYPES[dtype].memory
        lines.append(f"  %{name} = getelementptr {memory}, ptr %{name}.leaf, i64 %first")
    return "\n".join(lines)
