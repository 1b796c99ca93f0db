"""The options of `shard_train_step` as one frozen value, checked together at the boundary."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jzero._errors import OptionError, message
from jzero.sharding._plan import STAGES

WHO = "shard_train_step"
GATHER = ("per_pass", "keep", "once_per_step")


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user chose; `shard_train_step` says what each means and costs."""

    stage: int = 3
    accumulate: int = 1
    reduce: str | None = None
    accumulate_dtype: Any = None
    reduce_dtype: Any = None
    gather: str | None = None

    def __post_init__(self) -> None:
        if self.stage not in STAGES or isinstance(self.stage, bool):
            raise OptionError(message(
                WHO, f"stage={self.stage!r}", "Stages are 0, 1, 2 and 3.",
                "Use 3 to shard parameters, gradients and optimizer state."))  # fmt: skip
        if isinstance(self.accumulate, bool) or not (
            isinstance(self.accumulate, int) and self.accumulate >= 1
        ):
            raise OptionError(message(
                WHO, f"accumulate={self.accumulate!r}",
                "It is the number of microbatches that each device works through, an int from 1.",
                "Use accumulate=1 to run the batch whole."))  # fmt: skip
        if self.reduce not in (None, "once", "each"):
            raise OptionError(message(
                WHO, f"reduce={self.reduce!r}", "Gradients are reduced 'once' or for 'each' microbatch.",
                "Drop it to let the stage decide."))  # fmt: skip
        if self.stage == 2 and self.reduce == "once":
            raise OptionError(message(
                WHO, "stage=2 and reduce='once'",
                "Stage 2 is stage 1 with gradients reduced for each microbatch.",
                "Drop reduce, or use stage=1."))  # fmt: skip
        if self.accumulate_dtype is not None and self.accumulate == 1:
            raise OptionError(message(
                WHO, "accumulate_dtype without accumulate",
                "It is the dtype in which the gradients of microbatches are summed up.",
                "Drop it, or say how many microbatches with accumulate=k."))  # fmt: skip
        if self.gather not in (None, *GATHER):
            raise OptionError(message(
                WHO, f"gather={self.gather!r}", f"Parameters are gathered {', '.join(map(repr, GATHER))}.",
                "Drop it for 'per_pass'."))  # fmt: skip
        if self.gather is not None and self.stage < 3:
            raise OptionError(message(
                WHO, f"stage={self.stage} and gather={self.gather!r}",
                "Below stage 3 parameters rest whole on every device, and nothing is gathered.",
                "Drop gather, or use stage=3."))  # fmt: skip
        for name in ("accumulate_dtype", "reduce_dtype"):
            _check_dtype(name, getattr(self, name))

    @property
    def reduce_once(self) -> bool:
        """Whether gradients are summed up on each device and reduced after the last microbatch."""
        return STAGES[self.stage].reduce_once if self.reduce is None else self.reduce == "once"

    @property
    def keep_gathered(self) -> bool:
        """Whether one gather serves forward and backward pass; below stage 3 memory for it is there."""
        return self.stage < 3 or self.gather in ("keep", "once_per_step")

    @property
    def gather_once(self) -> bool:
        """Whether one gather serves all microbatches."""
        return self.stage < 3 or self.gather == "once_per_step"


def _check_dtype(name: str, dtype: Any) -> None:
    try:
        fits = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        fits = False
    if not fits:
        raise OptionError(message(
            WHO, f"{name}={dtype!r}", "Gradients are floating point numbers.",
            "Use jnp.float32 or jnp.bfloat16, or drop it."))  # fmt: skip
