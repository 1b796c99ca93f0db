"""What a script is: a training as its author wrote it, which is given what it jits its step with."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax

Jit = Callable[..., Any]
NUM_STEPS = 3
BATCH_SIZE = 16


@dataclasses.dataclass(frozen=True)
class Script:
    """A training script.

    Attributes:
      run: `run(jit)` trains and returns all that the script is left with, in a pytree: what it trained, and
        the metrics of every step. `jit` stands where the author wrote `author`.
      author: what the author wrote, as `jax.jit`.
      options: of `shard_train_step`, what the changed line says beside stage and mesh.
      rounded_to: as of `Program`.
    """

    run: Callable[[Jit], Any]
    author: Jit
    options: Mapping[str, Any]
    rounded_to: str


SCRIPTS: dict[str, Script] = {}


def script(
    author: Jit = jax.jit, rounded_to: str = "float32", **options: Any
) -> Callable[[Callable[[Jit], Any]], Any]:
    """Registers a script under its function's name."""

    def register(run: Callable[[Jit], Any]) -> Callable[[Jit], Any]:
        SCRIPTS[run.__name__] = Script(run, author, options, rounded_to)
        return run

    return register


def adam(learning_rate: Any = 1e-2) -> optax.GradientTransformation:
    # With the default eps of 1e-8 a gradient of rounding errors alone moves its parameter by a whole
    # learning rate.
    return optax.adam(learning_rate, eps=1e-3)


def images(num: int = NUM_STEPS, size: int = 8, channels: int = 1) -> list[dict[str, np.ndarray]]:
    """Batches in NumPy, as data loaders give them: 'image' float32 [16, 8, 8, 1], 'label' int32 [16]."""
    rng = np.random.default_rng(0)
    shape = (BATCH_SIZE, size, size, channels)
    return [
        {
            "image": rng.normal(size=shape).astype(np.float32),
            "label": rng.integers(0, 10, BATCH_SIZE).astype(np.int32),
        }
        for _ in range(num)
    ]


def tokens(num: int = NUM_STEPS, length: int = 9, vocab: int = 24) -> np.ndarray:
    """int32 [num, 16, 9]."""
    shape = (num, BATCH_SIZE, length)
    return np.random.default_rng(1).integers(0, vocab, shape).astype(np.int32)
