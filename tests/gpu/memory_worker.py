"""Trains a few steps in a process of its own, prints bytes of its device: `memory_worker.py TIER [LAYERS]`.

A process's peak cannot be set back, so each tier has one. Prints a line of JSON: `params` is how many there
are, `at_rest` the bytes of arrays on the device between steps, `in_use` and `peak` what the allocator counted
(null where it counts nothing: on CPUs).
"""

import functools
import gc
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jzero
from small import grouped

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
# Parameters rest on the host, too, and come layer by layer.
LAYERS: dict[str, Any] = {
    "offload": jzero.HostCPU(),
    "offload_params": jzero.PinnedHost(DEVICE_BYTES),
    "offload_activations": jzero.PinnedHost(),
}
TX = jzero.master_weights(optax.adamw(1e-3))


def init(num_layers: int) -> Any:
    keys = jax.random.split(jax.random.key(0), num_layers)
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


def main(tier: str, num_layers: int = NUM_LAYERS) -> None:
    options = LAYERS if tier == "layers" else {"offload": POLICIES[tier]}
    train_step = jzero.shard_train_step(step_fn, **grouped(**options))
    batch = jnp.ones((ROWS, DIM), jnp.bfloat16)
    make = functools.partial(init, num_layers)
    train_step.plan(jax.eval_shape(make), batch)  # so that the state is made where it will rest
    state = train_step.init(make)
    for _ in range(4):
        state, loss = train_step(state, batch)
    state = jax.block_until_ready(train_step.flush(state))
    assert jnp.isfinite(loss)
    gc.collect()
    here = [x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == "device"]
    stats = jax.devices()[0].memory_stats() or {}
    found = {
        "params": num_layers * DIM**2,
        "at_rest": sum(here),
        "in_use": stats.get("bytes_in_use"),
        "peak": stats.get("peak_bytes_in_use"),
    }
    print(json.dumps(found))


@functools.cache
def measured(*arguments: str) -> dict[str, int]:
    """What a process of its own prints: a peak cannot be set back."""
    path = [str(pathlib.Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    run = subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
