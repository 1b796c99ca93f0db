"""How much of the host's update begins before the backward pass ends, with a clip by the global norm?

python experiments/offload/early/measure.py --out RECORD   # two minutes

Parameters rest on the hosts, or in files with the optimizer state, a loop over layers. An update is early if
it begins before the last program of the backward pass is started. Its share is in bytes of what it renews, to
which its time is proportional. What is undone is made again behind the backward pass, and is no part of that
share.
"""

import argparse
import dataclasses
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.shared.devices import use_virtual_devices

use_virtual_devices(2)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

import jzero  # noqa: E402
from experiments.shared import records  # noqa: E402
from jzero.offload._file_run import FileRun  # noqa: E402
from jzero.offload._host_updates import HostUpdates  # noqa: E402
from jzero.offload._memory_run import MemoryRun  # noqa: E402
from jzero.offload.execute._executor import Execution  # noqa: E402
from jzero.offload.kernels._host_update import HostUpdate  # noqa: E402
from jzero.offload.kernels._tiled_update import TiledUpdate  # noqa: E402

LAYERS, WIDTH, ROWS = 8, 64, 16
ADAM = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAM)
# By what the batch is multiplied: gradients that are clipped, and that are not.
SMALL, LARGE = 1e-3, 1e3
CASES: dict[str, tuple[Any, Callable[[int], float]]] = {
    "no clip": (ADAM, lambda i: SMALL),
    "none": (CLIPPED, lambda i: SMALL),
    "every tenth": (CLIPPED, lambda i: LARGE if i % 10 == 5 else SMALL),
    "every other": (CLIPPED, lambda i: LARGE if i % 2 else SMALL),
    "every one": (CLIPPED, lambda i: LARGE),
}
# How much of the state may be there twice: nothing is assumed; the default; all of it; files have two
# versions.
SHARES = (0.0, 0.25, 1.0, "files", "files, parameters pinned")


def step(state: Any, x: jax.Array, tx: Any) -> Any:
    params, opt_state = state

    def layer(x: jax.Array, w: Any) -> jax.Array:
        return x + jnp.tanh(x @ w["up"]) @ w["down"]

    def loss(params: Any) -> jax.Array:
        y, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, params["layers"])
        return jnp.mean((y @ params["head"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value


def new_state(tx: Any) -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"up": (LAYERS, WIDTH, 2 * WIDTH), "down": (LAYERS, 2 * WIDTH, WIDTH)}
    layers = {
        name: 0.02 * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys[:2], shapes.items(), strict=True)
    }
    params = {"layers": layers, "head": 0.02 * jax.random.normal(keys[2], (WIDTH, WIDTH))}
    return params, tx.init(params)


class Log:
    """What happens in a step, in order.

    Attributes:
      programs: how many of the devices' have been started.
      begun: of each update, how many had been, and its bytes.
      undone: bytes.
    """

    def __init__(self) -> None:
        self.clear()
        run, start, restore = Execution._run, HostUpdate.start, MemoryRun._restore
        update_tile, finish = TiledUpdate.update_tile, FileRun.finish

        def nbytes(arrays: Any) -> int:
            return sum(x.nbytes for shard in arrays for x in shard)

        def logged_run(run_: Any, visit: Any) -> Any:
            self.programs += bool(visit.run.program)
            return run(run_, visit)

        def logged_start(update: Any, states: Any, *args: Any) -> Any:
            self.begun.append((self.programs, nbytes(states)))
            return start(update, states, *args)

        def logged_restore(run_: Any, arrived: Any, old: Any) -> None:
            self.undone += nbytes(old)
            restore(run_, arrived, old)

        def logged_tile(update: Any, shard: int, tile: int, *args: Any) -> Any:
            nbytes = sum(x.nbytes for x in update.layout.tiles[tile])
            self.begun.append((self.programs, nbytes + update.resident_bytes(tile)))
            return update_tile(update, shard, tile, *args)

        def logged_finish(run_: Any, reads: Any) -> Any:
            kept = finish(run_, reads)
            if run_._step is not None and not kept:
                self.undone += sum(nbytes for _, nbytes in self.begun)
            return kept

        patches = (
            (TiledUpdate, "update_tile", logged_tile),
            (FileRun, "finish", logged_finish),
            (Execution, "_run", logged_run),
            (HostUpdate, "start", logged_start),
            (MemoryRun, "_restore", logged_restore),
        )
        for of, name, function in patches:
            setattr(of, name, function)

    def clear(self) -> None:
        self.programs = self.undone = 0
        self.begun: list[tuple[int, int]] = []

    def early_bytes(self) -> int:
        return sum(nbytes for at, nbytes in self.begun if at < self.programs)


def measured(case: str, share: Any, log: Log, steps: int, folder: str) -> dict[str, float]:
    tx, scale = CASES[case]
    pinned = jzero.PinnedHost(device_bytes=2**18)
    if isinstance(share, str):
        HostUpdates.old_share = 0.25
        files = jzero.NVMe(folder, host_bytes=2**20)
        params = dataclasses.replace(files, device_bytes=2**18) if share == "files" else pinned
        memory = jzero.Memory(params=params, optimizer=files)
    else:
        HostUpdates.old_share = share
        memory = jzero.Memory(params=pinned, optimizer=jzero.HostCPU())
    axes = jzero.Axes(min_shard_bytes=0)
    train_step = jzero.shard_train_step(
        lambda state, x: step(state, x, tx), stage=3, memory=memory, axes=axes
    )
    state, x = train_step.init(lambda: new_state(tx)), jnp.ones((ROWS, WIDTH))
    renewed = steps * sum(x.nbytes for x in jax.tree.leaves(state) if x.size > 1)
    early = undone = 0
    for i in range(steps + 2):
        log.clear()
        state, loss = train_step(state, x * scale(i))
        jax.block_until_ready(loss)
        if i >= 2:
            # One clip is of all leaves: all that has begun is undone, or nothing.
            early += 0 if log.undone else log.early_bytes()
            undone += log.undone
    return {"early": early / renewed, "undone": undone / renewed}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, help="write a record here")
    args = parser.parse_args()
    log, rows = Log(), []
    print("| steps that clip | old values | begins early | undone |")
    print("| --- | ---: | ---: | ---: |")
    for case, share in itertools.product(CASES, SHARES):
        # What waits or begins in any case is the same whatever else happens.
        if (case == "no clip" and share in SHARES[1:3]) or (
            not share and case not in ("no clip", "none")
        ):
            continue
        with tempfile.TemporaryDirectory() as folder:
            row = measured(case, share, log, args.steps, folder)
        rows.append({"case": case, "share": share, **row})
        held = share if isinstance(share, str) else f"{share:.0%}"
        print(f"| {case} | {held} | {row['early']:.0%} | {row['undone']:.0%} |", flush=True)
    if args.out:
        library = {"library": records.library(), "rows": rows}
        records.write(args.out, {**records.environment("jax", "optax", "llvmlite"), **library})


if __name__ == "__main__":
    main()
