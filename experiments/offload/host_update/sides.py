"""The ways to do one update. Each is a function without arguments that does it once, in the same memory."""

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from jzero.offload.kernels._host_update import HostUpdate
from problem import RATE, Config, Memory, update_of

HERE = Path(__file__).parent
Side = Callable[[], object]
LIMIT, JZERO, XLA = "limit", "jzero", "optax on XLA:CPU"
DEEPSPEED, FUSED, FOREACH = "DeepSpeed", "torch fused", "torch foreach"


def sides_of(memory: Memory) -> dict[str, Side]:
    """Every side that has the optimizer."""
    made = {
        LIMIT: limit,
        JZERO: by_jzero,
        DEEPSPEED: by_deepspeed,
        FUSED: lambda memory: by_torch(memory, fused=True),
        FOREACH: lambda memory: by_torch(memory, fused=False),
        XLA: by_xla,
    }
    found = {name: make(memory) for name, make in made.items()}
    return {name: side for name, side in found.items() if side is not None}


def limit(memory: Memory) -> Side:
    """One pass over the memory, with no more arithmetic than an addition."""
    function = limit_library().limit
    arrays = [memory.params, *memory.moments, *[None] * (2 - len(memory.moments))]
    addresses = [None if x is None else ctypes.c_void_p(x.ctypes.data) for x in arrays]
    # Leaves beside each other are one: the limit has no overhead for their number.
    grads = ctypes.c_void_p(memory.grads.ctypes.data)
    copy = None if memory.copy is None else ctypes.c_void_p(memory.copy.ctypes.data)
    bits, leaves = 8 * memory.grads.dtype.itemsize, 1 + len(memory.moments)
    size = ctypes.c_int64(memory.size)
    return lambda: function(leaves, *addresses, grads, bits, copy, size)


def limit_library() -> ctypes.CDLL:
    path = Path(tempfile.mkdtemp()) / "limit.so"
    flags = "-O3 -march=native -mprefer-vector-width=512 -fopenmp -shared -fPIC".split()
    subprocess.run(["g++", *flags, HERE / "limit.cpp", "-o", path], check=True)
    return ctypes.CDLL(str(path))


def by_jzero(memory: Memory) -> Side:
    update, state = update_of(memory)
    grads = jax.device_put(memory.leaves(memory.grads), may_alias=True)
    engine = HostUpdate(update, state, grads)
    copies = [] if memory.copy is None else memory.leaves(memory.copy)

    def run() -> None:
        engine.prepare([state], [grads])
        for _ in engine.run([copies]):
            pass

    return run


def by_xla(memory: Memory) -> Side:
    """optax under `jax.jit`, state donated: in memory of its own, as XLA can donate no other."""
    update, leaves = update_of(memory)
    state = [jax.numpy.array(leaf, copy=True) for leaf in leaves]
    grads = jax.device_put(memory.leaves(memory.grads), may_alias=True)
    compiled = jax.jit(update, donate_argnums=0)

    def run() -> Any:
        nonlocal state
        state, copies = jax.block_until_ready(compiled(state, grads))
        return copies

    return run


def tensors(memory: Memory, array: np.ndarray) -> list[torch.Tensor]:
    """Leaves as PyTorch sees them, without a copy."""
    if array.dtype == np.float32:
        return [torch.from_numpy(leaf) for leaf in memory.leaves(array)]
    views = [torch.from_numpy(leaf.view(np.int16)) for leaf in memory.leaves(array)]
    return [view.view(torch.bfloat16) for view in views]


def by_torch(memory: Memory, fused: bool) -> Side | None:
    params = [torch.nn.Parameter(x) for x in tensors(memory, memory.params)]
    how: Any = {"fused": True} if fused else {"foreach": True}
    match memory.config.optimizer:
        case "AdamW":
            tx: Any = torch.optim.AdamW(params, RATE, weight_decay=1e-2, **how)
            names = ["exp_avg", "exp_avg_sq"]
        case "SGD + momentum":
            tx, names = torch.optim.SGD(params, RATE, momentum=0.9, **how), ["momentum_buffer"]
        case "RMSProp" if not fused:
            tx, names = torch.optim.RMSprop(params, RATE, alpha=0.99, **how), ["square_avg"]
        case _:
            return None
    return torch_side(memory, params, tx, names, torch.zeros(()))


def by_deepspeed(memory: Memory) -> Side | None:
    """DeepSpeed's CPU optimizers, as ZeRO-Offload calls them."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.lion import DeepSpeedCPULion

    params = [torch.nn.Parameter(x) for x in tensors(memory, memory.params)]
    match memory.config.optimizer:
        case "AdamW":
            tx: Any = DeepSpeedCPUAdam(params, RATE, weight_decay=1e-2)
            names = ["exp_avg", "exp_avg_sq"]
        case "Lion":
            tx, names = DeepSpeedCPULion(params, RATE, weight_decay=1e-2), ["exp_avg"]
        case _:
            return None
    return torch_side(memory, params, tx, names, 0)


def torch_side(
    memory: Memory, params: list[torch.nn.Parameter], tx: Any, names: list[str], step: Any
) -> Side:
    """Steps of an optimizer that reads float32 gradients: those in bfloat16 are converted before it, and its
    parameters to bfloat16 after it, by PyTorch's own kernels."""
    moments = [tensors(memory, array) for array in memory.moments]
    for i, param in enumerate(params):
        values = dict(zip(names, (leaves[i] for leaves in moments), strict=True))
        tx.state[param] = {
            "step": step.clone() if isinstance(step, torch.Tensor) else step
        } | values
    grads32 = tensors(memory, memory.grads32)
    for param, grad in zip(params, grads32, strict=True):
        param.grad = grad
    given = tensors(memory, memory.grads) if memory.config.grads == "bfloat16" else []
    copies = [] if memory.copy is None else tensors(memory, memory.copy)

    @torch.no_grad()
    def run() -> None:
        if given:
            torch._foreach_copy_(grads32, given)
        tx.step()
        if copies:
            torch._foreach_copy_(copies, params)

    return run


def check(config: Config) -> dict[str, float]:
    """How far the parameters of each side are from jzero's after one step from one state."""
    results = {}
    for name in [JZERO, DEEPSPEED, FUSED, FOREACH]:
        memory = Memory(config)
        side = sides_of(memory).get(name)
        if side is not None:
            side()
            results[name] = memory.params
    largest = np.abs(results[JZERO]).max()
    return {
        name: float(np.abs(params - results[JZERO]).max() / largest)
        for name, params in results.items()
    }
