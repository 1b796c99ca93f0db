# SPDX-License-Identifier: Apache-2.0
"""Optimizers of DeepSpeed that optax computes otherwise: LAMB with a bounded coefficient, torch's Adagrad."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jzero._errors import StateError, message


class FusedLambState(NamedTuple):
    """State of `lamb`: how many updates were made, int32[], and both moments, like the parameters."""

    num_updates: jax.Array
    mu: Any
    nu: Any


class SumOfSquaresState(NamedTuple):
    """State of `adagrad`: the sum of squared gradients, like the parameters."""

    sum_of_squares: Any


def lamb(
    learning_rate: Any, b1: Any = 0.9, b2: Any = 0.999, eps: float = 1e-8, weight_decay: float = 0.0,
    max_coeff: float = 10.0, min_coeff: float = 0.01, bias_correction: bool = True,
) -> optax.GradientTransformation:  # fmt: skip
    """LAMB as DeepSpeed's FusedLamb computes it, which `optax.lamb` does not.

    For each parameter p with gradient g, at update t::

        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        u = m / (sqrt(v) + eps) + weight_decay * p
        coefficient = clip(norm(p) / norm(u), min_coeff, max_coeff)      # 1 where a norm is 0
        p -= learning_rate * sqrt(1 - b2**t) / (1 - b1**t) * coefficient * u

    `optax.lamb` corrects m and v themselves, so that decay weighs otherwise, and its ratio has no bounds.

    >>> import jax.numpy as jnp, jzero
    >>> tx = jzero.deepspeed.lamb(0.1, bias_correction=False)
    >>> w = jnp.full(4, 2.0)
    >>> updates, state = tx.update(jnp.ones(4), tx.init(w), w)   # the step is as long as 0.1 * w
    >>> [round(x, 4) for x in updates.tolist()]
    [-0.2, -0.2, -0.2, -0.2]

    Arguments are those of `optax.lamb`, and the bounds of the coefficient. Without params `update` raises
    StateError.

    Reference:
      You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020.
    """

    def init(params: Any) -> FusedLambState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return FusedLambState(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(
        updates: Any, state: FusedLambState, params: Any = None
    ) -> tuple[Any, FusedLambState]:
        if params is None:
            raise StateError(message(
                "lamb", "update was called without params",
                "Its coefficient is the ratio of two norms, the parameter's and the update's.",
                "Call tx.update(grads, opt_state, params)."))  # fmt: skip
        num_updates = state.num_updates + 1
        mu = jax.tree.map(lambda g, m: b1 * m + (1 - b1) * g, updates, state.mu)
        nu = jax.tree.map(lambda g, v: b2 * v + (1 - b2) * g * g, updates, state.nu)
        correction = (
            jnp.sqrt(1 - b2**num_updates) / (1 - b1**num_updates) if bias_correction else 1.0
        )

        def one(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            u = m / (jnp.sqrt(v) + eps) + weight_decay * p
            norm, size = jnp.sqrt(jnp.sum(p * p)), jnp.sqrt(jnp.sum(u * u))
            apart = (norm > 0) & (size > 0)
            ratio = jnp.clip(norm / jnp.where(apart, size, 1.0), min_coeff, max_coeff)
            return correction * jnp.where(apart, ratio, 1.0) * u

        return jax.tree.map(one, params, mu, nu), FusedLambState(num_updates, mu, nu)

    return optax.chain(
        optax.GradientTransformation(init, update), optax.scale_by_learning_rate(learning_rate)
    )


def adagrad(
    learning_rate: Any, initial_accumulator_value: float = 0.0, eps: float = 1e-10
) -> optax.GradientTransformation:
    """Adagrad as torch and DeepSpeed compute it; `optax.adagrad` has `eps` inside the root.

    For each parameter p with gradient g::

        s = s + g**2
        p -= learning_rate * g / (sqrt(s) + eps)

    >>> import jax.numpy as jnp, jzero
    >>> tx = jzero.deepspeed.adagrad(0.5)
    >>> updates, state = tx.update(jnp.full(2, 3.0), tx.init(jnp.ones(2)))
    >>> updates.tolist()
    [-0.5, -0.5]

    Reference:
      Duchi, Hazan, Singer, "Adaptive Subgradient Methods for Online Learning", 2011.
    """

    def init(params: Any) -> SumOfSquaresState:
        return SumOfSquaresState(
            jax.tree.map(lambda p: jnp.full_like(p, initial_accumulator_value), params)
        )

    def update(
        updates: Any, state: SumOfSquaresState, params: Any = None
    ) -> tuple[Any, SumOfSquaresState]:
        sums = jax.tree.map(lambda g, s: s + g * g, updates, state.sum_of_squares)
        steps = jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + eps), updates, sums)
        return steps, SumOfSquaresState(sums)

    return optax.chain(
        optax.GradientTransformation(init, update), optax.scale_by_learning_rate(learning_rate)
    )
