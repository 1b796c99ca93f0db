"""Where optimizer state rests: one frozen type for each tier, no offload being one of them."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, ClassVar

from jzero._errors import OptionError, message


@dataclasses.dataclass(frozen=True)
class NoOffload:
    """Everything rests on the devices; the default of `shard_train_step(offload=...)`."""

    tier: ClassVar[str] = "device"


@dataclasses.dataclass(frozen=True)
class PinnedHost:
    """Optimizer state rests in the pinned memory of the devices' host, and is updated on the devices.

    A step computes gradients, and then works through the optimizer state in pieces::

        for piece in pieces:                         # so many at a time that they fit in device_bytes
            moments = copy(piece, host -> device)    # while the piece before is updated
            params, moments = update(gradients, params, moments)
            copy(moments, device -> host)            # while the next piece is updated

    Device memory: `device_bytes` in place of the optimizer state; gradients, in shards, wait for their turn.
    Traffic between device and host, in each step: the optimizer state, to the device once for each level of
    the update that reads it (one, unless something like the norm of all updates scales them), and back once.
    For Adam on float32 that is 16 bytes per parameter of a device's shard.

    A conditional update (`optax.MultiSteps`, `optax.apply_if_finite`) is one piece of all leaves, which must
    fit into `device_bytes`. The step cannot be part of an outer `jax.jit`; `jax.eval_shape` counts as one.

    >>> import jax, jax.numpy as jnp, optax, jzero
    >>> tx = optax.adam(1e-2)
    >>> def step_fn(state, batch):
    ...     params, opt_state = state
    ...     grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(params)
    ...     updates, opt_state = tx.update(grads, opt_state, params)
    ...     return optax.apply_updates(params, updates), opt_state
    >>> train_step = jzero.shard_train_step(step_fn, offload=jzero.PinnedHost(device_bytes=2**20))
    >>> w = jnp.ones((64, 64))
    >>> params, opt_state = train_step((w, tx.init(w)), jnp.ones((8, 64)))
    >>> params.sharding.memory_kind, opt_state[0].mu.sharding.memory_kind
    ('device', 'pinned_host')

    Attributes:
      device_bytes: the most bytes of optimizer state on each device at any time, while a step runs. A third
        of it is a piece's size, so that one is copied in, one updated and one copied out at the same time.
    """

    device_bytes: int = 2**30
    tier: ClassVar[str] = "pinned_host"

    def __post_init__(self) -> None:
        num = _int(self.device_bytes)
        if num is None or num < 1:
            raise OptionError(message(
                "PinnedHost", f"device_bytes={self.device_bytes!r}",
                "It is how many bytes of optimizer state may be on a device at a time, an int from 1.",
                "Use device_bytes=2**30, or drop it."))  # fmt: skip
        object.__setattr__(self, "device_bytes", num)


def _int(x: Any) -> int | None:
    """An int, of NumPy's, too; None if it is none."""
    if isinstance(x, bool):
        return None
    try:
        return operator.index(x)
    except TypeError:
        return None


Offload = NoOffload | PinnedHost
NO_OFFLOAD = NoOffload()
