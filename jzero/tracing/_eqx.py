# SPDX-License-Identifier: Apache-2.0
"""Equinox's train steps, which take and return modules, as functions of a state of arrays."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate

import jax

from jzero._errors import StepError, describe_leaf, message
from jzero.tracing._held import Held
from jzero.tracing._modules import check_no_pmap
from jzero.tracing._returned import Like

WHO = "from_eqx"


def from_eqx(
    train_step: Callable[..., Any], *values: Any, **named: Any
) -> tuple[Callable[Concatenate[Any, ...], tuple[Any, Any]], Any]:
    """Turns `train_step(model, opt_state, batch) -> (model, opt_state, loss)` into `step(state, batch)`.

    `shard_train_step` accepts such a step as it is. A function of a state has it in one argument, of arrays
    only, while an Equinox module has functions, strings and Python numbers too. The returned step does::

        model, opt_state = eqx.combine(state, static)
        model, opt_state, loss = train_step(model, opt_state, *args)   # in the order in which it returns them
        return eqx.filter((model, opt_state), eqx.is_array), loss

    >>> import equinox as eqx, jax, jax.numpy as jnp, optax, jzero
    >>> model, tx = eqx.nn.MLP(4, 8, 16, 1, key=jax.random.key(0)), optax.adam(1e-2)
    >>> opt_state = tx.init(eqx.filter(model, eqx.is_array))
    >>> @eqx.filter_jit
    ... def train_step(model, batch, opt_state):
    ...     loss_fn = lambda model: jnp.mean(jax.vmap(model)(batch) ** 2)
    ...     loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
    ...     updates, opt_state = tx.update(grads, opt_state)
    ...     return loss, eqx.apply_updates(model, updates), opt_state
    >>> step_fn, state = jzero.from_eqx(train_step, model, opt_state=opt_state)
    >>> train_step = jzero.shard_train_step(step_fn, stage=3)
    >>> state, loss = train_step(state, jnp.ones((8, 4)))
    >>> loss.shape
    ()

    To evaluate sharded, or to save, combine the arrays with the rest again:

    >>> def predict(state, batch):
    ...     trained, _ = eqx.combine(state, (model, opt_state))
    ...     return jax.vmap(trained)(batch)
    >>> jzero.shard_eval_step(predict, like=train_step)(state, jnp.ones((5, 4))).shape
    (5, 8)

    >>> model, opt_state = eqx.combine(train_step.unshard(state), (model, opt_state))
    >>> model(jnp.ones(4)).shape
    (8,)

    Args:
      train_step: a function of modules and other arguments, under `eqx.filter_jit` or not.
      *values: its first arguments, which it returns anew: models, optimizer states, `eqx.nn.State`, a key
        that it splits; also tuples, lists and dicts of them.
      **named: the others, by the names of their parameters. What has no arrays (an
        `optax.GradientTransformation`) stays as it is.

    Returns:
      `(step_fn, state)`: for `jzero.shard_train_step`, and its first state: a tuple with the arrays of each,
      in the order of the step's parameters. The arguments of `step_fn` are the state and the step's other
      parameters; it returns the new state, and the step's other results: alone, as a tuple, or None.

    The new values are found among the elements of the tuple that the step returns, by their structure, shapes
    and dtypes; of two that are alike (a model and its average) the first one returned is the first one
    passed.

    Raises:
      StepError: nothing passed has arrays, or it has no parameter of the step. When the step is traced: a
        value with arrays is not among what the step returns, or more results are like it than there are
        such values; or an argument of the call (an optimizer's state) is returned anew.
    """
    import equinox as eqx

    held = Held.of(WHO, train_step, values, named)
    check_no_pmap(train_step, WHO)
    state, static = eqx.partition(held.values, _is_array)
    if not jax.tree.leaves(state):
        raise StepError(message(
            WHO, [f"{name} has no arrays" for name in held.names], "A state is made of arrays.",
            "Pass the model and the optimizer's state.", "arguments"))  # fmt: skip

    def step_fn(state: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        old = eqx.combine(state, static)
        results = held.call(train_step, old, args, kwargs)
        new, rest = _found(held.names, old, results)
        _check_rest(held.arguments(args, kwargs), rest)
        return eqx.filter(new, eqx.is_array), rest

    step_fn.__name__ = getattr(train_step, "__name__", "train_step")
    step_fn.__signature__ = held.signature  # type: ignore[attr-defined]
    return step_fn, state


def _found(names: Sequence[str], old: tuple[Any, ...], returned: Any) -> tuple[Any, Any]:
    """The new values of `old`, and the step's other results."""
    results = list(returned) if isinstance(returned, tuple | list) else [returned]
    found, given = [*map(_apart, results)], [*map(_apart, old)]
    likes = [*map(Like, given)]  # Structure, shapes and dtypes, and everything that is no array.
    if len(old) == 1 and likes[0](_apart(returned)):  # The state is one tuple, returned alone.
        return (returned,), None
    taken: dict[int, int] = {}  # from a result's index to that of the old value
    bad = []
    for i, like in enumerate(likes):
        alike = [j for j, other in enumerate(found) if like(other)]
        same = [k for k, other in enumerate(given) if like(other)]
        if len(alike) == len(same):
            taken[alike[same.index(i)]] = i
        elif jax.tree.leaves(given[i][0]):
            bad.append(_unlike(names[i], old[i], results, alike, len(same)))
    if bad:
        raise StepError(message(
            WHO, bad, "The step must return each value passed to from_eqx once, with its structure, shapes "
            "and dtypes, as an element of the tuple that it returns.",
            "Return it; or close over it, if the step does not change it; or pass it in one argument "
            "with another, (model, value), if another result is like it.", "values"))  # fmt: skip
    new = list(old)  # What has no arrays need not be returned.
    for j, i in taken.items():
        new[i] = results[j]
    rest = tuple(result for j, result in enumerate(results) if j not in taken)
    return tuple(new), rest[0] if len(rest) == 1 else rest or None


def _check_rest(arguments: Mapping[str, Any], rest: Any) -> None:
    """Refuses an argument of the call that the step returns anew, such as an optimizer's state."""
    results = rest if isinstance(rest, tuple) else (rest,)
    bad = [
        f"{name} ({_kind(value)}) comes with the call, and the step returns another"
        for name, value in arguments.items()
        for result in results
        if not jax.tree_util.all_leaves([value])
        and Like(_apart(value))(_apart(result))
        and not all(map(operator.is_, jax.tree.leaves(value), jax.tree.leaves(result)))
    ]
    if bad:
        raise StepError(message(
            WHO, bad, "Whatever passes from step to step is the state, which is stored sharded.",
            f"Pass it to from_eqx, by the name of its parameter: {bad[0].split(' ')[0]}=...",
            "arguments"))  # fmt: skip


def _apart(value: Any) -> Any:
    import equinox as eqx

    return eqx.partition(value, _is_array)


def _is_array(x: Any) -> bool:
    import equinox as eqx

    return isinstance(x, jax.ShapeDtypeStruct) or eqx.is_array(x)


def _unlike(name: str, old: Any, results: list[Any], alike: list[int], num: int) -> str:
    """Why a value was not found: several results are like it, or the one of its type differs."""
    kind = f"{name} ({_kind(old)})"
    if alike:
        return f"{kind} is like results {alike}, and {num} of the values passed are like it"
    of_its_type = [i for i, result in enumerate(results) if type(result) is type(old)]
    if not isinstance(old, tuple | list | dict | jax.Array) and len(of_its_type) == 1:
        before, after = _leaves(old), _leaves(results[of_its_type[0]])
        found = [
            f"{name}{path} was {before.get(path, 'missing')} and becomes {after.get(path, 'missing')}"
            for path in sorted({*before, *after})
            if before.get(path) != after.get(path)
        ]
        if found:
            return f"result {of_its_type[0]} is another {kind}: {'; '.join(found[:3])}"
    return f"{kind} is not among the results: {', '.join(map(_kind, results))}"


def _leaves(tree: Any) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path): _kind(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _kind(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return describe_leaf("", value.shape, value.dtype).strip()
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    return f"a {type(value).__name__}"
