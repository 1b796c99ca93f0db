"""How much memory of the host a save needs beside the state, and whether 100 saves leave it flat.

python experiments/checkpoint_memory/measure.py                   # about 10 minutes, and 14 GB of memory
python experiments/checkpoint_memory/measure.py --mb 256 --saves 10

Each case is a process of its own on 8 virtual CPU devices: a state of leaves of 64 MB of random numbers is
saved, and a step consumes it as soon as `save` returns: what is yet to be written, the save alone holds then.
A thread reads the process's resident memory every 2 ms; the result is its peak less what it was before.
Writes results/<date>.json.
"""

import argparse
import gc
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import jzero
from experiments.shared import records
from experiments.shared.devices import use_virtual_devices

HERE = Path(__file__).parent
LEAF_MB = 64
PACKAGES = ("jax", "jaxlib", "orbax-checkpoint", "tensorstore", "numpy")
SAVE_BYTES = {"jzero, 256MiB": "256MiB", "jzero": "2GiB"}


def step_fn(state: Any, batch: jax.Array) -> Any:
    return jax.tree.map(lambda x: x * (1 - 1e-9 * batch.mean()), state)


def resident() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()


class Peak:
    """The most memory that was resident while it was watched."""

    def __enter__(self) -> "Peak":
        gc.collect()
        self.before = self.most = resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.most = max(self.most, resident())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def saver(who: str, directory: Path, train_step: Any) -> tuple[Callable[[int, Any], Any], Any]:
    """What saves a state, and what waits until it is written."""
    if who == "Orbax":
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        manager = ocp.CheckpointManager(directory, options=options)
        save = lambda step, state: manager.save(step, args=ocp.args.StandardSave(state))  # noqa: E731
        return save, manager.wait_until_finished
    checkpointer = jzero.Checkpointer(
        directory, train_step, max_to_keep=2, save_bytes=SAVE_BYTES[who]
    )
    return checkpointer.save, checkpointer.wait


def one_case(who: str, mb: int, saves: int) -> dict[str, Any]:
    use_virtual_devices(8)
    train_step = jzero.shard_train_step(step_fn, mesh=jax.make_mesh((8,), ("data",)))
    rng, batch = np.random.default_rng(0), np.ones((8, 1), np.float32)
    num = max(mb // LEAF_MB, 1)
    state = {"warm": rng.standard_normal((1024,), np.float32)}
    blocked, after = [], []
    with tempfile.TemporaryDirectory(dir=HERE) as folder:
        save, wait = saver(who, Path(folder, "warm"), train_step)
        save(1, train_step.shard(state))
        wait()  # All modules are imported, and threads are there.
        del state
        shape = (mb * 10**6 // num // 4 // 1024 // 8 * 8, 1024)
        state = {}
        for i in range(num):
            state |= train_step.shard({f"w{i}": rng.standard_normal(shape, np.float32)})
        state = jax.block_until_ready(train_step(state, jnp.asarray(batch)))
        save, wait = saver(who, Path(folder, "steps"), train_step)
        with Peak() as peak:
            for step in range(1, saves + 1):
                start = time.perf_counter()
                save(step, state)
                blocked.append(time.perf_counter() - start)
                state = jax.block_until_ready(train_step(state, jnp.asarray(batch)))
                wait()
                if step in {1, 2, 5, 10, 20, 50, 100, saves}:
                    gc.collect()
                    after.append((step, (resident() - peak.before) // 10**6))
        nbytes = sum(x.nbytes for x in state.values())
    return {
        "who": who, "state_mb": nbytes // 10**6, "saves": saves,
        "peak_mb": (peak.most - peak.before) // 10**6, "blocked_s": float(np.median(blocked)),
        "max_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000, "after_mb": after,
        "threads": threading.active_count(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, nargs="+", default=[1024, 4096], help="of the state")
    parser.add_argument("--saves", type=int, default=100, help="of a state of 64 MB")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        who, mb, saves = args.case
        print(json.dumps(one_case(who, int(mb), int(saves))))
        return
    found = []
    cases = [(mb, 1) for mb in args.mb] + [(LEAF_MB, args.saves)]
    for mb, saves in cases:
        for who in (*SAVE_BYTES, "Orbax"):
            command = [sys.executable, __file__, "--case", who, str(mb), str(saves)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
            print(found[-1], flush=True)
    about = records.environment(*PACKAGES, num_devices=8)
    records.write(args.out / f"{about['date']}.json", {"environment": about, "cases": found})


if __name__ == "__main__":
    main()
