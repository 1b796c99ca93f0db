"""Saves and restores a state by jzero and by plain Orbax, in turns.

python experiments/checkpoint_speed/measure.py                                # about 10 minutes
python experiments/checkpoint_speed/measure.py --rounds 3 --params 8M
python experiments/checkpoint_speed/measure.py --bucket                       # to an S3 server, too

Both write to the same disk from 8 virtual CPU devices, with what Orbax does by default (OCDBT, zstd), and
save until the checkpoint is complete. jzero syncs every file before it counts; Orbax does not, so its time
is also taken with a sync of the same files after it. Every ratio is the median of the rounds' ratios.
The S3 server is moto's, on this machine and its processors: how long a bucket's save takes is the server's
time for the most part; how long it blocks the training is jzero's.
Writes results/<date>.json.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import jzero
from experiments.shared import records
from experiments.shared.devices import use_virtual_devices
from jzero.checkpoint._bucket import Bucket

HERE = Path(__file__).parent
NUM_DEVICES = 8
TX = optax.adamw(1e-3)
PRIME = 5_000_011  # elements of a vector of 20 MB that nothing divides
KEPT = "blocks the training"
SAVED = "save"
SYNCED = "save, synced"
RESTORED = "restore"


def step_fn(state: Any, batch: jax.Array) -> Any:
    params, opt_state = state
    grads = jax.grad(lambda p: sum(jnp.mean(w * batch.sum()) ** 2 for w in p.values()))(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def new_state(num_params: int, num_leaves: int) -> Any:
    """Trained weights are hardly compressible, so all leaves are random numbers."""
    rows = max(num_params // (num_leaves * 1024) // NUM_DEVICES, 1) * NUM_DEVICES
    return with_moments({f"w{i}": (rows, 1024) for i in range(num_leaves)})


def vector_state() -> Any:
    return with_moments({"w": (PRIME,)})


def with_moments(shapes: dict[str, tuple[int, ...]]) -> Any:
    """In NumPy: nothing has to be compiled for it."""
    rng = np.random.default_rng(0)

    def values() -> dict[str, np.ndarray]:
        return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}

    whole = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    adam, *rest = jax.eval_shape(TX.init, whole)
    return values(), (adam._replace(count=np.int32(1), mu=values(), nu=values()), *rest)


class Jzero:
    def __init__(self, directory: Path, train_step: jzero.ShardedStep):
        self.directory = directory
        self.checkpointer = jzero.Checkpointer(directory, train_step)
        self.checkpointer.latest_step()  # as every training asks before its first step

    def save(self, state: Any) -> None:
        self.checkpointer.save(1, state)

    def wait(self) -> None:
        self.checkpointer.wait()

    def sync(self) -> None:
        """It has been done."""

    def restore(self, state: Any) -> Any:
        return self.checkpointer.restore(state)

    def close(self) -> None:
        self.checkpointer.close()


class InBucket(Jzero):
    def __init__(self, directory: Path, train_step: jzero.ShardedStep):
        self.directory = directory
        self.bucket = Bucket("s3", os.environ["BUCKET"], directory.name)
        self.checkpointer = jzero.Checkpointer(str(self.bucket), train_step)
        self.checkpointer.latest_step()

    def close(self) -> None:
        super().close()
        self.bucket.remove(self.bucket.names())


class Orbax:
    def __init__(self, directory: Path, train_step: jzero.ShardedStep):
        self.directory = directory
        self.manager = ocp.CheckpointManager(directory)

    def save(self, state: Any) -> None:
        self.manager.save(1, args=ocp.args.StandardSave(state))

    def wait(self) -> None:
        self.manager.wait_until_finished()

    def sync(self) -> None:
        for folder, _, names in os.walk(self.directory, topdown=False):
            for path in [*(Path(folder, name) for name in names), Path(folder)]:
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)

    def restore(self, state: Any) -> Any:
        return self.manager.restore(1, args=ocp.args.StandardRestore(state))

    def close(self) -> None:
        self.manager.close()


def one_round(kind: Any, train_step: Any, state: Any, abstract: Any) -> dict[str, float]:
    """Seconds of each thing."""
    with tempfile.TemporaryDirectory(dir=HERE) as directory:
        one = kind(Path(directory), train_step)
        os.sync()  # What the other one wrote must not be written now.
        times = [time.perf_counter()]
        for what in (lambda: one.save(state), one.wait, one.sync):
            what()
            times.append(time.perf_counter())
        start = time.perf_counter()
        jax.block_until_ready(one.restore(abstract))
        restored = time.perf_counter() - start
        one.close()
    blocked, saved, synced = (at - times[0] for at in times[1:])
    return {KEPT: blocked, SAVED: saved, SYNCED: synced, RESTORED: restored}


def measure(
    init: Callable[..., Any], args: tuple[Any, ...], rounds: int, bucket: bool
) -> dict[str, Any]:
    mesh = jax.make_mesh((NUM_DEVICES,), ("data",))
    train_step = jzero.shard_train_step(step_fn, mesh=mesh)
    state = train_step.shard(init(*args))
    leaves = jax.tree.leaves(state)
    whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    # A padded leaf is jzero's own: to Orbax goes what is at rest.
    tree = jax.tree.structure(state)
    plain = jax.tree.unflatten(tree, [getattr(leaf, "storage", leaf) for leaf in leaves])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), plain
    )
    kinds: list[tuple[str, Any, Any, Any]] = [
        ("jzero", Jzero, state, whole), ("orbax", Orbax, plain, abstract),
        *[("bucket", InBucket, state, whole)] * bucket,
    ]  # fmt: skip
    found: dict[str, dict[str, list[float]]] = {name: {} for name, *_ in kinds}
    for round_ in range(rounds):
        for name, kind, *given in kinds[:: 1 if round_ % 2 else -1]:
            for what, seconds in one_round(kind, train_step, *given).items():
                found[name].setdefault(what, []).append(seconds)
    return {"bytes": sum(leaf.nbytes for leaf in leaves), "leaves": len(leaves), "seconds": found}


def summary(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Seconds of both, and how many times as long Orbax takes."""
    rows = []
    for what in (KEPT, SAVED, SYNCED, RESTORED):
        ours, theirs = (np.array(found["seconds"][who][what]) for who in ("jzero", "orbax"))
        low, ratio, high = np.percentile(theirs / ours, [25, 50, 75])
        seconds = [float(np.median(times)) for times in (ours, theirs)]
        rows.append(
            dict(what=what, ratio=ratio, low=low, high=high, jzero=seconds[0], orbax=seconds[1])
        )
        if "bucket" in found["seconds"]:
            rows[-1]["bucket"] = float(np.median(found["seconds"]["bucket"][what]))
            others = ours / np.array(found["seconds"]["bucket"][what])
            rows[-1]["bucket_ratio"] = list(np.percentile(others, [50, 25, 75]))
    return rows


def environment() -> dict[str, Any]:
    return {
        **records.versions("jax", "jaxlib", "orbax-checkpoint", "tensorstore", "numpy"),
        "cpus": str(os.cpu_count()),
        "load": " ".join(f"{x:.1f}" for x in os.getloadavg()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--params", default="64M", help="parameters; the state has 12 bytes for each"
    )
    parser.add_argument(
        "--leaves", type=int, nargs="+", default=[8, 128, 667], help="of the parameters"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bucket", action="store_true", help="also to an S3 server, moto's")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if args.bucket:
            sys.path.append(str(HERE.parents[1] / "tests"))
            import s3_server

            found = {"AWS_ENDPOINT_URL": stack.enter_context(s3_server.started())}
            os.environ.update(s3_server.CREDENTIALS, BUCKET=s3_server.BUCKET, **found)
        run(args)


def run(args: argparse.Namespace) -> None:
    num_params = jzero.estimate(args.params, devices=1).num_params
    cases: list[tuple[Callable[..., Any], tuple[int, ...]]] = [(vector_state, ())]
    cases += [(new_state, (num_params, num)) for num in args.leaves]
    tables = []
    for init, given in cases:
        found = measure(init, given, args.rounds, args.bucket)
        rows = summary(found)
        tables.append({**found, "summary": rows})
        print(f"{found['leaves']} leaves, {found['bytes'] / 1e6:.0f} MB")
        for row in rows:
            print(
                f"  {row['what']:<20} jzero {row['jzero']:.3f} s, Orbax {row['orbax']:.3f} s; "
                f"ratio {row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})",
                flush=True,
            )
            if args.bucket:
                ratio, low, high = row["bucket_ratio"]
                print(
                    f"  {'':<20} bucket {row['bucket']:.3f} s; "
                    f"local / bucket {ratio:.2f} ({low:.2f} to {high:.2f})",
                    flush=True,
                )
    about = environment()
    records.write(args.out / f"{about['date']}.json", {"environment": about, "tables": tables})


if __name__ == "__main__":
    use_virtual_devices(NUM_DEVICES)
    main()
