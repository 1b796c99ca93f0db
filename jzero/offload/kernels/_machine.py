# SPDX-License-Identifier: Apache-2.0
"""LLVM IR to machine code in this process, with llvmlite."""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable
from typing import Any

from jzero._errors import message

X86 = platform.machine() in ("x86_64", "AMD64")


def llvm(who: str) -> Any:
    """The module `llvmlite.binding`, ready to compile.

    Raises:
      ImportError: llvmlite is not installed.
    """
    try:
        import llvmlite.binding
    except ImportError:
        raise ImportError(message(
            who, "llvmlite is not installed", "It compiles the update of state that rests on the host.",
            "Install it with pip install 'jzero[offload]'.")) from None  # fmt: skip
    return llvmlite.binding


@functools.cache
def compiled(text: str, name: str, who: str) -> int:
    """The address of the function `name` of LLVM IR; equal texts are compiled once."""
    binding = llvm(who)
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    module = binding.parse_assembly(text)
    module.verify()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        opt=3,
        jit=True,
    )
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _engines.append(engine)
    return int(engine.get_function_address(name))


def callable_at(address: int) -> Callable[[int, int], int]:
    """The function `int64(address, int64)` there. It lets go of the interpreter's lock while it runs."""
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)(address)


# Machine code lives as long as its engine.
_engines: list[Any] = []
