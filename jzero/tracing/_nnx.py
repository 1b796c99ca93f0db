"""NNX's mutating train steps, as functions of a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jzero._errors import StepError, message
from jzero.tracing._keys import fold_device_index


def from_nnx(
    train_step: Callable[..., Any], *objects: Any, fold_keys: bool = True
) -> tuple[Callable[..., Any], Any]:
    """Turns `train_step(model, optimizer, ..., batch)`, which mutates, into `step(state, batch)`.

    The step that comes back does::

        model, optimizer, ... = nnx.merge(graph, state)
        result = train_step(model, optimizer, ..., *args)
        return nnx.state((model, optimizer, ...)), result

    >>> import jax, jax.numpy as jnp, optax, jzero
    >>> from flax import nnx
    >>> model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    >>> def train_step(model, optimizer, batch):
    ...     loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(batch) ** 2))(model)
    ...     optimizer.update(model, grads)
    ...     return loss
    >>> step_fn, state = jzero.from_nnx(train_step, model, optimizer)
    >>> state, loss = jzero.shard_train_step(step_fn, stage=3)(state, jnp.ones((8, 4)))
    >>> nnx.update((model, optimizer), state)  # back into the objects, to evaluate or to save

    Args:
      train_step: a function of NNX objects and other arguments; it may return anything, or nothing.
      *objects: the NNX objects, in the order in which `train_step` takes them. Variables that they
        share are kept once.
      fold_keys: fold the device's index into the keys of `nnx.Rngs` for the time of a step, so that
        dropout differs between devices. The keys in the state stay what they are.

    Returns:
      `(step_fn, state)`: for `jzero.shard_train_step`, and its first state (an `nnx.State`).

    Raises:
      StepError: when the step is traced, if `train_step` adds or removes variables.
    """
    from flax import nnx

    graph, state = nnx.split(objects)

    def step_fn(state: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        merged = nnx.merge(graph, state)
        keys = _rng_keys(nnx, merged) if fold_keys else []
        before = [key.get_value() for key in keys]
        for key, value in zip(keys, before, strict=True):
            key.set_value(fold_device_index(value))
        result = train_step(*merged, *args, **kwargs)
        for key, value in zip(keys, before, strict=True):
            key.set_value(value)
        new_graph, new_state = nnx.split(merged)
        if new_graph != graph:
            raise StepError(message(
                "from_nnx", "train_step changes the structure of its objects",
                "A step must keep every variable that it got, and add none.",
                "Create variables when the model is built, not in the step."))  # fmt: skip
        return new_state, result

    return step_fn, state


def _rng_keys(nnx: Any, objects: Any) -> list[Any]:
    keys: dict[int, Any] = {}
    for _, node in nnx.iter_graph(objects):
        if isinstance(node, nnx.RngKey):
            keys[id(node)] = node
    return list(keys.values())
