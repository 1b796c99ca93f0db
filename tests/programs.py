"""What tests read out of a step: models, traffic from the jaxpr, collectives of the compiled program."""

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

VOCAB, WIDTH, HIDDEN, SEQ, BATCH = 32, 16, 64, 8, 16


class Block(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        h = nn.Dense(HIDDEN, use_bias=False, dtype=self.dtype)(nn.gelu(x))
        return x + nn.Dense(WIDTH, use_bias=False, dtype=self.dtype)(nn.gelu(h)), None


class Model(nn.Module):
    """Tied embeddings around `depth` MLP blocks; every leaf is a matrix that 8 devices divide."""

    depth: int = 3
    scan: bool = True
    remat: bool = False
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCAB, WIDTH, dtype=self.dtype)
        x = embed(tokens)
        block: Any = nn.remat(Block, prevent_cse=not self.scan) if self.remat else Block
        if self.scan:
            stack = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.depth,
            )
            x, _ = stack(self.dtype)(x, None)
        else:
            for _ in range(self.depth):
                x, _ = block(self.dtype)(x, None)
        return embed.attend(x)


def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, tokens).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def abstract_state(model: nn.Module, tx: Any = None) -> Any:
    """Shapes of the model's `TrainState`."""
    optimizer = optax.adamw(1e-3) if tx is None else tx

    def init() -> TrainState:
        params = model.init(jax.random.key(0), jnp.zeros((2, SEQ), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    return jax.eval_shape(init)


def tokens(batch: int = BATCH) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, SEQ), jnp.int32)


def num_params(state: TrainState) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(state.params))


def compiled_collectives(text: str) -> dict[str, int]:
    """How many collectives of each kind stand in a compiled program (loops not multiplied)."""
    kinds = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
    return {
        kind: count
        for kind in kinds
        if (
            count := len(
                re.findall(rf"= \S+ {kind}(?:-start)?\(|= \(.*?\) {kind}(?:-start)?\(", text)
            )
        )
    }


def compiled_elements(text: str, kind: str) -> list[int]:
    """Elements of every result of a kind of collective that a compiled program runs, sorted."""
    sizes = []
    for computation, times in compiled_times(text).items():
        for match in re.finditer(rf"= (\(?[^=]*?\)?) {kind}(?:-start)?\(", computation):
            for dims in re.findall(r"\w+\[([\d,]*)\]", match.group(1)):
                size = 1
                for dim in filter(None, dims.split(",")):
                    size *= int(dim)
                sizes += [size] * times
    return sorted(sizes)


def compiled_times(text: str) -> dict[str, int]:
    """The computations of a compiled program, and how often each runs; fusions do not count."""
    names = {}
    for computation in re.split(r"\n(?=%|ENTRY)", text):
        if name := re.match(r"(?:ENTRY )?%([\w.\-]+)", computation):
            names[name.group(1)] = computation
    waiting = [(c, 1) for c in names.values() if c.startswith("ENTRY")]
    found: dict[str, int] = {}
    while waiting:
        computation, times = waiting.pop()
        found[computation] = found.get(computation, 0) + times
        for line in computation.splitlines():
            if body := re.search(r" while\(.*body=%([\w.\-]+)", line):
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
                assert trips is not None, line
                waiting.append((names[body.group(1)], times * int(trips.group(1))))
            elif call := re.search(r" call\(.*to_apply=%([\w.\-]+)", line):
                waiting.append((names[call.group(1)], times))
    return found
