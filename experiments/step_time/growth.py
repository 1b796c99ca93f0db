"""How the time to trace and lower grows with the leaves of a state, through jzero and through `jax.jit`.

python experiments/step_time/growth.py                    # 1,000 to 10,000 leaves; ten minutes on two cores
python experiments/step_time/growth.py --leaves 1000 2500

Processor seconds of a process of its own for each number, with 8 virtual CPU devices. Prints a table in
Markdown and writes <date>-growth.json.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import optax

import jzero
from experiments.shared import records

# ---------------------------------------------------------------------------------------------
leaves = (1000, 2500, 5000, 10_000)
width = 64
ways = ("jax.jit", "jzero")
# ---------------------------------------------------------------------------------------------

tx = optax.adam(1e-3)


def loss_fn(params: list[jax.Array], x: jax.Array) -> jax.Array:
    """A chain of products, each with a matrix of its own."""
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def step(state: Any, x: jax.Array) -> Any:
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def lowered(way: str, num_leaves: int) -> dict[str, float]:
    """Seconds, and the memory of this process, to trace and lower the step once, at stage 3."""
    params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * (num_leaves // 3)
    state = params, jax.eval_shape(tx.init, params)
    x = jax.ShapeDtypeStruct((64, width), jnp.float32)
    mesh = jax.make_mesh((8,), ("data",))
    train_step = jax.jit(step) if way == "jax.jit" else jzero.shard_train_step(step, mesh=mesh)
    start = time.process_time()
    train_step.lower(state, x)
    seconds = time.process_time() - start
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": round(seconds, 2), "peak_rss_mib": round(kib / 1024)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--leaves", type=int, nargs="+", default=list(leaves))
    parser.add_argument("--one", nargs=2, metavar=("WAY", "LEAVES"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(lowered(args.one[0], int(args.one[1]))))
        return
    result: dict[str, Any] = {**records.environment("jax", "jaxlib", "optax"), "leaves": {}}
    result["jzero files"] = records.library()
    path = args.out / f"{result['date']}-growth.json"
    print(f"| leaves | {' s | '.join(ways)} s | ratio | {' MiB | '.join(ways)} MiB |")
    print("| --- " * (2 * len(ways) + 2) + "|")
    for num in args.leaves:
        found = {way: in_a_process(way, num) for way in ways}
        result["leaves"][num] = found
        seconds = [found[way]["seconds"] for way in ways]
        memory = [found[way]["peak_rss_mib"] for way in ways]
        cells = [
            *map("{:.1f}".format, seconds),
            f"{seconds[1] / seconds[0]:.2f}",
            *map(str, memory),
        ]
        print(f"| {num:,} | {' | '.join(cells)} |", flush=True)
        records.write(path, result)


def in_a_process(way: str, num_leaves: int) -> dict[str, float]:
    """As `lowered` says, in a process that has traced nothing before."""
    command = [sys.executable, __file__, "--one", way, str(num_leaves)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
