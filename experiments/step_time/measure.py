"""Times a scanned transformer's train step through jzero against plain `jax.jit`.

python experiments/step_time/measure.py                                # about 5 minutes
python experiments/step_time/measure.py --rounds 3 --out /tmp/step_time

1. Step time: jzero / `jax.jit` of the same step with the same at-rest shardings, on 8 devices.
2. Trace and lowering time: jzero on 1 and 8 devices / `jax.jit` of the same step on one device.
3. Processor time of the calling thread in one call, of a small step whose state has 7, 61 or 301 leaves:
   jzero / `jax.jit` with the same at-rest shardings, on 8 devices.

Runs alternate, and the ratio is the median over the rounds' ratios, because on a busy machine the
times themselves drift. Writes <date>.json.
"""

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jzero

# ---------------------------------------------------------------------------------------------
vocab_size = 256
context = 128
num_layers = 6
num_heads = 4
dim = 256
batch_size = 16  # sequences, over all devices
num_devices = 8
stages = (1, 3)
steps_per_run = 2
nums_params = (2, 20, 100)  # with Adam's moments and count: 7, 61 and 301 leaves
calls_per_run = 10
# ---------------------------------------------------------------------------------------------

tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def init(key: jax.Array) -> dict[str, Any]:
    def weights(index: int, *shape: int) -> jax.Array:
        return 0.02 * jax.random.normal(jax.random.fold_in(key, index), shape)

    params = {
        "embed": weights(0, vocab_size, dim),
        "positions": weights(1, context, dim),
        "blocks": {  # stacked along dim 0, one slice per layer
            "scales": weights(2, num_layers, 2, dim),
            "qkv": weights(3, num_layers, dim, 3 * dim),
            "project": weights(4, num_layers, dim, dim),
            "up": weights(5, num_layers, dim, 4 * dim),
            "down": weights(6, num_layers, 4 * dim, dim),
        },
    }
    return {"params": params, "opt_state": tx.init(params)}


def block(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    scales = 1 + weights["scales"]
    qkv = jax.nn.standardize(x) * scales[0] @ weights["qkv"]
    q, k, v = (a.reshape(*a.shape[:-1], num_heads, -1) for a in jnp.split(qkv, 3, axis=-1))
    attention = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + attention.reshape(x.shape) @ weights["project"]
    hidden = jax.nn.gelu(jax.nn.standardize(x) * scales[1] @ weights["up"])
    return x + hidden @ weights["down"], None


def loss_fn(params: dict[str, Any], batch: jax.Array) -> jax.Array:
    tokens, targets = batch[:, :-1], batch[:, 1:]
    x = params["embed"][tokens] + params["positions"]
    x, _ = jax.lax.scan(jax.checkpoint(block, prevent_cse=False), x, params["blocks"])
    logits = jax.nn.standardize(x) @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def step(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def make_mesh(devices: int) -> jax.sharding.Mesh:
    auto = jax.sharding.AxisType.Auto  # the mode in which plain jit shards an unchanged step
    return jax.make_mesh((devices,), ("data",), (auto,), devices=jax.devices()[:devices])


def make_batch() -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocab_size, (batch_size, context + 1), np.int32)


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
    jzero_step = jzero.shard_train_step(step, mesh=mesh, min_shard_bytes=0)
    states = [jzero_step.shard(jzero_step.init(init), batch) for _ in range(2)]
    at_rest = jzero_step.state_shardings(states[0], batch)
    jit_step = jax.jit(
        step, in_shardings=(at_rest, sharded), out_shardings=(at_rest, whole), donate_argnums=0
    )
    steps = [jzero_step, jit_step]

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
    steps, losses = [jzero_step, jit_step], [0.0, 0.0]

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


def compare_lowering_times(devices: int, rounds: int) -> dict[str, Any]:
    single, batch = jax.device_put(init(jax.random.key(0)), jax.devices()[0]), make_batch()
    mesh = make_mesh(devices)
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


def environment() -> dict[str, Any]:
    packages = ["jax", "jaxlib", "optax", "numpy"]
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpus = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
        "cpu": f"{os.cpu_count()} x {cpus[0] if cpus else platform.machine()}",
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--calls", action="store_true", help="only print 3, in 2 minutes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    # XLA reads this when the first device is asked for; of two settings the last one counts.
    flag = f"--xla_force_host_platform_device_count={num_devices}"
    # Virtual devices may wait for each other for ever under this scheduler (docs/design.md, 7).
    order = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag} {order}"
    os.environ.setdefault("PJRT_NPROC", "32")  # threads: collectives that wait hold one each

    result: dict[str, Any] = {
        **environment(),
        "settings": {
            "model": f"scanned + remat, {num_layers} layers, dim {dim}, context {context}",
            "parameters": sum(
                x.size for x in jax.tree.leaves(jax.eval_shape(init, jax.random.key(0))["params"])
            ),
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
    for devices in (1, num_devices):
        name = f"trace_and_lower_time_on_{devices}_devices"
        result[name] = compare_lowering_times(devices, args.rounds)
        print(name, result[name], flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{result['date']}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written: {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
