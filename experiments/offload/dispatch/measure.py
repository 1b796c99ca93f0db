"""How long does the thread that calls a step with offload work, and on how many programs and copies?

python experiments/offload/dispatch/measure.py                      # every policy, about a minute
python experiments/offload/dispatch/measure.py --beside ../before   # and those of another checkout, in turns

Layers of nine leaves, as Llama has them, so small that nothing but the calls takes time. Counted is the time
of the calling thread's processor, which waiting does not add to: the least of the steps.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from experiments.shared.devices import use_virtual_devices

use_virtual_devices(8)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

import jzero  # noqa: E402
from experiments.shared import records  # noqa: E402
from jzero.preflight import _dispatches  # noqa: E402
from jzero.segments import _programs  # noqa: E402

WIDTH, ROWS = 32, 16
LEAVES = {
    "q": (1, 1),
    "k": (1, 1),
    "v": (1, 1),
    "o": (1, 1),
    "gate": (1, 2),
    "up": (1, 2),
    "down": (2, 1),
}
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def layer(x: jax.Array, w: Any) -> jax.Array:
    h = x * w["norm1"]
    x = x + jnp.tanh(h @ w["q"] + h @ w["k"] + h @ w["v"]) @ w["o"]
    h = x * w["norm2"]
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def step(state: Any, x: jax.Array) -> Any:
    params, opt_state = state

    def loss(params: Any) -> jax.Array:
        y, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, params["layers"])
        return jnp.mean((y @ params["head"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value


def new_state(num: int) -> Any:
    shapes = {name: (a * WIDTH, b * WIDTH) for name, (a, b) in LEAVES.items()}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    pairs = zip(shapes.items(), keys, strict=True)
    layers = {name: 0.1 * jax.random.normal(key, (num, *shape)) for (name, shape), key in pairs}
    layers |= {"norm1": jnp.ones((num, WIDTH)), "norm2": jnp.ones((num, WIDTH))}
    params = {"layers": layers, "head": jnp.eye(WIDTH)}
    return params, TX.init(params)


def policies() -> dict[str, Any]:
    """What `memory` may be, by name."""
    params, state = jzero.PinnedHost(device_bytes=2**20), jzero.PinnedHost(device_bytes=2**16)
    files, both = jzero.NVMe(tempfile.mkdtemp()), jzero.NVMe(tempfile.mkdtemp())
    return {
        "everything on the devices": jzero.NoOffload(),
        "PinnedHost": state,
        "HostCPU": jzero.HostCPU(),
        "NVMe": files,
        "parameters pinned, HostCPU": jzero.Memory(params=params, optimizer=jzero.HostCPU()),
        "parameters and PinnedHost": jzero.Memory(params=params, optimizer=state),
        "parameters and NVMe, files": jzero.Memory(params=both, optimizer=both),
    }


def started(train_step: Any, state: Any, x: Any) -> tuple[int, int]:
    """Programs and copies that a step starts, by its trace; what the host sends back is not among them."""
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    train_step = train_step.on_mesh(mesh)
    call = train_step._programs.bind((jax.eval_shape(lambda: state), x), {})
    program = train_step._programs.of(call)
    leaves, arrays = _programs.stored_inputs(call, program)
    found = _dispatches.read_dispatches(program.step.dispatched(leaves, arrays), [*leaves, *arrays])
    return sum(step.program is not None for step in found.steps), sum(
        len(step.copies) for step in found.steps
    )


def measured(memory: Any, args: argparse.Namespace) -> dict[str, Any]:
    axes = jzero.Axes(min_shard_bytes=0)
    train_step = jzero.shard_train_step(step, stage=3, memory=memory, axes=axes)
    x = jnp.ones((ROWS, WIDTH))
    programs, copies = started(train_step, new_state(args.layers), x)
    state = train_step.init(lambda: new_state(args.layers))
    found = []
    for i in range(args.steps + 2):
        before = time.thread_time()
        state, loss = train_step(state, x)
        if i >= 2:
            found.append(time.thread_time() - before)
        jax.block_until_ready(loss)
    return {"ms": 1e3 * min(found), "programs": programs, "copies": copies}


def all_rows(args: argparse.Namespace) -> dict[str, Any]:
    return {name: measured(memory, args) for name, memory in policies().items()}


def in_turns(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The least times of this library, and of the one in another checkout, each in processes of its own."""
    found: list[dict[str, Any]] = [{}, {}]
    for _ in range(args.rounds):
        for root, best in zip((records.ROOT, args.beside.resolve()), found, strict=True):
            path = os.pathsep.join([str(root), str(records.ROOT)])
            command = [sys.executable, __file__, "--json", f"--layers={args.layers}"]
            env = os.environ | {"PYTHONPATH": path}
            done = subprocess.run(
                command, env=env, cwd=root, capture_output=True, text=True, check=True
            )
            for name, row in json.loads(done.stdout.splitlines()[-1]).items():
                best[name] = min(best.get(name, row), row, key=lambda row: row["ms"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--out", type=Path, help="write a record here")
    args = parser.parse_args()
    if args.json:
        print(json.dumps(all_rows(args)))
        return
    rows, *others = in_turns(args) if args.beside else [all_rows(args)]
    print("| state | thread, ms a step | programs | ms a program | before, ms a step |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, row in rows.items():
        before = f"{others[0][name]['ms']:.1f}" if others else ""
        each = row["ms"] / row["programs"]
        print(f"| {name} | {row['ms']:.1f} | {row['programs']} | {each:.2f} | {before} |")
    if args.out:
        found = {"library": records.library(), "rows": rows}
        if args.beside:
            found |= {"before": {"library": records.library(args.beside), "rows": others[0]}}
        records.write(args.out, {**records.environment("jax", "optax"), **found})


if __name__ == "__main__":
    main()
