"""The zoo compiled ahead of time for H200s: jzero, and its rivals, one program after the other.

python experiments/rivals/measure.py                     # 64 devices, XLA's defaults; no GPU is needed
python experiments/rivals/measure.py --devices 8 512
python experiments/rivals/measure.py --flags nvidia --rows T5 MoE --rivals jzero expert

Nothing runs. Writes a line of results/<date>.jsonl for every program, and leaves out those that are there:
the same text, flags and versions. What XLA made of a program is also kept in .cache/rivals, so that another
`jzero.preflight` reads it without compiling.
"""

import argparse
import gzip
import hashlib
import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax

import jzero
from experiments.rivals import held, zoo
from experiments.shared import records

CACHE = records.ROOT / ".cache" / "rivals"
RESULTS = Path(__file__).parent / "results"
OPS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_GIB = 2**30
# NVIDIA's page "Tips for High-Performance LLMs with JAX and XLA": latency hiding, collectives of FSDP, loops.
# Its xla_gpu_enable_pipelined_* are no options of jaxlib 0.12.0.1.
FLAGS: dict[str, dict[str, Any]] = {
    "default": {},
    "overlap 4": {"xla_gpu_experimental_parallel_collective_overlap_limit": 4},
    "nvidia": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_all_reduce_combine_threshold_bytes": _GIB,
        "xla_gpu_all_gather_combine_threshold_bytes": _GIB,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": _GIB,
        "xla_gpu_enable_all_gather_combine_by_dim": False,
        "xla_gpu_enable_reduce_scatter_combine_by_dim": False,
        "xla_gpu_enable_while_loop_double_buffering": True,
    },
}


def processor_seconds() -> float:
    """Of this process and of those that it started (ptxas)."""
    return sum(os.times()[:4])


class Kept(jax.stages.Lowered):
    """A lowered program that is compiled once: what `preflight` reads of it is in a file afterwards."""

    def __init__(self, lowered: jax.stages.Lowered, flags: dict[str, Any]):
        for name in jax.stages.Lowered.__slots__:
            setattr(self, name, getattr(lowered, name))
        says = [
            lowered.as_text(),
            flags,
            records.versions("jaxlib", "jax-cuda12-plugin") | {"date": ""},
        ]
        self.name = hashlib.sha256(json.dumps(says).encode()).hexdigest()[:16]
        self.path = CACHE / f"{self.name}.json.gz"

    def compile(self, compiler_options: Any = None, **_: Any) -> Any:
        if not self.path.exists():
            with tempfile.TemporaryDirectory() as dump:
                options = compiler_options | held.OPTIONS | {"xla_dump_to": dump}
                start = processor_seconds()
                compiled = super().compile(compiler_options=options)
                seconds = processor_seconds() - start
                memory: Any = compiled.memory_analysis()
                sizes = {name: getattr(memory, name) for name in dir(memory) if "bytes" in name}
                kept = {
                    "text": compiled.as_text(), "memory": sizes, "seconds": seconds,
                    "held": held.held_at_peak(Path(dump)),
                }  # fmt: skip
            CACHE.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_suffix(".part")
            partial.write_bytes(gzip.compress(json.dumps(kept).encode()))
            partial.rename(self.path)
        kept = self.read()
        memory = SimpleNamespace(**kept["memory"])
        return SimpleNamespace(as_text=lambda: kept["text"], memory_analysis=lambda: memory)

    def read(self) -> Any:
        return json.loads(gzip.decompress(self.path.read_bytes()))


def numbers(found: jzero.Preflight) -> dict[str, Any]:
    moved = {op: found.nbytes(op) for op in OPS if found.nbytes(op)}
    each = found.schedule.collectives
    schedule = found.schedule
    return {
        "peak_bytes": found.peak_bytes,
        "argument_bytes": found.argument_bytes,
        "moved_bytes": moved,
        "hidden": found.hidden(),
        "exposed_seconds": round(schedule.exposed_seconds, 5),
        "step_seconds": round(schedule.step_seconds, 5),
        "product_seconds": round(schedule.product_seconds, 5),
        "times": {op: sum(c.times for c in each if c.op == op) for op in moved},
        "seconds": {
            op: round(sum(c.times * c.seconds for c in each if c.op == op), 5) for op in moved
        },
        "unknown_loops": schedule.unknown_loops,
    }


def measure(
    rival: str, row: zoo.Row, devices: int, flags: str, known: set[Any]
) -> dict[str, Any] | None:
    """One program, traced, lowered and compiled; None if it is known. Seconds are of processors."""
    where: dict[str, Any] = {"target": "h200", "topology": f"{devices // 8}x8"}
    model = row.small if devices == 8 else row.model
    given = zoo.rival(rival, row, model, jzero.target_mesh(*where.values()))
    state, batch = jax.eval_shape(lambda x: x, (given.state, given.batch))
    jax.eval_shape(model.step, state, batch)  # so that what JAX caches counts for nobody
    start = processor_seconds()
    lowered = given.step.lower(given.state, given.batch)
    seconds = processor_seconds() - start
    program = Kept(lowered, FLAGS[flags])
    if program.name in known:
        return None
    found = jzero.preflight(program, **where, compiler_options=FLAGS[flags])
    kept = program.read()
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state["params"])),
        **numbers(found),
        "lower_seconds": round(seconds, 1),
        "compile_seconds": round(kept["seconds"], 1),
        "held": kept["held"],
        "program": program.name,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[64])
    parser.add_argument("--rows", nargs="+", choices=zoo.ROWS, default=list(zoo.ROWS))
    parser.add_argument("--rivals", nargs="+", choices=zoo.RIVALS, default=list(zoo.RIVALS))
    parser.add_argument("--flags", nargs="+", choices=FLAGS, default=["default"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    about = {**records.versions("jax", "jaxlib", "flax", "optax"), "target": "H200"}
    about["preflight"] = records.git("rev-parse", "--short", "HEAD:jzero/preflight")
    path = args.out / f"{about['date']}.jsonl"
    for devices, name in [(devices, name) for devices in args.devices for name in args.rows]:
        row = zoo.ROWS[name]
        if devices != 64 and row.small is None:
            continue
        for flags, rival in [(flags, rival) for flags in args.flags for rival in args.rivals]:
            cell = {"model": name, "devices": devices, "flags": flags, "rival": rival}
            same = [x for x in records.read_lines(path) if cell.items() <= x.items()]
            # The last one counts (report.py).
            known = {x["program"] for x in same[-1:] if x["preflight"] == about["preflight"]}
            result = measure(rival, row, devices, flags, known)
            if result is not None:
                records.append(path, cell | result | about)
                keys = (
                    "peak_bytes",
                    "moved_bytes",
                    "exposed_seconds",
                    "step_seconds",
                    "compile_seconds",
                )
                print(*cell.values(), *(result[key] for key in keys), sep="  ", flush=True)


if __name__ == "__main__":
    main()
