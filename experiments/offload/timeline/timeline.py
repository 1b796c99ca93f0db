"""Draws what devices and host do in time, from traces that jax.profiler records: does the update overlap?

python experiments/offload/timeline/timeline.py                     # make offload-timeline
python experiments/offload/timeline/timeline.py --layers 24 --dim 2048 --rows 8        # on an accelerator

train_lm's model at stage 3 with bfloat16 parameters and masters: without offload, updated by the host, and
updated by the host a step later. Without an accelerator, on virtual CPU devices. Writes <date>.json and .png;
--traces keeps the traces, for Perfetto or XProf.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jzero
import lanes
import picture
from experiments.shared import training
from experiments.shared.devices import use_virtual_devices

HERE = Path(__file__).parent
common, train_linen = training.modules()

POLICIES = {
    "no offload": jzero.NoOffload(),
    "HostCPU()": jzero.HostCPU(),
    "HostCPU(delayed_update=True)": jzero.HostCPU(delayed_update=True, delay_after=0),
}
WARM_UP = 4  # steps that compile, and touch all memory


def record(policy: Any, args: argparse.Namespace, folder: Path) -> None:
    """Traces some steps of a training."""
    init = train_linen.make_init(argparse.Namespace(steps=100, seed=0, bfloat16_params=True))
    mesh = jax.make_mesh((args.devices,), ("data",), devices=jax.devices()[: args.devices])
    step = jzero.shard_train_step(train_linen.train_step, stage=3, memory=policy, mesh=mesh)
    shape = args.rows * args.devices, common.context + 1
    batch = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    state = step.init(init)
    for _ in range(WARM_UP):
        state, metrics = step(state, batch)
    jax.block_until_ready(metrics)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Calls of Python functions would be most of the trace.
    with jax.profiler.trace(str(folder), profiler_options=options):
        for i in range(args.steps):
            with jax.profiler.StepTraceAnnotation(lanes.STEP, step_num=i):
                state, metrics = step(state, batch)
                jax.block_until_ready(metrics)  # as a training that prints its loss
        jax.block_until_ready(jax.tree.leaves(state))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--devices", type=int, default=1)
    add("--layers", type=int, default=4)
    add("--dim", type=int, default=512)
    add("--rows", type=int, default=1, help="sequences of each device")
    add("--steps", type=int, default=4, help="that are traced")
    add("--traces", type=Path, help="folder to keep the traces in")
    add("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    use_virtual_devices(args.devices)
    vars(common).update(num_layers=args.layers, dim=args.dim, num_heads=max(args.dim // 64, 1))
    if jax.default_backend() != "cpu":
        common.compute_dtype = jnp.bfloat16
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, policy in POLICIES.items():
            folder = (args.traces or Path(temporary)) / name
            record(policy, args, folder)
            found[name] = lanes.read(folder)
            jax.clear_caches()
    settings = {name: vars(args)[name] for name in ("layers", "dim", "rows", "steps")}
    numbers = {name: lanes.summary(timeline) for name, timeline in found.items()}
    result = {**common.environment(args.devices), "settings": settings, "summary": numbers}
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / result["date"]
    where = result["devices"]
    if jax.default_backend() == "cpu":
        where = f"{args.devices} virtual device on the host's own {os.cpu_count()} cores"
    picture.draw(stem.with_suffix(".png"), found, where)
    with open(stem.with_suffix(".json"), "w") as file:
        json.dump(result | {"timelines": found}, file)
    print(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
