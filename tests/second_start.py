"""A training's start, in a process of its own: prints what JAX's persistent cache was asked, and had."""

import collections
import json
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jzero
from small import grouped

asked: collections.Counter[str] = collections.Counter()
TRAININGS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "pinned": {"offload": jzero.PinnedHost(device_bytes=2**10)},
    "host": {"offload": jzero.HostCPU(), "accumulate": 2},
}
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def note(event: str, **_: str | int) -> None:
    asked[event] += 1


def loss_fn(params, x):
    layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None), prevent_cse=False)
    return jnp.mean(jax.lax.scan(layer, x @ params["in"], params["layers"])[0] ** 2)


def step(params, opt_state, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def init():
    # 8 devices divide no dim of the first one: it rests padded.
    params = {"in": jnp.ones((30, 12)), "layers": jnp.ones((3, 12, 12))}
    return params, tx.init(params)


jax.monitoring.register_event_listener(note)
found = {}
for name, options in TRAININGS.items():
    asked.clear()
    train_step: Any = jzero.shard_train_step(
        step, **grouped(state_argnums=(0, 1), min_shard_bytes=0, **options)
    )
    *state, loss = train_step(*train_step.init(init), jnp.ones((16, 30)))
    train_step(*state, jnp.ones((16, 30)))
    found[name] = {
        kind: asked[f"/jax/compilation_cache/cache_{kind}"] for kind in ("hits", "misses")
    }
print(json.dumps(found))
