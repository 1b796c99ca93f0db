"""jzero's own update by both of its compilers, in all dtypes of gradients and copies, in turns.

python experiments/offload/host_update/compilers.py            # needs llvmlite, and no rivals
python experiments/offload/host_update/compilers.py --help

"cast" gradients are float32 before the optimizer sees them, as `jzero.master_weights` has it; with others it
computes as they are, so that every product with them is rounded to bfloat16.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import jax

import problem
from experiments.shared import records
from jzero.offload.kernels._host_update import HostUpdate
from jzero.offload.kernels._loops import BlockLoops, KernelLoops
from jzero.offload.kernels._xla_loops import XlaLoops
from problem import MOMENTS, Config, Memory

COMPILERS: dict[str, type[BlockLoops]] = {"LLVM": KernelLoops, "XLA": XlaLoops}
# Gradients, whether they are cast, copy.
TRAFFIC = [
    ("float32", True, False), ("float32", True, True), ("bfloat16", True, False), ("bfloat16", True, True),
    ("bfloat16", False, False), ("bfloat16", False, True),
]  # fmt: skip


def side(config: Config, cast: bool, by: type[BlockLoops], threads: int) -> Callable[[], None]:
    """One update, in memory of its own."""
    memory = Memory(config)
    update, state = problem.update_of(memory, cast)
    grads = jax.device_put(memory.leaves(memory.grads), may_alias=True)
    with jax.numpy_dtype_promotion("standard"):
        engine = HostUpdate(update, state, grads, threads=threads, by=by)
    copies = [] if memory.copy is None else memory.leaves(memory.copy)

    def run() -> None:
        engine.prepare([state], [grads])
        for _ in engine.run([copies]):
            pass

    return run


def shortest(sides: list[Callable[[], None]], rounds: int) -> list[float]:
    """Seconds of each, the shortest of some rounds in which all take turns, the second time of two."""
    found = [float("inf")] * len(sides)
    for number in range(rounds):
        for k in range(len(sides)):
            which = (number + k) % len(sides)
            sides[which]()
            start = time.perf_counter()
            sides[which]()
            found[which] = min(found[which], time.perf_counter() - start)
    return found


def rows(optimizer: str, args: Any, threads: int) -> list[str]:
    """Times of one optimizer, and how they compare with those of float32 gradients."""
    names = args.compilers
    kinds = [(*traffic, name) for traffic in TRAFFIC for name in names]
    sides = [
        side(Config(optimizer, args.millions, 1, grads, copy), cast, COMPILERS[name], threads)
        for grads, cast, copy, name in kinds
    ]
    seconds = dict(zip(kinds, shortest(sides, args.rounds), strict=True))
    lines = []
    for grads, cast, copy in TRAFFIC:
        times = [seconds[grads, cast, copy, name] for name in names]
        given = grads + (", cast" if cast and grads != "float32" else "")
        same, plain = (seconds["float32", True, with_copy, names[0]] for with_copy in (copy, False))
        cells = [f"{1e3 * t:.1f}" for t in times] + [f"{times[0] / t:.2f}" for t in (same, plain)]
        if len(names) > 1:
            cells.append(f"{times[-1] / times[0]:.1f}")
        what = f"| {optimizer} | {threads} | {given} | {'bfloat16' if copy else ''}"
        lines.append(f"{what} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizers", nargs="+", default=["AdamW", "Lion"], choices=list(MOMENTS))
    parser.add_argument("--compilers", nargs="+", default=list(COMPILERS), choices=list(COMPILERS))
    parser.add_argument("--millions", type=int, default=16)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    print(records.versions("jax", "jaxlib", "optax", "llvmlite", "numpy"), "load", os.getloadavg())
    heads = ["optimizer", "threads", "gradients", "copy", *(f"{x}, ms" for x in args.compilers)]
    heads += ["over float32", "over float32 without a copy"]
    if len(args.compilers) > 1:
        heads.append(f"{args.compilers[-1]} over {args.compilers[0]}")
    print("| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads))
    for optimizer in args.optimizers:
        for threads in args.threads:
            print("\n".join(rows(optimizer, args, threads)), flush=True)


if __name__ == "__main__":
    main()
