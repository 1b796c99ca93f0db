# SPDX-License-Identifier: Apache-2.0
"""What compiles the loops of a host's update: LLVM where llvmlite is installed, XLA:CPU elsewhere.

Both take the same groups of equations and the same tables of addresses, and make the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jzero.offload.kernels import _machine
from jzero.offload.kernels._code_paths import Group
from jzero.offload.kernels._kernel import NAME
from jzero.offload.kernels._loops import BlockLoops, KernelLoops
from jzero.offload.kernels._xla_loops import XlaLoops, XlaProgram


class Compiler(NamedTuple):
    """One of the two.

    Attributes:
      program: `(LLVM IR, dtypes of operands, group) -> what a BlockLoop runs`; equal ones are compiled once.
      loops: what runs them.
    """

    program: Callable[[str, tuple[str, ...], Group], Any]
    loops: Callable[..., BlockLoops]


def _xla_program(text: str, dtypes: tuple[str, ...], group: Group) -> XlaProgram:
    key = (text, dtypes)
    if key not in _programs:
        _programs[key] = XlaProgram(group, _machine.processor())
    return _programs[key]


# As long as machine code of LLVM's.
_programs: dict[tuple[str, tuple[str, ...]], XlaProgram] = {}

LLVM = Compiler(lambda text, dtypes, group: _machine.compiled(text, NAME), KernelLoops)
XLA = Compiler(_xla_program, XlaLoops)


def compiler() -> Compiler:
    """LLVM, if it is there."""
    return XLA if _machine.llvm() is None else LLVM
