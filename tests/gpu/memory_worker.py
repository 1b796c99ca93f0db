"""Trains a few steps in a process of its own and prints the bytes on its device: `memory_worker.py TIER`.

A process's peak cannot be set back, so each tier has one. Prints a line of JSON: `params` is how many there
are, `at_rest` the bytes of arrays on the device between steps, `in_use` and `peak` what the allocator counted
(null where it counts nothing: on CPUs).
"""

import gc
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jzero

DEVICE_BYTES = 2**26
# So large on GPUs that making the state, 256 MiB at a time, is not what makes the peak.
NUM_LAYERS, ROWS = 16, 64
DIM = 4096 if jax.devices()[0].platform == "gpu" else 512
POLICIES: dict[str, Any] = {
    "device": jzero.NoOffload(),
    "pinned_host": jzero.PinnedHost(DEVICE_BYTES),
    "host": jzero.HostCPU(),
    "delayed": jzero.HostCPU(delayed_update=True, delay_after=1),
}
TX = jzero.master_weights(optax.adamw(1e-3))


def init() -> Any:
    keys = jax.random.split(jax.random.key(0), NUM_LAYERS)
    params = [jax.random.normal(key, (DIM, DIM), jnp.bfloat16) * DIM**-0.5 for key in keys]
    return params, TX.init(params)


def step_fn(state: Any, x: jax.Array) -> Any:
    def loss_fn(params: list[jax.Array]) -> jax.Array:
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def main(tier: str) -> None:
    train_step = jzero.shard_train_step(step_fn, offload=POLICIES[tier])
    batch = jnp.ones((ROWS, DIM), jnp.bfloat16)
    train_step.plan(jax.eval_shape(init), batch)  # so that the state is made where it will rest
    state = train_step.init(init)
    for _ in range(4):
        state, loss = train_step(state, batch)
    state = jax.block_until_ready(train_step.flush(state))
    assert jnp.isfinite(loss)
    gc.collect()
    here = [x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == "device"]
    stats = jax.devices()[0].memory_stats() or {}
    found = {
        "params": NUM_LAYERS * DIM**2,
        "at_rest": sum(here),
        "in_use": stats.get("bytes_in_use"),
        "peak": stats.get("peak_bytes_in_use"),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
