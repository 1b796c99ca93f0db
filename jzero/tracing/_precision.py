# SPDX-License-Identifier: Apache-2.0
"""Optimizers for 16-bit parameters: float32 masters, or stochastic rounding without them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jzero._errors import StateError, message


class MasterWeightsState(NamedTuple):
    """State of `master_weights`.

    Attributes:
      masters: the parameters in the masters' dtype; `optax.MaskedNode()` for those that need none.
      inner: state of the wrapped optimizer, made from the masters.
    """

    masters: Any
    inner: Any


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`: how many updates were made, int32[], and the wrapped optimizer's."""

    num_updates: jax.Array
    inner: Any


def master_weights(
    tx: optax.GradientTransformation, dtype: Any = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """Keeps full-precision masters of low-precision parameters in the optimizer's state.

    Each update does::

        masters, inner = tx(grads cast to dtype, inner, masters)     # in full precision
        params = masters cast to the parameters' dtype

    Masters are optimizer state like any moment: ZeRO shards them with the moments from stage 1 on. For Psi
    bfloat16 parameters under Adam that is 2 Psi bytes of parameters, 2 Psi of gradients and 12 Psi of
    optimizer state. Compared with float32 parameters that the model casts, stored parameters take half
    the bytes, and so do gathers at stage 3 without any cast.

    >>> import jax.numpy as jnp, jzero, optax
    >>> tx = jzero.master_weights(optax.sgd(1e-3))
    >>> params = jnp.ones(2, jnp.bfloat16)
    >>> state = tx.init(params)
    >>> for _ in range(4):
    ...     updates, state = tx.update(jnp.ones(2, jnp.bfloat16), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> params.tolist(), [round(x, 4) for x in state.masters.tolist()]
    ([0.99609375, 0.99609375], [0.996, 0.996])

    The masters are the truth: parameters changed from outside are overwritten by the next update. Updates
    are in the masters' dtype, so wrappers that choose between updates and gradients go inside:
    `master_weights(optax.apply_if_finite(tx, 5))`.

    Args:
      tx: any optimizer; it sees gradients and parameters in the masters' dtype.
      dtype: of the masters. Parameters that are not narrower than it (float32 ones, integers) have none.

    Returns:
      An optax transformation; its updates are for `optax.apply_updates`, and come last in a chain.

    Raises:
      StateError: `update` is called without the parameters.

    Reference:
      Micikevicius et al., "Mixed Precision Training", 2018, section 3.1; Rajbhandari et al., ZeRO (2020),
      section 3.1.
    """
    inner_tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> MasterWeightsState:
        masters = jax.tree.map(
            lambda p: p.astype(dtype) if _narrower(p, dtype) else optax.MaskedNode(), params
        )
        return MasterWeightsState(masters, inner_tx.init(_merge(params, masters)))

    def update(
        updates: Any, state: MasterWeightsState, params: Any = None, **extra: Any
    ) -> tuple[Any, MasterWeightsState]:
        _check_params("master_weights", params)
        old = _merge(params, state.masters)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), updates, old)
        steps, inner = inner_tx.update(grads, state.inner, old, **extra)
        new = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), old, steps)
        out = jax.tree.map(
            lambda p, step, n: _difference(n.astype(p.dtype), p, dtype) if _narrower(p, dtype) else step,
            params, steps, new,
        )  # fmt: skip
        masters = jax.tree.map(
            lambda n, p: n if _narrower(p, dtype) else optax.MaskedNode(), new, params
        )
        return out, MasterWeightsState(masters, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def stochastic_rounding(
    tx: optax.GradientTransformation, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Updates bfloat16 parameters in float32 and rounds the result up or down at random.

    The chance of rounding up is the remainder, so that updates too small for bfloat16's 8 bits count in the
    mean instead of being lost. It keeps no masters: 2 Psi bytes of parameters and 8 Psi of Adam's moments.
    The random bits are a function of seed, update, leaf and element; each device computes those of its
    shard.

    >>> import jax.numpy as jnp, jzero, optax
    >>> tx = jzero.stochastic_rounding(optax.sgd(1e-3))
    >>> params = jnp.ones(10_000, jnp.bfloat16)          # its neighbour below is 1 - 1 / 256
    >>> updates, state = tx.update(jnp.ones_like(params), tx.init(params), params)
    >>> mean = optax.apply_updates(params, updates).astype(jnp.float32).mean()
    >>> bool(abs(mean - 0.999) < 1e-4)
    True

    Args:
      tx: any optimizer; it sees gradients and parameters in float32.
      seed: of the random bits.

    Returns:
      An optax transformation; its updates are for `optax.apply_updates`, and come last in a chain.

    Raises:
      StateError: a parameter is float16, or `update` is called without the parameters.

    Reference:
      Gupta et al., "Deep Learning with Limited Numerical Precision", 2015, section 3.
    """
    inner_tx = optax.with_extra_args_support(tx)

    def widened(params: Any) -> Any:
        return jax.tree.map(
            lambda p: p.astype(jnp.float32) if p.dtype == jnp.bfloat16 else p, params
        )

    def init(params: Any) -> StochasticRoundingState:
        if any(p.dtype == jnp.float16 for p in jax.tree.leaves(params)):
            raise StateError(message(
                "stochastic_rounding", "a parameter is float16",
                "Only bfloat16 is float32 with fewer mantissa bits.",
                "Use bfloat16 parameters, or jzero.master_weights."))  # fmt: skip
        return StochasticRoundingState(jnp.zeros((), jnp.int32), inner_tx.init(widened(params)))

    def update(
        updates: Any, state: StochasticRoundingState, params: Any = None, **extra: Any
    ) -> tuple[Any, StochasticRoundingState]:
        _check_params("stochastic_rounding", params)
        wide = widened(params)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), updates, wide)
        steps, inner = inner_tx.update(grads, state.inner, wide, **extra)
        leaves, tree = jax.tree.flatten(params)
        out = [
            _difference(
                _round(w + step, _bits(w.shape, seed, state.num_updates, i)), p, jnp.float32
            )
            if p.dtype == jnp.bfloat16
            else step
            for i, (p, w, step) in enumerate(
                zip(leaves, jax.tree.leaves(wide), jax.tree.leaves(steps), strict=True)
            )
        ]
        return jax.tree.unflatten(tree, out), StochasticRoundingState(state.num_updates + 1, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _narrower(p: Any, dtype: Any) -> bool:
    floating = jnp.issubdtype(p.dtype, jnp.floating)
    return bool(floating and p.dtype.itemsize < jnp.dtype(dtype).itemsize)


def _merge(params: Any, masters: Any) -> Any:
    return jax.tree.map(lambda p, m: p if isinstance(m, optax.MaskedNode) else m, params, masters)


def _difference(new: jax.Array, old: jax.Array, dtype: Any) -> jax.Array:
    # Both have few bits, so that their difference in `dtype` is exact, and added to `old` gives `new`.
    return new.astype(dtype) - old.astype(dtype)


def _check_params(who: str, params: Any) -> None:
    if params is None:
        raise StateError(message(
            who, "update was called without params", "It computes new parameters from old ones.",
            "Call tx.update(grads, opt_state, params)."))  # fmt: skip


def _round(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Rounds float32 to the bfloat16 below or above; the chance of above is the remainder."""
    word = jax.lax.bitcast_convert_type(x, jnp.uint32)
    rounded = (word + (bits & jnp.uint32(0xFFFF))) & jnp.uint32(0xFFFF0000)
    out = jax.lax.bitcast_convert_type(rounded, jnp.float32)
    return jnp.where(jnp.isfinite(x), out, x).astype(jnp.bfloat16)


def _bits(shape: tuple[int, ...], seed: int, count: jax.Array, leaf: int) -> jax.Array:
    """Random words by the element's index, so that a device computes only those of its shard."""
    index = jnp.zeros(shape, jnp.uint32)
    for dim, size in enumerate(shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
    start = mix(mix(count.astype(jnp.uint32) ^ jnp.uint32(seed % 2**32)) + jnp.uint32(leaf))
    return mix(mix(index * jnp.uint32(0x9E3779B9) ^ start) + start)


def mix(word: jax.Array) -> jax.Array:
    """MurmurHash3's finalizer (Appleby, 2011): each input bit changes each output bit half the time."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = (word ^ (word >> shift)) * np.uint32(factor)
    return word ^ (word >> 16)
