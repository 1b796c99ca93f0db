"""One update: its optimizer, its size, and the memory that every side updates in turn."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jzero.offload.memory._addresses import host_empty

# Moments beside the parameter.
MOMENTS = {"AdamW": 2, "Lion": 1, "SGD + momentum": 1, "RMSProp": 1}
RATE = 1e-4


def optimizer(name: str) -> optax.GradientTransformation:
    """The optimizer in optax."""
    return {
        "AdamW": lambda: optax.adamw(RATE, weight_decay=1e-2),
        "Lion": lambda: optax.lion(RATE, weight_decay=1e-2),
        "SGD + momentum": lambda: optax.sgd(RATE, momentum=0.9),
        # As PyTorch's: epsilon outside the root.
        "RMSProp": lambda: optax.rmsprop(RATE, decay=0.99, eps=1e-8, eps_in_sqrt=False),
    }[name]()


@dataclasses.dataclass(frozen=True)
class Config:
    """What is updated: so many parameters in so many leaves, by which optimizer, with which gradients."""

    optimizer: str
    millions: int
    num_leaves: int
    grads: str = "float32"
    copy: bool = False

    @property
    def leaf_size(self) -> int:
        """Elements of a leaf; all start on cache lines, in 16 bits too, as arrays do."""
        return (self.millions << 20) // self.num_leaves // 32 * 32


class Memory:
    """The parameters, moments, gradients and 16-bit copies of one update, in leaves."""

    def __init__(self, config: Config):
        self.config = config
        self.size = config.leaf_size * config.num_leaves
        rng = np.random.default_rng(0)
        self.params = self._filled(rng, 1.0)
        self.moments = [self._filled(rng, 1e-3) for _ in range(MOMENTS[config.optimizer])]
        if config.optimizer != "Lion" and config.optimizer != "SGD + momentum":
            np.abs(self.moments[-1], out=self.moments[-1])  # A second moment.
        self.grads32 = self._filled(rng, 1e-2)
        self.grads = self.grads32
        if config.grads == "bfloat16":
            self.grads = host_empty((self.size,), jnp.bfloat16)
            self.grads[:] = self.grads32
        self.copy = host_empty((self.size,), jnp.bfloat16) if config.copy else None
        if self.copy is not None:
            self.copy[:] = 0  # Fresh pages are slow the first time.

    def _filled(self, rng: np.random.Generator, scale: float) -> np.ndarray:
        # A block of random numbers again and again: as many as there are would take minutes.
        block = (scale * rng.standard_normal(1 << 16)).astype(np.float32)
        array = host_empty((self.size,), np.float32)
        for start in range(0, self.size, len(block)):
            array[start : start + len(block)] = block[: self.size - start]
        return array

    def leaves(self, array: np.ndarray) -> list[np.ndarray]:
        """The leaves of one of the arrays."""
        size = self.config.leaf_size
        return [array[i * size : (i + 1) * size] for i in range(self.config.num_leaves)]


def update_of(memory: Memory, cast: bool = True) -> tuple[Any, list[Any]]:
    """optax's update as a function of flat arrays, perhaps of gradients cast to float32, and its state."""
    tx, config = optimizer(memory.config.optimizer), memory.config
    params = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in memory.leaves(memory.params)]
    shapes, tree = jax.tree.flatten((params, jax.eval_shape(tx.init, params)))
    moments = iter([x for array in memory.moments for x in memory.leaves(array)])
    state = memory.leaves(memory.params) + [
        next(moments) if shape.shape else np.zeros((), shape.dtype)
        for shape in shapes[len(params) :]
    ]

    def update(state: Any, grads: Any) -> tuple[Any, Any]:
        params, opt_state = jax.tree.unflatten(tree, state)
        grads = [grad.astype(jnp.float32) for grad in grads] if cast else [*grads]
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        copies = [param.astype(jnp.bfloat16) for param in params] if config.copy else []
        return jax.tree.leaves((params, opt_state)), copies

    return update, state
