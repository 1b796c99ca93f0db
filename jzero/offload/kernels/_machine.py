# SPDX-License-Identifier: Apache-2.0
"""The processors of this machine as a device of JAX, and LLVM IR as machine code."""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable
from typing import Any

import jax

from jzero._errors import MeshError, message

X86 = platform.machine() in ("x86_64", "AMD64")


def processor(platform: str = "cpu") -> jax.Device:
    """The host as a device of JAX; raises a `MeshError` if JAX runs without it."""
    try:
        return jax.local_devices(backend=platform)[0]
    except RuntimeError as error:
        raise MeshError(message(
            "HostUpdate", f"JAX has no {platform} backend", "XLA computes on the host what kernels do not.",
            "Set JAX_PLATFORMS=cuda,cpu, or do not set it.")) from error  # fmt: skip


@functools.cache
def llvm() -> Any:
    """The module `llvmlite.binding`, ready to compile; None where it is not installed."""
    try:
        import llvmlite.binding as binding
    except ImportError:
        return None
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding


@functools.cache
def compiled(text: str, name: str) -> int:
    """The address of the function `name` of LLVM IR; equal texts are compiled once."""
    binding = llvm()
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
    """The function `int64(address, int64)` there; it releases the interpreter's lock while it runs."""
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)(address)


# Machine code lives as long as its engine.
_engines: list[Any] = []
