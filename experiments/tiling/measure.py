"""What tiles of matrices save in memory and cost in traffic and time, compiled for H200s ahead of time.

python experiments/tiling/measure.py                                    # 3.4B on 64 H200s; no GPU needed
python experiments/tiling/measure.py --recompute nothing
python experiments/tiling/measure.py --layers 127 --dim 25600 --heads 200 --devices 1024    # 1T
python experiments/tiling/measure.py --attention 'in parts' --layers 127 ...                # as above
python experiments/tiling/measure.py --activations host --tile-mib 64 --layers 127 ...      # as above

Nothing runs. Prints a table in Markdown, writes <date>-<layers>x<dim>-<devices>-<recompute>-<attention>.json
(with `-on-the-host` where activations are).
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jzero
from experiments.paper_tables.model import GPT, RECOMPUTE, tx
from experiments.shared import records
from experiments.shared.gpt import make_step

# XLA has a pass of its own that recomputes where a program exceeds the target's memory. Without it the bytes
# are those of the step as it is written (as in experiments/paper_tables).
COMPILER_OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}
TILE_MIB = (None, 256, 64, 16)
GB = 1e9
HEADER = (
    "tile_bytes", "at rest GB", "within a step GB", "peak GB", "gathered GB", "reduced GB",
    "largest gathered MB", "largest reduced MB", "hidden: gathered", "reduced", "products s", "exposed s",
)  # fmt: skip


def measure(model: GPT, devices: int, tile_bytes: int | None, activations: str) -> dict[str, Any]:
    """Bytes on each device, bytes that move, and what of their time hides, of one compiled program."""
    policy = jzero.PinnedHost() if activations == "host" else jzero.NoOffload()
    train_step = jzero.shard_train_step(
        make_step(model.loss, tx),
        memory=jzero.Memory(activations=policy),
        comm=jzero.Comm(tile_bytes=tile_bytes),
    )
    start = time.process_time()
    found = jzero.preflight(
        train_step, model.abstract_state(), model.batch(devices), target="h200",
        topology=f"{devices // 8}x8", compiler_options=COMPILER_OPTIONS,
    )  # fmt: skip
    assert found.report is not None
    return {
        "tile_bytes": tile_bytes,
        "at_rest": found.at_rest,
        "within": found.peak_bytes - found.argument_bytes,
        "peak": found.peak_bytes,
        "on_host": sum(r.nbytes for r in found.report.plan.activations or ()),
        **{op: moved(found, op) for op in ("all-gather", "reduce-scatter")},
        "untiled": [f"{each.leaf}, {each.what}: {each.why}" for each in found.report.untiled],
        "product_seconds": round(found.schedule.product_seconds, 5),
        "exposed_seconds": round(found.schedule.exposed_seconds, 5),
        "cpu_seconds": round(time.process_time() - start, 1),
    }


def moved(found: jzero.Preflight, op: str) -> dict[str, Any]:
    """Of the compiled program's collectives of a kind: bytes, hidden share of their time, and the largest."""
    largest = max(c.whole_bytes for c in found.schedule.collectives if c.op == op)
    return {
        "bytes": found.nbytes(op),
        "hidden": found.hidden(op),
        "largest": largest,
    }


def row(found: dict[str, Any]) -> str:
    gathers, reductions = found["all-gather"], found["reduce-scatter"]
    tile = found["tile_bytes"]
    cells = [
        "none" if tile is None else f"{tile / 2**20:g} MiB",
        *(f"{found[what] / GB:.2f}" for what in ("at_rest", "within", "peak")),
        *(f"{each['bytes'] / GB:.1f}" for each in (gathers, reductions)),
        *(f"{each['largest'] / 1e6:.0f}" for each in (gathers, reductions)),
        *(f"{100 * each['hidden']:.1f} %" for each in (gathers, reductions)),
        f"{found['product_seconds']:.3f}",
        f"{found['exposed_seconds']:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--devices", type=int, default=64, help="a multiple of 8")
    parser.add_argument(
        "--recompute", choices=RECOMPUTE, default="blocks", help="in the backward pass"
    )
    parser.add_argument("--attention", choices=("whole", "in parts"), default="whole")
    parser.add_argument("--activations", choices=("device", "host"), default="device")
    parser.add_argument("--tile-mib", type=int, nargs="+", help="of these sizes only")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    model = GPT(
        args.layers, args.dim, args.heads, recompute=args.recompute, attention=args.attention
    )
    result: dict[str, Any] = {
        **records.versions("jax", "jaxlib", "optax"),
        "target": f"{args.devices} x H200, compiled ahead of time",
        "model": str(model),
        "parameters": model.num_params,
        "programs": [],
    }
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}")
    for mib in args.tile_mib or TILE_MIB:
        found = measure(model, args.devices, mib and mib * 2**20, args.activations)
        result["programs"].append(found)
        print(row(found), flush=True)
    size = f"{args.layers}x{args.dim}-{args.devices}"
    name = f"{result['date']}-{size}-{args.recompute}-{args.attention}".replace(" ", "-")
    name += "-on-the-host" * (args.activations == "host")
    args.out.mkdir(exist_ok=True)
    (args.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
