"""Saves and restores a state by jzero and by plain Orbax, in turns.

python experiments/checkpoint_speed/measure.py                                # about 3 minutes
python experiments/checkpoint_speed/measure.py --rounds 3 --params 8M

Both write to the same disk from 8 virtual CPU devices, with what Orbax does by default (OCDBT, zstd),
and wait until the checkpoint is complete. Every ratio is the median of the rounds' ratios. Writes
results/<date>.json.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import jzero

HERE = Path(__file__).parent
NUM_DEVICES = 8
TX = optax.adamw(1e-3)


def step_fn(state: Any, batch: jax.Array) -> Any:
    params, opt_state = state
    grads = jax.grad(lambda p: sum(jnp.mean((batch @ w) ** 2) for w in p.values()))(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def new_state(num_params: int, num_leaves: int) -> Any:
    """Trained weights are hardly compressible, so all leaves are random numbers."""
    rows = max(num_params // (num_leaves * 1024) // NUM_DEVICES, 1) * NUM_DEVICES
    keys = jax.random.split(jax.random.key(0), num_leaves)
    params = {f"w{i}": 0.02 * jax.random.normal(key, (rows, 1024)) for i, key in enumerate(keys)}
    opt_state = TX.init(params)
    return params, jax.tree.map(lambda x: x + 1e-3 * params["w0"] if x.ndim else x, opt_state)


class Jzero:
    def __init__(self, directory: Path, train_step: jzero.ShardedTrainStep):
        self.checkpointer = jzero.Checkpointer(directory, train_step)

    def save(self, state: Any) -> None:
        self.checkpointer.save(1, state)
        self.checkpointer.wait()

    def restore(self, state: Any) -> Any:
        return self.checkpointer.restore(state)

    def close(self) -> None:
        self.checkpointer.close()


class Orbax:
    def __init__(self, directory: Path, train_step: jzero.ShardedTrainStep):
        self.manager = ocp.CheckpointManager(directory)

    def save(self, state: Any) -> None:
        self.manager.save(1, args=ocp.args.StandardSave(state))
        self.manager.wait_until_finished()

    def restore(self, state: Any) -> Any:
        return self.manager.restore(1, args=ocp.args.StandardRestore(state))

    def close(self) -> None:
        self.manager.close()


def timed(what: Any, *args: Any) -> tuple[float, Any]:
    os.sync()  # What the other one wrote must not be written now.
    start = time.perf_counter()
    result = jax.block_until_ready(what(*args))
    return time.perf_counter() - start, result


def measure(num_params: int, num_leaves: int, rounds: int) -> dict[str, Any]:
    mesh = jax.make_mesh((NUM_DEVICES,), ("data",))
    train_step = jzero.shard_train_step(step_fn, mesh=mesh)
    state = train_step.init(new_state, num_params, num_leaves)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    seconds: dict[str, list[float]] = {}
    for round_ in range(rounds):
        for kind in (Jzero, Orbax)[:: 1 if round_ % 2 else -1]:
            with tempfile.TemporaryDirectory(dir=HERE) as directory:
                one = kind(Path(directory), train_step)
                save, _ = timed(one.save, state)
                restore, restored = timed(one.restore, abstract)
                one.close()
            del restored
            name = kind.__name__.lower()
            seconds.setdefault(f"{name} save", []).append(save)
            seconds.setdefault(f"{name} restore", []).append(restore)
    return {"bytes": nbytes, "leaves": len(jax.tree.leaves(state)), "seconds": seconds}


def summary(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Throughput of jzero as a share of Orbax's, and both in MB/s."""
    rows = []
    for what in ("save", "restore"):
        ours, theirs = (np.array(found["seconds"][f"{who} {what}"]) for who in ("jzero", "orbax"))
        low, ratio, high = np.percentile(theirs / ours, [25, 50, 75])
        rates = [found["bytes"] / 1e6 / float(np.median(times)) for times in (ours, theirs)]
        rows.append(
            dict(what=what, ratio=ratio, low=low, high=high, jzero=rates[0], orbax=rates[1])
        )
    return rows


def environment() -> dict[str, str]:
    packages = ["jax", "jaxlib", "orbax-checkpoint", "tensorstore", "numpy"]
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
        "cpus": str(os.cpu_count()),
        "load": " ".join(f"{x:.1f}" for x in os.getloadavg()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--params", default="64M", help="parameters; the state has 12 bytes for each"
    )
    parser.add_argument("--leaves", type=int, nargs="+", default=[8, 128], help="of the parameters")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    num_params = jzero.estimate(args.params, devices=1).num_params
    tables = []
    for num_leaves in args.leaves:
        found = measure(num_params, num_leaves, args.rounds)
        rows = summary(found)
        tables.append({**found, "summary": rows})
        print(f"{found['leaves']} leaves, {found['bytes'] / 1e6:.0f} MB")
        for row in rows:
            print(
                f"  {row['what']:<8} jzero {row['jzero']:.0f} MB/s, Orbax {row['orbax']:.0f} MB/s; "
                f"ratio {row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
            )
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{datetime.date.today()}.json"
    path.write_text(json.dumps({"environment": environment(), "tables": tables}, indent=1) + "\n")


if __name__ == "__main__":
    flag = f"--xla_force_host_platform_device_count={NUM_DEVICES}"
    order = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag} {order}"
    main()
