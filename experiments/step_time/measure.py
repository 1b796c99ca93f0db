"""Times a scanned transformer's train step through jzero against plain `jax.jit`.

python experiments/step_time/measure.py                                # about 25 minutes
python experiments/step_time/measure.py --rounds 3 --out /tmp/step_time

1. Step time: jzero / `jax.jit` of the same step with the same at-rest shardings, on 8 devices.
2. Trace and lowering time: jzero on 1 and 8 devices / `jax.jit` of the same step on one device.
3. Time to trace, lower and compile 12 unrolled layers: jzero at stage 3 / `jax.jit` with the same at-rest
   shardings and every activation pinned to the batch's shards, as an expert would write it, on 8 devices.
4. Processor time of the calling thread in one call, of a small step whose state has 7, 61 or 301 leaves:
   jzero / `jax.jit` with the same at-rest shardings, on 8 devices.

Runs alternate, and the ratio is the median over the rounds' ratios, because on a busy machine the
times themselves drift. Writes <date>.json.
"""

import argparse
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jzero
from experiments.shared import devices, records
from experiments.shared.gpt import GPT, make_step

# ---------------------------------------------------------------------------------------------
model = GPT(layers=6, dim=256, heads=4, vocab=256, context=128, dtype=jnp.float32)
batch_size = 16  # sequences, over all devices
num_devices = 8
stages = (1, 3)
steps_per_run = 2
unrolled = replace(model, layers=12, scan=False)
compile_rounds = 5
nums_params = (2, 20, 100)  # with Adam's moments and count: 7, 61 and 301 leaves
calls_per_run = 10
# ---------------------------------------------------------------------------------------------

tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
step = make_step(model.loss, tx)


def init(key: jax.Array) -> dict[str, Any]:
    keys = iter(jax.random.split(key, len(jax.tree.leaves(model.shapes))))
    return model.state(tx, lambda shape: 0.02 * jax.random.normal(next(keys), shape))


def make_mesh(num: int) -> jax.sharding.Mesh:
    auto = jax.sharding.AxisType.Auto  # the mode in which plain jit shards an unchanged step
    return jax.make_mesh((num,), ("data",), (auto,), devices=jax.devices()[:num])


def make_batch() -> np.ndarray:
    shape = (batch_size, model.context + 1)
    return np.random.default_rng(0).integers(0, model.vocab, shape, np.int32)


def compare_call_times(num_params: int, rounds: int) -> dict[str, Any]:
    adam, mesh = optax.adam(1e-3), make_mesh(num_devices)
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())

    def init() -> Any:
        params = [jnp.full((16, 16), 0.1) for _ in range(num_params)]
        return params, adam.init(params)

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        return sum((jnp.mean((batch @ w) ** 2) for w in params), jnp.zeros(()))

    def step(state: Any, batch: jax.Array) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = adam.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    batch = jax.device_put(np.ones((num_devices, 16), np.float32), sharded)
    jzero_step = jzero.shard_train_step(step, axes=jzero.Axes(min_shard_bytes=0), mesh=mesh)
    states = [jzero_step.shard(jzero_step.init(init), batch) for _ in range(2)]
    at_rest = jzero_step.state_shardings(states[0], batch)
    jit_step = jax.jit(
        step, in_shardings=(at_rest, sharded), out_shardings=(at_rest, whole), donate_argnums=0
    )
    steps: list[Any] = [jzero_step, jit_step]

    def run(which: int) -> float:
        seconds = 0.0
        for _ in range(calls_per_run):
            start = time.thread_time()
            states[which], _ = steps[which](states[which], batch)
            seconds += time.thread_time() - start
            jax.block_until_ready(states[which])
        return seconds / calls_per_run

    return interleave(run, rounds)


def compare_step_times(stage: int, rounds: int) -> dict[str, Any]:
    mesh = make_mesh(num_devices)
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    batch = jax.device_put(make_batch(), sharded)
    jzero_step = jzero.shard_train_step(step, stage=stage, mesh=mesh)
    states = [jzero_step.init(init, jax.random.key(0)) for _ in range(2)]
    states = [jzero_step.shard(state, batch) for state in states]
    at_rest = jzero_step.state_shardings(states[0], batch)
    jit_step = jax.jit(
        step, in_shardings=(at_rest, sharded), out_shardings=(at_rest, whole), donate_argnums=0
    )
    steps: list[Any] = [jzero_step, jit_step]
    losses = [0.0, 0.0]

    def run(which: int) -> float:
        start = time.perf_counter()
        for _ in range(steps_per_run):
            states[which], loss = steps[which](states[which], batch)
            losses[which] = float(loss)  # waits for the device
        return (time.perf_counter() - start) / steps_per_run

    result = interleave(run, rounds)
    if not math.isclose(*losses, rel_tol=1e-3):
        raise AssertionError(f"stage {stage}: jzero and jit disagree on the loss: {losses}")
    return {**result, "last_losses": losses}


def compare_lowering_times(num: int, rounds: int) -> dict[str, Any]:
    single, batch = jax.device_put(init(jax.random.key(0)), jax.devices()[0]), make_batch()
    mesh = make_mesh(num)
    placed = jzero.shard_train_step(step, stage=3, mesh=mesh).init(init, jax.random.key(0))

    def run(which: int) -> float:
        def fresh_step(state, batch):  # a new function object, so that no trace is in a cache
            return step(state, batch)

        start = time.perf_counter()
        if which == 0:
            jzero.shard_train_step(fresh_step, stage=3, mesh=mesh).lower(placed, batch)
        else:
            jax.jit(fresh_step, donate_argnums=0).lower(single, batch)
        return time.perf_counter() - start

    return interleave(run, rounds)


def compare_compile_times(rounds: int) -> dict[str, Any]:
    """Of programs that no cache has: XLA's is off, and every round traces new functions."""
    mesh = make_mesh(num_devices)
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    batch = jax.ShapeDtypeStruct((batch_size, model.context + 1), jnp.int32, sharding=sharded)
    state = jax.eval_shape(partial(unrolled.state, tx))
    at_rest = jzero.shard_train_step(step, stage=3, mesh=mesh).state_shardings(state)
    placed = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, at_rest
    )

    def run(which: int) -> float:
        def on_rows(x: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(x, sharded)

        loss = unrolled.loss if which == 0 else partial(unrolled.loss, constrain=on_rows)
        fresh_step, start = make_step(loss, tx), time.perf_counter()
        if which == 0:
            jzero.shard_train_step(fresh_step, stage=3, mesh=mesh).lower(placed, batch).compile()
        else:
            whole = NamedSharding(mesh, PartitionSpec())
            annotated = jax.jit(fresh_step, donate_argnums=0, out_shardings=(at_rest, whole))
            annotated.lower(placed, batch).compile()
        return time.perf_counter() - start

    return interleave(run, rounds)


def interleave(run: Callable[[int], float], rounds: int) -> dict[str, Any]:
    """Times run(0) (jzero) and run(1) (jit), alternating which goes first; seconds and ratio."""
    for which in (0, 1):
        run(which)  # compiles, and fills the caches that both share
    times = np.array([[run(0), run(1)] if i % 2 else [run(1), run(0)][::-1] for i in range(rounds)])
    ratios = times[:, 0] / times[:, 1]
    low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75]).round(3).tolist()
    return {
        "ratio": median,
        "ratio_quartiles": [low, high],
        "jzero_seconds": float(np.median(times[:, 0]).round(6)),
        "jit_seconds": float(np.median(times[:, 1]).round(6)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--calls", action="store_true", help="only print 4, in 2 minutes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    devices.use_virtual_devices(num_devices)

    result: dict[str, Any] = {
        **records.environment("jax", "jaxlib", "optax", "numpy"),
        "settings": {
            "model": f"scanned + remat, {model.layers} layers, dim {model.dim}, context {model.context}",
            "parameters": model.num_params,
            "batch_size": batch_size,
            "rounds": args.rounds,
            "steps_per_run": steps_per_run,
        },
    }
    for num_params in nums_params:
        name = f"call_time_{3 * num_params + 1}_leaves_on_{num_devices}_devices"
        result[name] = compare_call_times(num_params, args.rounds)
        print(name, result[name], flush=True)
    if args.calls:
        return
    for stage in stages:
        name = f"step_time_stage_{stage}_on_{num_devices}_devices"
        result[name] = compare_step_times(stage, args.rounds)
        print(name, result[name], flush=True)
    for num in (1, num_devices):
        name = f"trace_and_lower_time_on_{num}_devices"
        result[name] = compare_lowering_times(num, args.rounds)
        print(name, result[name], flush=True)
    name = f"compile_time_of_{unrolled.layers}_unrolled_layers_on_{num_devices}_devices"
    result[name] = compare_compile_times(compile_rounds)
    print(name, result[name], flush=True)
    path = args.out / f"{result['date']}.json"
    records.write(path, result)
    print(f"written: {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
