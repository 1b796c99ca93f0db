# SPDX-License-Identifier: Apache-2.0
"""NNX's mutating train steps, as functions of a state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Concatenate, TypeVar

from jzero._errors import StepError, a_type, message
from jzero.tracing._held import Held
from jzero.tracing._objects import FROM_NNX as WHO
from jzero.tracing._objects import changes_of, check_partial, explained, listed

_Result = TypeVar("_Result")


def from_nnx(
    train_step: Callable[..., _Result], *objects: Any, **named: Any
) -> tuple[Callable[Concatenate[Any, ...], tuple[Any, _Result]], Any]:
    """Turns `train_step(model, optimizer, ..., batch)`, which mutates, into `step(state, batch)`.

    `shard_train_step` accepts such a step as it is. A function of a state is for cases that objects do not
    cover: more state (`state=`), an outer `jax.jit`, `jzero.testing`. The returned step does::

        model, optimizer, ... = nnx.merge(graph, state)
        result = train_step(model, optimizer, ..., *args)
        return nnx.state((model, optimizer, ...)), result

    so that objects are mutated as `nnx.jit(train_step)` mutates them: parameters, batch statistics, metrics,
    and the counts of `nnx.Rngs`, in any argument of the step.

    >>> import jax, jax.numpy as jnp, optax, jzero
    >>> from flax import nnx
    >>> model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Dropout(0.5))
    >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    >>> metrics, rngs = nnx.metrics.Average("loss"), nnx.Rngs(dropout=1)
    >>> def train_step(model, optimizer, metrics, batch, rngs):
    ...     loss_fn = lambda model, rngs: jnp.mean(model(batch, rngs=rngs) ** 2)
    ...     loss, grads = nnx.value_and_grad(loss_fn)(model, rngs)
    ...     metrics.update(loss=loss)
    ...     optimizer.update(model, grads)
    >>> step_fn, state = jzero.from_nnx(train_step, model, optimizer, metrics, rngs=rngs)
    >>> train_step = jzero.shard_train_step(step_fn, stage=3)
    >>> for _ in range(2):
    ...     state, _ = train_step(state, jnp.ones((8, 4)))

    The objects stay what they were. To evaluate sharded, merge them with the state:

    >>> graph = nnx.graphdef((model, optimizer, metrics, rngs))
    >>> def predict(state, batch):
    ...     model, *_ = nnx.merge(graph, state, copy=True)
    ...     model.eval()
    ...     return model(batch)
    >>> jzero.shard_eval_step(predict, like=train_step)(state, jnp.ones((5, 4))).shape
    (5, 8)

    To log or to save, write the state back into them, as plain arrays, in the order of the step's parameters:

    >>> nnx.update((model, optimizer, metrics, rngs), train_step.unshard(state))
    >>> metrics.count.get_value().item(), rngs.dropout.count.get_value().item()
    (2, 2)

    In a step with collectives of its own (`axis_name`) all devices draw the same numbers, as under
    `jax.pmap`, until it says otherwise: `rngs = nnx.Rngs(jzero.fold_device_index(rngs.dropout()))`.

    Args:
      train_step: a function of NNX objects and other arguments, under `nnx.jit` or not; it may return
        arrays, or nothing.
      *objects: the NNX objects that it takes first; also tuples, lists and dicts of them. Variables that
        objects share are kept once.
      **named: the others, by the names of their parameters: `metrics=metrics, rngs=rngs`.

    Returns:
      `(step_fn, state)`: for `jzero.shard_train_step`, and its first state, an `nnx.State` of all objects in
      the order of the step's parameters. `step_fn` takes the state and the step's other parameters.

    Raises:
      StepError: an argument here that is no NNX object, or has no parameter of the step. When the step is
        traced: `train_step` adds or removes variables, or leaves its objects in another mode than it found
        them (`model.eval()`); an NNX object is among a call's other arguments, whose mutations would be
        lost, or among what the step returns; it changes one that is no argument of it.
    """
    from flax import nnx

    check_partial(train_step, WHO)
    held = Held.of(WHO, train_step, objects, named)
    _check_given(held)
    graph, state = nnx.split(held.values)

    def step_fn(state: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        _check_arguments(held.arguments(args, kwargs))
        merged = nnx.merge(graph, state, copy=True)  # The caller's state stays as it is.
        with explained(WHO):
            result = held.call(train_step, merged, args, kwargs)
        new_graph, new_state = nnx.split(merged)
        if new_graph != graph:
            raise StepError(message(
                WHO, changes_of(held.names, nnx.merge(graph, state, copy=True), merged),
                "A step leaves its objects in the structure and mode in which it finds them.",
                "Create variables when the model is built; call model.train() or model.eval() before "
                "from_nnx, so that each step begins as the one before it ends.", "things"))  # fmt: skip
        if bad := listed(result, "result"):
            raise StepError(message(
                WHO, bad, "Objects are in the state, and what a step returns beside it are arrays.",
                "Return what you want to read of it: nnx.state(model), or an array.",
                "results"))  # fmt: skip
        return new_state, result

    step_fn.__name__ = getattr(train_step, "__name__", "train_step")
    step_fn.__signature__ = held.signature  # type: ignore[attr-defined]
    return step_fn, state


def _check_given(held: Held) -> None:
    bad = [
        f"{name} is {a_type(value)} without NNX objects"
        for name, value in zip(held.names, held.values, strict=True)
        if not listed(value, name)
    ]
    if bad:
        raise StepError(message(
            WHO, bad, "The objects passed to from_nnx become the state; all else is passed with each call.",
            "Pass models, optimizers, metrics and nnx.Rngs, and the rest to the step.",
            "arguments"))  # fmt: skip


def _check_arguments(given: Mapping[str, Any]) -> None:
    bad = [found for name, value in given.items() for found in listed(value, name)]
    if bad:
        names = [name for name, value in given.items() if listed(value, name)]
        raise StepError(message(
            WHO, bad, "What a step changes in an NNX object is kept in the state only, and would be lost.",
            f"Pass it to from_nnx: from_nnx(train_step, model, ..., {names[0]}={names[0]}).",
            "arguments"))  # fmt: skip
