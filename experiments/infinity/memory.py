"""What rests and visits where, at several depths: counted in arrays of a run, and compiled for H200s.

python experiments/infinity/memory.py                        # both; JAX_PLATFORMS=cpu where there is no GPU
python experiments/infinity/memory.py --live                 # of a run on virtual devices: two minutes
python experiments/infinity/memory.py --only '24 x 2048'     # compile some rows, into the day's results
python experiments/infinity/memory.py --show experiments/infinity/results/<date>-compiled.json

1. Live arrays: the most bytes on one of 8 virtual devices between any two programs of a step, of all arrays
   and of parameters that were fetched. Nothing that a program has inside is in it.
2. Compiled for 8 H200s by `jzero.preflight`: the most bytes that a device holds in a step, temporaries
   included, and in pinned memory. `jax.jit` is compiled for one. Nothing runs.

Prints tables in Markdown, writes <date>-live.json and <date>-compiled.json.
"""

import argparse
import json
import math
import os
import re
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero
from experiments.shared import devices, records
from experiments.shared.gpt import GPT, make_step
from jzero.offload.execute import _stream
from jzero.offload.execute._stream import StreamSlot
from tiers import ACTIVATIONS, ALL, IN_TURN, LAYER_MAJOR, ONE_DEVICE, PLAIN, STATE, tiers

# ---------------------------------------------------------------------------------------------
num_devices = 8
live_depths = (4, 8, 12, 24)
live_ways = (ONE_DEVICE, PLAIN, STATE, ALL)
live_model = GPT(layers=1, dim=128, heads=2, vocab=256, context=64, dtype=jnp.float32)
live_device_bytes = 2**21  # two layers as they are fetched and gathered

topology, target = "1x8", "h200"
rows_per_device = 1  # sequences of 1024 tokens, in each microbatch
# Layers, dim and heads; GiB of parameters on a device at a time; which tiers.
sizes: dict[str, tuple[GPT, float, tuple[str, ...]]] = {
    f"{layers} x {dim}": (GPT(layers, dim, dim // 128, dtype=jnp.float32), window, names)
    for layers, dim, window, names in (
        (4, 2048, 1, (ONE_DEVICE, PLAIN, STATE, ALL, ACTIVATIONS)),
        (8, 2048, 1, (ONE_DEVICE, PLAIN, STATE, ALL, ACTIVATIONS)),
        (12, 2048, 1, (ONE_DEVICE, PLAIN, STATE, ALL, ACTIVATIONS)),
        (24, 2048, 1, (ONE_DEVICE, PLAIN, STATE, ALL, ACTIVATIONS, IN_TURN, LAYER_MAJOR)),
        (48, 4096, 4, (PLAIN, ALL, ACTIVATIONS)),
        (96, 8192, 16, (PLAIN, ALL, ACTIVATIONS)),
    )
}
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
# ---------------------------------------------------------------------------------------------

MIB = 2**20


# -- live arrays -------------------------------------------------------------------------------


class Watch:
    """The most bytes that are alive on one device when a part of a step begins or ends."""

    def __init__(self) -> None:
        self._fetched: list[weakref.ref[jax.Array]] = []
        self._stream = _stream.stream
        self.parameters = self.total = 0

    def stream(self, visits: Iterable[StreamSlot | None], *limits: Any) -> None:
        """As `_stream.stream`, and looks."""
        self._stream((visit and self._watched(visit) for visit in visits), *limits)

    def _watched(self, visit: StreamSlot) -> StreamSlot:
        def fetch() -> Any:
            arrays = visit.fetch()
            self._fetched += map(weakref.ref, arrays.values())
            return arrays

        def update(arrays: Any) -> Any:
            self.look()
            waits = visit.update(arrays)
            jax.block_until_ready(waits)
            self.look()
            return waits

        return visit._replace(fetch=fetch, update=update)

    def look(self) -> None:
        fetched = [x for ref in self._fetched if (x := ref()) is not None]
        self.parameters = max(self.parameters, sum(map(on_device, fetched)))
        self.total = max(self.total, sum(map(on_device, jax.live_arrays())))


def on_device(x: jax.Array) -> int:
    """Bytes that the first device has of an array."""
    place = x.sharding
    if place.memory_kind != "device" or jax.devices()[0] not in place.device_set:
        return 0
    # Not of `addressable_shards`: their data are arrays that live, too.
    return math.prod(place.shard_shape(x.shape)) * x.dtype.itemsize


def live(layers: int, options: dict[str, Any]) -> dict[str, int]:
    model = replace(live_model, layers=layers)
    train_step = jzero.shard_train_step(make_step(model.loss, tx), **options)
    state = train_step.init(lambda: model.state(tx, lambda shape: 0.02 * jnp.ones(shape)))
    shape = (num_devices, model.context + 1)
    batch: Any = np.random.default_rng(0).integers(0, model.vocab, shape, np.int32)
    state, _ = train_step(state, batch)
    watch = Watch()
    with mock.patch.object(_stream, "stream", watch.stream):
        state, loss = train_step(state, batch)
    jax.block_until_ready(loss)
    watch.look()
    params = sum(map(on_device, jax.tree.leaves(state["params"])))
    return {
        "parameters": model.num_params,
        "parameter_bytes": max(params, watch.parameters),
        "total_bytes": watch.total,
    }


def live_one_device(layers: int) -> dict[str, int]:
    model = replace(live_model, layers=layers)
    state = jax.eval_shape(partial(model.state, tx))
    sizes = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
             for tree in (state["params"], state)]  # fmt: skip
    return {
        "parameters": model.num_params,
        "parameter_bytes": sizes[0],
        "total_bytes": sizes[1],
    }


def measure_live(depths: Sequence[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    header = ("tiers", *(f"{layers} layers" for layers in depths))
    print("KiB on a device: of parameters / of all arrays\n")
    print(f"| {' | '.join(header)} |\n|{' --- |' * len(header)}")
    every = tiers(live_device_bytes)
    for name in live_ways:
        options = every.get(name)
        rows = found[name] = {
            str(layers): live_one_device(layers) if options is None else live(layers, options)
            for layers in depths
        }
        cells = [f"{r['parameter_bytes'] / 2**10:.0f} / {r['total_bytes'] / 2**10:.0f}"
                 for r in rows.values()]  # fmt: skip
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return found


# -- compiled ----------------------------------------------------------------------------------


def compiled(model: GPT, name: str, window: float) -> dict[str, Any]:
    step, start = make_step(model.loss, tx), time.process_time()
    state = jax.eval_shape(partial(model.state, tx))
    options = tiers(int(window * 2**30)).get(name, {})
    microbatches = options.get("microbatches", jzero.Microbatches())
    rows = rows_per_device * (1 if name == ONE_DEVICE else num_devices) * microbatches.num
    batch = jax.ShapeDtypeStruct((rows, model.context + 1), jnp.int32)
    if name == ONE_DEVICE:
        mesh = jzero.target_mesh(target, "1x1")
        place = jax.sharding.NamedSharding(mesh, jax.P())
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), (state, batch)
        )
        lowered = jax.jit(step, donate_argnums=0).lower(*placed)
        found = jzero.preflight(lowered, target=target, topology="1x1")
    else:
        train_step = jzero.shard_train_step(step, **options)
        found = jzero.preflight(train_step, state, batch, target=target, topology=topology)
    transfers = found.report.transfers if found.report else ()
    return {
        "parameters": model.num_params,
        "at_rest_bytes": found.argument_bytes,
        "peak_bytes": found.peak_bytes,
        "host_bytes": found.host_bytes,
        **{way: sum(c.nbytes for c in transfers if c.direction == way)
           for way in ("to device", "to host")},
        "between_devices": sum(c.nbytes for c in found.schedule.collectives),
        "product_seconds": round(found.schedule.product_seconds, 5),
        "parts": [part._asdict() for part in found.parts],
        "cpu_seconds": round(time.process_time() - start, 1),
    }  # fmt: skip


HEADER = (
    "layers x dim", "parameters", "tiers", "at rest MiB", "peak MiB", "pinned MiB", "to device MiB",
    "to host MiB", "between devices MiB", "products ms", "programs",
)  # fmt: skip


def row(size: str, name: str, found: dict[str, Any]) -> str:
    keys = ("at_rest_bytes", "peak_bytes", "host_bytes", "to device", "to host", "between_devices")
    cells = [
        size,
        f"{found['parameters'] / 1e9:.2f}B",
        name,
        *(f"{found[key] / MIB:,.0f}" for key in keys),
        f"{1000 * found['product_seconds']:.0f}",
        f"{max(len(found['parts']), 1)}",
    ]
    return f"| {' | '.join(cells)} |"


def show(found: dict[str, Any]) -> None:
    """Prints what was compiled, in the order of `sizes`."""
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}")
    for size, (_, _, names) in sizes.items():
        for name in names:
            if (key := f"{size}; {name}") in found:
                print(row(size, name, found[key]))


def measure_compiled(only: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}")
    for size, (model, window, names) in sizes.items():
        for name in names:
            if re.search(only, f"{size}; {name}"):
                one = found[f"{size}; {name}"] = compiled(model, name, window)
                print(row(size, name, one), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--live", action="store_true", help="only arrays of a run")
    parser.add_argument("--depths", type=int, nargs="+", default=live_depths, help="of that run")
    parser.add_argument("--only", help="a regular expression: compile only these rows")
    parser.add_argument("--show", type=Path, help="only print the table of such results")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.show is not None:
        show(json.loads(args.show.read_text())["found"])
        return
    devices.use_virtual_devices(num_devices)
    measures: dict[str, Callable[[], dict[str, Any]]] = {}
    if args.only is None:
        measures["live"] = partial(measure_live, args.depths)
    if not args.live:
        measures["compiled"] = partial(measure_compiled, args.only or "")
    for name, measure in measures.items():
        result: dict[str, Any] = {
            **records.environment("jax", "jaxlib", "optax"),
            "jzero files": records.library(),
        }
        path = args.out / f"{result['date']}-{name}.json"
        before = json.loads(path.read_text())["found"] if path.exists() else {}
        result["found"] = before | measure()
        records.write(path, result)
        print(f"written: {os.path.relpath(path)}\n", flush=True)


if __name__ == "__main__":
    main()
