"""jzero's side: a step written for one device, and `shard_train_step`, the one line."""

from collections import Counter
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import common
import jzero
from experiments.shared import gpt

tx = optax.adamw(**common.adamw)
standardize = partial(jax.nn.standardize, epsilon=common.norm_epsilon)


def connect(setup: common.Setup) -> None:
    if not setup.alone:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{setup.port}", common.num_processes, setup.rank)
    jax.devices()  # waits for the other process


def block(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    scales = weights["norm_1"], weights["norm_2"]
    return gpt.block(x, weights, scales, common.num_heads, norm=standardize), None


def loss_fn(params: dict[str, Any], batch: jax.Array) -> jax.Array:
    tokens, targets = batch[:, :-1], batch[:, 1:]
    x = params["embed"][tokens] + params["positions"]
    if isinstance(params["blocks"], list):
        for weights in params["blocks"]:
            x, _ = block(x, weights)
    else:  # one stack of layers
        x, _ = jax.lax.scan(block, x, params["blocks"])
    logits = standardize(x) * params["norm"] @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


train_step = gpt.make_step(loss_fn, tx)


class Trainer:
    def __init__(self, setup: common.Setup) -> None:
        params, batches = common.initial_weights(), common.local_batches(setup.rank)
        if {"scanned": True, "unrolled": False}[setup.variant]:
            params["blocks"] = jax.tree.map(lambda *leaves: np.stack(leaves), *params["blocks"])
        state = {"params": params, "opt_state": tx.init(params)}
        self.train_step: Any
        if setup.alone:
            self.train_step = jax.jit(train_step, donate_argnums=0)
            self.state, self.batches = jax.device_put((state, batches))
            return
        mesh = jax.make_mesh((common.num_processes,), ("data",))
        self.train_step = jzero.shard_train_step(train_step, stage=3, mesh=mesh)
        split = NamedSharding(mesh, PartitionSpec("data"))
        self.batches = [jax.make_array_from_process_local_data(split, batch) for batch in batches]
        self.state = self.train_step.shard(state, self.batches[0])

    def step(self, index: int) -> float:
        self.state, loss = self.train_step(self.state, self.batches[index])
        return float(loss)  # waits for the step

    def traffic(self) -> dict[str, int]:
        found: Counter[str] = Counter()
        for collective in self.train_step.describe(self.state, self.batches[0]).traffic:
            found[collective.op] += collective.nbytes
        return dict(found)

    def bytes_at_rest(self) -> int:
        leaves = jax.tree.leaves(self.state)
        return sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
