"""What codes on the wire are worth over networks of several speeds, by the schedule of compiled programs.

python experiments/wire/schedule.py              # 0.94B on 2 x 8 H200s; five minutes, no GPU needed
python experiments/wire/schedule.py --show       # the tables of the last result

Nothing runs. Each way to train is compiled ahead of time, and its schedule is read with the bandwidths of the
target, but for the network's. *Exposed* is the time for which a device waits for collectives, by the model of
`preflight`. Prints tables in Markdown, writes <date>-schedule.json.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jzero
from experiments.shared import records
from experiments.shared.gpt import GPT, make_step
from jzero.preflight._schedule import CompiledSchedule, hidden_share, read_schedule
from jzero.preflight._targets import read_topology
from jzero.targets._links import with_links
from jzero.targets._target import find_target

HOPS = {"local": jnp.int8, "node": jzero.Blocks(jnp.int4, rotate=True)}
WAYS = {
    "exact": jzero.Comm(),
    "gathers in int8": jzero.Comm(gather_dtype=jnp.int8),
    "gathers in int8, reductions in int8 and int4": jzero.Comm(
        gather_dtype=jnp.int8, reduce_dtype=HOPS
    ),
}
GBITS = (12.5, 25, 50, 100, 200, 400)
AXES = {"node": 2, "local": 8}


def compiled(model: GPT, comm: jzero.Comm) -> dict[str, Any]:
    """A way to train: memory, and its schedule over each network."""
    target = find_target("schedule.py", "h200")
    topology = read_topology("schedule.py", target, f"{AXES['node']}x{AXES['local']}")
    mesh = jzero.target_mesh("h200", "2x8", AXES)
    tx = jzero.master_weights(optax.adamw(1e-4))
    state = jax.eval_shape(lambda: model.state(tx, lambda shape: jnp.zeros(shape, jnp.bfloat16)))
    tokens = jax.ShapeDtypeStruct((mesh.size, model.context + 1), jnp.int32)
    train_step = jzero.shard_train_step(make_step(model.loss, tx), comm=comm, mesh=mesh)
    start = time.perf_counter()
    found: Any = train_step.lower(state, tokens)
    program = found.compile({"xla_gpu_autotune_level": 0})
    seconds, text = time.perf_counter() - start, str(program.as_text())
    memory: Any = program.memory_analysis()
    over = {
        gbits: read_schedule(text, AXES, with_links(target, {1: gbits * 1e9 / 8}), topology)
        for gbits in GBITS
    }
    last = over[GBITS[-1]]
    return {
        "compile seconds": round(seconds, 1),
        "peak MiB": round(memory.peak_memory_in_bytes / 2**20),
        "products ms": round(1e3 * last.product_seconds, 2),
        "MiB": moved(last),
        "hidden, of what crosses nodes": hidden_share(
            [x for x in last.collectives if "node" in x.axes]
        ),
        "exposed ms": {gbits: round(1e3 * x.exposed_seconds, 2) for gbits, x in over.items()},
    }


def moved(schedule: CompiledSchedule) -> dict[str, int]:
    """MiB of whole values, by collective and axes."""
    found: dict[str, float] = {}
    for x in schedule.collectives:
        name = f"{x.op} over {' and '.join(x.axes)}"
        found[name] = found.get(name, 0) + x.nbytes / 2**20
    return {name: round(x) for name, x in found.items() if round(x)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--show", action="store_true", help="what the last run has written")
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.show:
        show(records.latest(args.out, "schedule"))
        return
    model = GPT(layers=args.layers, dim=args.dim, heads=args.dim // 128, scan=True, remat=True)
    result: dict[str, Any] = {
        **records.environment("jax", "jaxlib", "optax"),
        "jzero files": records.library(),
        "parameters": model.num_params,
        "ways": {},
    }
    path = args.out / f"{result['date']}-schedule.json"
    for name, comm in WAYS.items():
        result["ways"][name] = compiled(model, comm)
        print(name, result["ways"][name], flush=True)
        records.write(path, result)
    show(result)
    print(f"written: {os.path.relpath(path)}")


def show(result: dict[str, Any]) -> None:
    print(f"{result['parameters']:,} parameters, JAX {result['jax']}")
    print("\n| | peak MiB | moved, MiB | hidden, of what crosses nodes |")
    print("| --- | --- | --- | --- |")
    for name, way in result["ways"].items():
        what = "; ".join(f"{op} {mib}" for op, mib in way["MiB"].items())
        hidden = records.percent(way.get("hidden, of what crosses nodes"))
        print(f"| {name} | {way['peak MiB']} | {what} | {hidden} |")
    print(f"\n| exposed ms at | {' | '.join(f'{x:g} Gb/s' for x in GBITS)} |")
    print("| --- " * (len(GBITS) + 1) + "|")
    for name, way in result["ways"].items():
        exposed = [f"{way['exposed ms'][key]:.1f}" for key in way["exposed ms"]]
        print(f"| {name} | {' | '.join(exposed)} |")


if __name__ == "__main__":
    main()
