"""Whether codes pay, by preflight's verdict: wires compared over 12.5 to 400 Gb/s for each GPU.

python experiments/wire/verdict.py              # 0.98B on 2 x 8 H200s; about ten minutes, no GPU needed
python experiments/wire/verdict.py --show       # what the last run has written

Nothing runs. The step is compiled ahead of time with exact wires and with each format of codes. Times are
those of collectives that no matrix product hides, by the compiled schedules, and of what codes take on the
device, by a model: `jzero.preflight(..., search_wire=True)`. Prints its text, writes <date>-verdict.json.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jzero
from experiments.shared import records
from experiments.shared.gpt import GPT, make_step

AXES = {"node": 2, "local": 8}


def compiled(model: GPT, rows: int, network: str) -> jzero.Preflight:
    """What preflight says of the step, with so many sequences for each device."""
    tx = jzero.master_weights(optax.adamw(1e-4))
    state = jax.eval_shape(lambda: model.state(tx, lambda shape: jnp.zeros(shape, jnp.bfloat16)))
    tokens = jax.ShapeDtypeStruct((16 * rows, model.context + 1), jnp.int32)
    train_step = jzero.shard_train_step(make_step(model.loss, tx))
    return jzero.preflight(
        train_step, state, tokens, target="h200", topology="2x8", axes=AXES,
        bandwidth={"node": network}, search_wire=True,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--show", action="store_true", help="what the last run has written")
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="for each device")
    parser.add_argument("--network", default="100Gb/s", help="of each device, between nodes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.show:
        found = records.latest(args.out, "verdict")
        for rows, run in found["runs"].items():
            print(f"\n{found['parameters']:,} parameters, {rows} sequences for each device\n")
            print(run["text"])
        return
    model = GPT(layers=args.layers, dim=args.dim, heads=args.dim // 128, scan=True, remat=True)
    result: dict[str, Any] = {
        **records.environment("jax", "jaxlib", "optax"),
        "jzero files": records.library(),
        "parameters": model.num_params,
        "runs": {},
    }
    path = args.out / f"{result['date']}-verdict.json"
    for rows in args.rows:
        found = compiled(model, rows, args.network)
        assert found.wires is not None
        print(found.wires, flush=True)
        result["runs"][rows] = {
            **found.wires.to_dict(),
            "product_seconds": found.schedule.product_seconds,
            "exact_kernel_bytes": found.schedule.kernel_bytes,
            "text": str(found.wires),
        }
        records.write(path, result)
    print(f"written: {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
