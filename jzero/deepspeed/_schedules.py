# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's learning rate schedules as optax schedules, functions of how many updates were made before.

DeepSpeed steps its scheduler after each update, so that the update with n before it has the learning rate of
the scheduler's iteration n - 1, and the first one what the scheduler's constructor sets.

Arguments have DeepSpeed's names and defaults. A `cycle_second_...` of None is as the first one, and a
`warmup_type` is 'log' or 'linear'. Schedules return float32[].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def lr_range_test(
    lr_range_test_min_lr: float = 1e-3, lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0, lr_range_test_staircase: bool = False,
) -> optax.Schedule:  # fmt: skip
    """DeepSpeed's LRRangeTest: the learning rate grows without bound, to find the largest that trains.

    For the update with n before it::

        interval = n / step_size              # its floor, with staircase
        lr = min_lr * (1 + step_rate * interval)

    >>> import jzero
    >>> schedule = jzero.deepspeed.lr_range_test(0.5, lr_range_test_step_size=4)
    >>> schedule(0).item(), schedule(4).item()
    (0.5, 1.0)
    """

    def schedule(count: Any) -> jax.Array:
        interval = _float(count) / lr_range_test_step_size
        interval = jnp.floor(interval) if lr_range_test_staircase else interval
        return lr_range_test_min_lr * (1 + lr_range_test_step_rate * interval)

    return schedule


def warmup_lr(
    warmup_min_lr: float = 0.0, warmup_max_lr: float = 1e-3, warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> optax.Schedule:  # fmt: skip
    """DeepSpeed's WarmupLR: from `warmup_min_lr` to `warmup_max_lr`, where it stays.

    With i = n - 1 (the first two updates have the least), and a num_steps of at least 2::

        gamma = log(i + 1) / log(num_steps)   # or i / num_steps, if warmup_type is 'linear'
        lr = min_lr + (max_lr - min_lr) * gamma, for i < num_steps; then max_lr

    >>> import jzero
    >>> schedule = jzero.deepspeed.warmup_lr(0.0, 1.0, warmup_num_steps=4, warmup_type="linear")
    >>> [schedule(n).item() for n in range(6)]
    [0.0, 0.0, 0.25, 0.5, 0.75, 1.0]
    """
    return warmup_decay_lr(None, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)


def warmup_decay_lr(
    total_num_steps: int | None, warmup_min_lr: float = 0.0, warmup_max_lr: float = 1e-3,
    warmup_num_steps: int = 1000, warmup_type: str = "log",
) -> optax.Schedule:  # fmt: skip
    """DeepSpeed's WarmupDecayLR: `warmup_lr`, and from its end on linearly back to `warmup_min_lr`.

    With i = n - 1, from i = num_steps on; a `total_num_steps` of None is no decay::

        gamma = max(0, (total_num_steps - i) / max(1, total_num_steps - num_steps))

    >>> import jzero
    >>> schedule = jzero.deepspeed.warmup_decay_lr(8, 0.0, 1.0, 4, "linear")
    >>> [schedule(n).item() for n in (5, 7, 9, 10)]
    [1.0, 0.5, 0.0, 0.0]
    """
    num = max(2, warmup_num_steps)

    def schedule(count: Any) -> jax.Array:
        i, left = _float(count) - 1, jnp.float32(1)
        if total_num_steps is not None:
            left = (total_num_steps - i) / max(1, total_num_steps - num)
        gamma = jnp.where(i < num, _warmup(i, num, warmup_type), jnp.maximum(0.0, left))
        return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * gamma

    return schedule


def warmup_cosine_lr(
    lr: float, total_num_steps: int, warmup_min_ratio: float = 0.0, warmup_num_steps: int = 1000,
    cos_min_ratio: float = 1e-4, warmup_type: str = "log",
) -> optax.Schedule:  # fmt: skip
    """DeepSpeed's WarmupCosineLR: up to the optimizer's `lr`, and along half a cosine down.

    With i = n - 1, and gamma of `warmup_lr`; the first update has a learning rate of 0::

        ratio = warmup_min_ratio + (1 - warmup_min_ratio) * gamma                      # for i < num_steps
        progress = min(1, (i - num_steps + 1) / max(1, total_num_steps - num_steps))   # then
        ratio = cos_min_ratio + (1 - cos_min_ratio) * (1 + cos(pi * progress)) / 2

    >>> import jzero
    >>> schedule = jzero.deepspeed.warmup_cosine_lr(1.0, 8, 0.5, 4, 0.0, "linear")
    >>> [round(schedule(n).item(), 3) for n in (0, 1, 4, 6, 8)]
    [0.0, 0.5, 0.875, 0.5, 0.0]
    """
    num = max(2, warmup_num_steps)

    def schedule(count: Any) -> jax.Array:
        i = _float(count) - 1
        up = warmup_min_ratio + (1 - warmup_min_ratio) * _warmup(i, num, warmup_type)
        progress = jnp.clip((i - num + 1) / max(1, total_num_steps - num), 0.0, 1.0)
        down = cos_min_ratio + (1 - cos_min_ratio) * (1 + jnp.cos(jnp.pi * progress)) / 2
        return jnp.where(i < 0, 0.0, lr * jnp.where(i < num, up, down))

    return schedule


def one_cycle(
    cycle_min_lr: float, cycle_max_lr: float, decay_lr_rate: float = 0.0,
    cycle_first_step_size: float = 2000, cycle_second_step_size: float | None = None,
    cycle_first_stair_count: int = 0, cycle_second_stair_count: int | None = None,
    decay_step_size: float = 0,
) -> optax.Schedule:  # fmt: skip
    """DeepSpeed's OneCycle: up and down once, and then a decay.

    For n up to `first + second`::

        height = n / first, and then (first + second - n) / second      # the floor of stairs, if there are
        lr = min_lr + (max_lr - min_lr) * height

    and from then on `min_lr / (1 + decay_lr_rate * (n - first - second) / decay_step_size)`; with a
    `decay_step_size` of 0 there is no decay.

    >>> import jzero
    >>> schedule = jzero.deepspeed.one_cycle(1.0, 3.0, 1.0, 4, 2, decay_step_size=1)
    >>> [schedule(n).item() for n in (0, 2, 4, 5, 6, 7)]
    [1.0, 2.0, 3.0, 2.0, 1.0, 0.5]
    """
    height_of = _cycle(
        cycle_first_step_size, cycle_second_step_size, cycle_first_stair_count,
        cycle_second_stair_count)  # fmt: skip
    rate = decay_lr_rate / decay_step_size if decay_step_size else 0.0

    def schedule(count: Any) -> jax.Array:
        height, after = height_of(count)
        return (cycle_min_lr + (cycle_max_lr - cycle_min_lr) * height) / (1 + rate * after)

    return schedule


def one_cycle_momentum(
    cycle_min_mom: float = 0.8, cycle_max_mom: float = 0.9, decay_mom_rate: float = 0.0,
    cycle_first_step_size: float = 2000, cycle_second_step_size: float | None = None,
    cycle_first_stair_count: int = 0, cycle_second_stair_count: int | None = None,
    decay_step_size: float = 0,
) -> optax.Schedule:  # fmt: skip
    """The first beta that DeepSpeed's OneCycle sets: down while `one_cycle` goes up, and the reverse.

    The first update has `cycle_min_mom`, the others `max_mom - (max_mom - min_mom) * height`, and after the
    cycle `max_mom * (1 + decay_mom_rate * (n - first - second) / decay_step_size)`.

    >>> import jzero
    >>> schedule = jzero.deepspeed.one_cycle_momentum(0.5, 1.0, 0.0, 4, 2)
    >>> [schedule(n).item() for n in (0, 1, 2, 4, 5, 6, 7)]
    [0.5, 0.875, 0.75, 0.5, 0.75, 1.0, 1.0]
    """
    height_of = _cycle(
        cycle_first_step_size, cycle_second_step_size, cycle_first_stair_count,
        cycle_second_stair_count)  # fmt: skip
    rate = decay_mom_rate / decay_step_size if decay_step_size else 0.0

    def schedule(count: Any) -> jax.Array:
        height, after = height_of(count)
        beta = (cycle_max_mom - (cycle_max_mom - cycle_min_mom) * height) * (1 + rate * after)
        # DeepSpeed's constructor sets the least, and its first step the most.
        return jnp.where(_float(count) == 0, cycle_min_mom, beta)

    return schedule


def _warmup(i: jax.Array, num: int, kind: str) -> jax.Array:
    i = jnp.maximum(i, 0.0)  # It is -1 before the first update.
    return jnp.log(i + 1) / math.log(num) if kind == "log" else i / num


def _cycle(
    first: float, second: float | None, first_stairs: int, second_stairs: int | None
) -> Callable[[Any], tuple[jax.Array, jax.Array]]:
    """A function of the number of updates: the height in the cycle, from 0 to 1, and the updates after it."""
    second = first if second is None else second
    second_stairs = first_stairs if second_stairs is None else second_stairs

    def stairs(n: jax.Array, size: float, num: int) -> jax.Array:
        return jnp.floor(n * num / size) / num if num else n / size

    def height(count: Any) -> tuple[jax.Array, jax.Array]:
        n = _float(count)
        down = jnp.maximum(stairs(first + second - n, max(second, 1), second_stairs), 0.0)
        height = jnp.where(n <= first, stairs(n, first, first_stairs), down)
        height = jnp.where(n >= first + second, 0.0, height)
        return height, jnp.maximum(n - first - second, 0.0)

    return height


def _float(count: Any) -> jax.Array:
    return jnp.asarray(count, jnp.float32)
