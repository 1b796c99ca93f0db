"""One way to train, in a process of its own: `worker.py WAY SECONDS`; prints a line of JSON.

A process of its own, since the runtime's count of the most memory in use cannot be set back.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

# Where jzero is installed without this repository, `experiments` is on no path.
sys.path.append(str(Path(__file__).parents[2]))
from experiments.shared import devices

devices.use_virtual_devices(8)  # where there are no others; before JAX touches one

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import jzero  # noqa: E402
from experiments.shared import records, speed  # noqa: E402
from experiments.shared.gpt import GPT, make_step  # noqa: E402

# ---------------------------------------------------------------------------------------------
on_gpu = GPT(layers=12, dim=1024, heads=16)  # 185M parameters, bfloat16 compute
on_cpu = GPT(layers=4, dim=128, heads=4, vocab=1024, context=128, dtype=jnp.float32)
rows = {"gpu": 8, "cpu": 1}  # sequences on each device
tx = optax.adamw(1e-4)
WAYS: dict[str, dict[str, Any] | None] = {
    "jax.jit": None,
    "stage 1": {"stage": 1},
    "stage 3": {"stage": 3},
    "PinnedHost": {"stage": 3, "memory": jzero.PinnedHost()},
    "HostCPU": {"stage": 3, "memory": jzero.HostCPU()},
}
GROUPS = 5  # of steps that are timed together
# ---------------------------------------------------------------------------------------------


def of_platform() -> tuple[GPT, int]:
    """The model, and sequences on each device."""
    platform = jax.devices()[0].platform
    return (on_cpu if platform == "cpu" else on_gpu), rows.get(platform, rows["gpu"])


def make_state(model: GPT, key: jax.Array) -> Any:
    keys = iter(jax.random.split(key, len(jax.tree.leaves(model.shapes))))
    return model.state(tx, lambda shape: 0.02 * jax.random.normal(next(keys), shape))


def start(way: str) -> tuple[Any, Any, Any, list[Any]]:
    """The step, its state and batch, and the devices that it runs on."""
    model, num_rows = of_platform()
    step, options = make_step(model.loss, tx), WAYS[way]
    used = jax.devices() if options is not None else jax.devices()[:1]
    shape = num_rows * len(used), model.context + 1
    tokens = np.random.default_rng(0).integers(0, model.vocab, shape, np.int32)
    key = jax.random.key(0)
    if options is None:
        state = jax.jit(lambda key: make_state(model, key))(key)
        return jax.jit(step, donate_argnums=0), state, tokens, used
    train_step = jzero.shard_train_step(step, **options)
    state = train_step.init(lambda key: make_state(model, key), key)
    return train_step, train_step.shard(state, tokens), tokens, used


def timed(step: Any, state: Any, tokens: Any, seconds: float) -> tuple[Any, dict[str, Any]]:
    """Seconds per step; only the end of a group of steps is waited for."""
    loss: Any = None

    def run(num: int) -> float:
        nonlocal state, loss
        begin = time.perf_counter()
        for _ in range(num):
            state, loss = step(state, tokens)
        jax.block_until_ready((state, loss))
        return (time.perf_counter() - begin) / num

    first, warm = run(1), run(2)
    third_loss = float(loss)  # the same in all ways on as many devices: they train alike
    num = max(1, min(50, round(seconds / GROUPS / warm)))
    found = [run(num) for _ in range(GROUPS)]
    return state, {
        "first_step_seconds": first, "step_seconds": statistics.median(found),
        "step_seconds_all": found, "third_loss": third_loss,
    }  # fmt: skip


def bytes_at_rest(step: Any, state: Any, tokens: Any) -> dict[str, int]:
    """Of each device's part of the state, on the device and on its host."""
    if not isinstance(step, jzero.ShardedTrainStep):
        return {"device": sum(leaf.nbytes for leaf in jax.tree.leaves(state)), "host": 0}
    plan = step.plan(state, tokens)
    tiers = {leaf.tier for leaf in plan.leaves}
    found = {tier: plan.nbytes_at_rest(tier=tier) for tier in tiers}
    device = found.pop("device", 0)
    return {"device": device, "host": sum(found.values())}


def peak_bytes(step: Any, state: Any, tokens: Any, used: list[Any]) -> tuple[int | None, str]:
    """The most that a device held, and who says so; an offloaded step is several programs."""
    counted = speed.bytes_in_use(used, "peak_bytes_in_use")
    if counted is not None:
        return counted, "the runtime's count"
    try:
        found = step.lower(state, tokens).compile().memory_analysis()
    except jzero.OptionError:
        return None, "not counted"
    inputs, outputs = found.argument_size_in_bytes, found.output_size_in_bytes
    peak = inputs + outputs - found.alias_size_in_bytes + found.temp_size_in_bytes
    return peak, "the compiled program's buffers"


def measure(way: str, seconds: float) -> dict[str, Any]:
    step, state, tokens, used = start(way)
    state, found = timed(step, state, tokens, seconds)
    model, num_rows = of_platform()
    num_tokens = num_rows * len(used) * model.context
    tokens_per_second = num_tokens / found["step_seconds"]
    flops = speed.flops_per_token(model.num_params, model.layers, model.dim, model.context)
    peak, source = peak_bytes(step, state, tokens, used)
    return found | {
        "way": way,
        "num_devices": len(used),
        "platform": used[0].platform,
        "model": {
            "parameters": model.num_params, "layers": model.layers, "dim": model.dim, "vocab": model.vocab,
            "context": model.context, "compute": str(jnp.dtype(model.dtype)), "remat": model.remat,
            "rows_per_device": num_rows,
        },
        "tokens_per_second": tokens_per_second,
        "mfu": speed.utilization(tokens_per_second, flops, used),
        "at_rest_bytes": bytes_at_rest(step, state, tokens),
        "peak_bytes": peak,
        "peak_bytes_by": source,
        "environment": records.environment("jax", "jaxlib", "optax", "numpy"),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], float(sys.argv[2]))))
