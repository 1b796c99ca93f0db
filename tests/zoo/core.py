"""Steps of Flax in float32, with which each option is tried: `CORE`.

Widths are multiples of 8, so that kernels can be sharded; ten classes are not, so that some leaves must stay
replicated.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training import train_state
from jax.sharding import PartitionSpec as P

import jzero

from ._parts import CLASSES, FEATURES, ROWS, adamw, cross_entropies
from ._program import Program, relative

# Steps of all kinds, one of each: those of this file, and others that train in float32, too.
CORE = (
    "mlp", "transformer", "transformer_scan", "transformer_scan_remat", "tied_embeddings", "mixed_bf16",
    "lstm", "moe_with_balance_loss", "maml_on_the_whole_batch", "inner_steps", "microbatch_scan",
    "cond_on_gradients", "while_in_update", "evaluate_after_update", "pmap_style", "pmap_style_local",
    "ctc", "gan", "sam", "gradient_penalty", "batch_norm", "dropout_typed_key", "dropout_key_in_state",
    "returns_only_state", "per_example_outputs", "nnx_mutating",
)  # fmt: skip
SEQ_LEN, VOCAB_SIZE = 8, 24
AXIS = "batch"


# -- models, states and data ----------------------------------------------------------------------------
def labelled_batches(num_steps: int) -> list[tuple[Any, ...]]:
    """One dict per step: 'x' float32 [32, 8], 'label' int32 [32]."""
    rng = np.random.default_rng(0)
    return [
        (
            {
                "x": rng.normal(size=(ROWS, FEATURES)).astype(np.float32),
                "label": rng.integers(0, CLASSES, ROWS).astype(np.int32),
            },
        )
        for _ in range(num_steps)
    ]


def token_batches(num_steps: int) -> list[tuple[Any, ...]]:
    """One array per step: int32 [32, 9]; the last column is only predicted."""
    rng, shape = np.random.default_rng(1), (ROWS, SEQ_LEN + 1)
    return [(rng.integers(0, VOCAB_SIZE, shape).astype(np.int32),) for _ in range(num_steps)]


def cross_entropy(logits: Any, labels: jax.Array) -> jax.Array:
    return cross_entropies(logits, labels).mean()


def accuracy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return (logits.argmax(-1) == labels).astype(jnp.float32).mean()


class MLP(nn.Module):
    width: int = 16
    num_outputs: int = CLASSES
    dropout_rate: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        # Smooth: in float16 a rounding could take a unit across the kink of a relu.
        x = nn.silu(nn.Dense(self.width, dtype=self.dtype)(x))
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        return nn.Dense(self.num_outputs, dtype=self.dtype)(x)


class Block(nn.Module):
    width: int = 16

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        mask = nn.make_causal_mask(x[..., 0])
        # No biases: the loss does not depend on a key's bias, whose gradient would be all rounding.
        attention = nn.MultiHeadDotProductAttention(num_heads=2, use_bias=False)
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(2 * self.width)(nn.LayerNorm()(x))))
        return x, None


class Transformer(nn.Module):
    scanned: bool = False
    remat: bool = False
    tied: bool = False
    num_layers: int = 2
    width: int = 16

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCAB_SIZE, self.width)
        positions = self.param("positions", nn.initializers.normal(0.1), (SEQ_LEN, self.width))
        x = embed(tokens) + positions[None]
        block = nn.remat(Block, prevent_cse=not self.scanned) if self.remat else Block
        if self.scanned:
            layers = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.num_layers,
            )
            x, _ = layers(self.width)(x, None)
        else:
            for _ in range(self.num_layers):
                x, _ = block(self.width)(x)
        x = nn.LayerNorm()(x)
        return embed.attend(x) if self.tied else nn.Dense(VOCAB_SIZE, use_bias=False)(x)


def create_state(model: nn.Module, example: jax.Array, tx: optax.GradientTransformation) -> Any:
    params = model.init(jax.random.key(0), example)["params"]
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def classifier_state(dtype: Any = jnp.float32) -> Any:
    return create_state(MLP(dtype=dtype), jnp.zeros((1, FEATURES)), adamw())


def loss_of(state: Any, params: Any, batch: Any) -> jax.Array:
    logits = state.apply_fn({"params": params}, batch["x"])
    return cross_entropy(logits.astype(jnp.float32), batch["label"])


def loss_and_grads(state: Any, batch: Any) -> tuple[jax.Array, Any]:
    return jax.value_and_grad(lambda params: loss_of(state, params, batch))(state.params)


def predict_next_step(state, tokens):
    def loss_fn(params):
        return cross_entropy(state.apply_fn({"params": params}, tokens[:, :-1]), tokens[:, 1:])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "grad_norm": optax.tree.norm(grads)}


def _classifier(step: Any, **more: Any) -> Program:
    kinds = {"init": lambda: classifier_state(), "batches": labelled_batches, "step": step}
    return Program(**{**kinds, **more})


# -- networks -------------------------------------------------------------------------------------------
@relative
def mlp():
    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["x"])
            return cross_entropy(logits, batch["label"]), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads)
        return state, {"loss": loss, "accuracy": accuracy(logits, batch["label"])}

    return _classifier(step)


def _transformer(**options) -> Program:
    def init():
        schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-2, warmup_steps=2, decay_steps=10)
        tx = optax.chain(optax.clip_by_global_norm(0.5), adamw(schedule, weight_decay=0.1))
        return create_state(Transformer(**options), jnp.zeros((1, SEQ_LEN), jnp.int32), tx)

    return Program(init=init, batches=token_batches, step=predict_next_step)


@relative
def transformer():
    return _transformer()


@relative
def transformer_scan():
    return _transformer(scanned=True)


@relative
def transformer_scan_remat():
    return _transformer(scanned=True, remat=True)


@relative
def tied_embeddings():
    return _transformer(tied=True, num_layers=1)


@relative
def mixed_bf16():
    """float32 parameters, bfloat16 compute.

    bfloat16 has 8 bits, and gradients are summed over the devices before the cast to float32: two roundings
    at 2**-8, twice that in the second moments.
    """

    def init():
        return classifier_state(jnp.bfloat16)

    def step(state, batch):
        loss, grads = loss_and_grads(state, batch)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return _classifier(step, init=init, rounded_to="bfloat16")


@relative
def ctc():
    """A scan whose carry starts from constants, inside optax."""
    num_frames, num_labels, vocab_size = 8, 3, 9

    def init():
        return create_state(MLP(num_outputs=vocab_size), jnp.zeros((1, num_frames, 8)), adamw())

    def batches(num_steps):
        rng = np.random.default_rng(4)

        def batch():
            lengths = rng.integers(1, num_labels + 1, (ROWS, 1))
            labels = rng.integers(1, vocab_size, (ROWS, num_labels))
            return {
                "frames": rng.normal(size=(ROWS, num_frames, 8)).astype(np.float32),
                "labels": labels.astype(np.int32),
                "paddings": (np.arange(num_labels)[None] >= lengths).astype(np.float32),
            }

        return [(batch(),) for _ in range(num_steps)]

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["frames"])
            no_padding = jnp.zeros(logits.shape[:2])
            return optax.ctc_loss(logits, no_padding, batch["labels"], batch["paddings"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return Program(init=init, batches=batches, step=step)


# -- loops and branches ---------------------------------------------------------------------------------
@relative
def inner_steps():
    """A `lax.scan` of three optimizer steps inside one step, over batches stacked along dim 0."""

    def batches(num_steps):
        parts = iter(labelled_batches(3 * num_steps))
        return [
            (jax.tree.map(lambda *rows: np.stack(rows), *(next(parts)[0] for _ in range(3))),)
            for _ in range(num_steps)
        ]

    def step(state, stacked):
        def one(state, batch):
            loss, grads = loss_and_grads(state, batch)
            return state.apply_gradients(grads=grads), loss

        state, losses = jax.lax.scan(one, state, stacked)
        return state, {"loss": losses.mean()}

    options = {"in_specs": {"stacked": P(None, "data")}}
    return _classifier(step, batches=batches, options=options)


@relative
def microbatch_scan():
    """The user's own gradient accumulation, with zeros as the first carry."""
    num = 2

    def step(state, batch):
        def accumulate(carry, microbatch):
            return jax.tree.map(jnp.add, carry, loss_and_grads(state, microbatch)), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
        parts = jax.tree.map(lambda x: x.reshape(num, x.shape[0] // num, *x.shape[1:]), batch)
        (loss, grads), _ = jax.lax.scan(accumulate, zeros, parts)
        grads = jax.tree.map(lambda g: g / num, grads)
        return state.apply_gradients(grads=grads), {"loss": loss / num}

    return _classifier(step)


@relative
def cond_on_gradients():
    """The update is skipped where the gradient is large, as it is on the second batch."""

    def batches(num_steps):
        result = labelled_batches(num_steps)
        if num_steps > 1:
            (batch,) = result[1]
            result[1] = ({**batch, "x": 30 * batch["x"]},)
        return result

    def step(state, batch):
        loss, grads = loss_and_grads(state, batch)
        is_small = optax.tree.norm(grads) < 5.0
        new = jax.lax.cond(is_small, lambda: state.apply_gradients(grads=grads), lambda: state)
        return new, {"loss": loss, "applied": is_small.astype(jnp.float32)}

    return _classifier(step, batches=batches)


@relative
def while_in_update():
    """Gradients are halved until they are small: the condition is a norm over all shards."""

    def step(state, batch):
        loss, grads = loss_and_grads(state, batch)

        def halve(carry):
            grads, count = carry
            return jax.tree.map(lambda g: 0.5 * g, grads), count + 1

        def is_large(carry):
            return optax.tree.norm(carry[0]) > 0.1

        grads, count = jax.lax.while_loop(is_large, halve, (grads, jnp.zeros((), jnp.int32)))
        return state.apply_gradients(grads=grads), {"loss": loss, "halvings": count}

    return _classifier(step)


@relative
def evaluate_after_update():
    """The new parameters are used again in the same step, after the update."""

    def step(state, batch):
        loss, grads = loss_and_grads(state, batch)
        state = state.apply_gradients(grads=grads)
        logits = state.apply_fn({"params": state.params}, batch["x"])
        after = {"loss": cross_entropy(logits, batch["label"])}
        return state, {"before": loss, "after": after, "right": accuracy(logits, batch["label"])}

    return _classifier(step)


# -- states and outputs ---------------------------------------------------------------------------------
@relative
def returns_only_state():
    def step(state, batch):
        return state.apply_gradients(grads=loss_and_grads(state, batch)[1])

    return _classifier(step, returns_metrics=False)


@relative
def per_example_outputs():
    """Outputs with one row per example come back as those of the whole batch."""

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["x"])
            losses = cross_entropies(logits, batch["label"])
            return losses.mean(), {"losses": losses, "logits": logits}

        (loss, rows), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, **rows}

    return _classifier(step)


@relative
def dropout_key_in_state():
    """The key rests in the state, and every step splits it."""
    model = MLP(dropout_rate=0.5)

    def init():
        params = model.init(jax.random.key(0), jnp.zeros((1, FEATURES)), train=False)["params"]
        return {"params": params, "opt_state": adamw().init(params), "key": jax.random.key(3)}

    def step(state, batch):
        key, dropout_key = jax.random.split(state["key"])

        def loss_fn(params):
            logits = model.apply({"params": params}, batch["x"], rngs={"dropout": dropout_key})
            return cross_entropy(logits, batch["label"])

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = adamw().update(grads, state["opt_state"], state["params"])
        params = jax.tree.map(jnp.add, state["params"], updates)
        return {"params": params, "opt_state": opt_state, "key": key}, {"loss": loss}

    return _classifier(step, init=init)


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(FEATURES, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.dropout(nnx.relu(self.hidden(x))))


def nnx_objects():
    model = NnxNet(nnx.Rngs(0, dropout=1))
    optimizer = nnx.Optimizer(model, adamw(), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
    return model, optimizer, metrics


def nnx_train(model, optimizer, metrics, batch):
    """The mutating step of Flax's tutorial."""

    def loss_fn(model):
        logits = model(batch["x"])
        return cross_entropy(logits, batch["label"]), logits

    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)
    return {"loss": loss}


@relative
def nnx_mutating():
    """By `jzero.from_nnx`, which finds the state in the objects; one device trains without it."""

    def init():
        return jzero.from_nnx(nnx_train, *nnx_objects())[1]

    step, _ = jzero.from_nnx(nnx_train, *nnx_objects())
    return _classifier(step, init=init)


# -- collectives of the step's own: it is written for one device's part of the batch ----------------------
class PmapNet(nn.Module):
    axis_name: str | None = AXIS
    dropout_rate: float = 0.0

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.8, axis_name=self.axis_name)(x)
        x = nn.Dropout(self.dropout_rate, deterministic=not self.dropout_rate)(nn.relu(x))
        return nn.Dense(CLASSES)(x)


class PmapState(train_state.TrainState):
    batch_stats: Any


def _pmap_step(state, batch, key=None):
    """As in Flax's ImageNet example, written for `jax.pmap(..., axis_name="batch")`."""

    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        rngs = {} if key is None else {"dropout": key}
        logits, updates = state.apply_fn(variables, batch["x"], mutable=["batch_stats"], rngs=rngs)
        return cross_entropy(logits, batch["label"]), (logits, updates["batch_stats"])

    (loss, (logits, stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    metrics = {"loss": loss, "accuracy": accuracy(logits, batch["label"])}
    metrics, stats, grads = jax.lax.pmean((metrics, stats, grads), axis_name=AXIS)
    return state.apply_gradients(grads=grads, batch_stats=stats), metrics


def _pmap(model: PmapNet, **more: Any) -> Program:
    def init():
        keys = dict(zip(("params", "dropout"), jax.random.split(jax.random.key(0)), strict=True))
        variables = model.init(keys, jnp.zeros((1, FEATURES)))
        return PmapState.create(apply_fn=model.apply, tx=adamw(), **variables)

    return _classifier(_pmap_step, init=init, options={"axis_name": AXIS}, **more)


@relative
def pmap_style():
    """Its own `lax.pmean` over its own axis name, batch statistics over all devices."""
    return _pmap(PmapNet())


@relative
def pmap_style_local():
    """Statistics of each device's own rows, and dropout by its own key: the meaning that pmap gives."""

    def batches(num_steps):
        keys = jax.random.split(jax.random.key(9), num_steps)
        return [(*batch, key) for batch, key in zip(labelled_batches(num_steps), keys, strict=True)]

    return _pmap(PmapNet(axis_name=None, dropout_rate=0.3), batches=batches)
