"""How long does a step wait for copies from the host, where iterations of layers copy in their own programs?

python experiments/offload/beside_copies/measure.py          # compiled for 8 H200s: no GPU is needed; minutes
python experiments/offload/beside_copies/measure.py --apart  # also with each fetch as a program of its own
python experiments/offload/beside_copies/measure.py --apart --layers 16

Layers of Llama in a loop, parameters in pinned memory. Nothing runs: times are those that `jzero.preflight`
models of the compiled programs.
"""

import argparse
from pathlib import Path
from typing import Any
from unittest import mock

import jax

import jzero
from experiments.rivals.models.llama import Llama
from experiments.shared import records
from jzero.offload._layer_schedule import LayerSchedule

OPTIMIZER: dict[str, Any] = {"HostCPU": jzero.HostCPU(), "PinnedHost": jzero.PinnedHost()}
ROWS = 4  # of 1024 tokens, on each device


def modelled(name: str, layers: int) -> dict[str, float]:
    model = Llama(layers=layers, dim=2048, heads=16, kv_heads=4, hidden=7168, vocab=32_000)
    params = jzero.PinnedHost(device_bytes=2**31)
    memory = jzero.Memory(params=params, optimizer=OPTIMIZER[name])
    train_step = jzero.shard_train_step(model.step, memory=memory)
    state = jax.eval_shape(model.init, jax.random.key(0))
    found = jzero.preflight(train_step, state, model.batch(8 * ROWS), target="h200", topology="1x8")
    schedule = found.schedule
    return {
        "step": 1e3 * schedule.step_seconds,
        "exposed": 1e3 * schedule.exposed_copy_seconds,
        "from host": 1e3 * schedule.from_host_seconds,
        "to host": 1e3 * schedule.to_host_seconds,
        "peak MiB": found.peak_bytes / 2**20,
    }


def apart() -> Any:
    """No iteration has room for what it would fetch for another one."""
    return mock.patch.object(LayerSchedule, "_fetches_within_programs", return_value=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--apart", action="store_true", help="also with fetches as programs of their own"
    )
    parser.add_argument("--out", type=Path, help="write a record here")
    args = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}
    print("| optimizer state | fetches | step, ms | waits for copies, ms | peak, MiB |")
    print("| --- | --- | ---: | ---: | ---: |")
    for name in OPTIMIZER:
        if args.apart:
            with apart():
                rows[f"{name} | by themselves"] = modelled(name, args.layers)
        rows[f"{name} | in iterations"] = modelled(name, args.layers)
        for key, row in rows.items():
            if key.startswith(name):
                numbers = f"{row['step']:.1f} | {row['exposed']:.2f} | {row['peak MiB']:.0f}"
                print(f"| {key} | {numbers} |", flush=True)
    if args.out:
        found = {"layers": args.layers, "library": records.library(), "rows": rows}
        records.write(args.out, {**records.versions("jax", "jaxlib"), **found})


if __name__ == "__main__":
    main()
