"""What an iteration costs the host: a step layer by layer, against the same step as one program.

python experiments/infinity/overhead.py                   # 1 and 8 virtual devices; ten minutes
python experiments/infinity/overhead.py --profile         # also which functions of the driver take the time

Both steps have their optimizer state updated by the host, so what differs are the programs of iterations.
Steps alternate, on a machine that may be busy, and the least times count. *wall*: of a step. *host*:
processor time of the thread that calls the step, which starts all programs. Prints a table in Markdown,
writes <date>-overhead.json.
"""

import argparse
import cProfile
import os
import pstats
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero
from experiments.shared import devices, records
from experiments.shared.gpt import GPT, make_step
from tiers import ALL, STATE, tiers

# ---------------------------------------------------------------------------------------------
least_layers = 4  # what both have around their loops cancels in the difference
model = GPT(layers=1, dim=32, heads=2, vocab=256, context=16, dtype=jnp.float32)
device_bytes = 2**20  # several layers: nothing waits for room
# ---------------------------------------------------------------------------------------------

tx = optax.adam(1e-3)


class Training:
    """A step of one tier on some devices, and its state."""

    def __init__(self, num_devices: int, layers: int, name: str):
        gpt = replace(model, layers=layers)
        mesh = jax.make_mesh((num_devices,), ("data",), devices=jax.devices()[:num_devices])
        self.step = jzero.shard_train_step(
            make_step(gpt.loss, tx), axes=jzero.Axes(min_shard_bytes=0), mesh=mesh,
            **tiers(device_bytes)[name],
        )  # fmt: skip
        self.state = self.step.init(lambda: gpt.state(tx, lambda shape: jnp.full(shape, 0.01)))
        shape = (num_devices, gpt.context + 1)
        tokens = np.random.default_rng(0).integers(0, gpt.vocab, shape, np.int32)
        spread = jax.sharding.NamedSharding(mesh, jax.P("data"))
        self.batch = jax.device_put(tokens, spread)
        for _ in range(2):
            self.run()

    def run(self) -> tuple[float, float]:
        """Milliseconds of a step: of the clock, and of the calling thread's processor time."""
        start, host = time.perf_counter(), time.thread_time()
        self.state, loss = self.step(self.state, self.batch)
        jax.block_until_ready(
            (loss, [x for x in jax.tree.leaves(self.state) if isinstance(x, jax.Array)])
        )
        return 1000 * (time.perf_counter() - start), 1000 * (time.thread_time() - host)


def measure(num_devices: int, layers: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of each step, and of an iteration: of those that a deeper model has more."""
    depths = (least_layers, layers)
    trainings = {(name, n): Training(num_devices, n, name) for name in (STATE, ALL) for n in depths}
    times: dict[tuple[str, int], list[tuple[float, float]]] = {key: [] for key in trainings}
    for _ in range(rounds):
        for key, training in trainings.items():
            times[key].append(training.run())
    found: dict[str, Any] = {}
    iterations = 2 * (depths[1] - depths[0])  # a forward and a backward one of each layer
    for i, what in enumerate(("wall", "host")):
        least = {key: min(each[i] for each in found) for key, found in times.items()}
        median = {
            key: float(np.median([each[i] for each in found])) for key, found in times.items()
        }
        found[f"{what}_ms"] = {f"{name}, {n} layers": round(x, 3) for (name, n), x in least.items()}
        for how, each in (("least", least), ("median", median)):
            more = {name: each[name, depths[1]] - each[name, depths[0]] for name in (STATE, ALL)}
            found[f"{what}_ms_per_iteration_{how}"] = round(
                (more[ALL] - more[STATE]) / iterations, 3
            )
    return found


def profile(num_devices: int, layers: int) -> None:
    """Prints where the calling thread is in steps layer by layer."""
    training = Training(num_devices, layers, ALL)
    profiler = cProfile.Profile(time.thread_time)
    profiler.enable()
    for _ in range(10):
        training.run()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(18)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=16, help="more than 4")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    devices.use_virtual_devices(max(args.devices))
    result: dict[str, Any] = {
        **records.environment("jax", "jaxlib", "optax"),
        "jzero files": records.library(),
        "settings": {
            "model": str(model),
            "layers": [least_layers, args.layers],
            "rounds": args.rounds,
        },
    }
    print("| devices | ms per iteration: host | wall | host, median | wall, median |")
    print("| --- | --- | --- | --- | --- |")
    for num in args.devices:
        found = result[f"{num} devices"] = measure(num, args.layers, args.rounds)
        cells = [
            f"{found[f'{what}_ms_per_iteration_{how}']:.2f}"
            for how in ("least", "median")
            for what in ("host", "wall")
        ]
        print(f"| {num} | {' | '.join(cells)} |", flush=True)
        if args.profile:
            profile(num, args.layers)
    path = args.out / f"{result['date']}-overhead.json"
    records.write(path, result)
    print(f"written: {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
