"""Parameters, data and updates that many families share.

Everything is drawn by NumPy in float64 and then rounded: float32 and float64 train alike. Widths are
small; kernels have a dim that 8 devices divide, and ten classes are not divisible.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROWS = 32
FEATURES = 8
WIDTH = 16
CLASSES = 10
SGD = optax.sgd(0.1, momentum=0.9)


def adamw(learning_rate: Any = 1e-2, **kwargs) -> optax.GradientTransformation:
    # With the default eps of 1e-8 a gradient that is zero but for rounding moves its parameter by a
    # whole learning rate. This eps keeps rounding errors the size of rounding errors.
    return optax.adamw(learning_rate, eps=1e-3, **kwargs)


def normal(seed: int, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    """Parameters and buffers."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, dtype)


def kernel(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Scaled by what it contracts: all dims but the last."""
    return normal(seed, shape, dtype, scale=np.prod(shape[:-1]) ** -0.5)


def dense_params(seed: int, num_in: int, num_out: int, dtype: Any) -> dict[str, jax.Array]:
    bias = normal(seed + 1, (num_out,), dtype, scale=0.1)
    return {"kernel": kernel(seed, (num_in, num_out), dtype), "bias": bias}


def dense(layer: Any, x: jax.Array) -> jax.Array:
    y = x @ layer["kernel"]
    return y + jnp.broadcast_to(layer["bias"], y.shape)


def mlp_params(
    dtype: Any, sizes: tuple[int, ...] = (FEATURES, WIDTH, CLASSES), seed: int = 0
) -> list[dict[str, jax.Array]]:
    pairs = zip(sizes[:-1], sizes[1:], strict=True)
    return [dense_params(seed + 10 * i, *pair, dtype) for i, pair in enumerate(pairs)]


def mlp(layers: Any, x: jax.Array) -> jax.Array:
    for layer in layers[:-1]:
        x = jnp.tanh(dense(layer, x))
    return dense(layers[-1], x)


def start(params: Any, tx: optax.GradientTransformation = SGD, **more: Any) -> dict[str, Any]:
    return {"params": params, "opt": tx.init(params), **more}


def mlp_of(*sizes: int, tx: optax.GradientTransformation = SGD) -> Callable[[Any], dict[str, Any]]:
    """`init` of a program that trains an MLP."""
    return lambda dtype: start(mlp_params(dtype, sizes or (FEATURES, WIDTH, CLASSES)), tx)


mlp_start = mlp_of()


def update(
    state: dict[str, Any], grads: Any, tx: optax.GradientTransformation = SGD, **more: Any
) -> dict[str, Any]:
    """The state after one update of its optimizer; `more` replaces other entries."""
    updates, opt = tx.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {**state, "params": params, "opt": opt, **more}


def learn(
    state: dict[str, Any],
    loss_fn: Callable[[Any], Any],
    tx: optax.GradientTransformation = SGD,
    **more: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One step of the optimizer on `loss_fn(params) -> (loss, outputs)`."""
    (loss, outputs), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    return update(state, grads, tx, **more), {"loss": loss, **outputs}


def learning(
    loss_fn: Callable[..., Any], tx: optax.GradientTransformation = SGD
) -> Callable[..., Any]:
    """The step that learns by `loss_fn(params, *batch) -> (loss, outputs)`, whose arguments it has."""

    def step(state: dict[str, Any], *batch: Any) -> Any:
        return learn(state, lambda params: loss_fn(params, *batch), tx)

    state, *_ = inspect.signature(learn).parameters.values()
    _, *others = inspect.signature(loss_fn).parameters.values()
    step.__signature__ = inspect.Signature([state, *others])  # type: ignore[attr-defined]
    return step


def classified(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The mean of the cross entropies, and each of them."""
    losses = cross_entropies(logits, labels)
    return losses.mean(), {"losses": losses}


def cross_entropies(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """One for each row (and position)."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def labelled(num_steps: int, dtype: Any, rows: int = ROWS, features: int = FEATURES) -> list[Any]:
    """(x [rows, features], label int32 [rows]) for each step."""
    rng = np.random.default_rng(5)
    return [
        (
            rng.normal(size=(rows, features)).astype(dtype),
            rng.integers(0, CLASSES, rows).astype(np.int32),
        )
        for _ in range(num_steps)
    ]


def normals(
    *shapes: tuple[int, ...], seed: int = 6, labels: int | tuple[int, ...] | None = None
) -> Callable[[int, Any], list[Any]]:
    """`batches` of one array of each shape, and of int32 labels if their shape is given."""

    def batches(num_steps: int, dtype: Any) -> list[Any]:
        rng = np.random.default_rng(seed)

        def batch() -> tuple[Any, ...]:
            arrays = tuple(rng.normal(size=shape).astype(dtype) for shape in shapes)
            if labels is None:
                return arrays
            return *arrays, rng.integers(0, CLASSES, labels).astype(np.int32)

        return [batch() for _ in range(num_steps)]

    return batches


def with_arguments(
    batches: Callable[[int, Any], list[Any]], more: Callable[[int, Any], tuple[Any, ...]]
) -> Callable[[int, Any], list[Any]]:
    """`batches` with further arguments: `more(i, dtype)` in step i."""

    def extended(num_steps: int, dtype: Any) -> list[Any]:
        return [(*args, *more(i, dtype)) for i, args in enumerate(batches(num_steps, dtype))]

    return extended


def cast(tree: Any, dtype: Any) -> Any:
    """All floats in `dtype`: models of libraries are made in float32."""

    def convert(leaf: Any) -> Any:
        is_float = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if is_float else leaf

    return jax.tree.map(convert, tree)
