"""jzero's side: the step is written for one device, and `shard_train_step` is the one line."""

import os
from typing import Any

import common


def serve(setup: common.Setup) -> None:
    common.pin(setup.rank)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    import jax

    import jzero  # noqa: F401

    if not setup.alone:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{setup.port}", common.num_processes, setup.rank)
    jax.devices()  # connects the processes
    baseline = common.memory()["now"]
    common.serve(setup.connection, baseline, Trainer(setup.rank, setup.variant, setup.alone))


class Trainer:
    def __init__(self, rank: int, variant: str, alone: bool) -> None:
        import jax
        import jax.numpy as jnp
        import numpy as np
        import optax
        from jax.sharding import NamedSharding, PartitionSpec

        import jzero

        self.alone = alone
        scanned = {"scanned": True, "unrolled": False}[variant]

        def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
            return jax.nn.standardize(x, epsilon=common.norm_epsilon) * scale

        def block(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            qkv = norm(x, weights["norm_1"]) @ weights["qkv"]
            q, k, v = (
                a.reshape(*a.shape[:-1], common.num_heads, -1) for a in jnp.split(qkv, 3, axis=-1)
            )
            attention = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + attention.reshape(x.shape) @ weights["project"]
            hidden = jax.nn.gelu(norm(x, weights["norm_2"]) @ weights["up"])
            return x + hidden @ weights["down"], None

        def loss_fn(params: dict[str, Any], batch: jax.Array) -> jax.Array:
            tokens, targets = batch[:, :-1], batch[:, 1:]
            x = params["embed"][tokens] + params["positions"]
            if scanned:
                x, _ = jax.lax.scan(block, x, params["blocks"])
            else:
                for weights in params["blocks"]:
                    x, _ = block(x, weights)
            logits = norm(x, params["norm"]) @ params["embed"].T
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

        tx = optax.adamw(**common.adamw)

        def step(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], jax.Array]:
            loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
            updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
            params = optax.apply_updates(state["params"], updates)
            return {"params": params, "opt_state": opt_state}, loss

        params = common.initial_weights()
        if scanned:
            params["blocks"] = jax.tree.map(lambda *leaves: np.stack(leaves), *params["blocks"])
        state = {"params": params, "opt_state": tx.init(params)}
        batches = common.local_batches(rank)
        if alone:
            self.train_step = jax.jit(step, donate_argnums=0)
            self.state, self.batches = jax.device_put((state, batches))
            return
        self.train_step = jzero.shard_train_step(step, stage=3)
        split = NamedSharding(jax.make_mesh((jax.device_count(),), ("data",)), PartitionSpec("data"))
        self.batches = [jax.make_array_from_process_local_data(split, batch) for batch in batches]
        self.state = self.train_step.shard(state, self.batches[0])

    def step(self, index: int) -> float:
        self.state, loss = self.train_step(self.state, self.batches[index])
        return float(loss)  # waits

    def traffic(self) -> dict[str, int]:
        if self.alone:
            return {}
        report = self.train_step.describe(self.state, self.batches[0])
        found: dict[str, int] = {}
        for collective in report.traffic:
            name = f"{collective.op} {collective.dtype}"
            found[name] = found.get(name, 0) + collective.nbytes
        return found

    def bytes_at_rest(self) -> int:
        import jax

        shards = [leaf.addressable_shards for leaf in jax.tree.leaves(self.state)]
        return sum(shard.data.nbytes for leaf in shards for shard in leaf)
