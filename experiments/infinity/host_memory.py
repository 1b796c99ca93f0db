"""What a training adds to its process for each parameter, by where its state rests.

python experiments/infinity/host_memory.py                     # a few minutes; needs no accelerator
python experiments/infinity/host_memory.py --show              # the table of the last run

A step with masters and AdamW on one device, in processes of their own, with 64 and with 192 layers; the most
that a process has of memory while it trains (VmHWM, from its third step on), and by how many bytes that grows
for each parameter that the larger one has more. The device is a CPU, so what would be on it is in there, too.
Buffers have the same sizes in both. Prints a table in Markdown, writes <date>-host-memory.json.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.shared import records

# ---------------------------------------------------------------------------------------------
WIDTH, LAYERS, BUFFERS, WINDOW = 512, (64, 192), 2**24, 2**22
STATE, BOTH = "and optimizer state in files", "and parameters in files"
ALL = "and gradients in files"
WAYS = {
    "optimizer state and parameters in the hosts' memory": ("HostCPU", "PinnedHost"),
    STATE: ("NVMe", "PinnedHost"),
    BOTH: ("NVMe", "NVMe"),
    ALL: ("NVMe", "NVMe"),
}
# ---------------------------------------------------------------------------------------------


def memory(way: str, folder: str) -> Any:
    import jzero

    gradients = way == ALL
    made = {
        "HostCPU": jzero.HostCPU(),
        "NVMe": jzero.NVMe(folder, host_bytes=BUFFERS, gradients=gradients),
        "PinnedHost": jzero.PinnedHost(WINDOW),
    }
    state, params = WAYS[way]
    in_files = jzero.NVMe(folder, host_bytes=BUFFERS, device_bytes=WINDOW, gradients=gradients)
    return jzero.Memory(
        params=in_files if params == "NVMe" else made[params], optimizer=made[state]
    )


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def train(way: str, layers: int) -> None:
    """Prints the bytes of this process at the most, of steps after the second one."""
    import jax
    import jax.numpy as jnp
    import optax

    import jzero

    tx = jzero.master_weights(optax.adamw(1e-3))

    def init() -> Any:
        w = jnp.full((layers, WIDTH, WIDTH), 2.0**-10, jnp.bfloat16)
        return w, tx.init(w)

    def step_fn(state: Any, x: jax.Array) -> Any:
        w, opt_state = state

        def loss(w: jax.Array) -> jax.Array:
            y, _ = jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), x, w)
            return jnp.mean(jnp.square(y.astype(jnp.float32)))

        updates, opt_state = tx.update(jax.grad(loss)(w), opt_state, w)
        return optax.apply_updates(w, updates), opt_state

    x = jnp.ones((8, WIDTH), jnp.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        step = jzero.shard_train_step(step_fn, mesh=mesh, memory=memory(way, folder))
        # Before there is a state, so that files take it as it is made.
        step.plan(jax.eval_shape(init), x)
        state = step.init(init)
        for number in range(5):
            if number == 2:
                Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
            state = step(state, x)
        jax.block_until_ready(jax.tree.leaves(state))
        print(peak_bytes())


def measured(way: str, layers: int) -> int:
    command = [sys.executable, __file__, "--way", way, "--layers", str(layers)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def table(rows: list[dict[str, Any]]) -> str:
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([str(row[name]) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--show", action="store_true", help="what the last run has written")
    parser.add_argument("--way", choices=WAYS, help="one process: prints its bytes")
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.show:
        print(table(records.latest(args.out, "host-memory")["rows"]))
        return
    if args.way:
        train(args.way, args.layers[0])
        return
    few, many = args.layers
    rows = []
    for way in WAYS:
        found = {layers: measured(way, layers) for layers in (few, many)}
        grows = (found[many] - found[few]) / ((many - few) * WIDTH**2)
        cells = {f"MB, {n} layers": round(x / 1e6) for n, x in found.items()}
        rows.append({"": way, **cells, "bytes more for each parameter": round(grows, 1)})
    print(table(rows))
    settings = {"width": WIDTH, "layers": [few, many], "buffers": BUFFERS, "window": WINDOW}
    result = {
        **records.versions("jax", "numpy"),
        "jzero files": records.library(),
        "settings": settings,
        "rows": rows,
    }
    path = args.out / f"{result['date']}-host-memory.json"
    records.write(path, result)
    print(f"written: {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
