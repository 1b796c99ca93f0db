"""Train steps of Equinox's examples, as `jzero.from_eqx` takes them: modules taken and returned.

The reference is the script itself: its own step under `eqx.filter_jit`, one call after the other.
"""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import jzero
from jzero._compare import to_host

from ._program import Program, relative
from .core import (
    CLASSES,
    ROWS,
    adamw,
    labelled_batches,
)


def of_values(
    train_step: Callable[..., Any], make: Callable[[], Mapping[str, Any]],
    batches: Callable[[int], list[tuple[Any, ...]]], batch_name: str, returned: tuple[str, ...],
) -> Program:  # fmt: skip
    """An entry of a step that takes `make()` by name and one argument more, and returns what is named."""

    def alone(batches):
        values, trained = dict(make()), []
        for (batch,) in batches:
            found = dict(zip(returned, train_step(**values, **{batch_name: batch}), strict=True))
            loss = found.pop("loss")
            values |= found
            state = eqx.filter(tuple(values.values()), eqx.is_array)
            trained.append(to_host((state, loss)))
        return trained

    def init():
        return jzero.from_eqx(train_step, **make())[1]

    step, _ = jzero.from_eqx(train_step, **make())
    return Program(init=init, batches=batches, step=step, alone=alone)


class CNN(eqx.Module):
    """The MNIST example's: layers and functions in one list."""

    layers: list

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 4, kernel_size=3, key=keys[0]),
            eqx.nn.MaxPool2d(kernel_size=2),
            jax.nn.silu,
            jnp.ravel,
            eqx.nn.Linear(4 * 81, 16, key=keys[1]),
            jax.nn.sigmoid,
            eqx.nn.Linear(16, CLASSES, key=keys[2]),
            jax.nn.log_softmax,
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@relative
def eqx_mnist():
    """Functions among the layers; the model's arrays are its leaves that are arrays."""
    tx = adamw()

    @eqx.filter_jit
    def make_step(model, opt_state, batch):
        def loss_fn(model, x, y):
            return -jnp.mean(jnp.take_along_axis(jax.vmap(model)(x), y[:, None], axis=1))

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch["image"], batch["label"])
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    def make():
        model = CNN(jax.random.key(0))
        return {"model": model, "opt_state": tx.init(eqx.filter(model, eqx.is_array))}

    def batches(num_steps):
        rng = np.random.default_rng(50)
        return [
            ({"image": jnp.asarray(rng.normal(size=(ROWS, 1, 12, 12)), jnp.float32),
              "label": batch["label"]},)
            for (batch,) in labelled_batches(num_steps)
        ]  # fmt: skip

    return of_values(make_step, make, batches, "batch", ("model", "opt_state", "loss"))
