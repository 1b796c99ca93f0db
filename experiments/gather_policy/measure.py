"""What each gather and reduce policy costs in traffic and in peak memory, compiled for H200s ahead of time.

python experiments/gather_policy/measure.py                     # 8 H200s, 4 microbatches; no GPU needed
python experiments/gather_policy/measure.py --microbatches 1
python experiments/gather_policy/measure.py --microbatches 1 --layers 8 --dim 4096 --policies 'per_pass$|pre'

Nothing runs. Prints a table in Markdown, writes <date>-<devices>-microbatches-<k>-<layers>x<dim>.json.
"""

import argparse
import dataclasses
import os
import re
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jzero
from experiments.shared import records
from experiments.shared.gpt import GPT, make_step
from jzero.preflight._schedule import hidden_share

# ---------------------------------------------------------------------------------------------
head_dim = 64
once, reduced_once = jzero.Comm(gather="once_per_step"), jzero.Microbatches(reduce="once")
policies: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3, per_pass": {"stage": 3},
    "stage 3, prefetch 1 GiB": {"stage": 3, "comm": jzero.Comm(prefetch_bytes=2**30)},
    "stage 3, prefetch 512 MiB": {"stage": 3, "comm": jzero.Comm(prefetch_bytes=2**29)},
    "stage 3, prefetch 16 MiB": {"stage": 3, "comm": jzero.Comm(prefetch_bytes=2**24)},
    "stage 3, prefetch 0": {"stage": 3, "comm": jzero.Comm(prefetch_bytes=0)},
    "stage 3, keep": {"stage": 3, "comm": jzero.Comm(gather="keep")},
    "stage 3, once_per_step": {"stage": 3, "comm": once},
    "stage 3, per_pass, reduce once": {"stage": 3, "microbatches": reduced_once},
    "stage 3, once_per_step, reduce once": {
        "stage": 3, "comm": once, "microbatches": reduced_once,
    },
}  # fmt: skip
# ---------------------------------------------------------------------------------------------

tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
HEADER = (
    "policy", "all-gather", "reduce-scatter", "at rest GiB", "temporary GiB", "peak GiB",
    "hidden in loops: gathers", "reductions", "hidden: gathers", "reductions", "exposed ms", "CPU s",
)  # fmt: skip


def measure(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    model = GPT(args.layers, args.dim, args.dim // head_dim)
    state, psi = jax.eval_shape(lambda: model.state(tx)), model.num_params
    rows = args.rows * args.microbatches * args.devices
    batch = jax.ShapeDtypeStruct((rows, model.context + 1), jnp.int32)
    step = make_step(model.loss, tx)
    microbatches = options.get("microbatches", jzero.Microbatches())
    microbatches = dataclasses.replace(microbatches, num=args.microbatches)
    train_step = jzero.shard_train_step(step, **options | {"microbatches": microbatches})
    start = time.process_time()
    topology = f"{args.devices // 8}x8"
    found = jzero.preflight(train_step, state, batch, target="h200", topology=topology)
    assert found.report is not None
    return {
        "psi": psi,
        "all_gather_psi": round(found.report.elements("all-gather") / psi, 3),
        "reduce_scatter_psi": round(found.report.elements("reduce-scatter") / psi, 3),
        "at_rest_bytes": found.at_rest,
        "temporary_bytes": found.temporary_bytes,
        "peak_bytes": found.peak_bytes,
        "gathers": collectives(found, "all-gather", args.microbatches),
        "reductions": collectives(found, "reduce-scatter", args.microbatches),
        "exposed_seconds": round(found.schedule.exposed_seconds, 5),
        # Of all threads: wall time depends on what else the machine does.
        "cpu_seconds": round(time.process_time() - start, 1),
    }


def collectives(found: jzero.Preflight, op: str, microbatches: int) -> dict[str, Any]:
    """Bytes of a kind, and the hidden share of its time: in layer loops, and of all."""
    in_loops = [c for c in found.schedule.collectives if c.op == op and c.times > microbatches]
    return {
        "bytes": found.nbytes(op),
        "in_loops": len(in_loops),
        "hidden_in_loops": hidden_share(in_loops),
        "hidden": found.hidden(op),
    }


def row(name: str, found: dict[str, Any]) -> str:
    kinds = found["gathers"], found["reductions"]
    sizes = [found[f"{what}_bytes"] / 2**30 for what in ("at_rest", "temporary", "peak")]
    cells = [
        name,
        f"{found['all_gather_psi']:.3g} Psi",
        f"{found['reduce_scatter_psi']:.3g} Psi",
        *(f"{size:.2f}" for size in sizes),
        *(records.percent(kind[what]) for what in ("hidden_in_loops", "hidden") for kind in kinds),
        f"{1000 * found['exposed_seconds']:.1f}",
        f"{found['cpu_seconds']}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, default=8, help="a multiple of 8")
    parser.add_argument("--microbatches", type=int, default=4, help="on each device")
    parser.add_argument("--rows", type=int, default=1, help="sequences per device and microbatch")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--policies", default="", help="a regular expression: only these")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    result: dict[str, Any] = {
        **records.versions("jax", "jaxlib", "optax"),
        "target": f"{args.devices} x H200, compiled ahead of time",
        "model": f"scanned + remat, {args.layers} layers, dim {args.dim}, "
        f"context {GPT.context}, bf16 compute",
        "rows_per_microbatch": args.rows,
        "microbatches": args.microbatches,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}")
    for name, options in policies.items():
        if re.search(args.policies, name):
            result[name] = measure(args, options)
            print(row(name, result[name]), flush=True)
    name = f"{args.devices}-microbatches-{args.microbatches}-{args.layers}x{args.dim}"
    path = args.out / f"{result['date']}-{name}.json"
    records.write(path, result)
    print(f"written: {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
