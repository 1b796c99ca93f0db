"""What activations on the host take off the devices: steps compiled for H200s ahead of time.

python experiments/activations/measure.py                       # 8 H200s, stage 3; no GPU needed
python experiments/activations/measure.py --only 'scanned, 16'  # some rows

Nothing runs. Prints a table in Markdown, writes <date>-<devices>-<rows>.json.
"""

import argparse
import os
import re
import time
from pathlib import Path
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

import jzero
from experiments.paper_tables import model
from experiments.shared import records
from experiments.shared.gpt import Constrain, make_step, unchanged

# ---------------------------------------------------------------------------------------------
dim, heads, vocab, context = 2048, 16, 32_000, 2048
rows_per_device = 8
link = (
    55e9  # bytes per second and direction between a device and its host, PCIe 5.0 x16 as measured
)
layouts = {  # how the layers are written, their number, what is computed again, the stage
    "scanned, 16 layers": (True, 16, "blocks", 3),
    "scanned, 32 layers": (True, 32, "blocks", 3),
    "scanned, 16 layers, products kept": (True, 16, "all but products", 3),
    "scanned, 16 layers, stage 2": (True, 16, "blocks", 2),
    "unrolled, 6 layers": (False, 6, "blocks", 3),
    "unrolled, 12 layers": (False, 12, "blocks", 3),
}
by_name = ("scanned, 16 layers", "unrolled, 6 layers")  # also with a policy of the step's own
# ---------------------------------------------------------------------------------------------

ON_HOST = "block inputs by name"
model.RECOMPUTE[ON_HOST] = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["block input"],
    offload_src="device",
    offload_dst="pinned_host",
)
HEADER = (
    "layers", "activations wait", "temporary MiB", "peak MiB", "on the host MiB", "link ms, each way",
    "products ms", "CPU s",
)  # fmt: skip


class GPT(model.GPT):
    """With a name for what enters a block, which a policy of the step's own may ask for."""

    def block(
        self,
        x: jax.Array,
        weights: Any,
        constrain: Constrain = unchanged,
        gathered: Any = unchanged,
    ) -> jax.Array:
        return super().block(checkpoint_name(x, "block input"), weights, constrain, gathered)


def measure(layout: tuple[bool, int, str, int], where: str, devices: int) -> dict[str, Any]:
    scan, layers, recompute, stage = layout
    gpt = GPT(
        layers, dim, heads, vocab=vocab, context=context, attention="in parts", scan=scan,
        recompute=ON_HOST if where == "host, by name" else recompute,
    )  # fmt: skip
    policy = jzero.PinnedHost() if where == "host" else jzero.NoOffload()
    step = make_step(gpt.loss, model.tx)
    train_step = jzero.shard_train_step(step, stage=stage, memory=jzero.Memory(activations=policy))
    state, batch = gpt.abstract_state(), gpt.batch(rows_per_device * devices)
    start = time.process_time()
    topology = f"{devices // 8}x8"
    found = jzero.preflight(train_step, state, batch, target="h200", topology=topology)
    assert found.report is not None
    moved = found.report.plan.activations
    return {
        "parameters": gpt.num_params,
        "temporary_bytes": found.temporary_bytes,
        "peak_bytes": found.peak_bytes,
        "host_bytes": None if moved is None else sum(r.nbytes for r in moved),
        "product_seconds": round(found.schedule.product_seconds, 5),
        "cpu_seconds": round(time.process_time() - start, 1),
    }


def row(name: str, where: str, found: dict[str, Any]) -> str:
    host = found["host_bytes"]
    on_host = ("-", "-") if host is None else (f"{host / 2**20:.0f}", f"{1000 * host / link:.1f}")
    cells = [
        name,
        where,
        f"{found['temporary_bytes'] / 2**20:.0f}",
        f"{found['peak_bytes'] / 2**20:.0f}",
        *on_host,
        f"{1000 * found['product_seconds']:.0f}",
        f"{found['cpu_seconds']}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, default=8, help="a multiple of 8")
    parser.add_argument("--only", default="", help="a regular expression: only these layouts")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    result: dict[str, Any] = {
        **records.versions("jax", "jaxlib", "optax"),
        "target": f"{args.devices} x H200, compiled ahead of time",
        "model": f"GPT of dim {dim}, {heads} heads, vocabulary {vocab}, bf16 with float32 masters, AdamW; "
        f"{rows_per_device} sequences of {context} tokens on each device",
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}")
    for name, layout in layouts.items():
        if not re.search(args.only, name):
            continue
        for where in ("device", "host", "host, by name"):
            if where == "host, by name" and name not in by_name:
                continue
            found = result[f"{name}; {where}"] = measure(layout, where, args.devices)
            print(row(name, where, found), flush=True)
    path = args.out / f"{result['date']}-{args.devices}.json"
    records.write(path, result)
    print(f"written: {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
