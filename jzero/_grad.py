"""`value_and_grad` and `grad`: JAX's, plus a mark on every gradient that says *to be reduced*."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero import _jaxpr

# Bound at import: while a step is traced with marks, jax.grad and jax.value_and_grad are the ones below.
_jax_value_and_grad = jax.value_and_grad
_jax_grad = jax.grad

_marking: contextvars.ContextVar[bool] = contextvars.ContextVar("jzero_marking", default=False)


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, **options: Any
) -> Callable[..., Any]:
    """`jax.value_and_grad`, saying explicitly that the gradient is reduced over the devices.

    Inside a step given to `jzero.shard_train_step` it behaves like::

        value, grads = jax.value_and_grad(fun)(params, ...)     # of this device's part of the batch
        grads = mean over the devices of grads                  # if params are the same on all of them

    Outside, it is `jax.value_and_grad`. An untouched step needs it only where jzero says so: it finds
    reductions by itself wherever the step calls `jax.grad` or `jax.value_and_grad` by these names.

    A gradient with respect to something that differs between devices (the batch, say, for adversarial
    examples) is not reduced.

    >>> import jax.numpy as jnp, jzero
    >>> value, grad = jzero.value_and_grad(lambda w, x: jnp.sum(w * x))(jnp.ones(2), jnp.arange(2.0))
    >>> value.item(), grad.tolist()
    (1.0, [0.0, 1.0])

    Args:
      fun: function to differentiate, as for `jax.value_and_grad`.
      argnums: positions to differentiate with respect to.
      has_aux: whether `fun` returns `(value, aux)`.
      **options: `holomorphic`, `allow_int` and `reduce_axes`, handed on to JAX.

    Returns:
      A function returning `(value, grads)`, gradients having the shapes and dtypes of the arguments.

    Reference:
      Rajbhandari et al., ZeRO (2020), section 5.2: gradients are reduced where they are produced.
    """
    return _differentiate(_jax_value_and_grad, fun, argnums, has_aux, options)


def grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, **options: Any
) -> Callable[..., Any]:
    """`jax.grad`, saying explicitly that the gradient is reduced; see `value_and_grad`.

    >>> import jax.numpy as jnp, jzero
    >>> jzero.grad(lambda w: jnp.sum(w**2))(jnp.ones(2)).tolist()
    [2.0, 2.0]
    """
    return _differentiate(_jax_grad, fun, argnums, has_aux, options)


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """While it is open, gradients taken by these names are marked, jax.grad's own included."""
    token = _marking.set(True)
    jax.value_and_grad, jax.grad = value_and_grad, grad  # type: ignore[assignment]
    try:
        yield
    finally:
        jax.value_and_grad, jax.grad = _jax_value_and_grad, _jax_grad
        _marking.reset(token)


def _differentiate(
    transform: Any, fun: Any, argnums: Any, has_aux: bool, options: dict[str, Any]
) -> Callable[..., Any]:
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def differentiated(*args: Any, **kwargs: Any) -> Any:
        def marked(*inner: Any, **inner_kwargs: Any) -> Any:
            leaves = list(inner)
            for i in numbers:
                leaves[i] = jax.tree.map(_mark_leaf, leaves[i])
            return fun(*leaves, **inner_kwargs)

        target = marked if _marking.get() else fun
        return transform(target, argnums, has_aux, **options)(*args, **kwargs)

    return differentiated


def _mark_leaf(leaf: Any) -> Any:
    return _mark(leaf) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) else leaf


@jax.custom_vjp
def _mark(x: Any) -> Any:
    return x


# The backward rule keeps the primal: whether it is the same on all devices decides about the reduction.
_mark.defvjp(lambda x: (x, x), lambda x, ct: (_jaxpr.reduce_mark_p.bind(ct, x),))
