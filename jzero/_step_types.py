# SPDX-License-Identifier: Apache-2.0
"""Types for type checkers: a step's arguments, its result, and its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from jzero._option_groups import Axes, Comm, Microbatches
from jzero._policy import Memory, Policy

if TYPE_CHECKING:
    # typing has defaults since Python 3.13. By these a bare `ShardedStep` is one of any step.
    from typing_extensions import ParamSpec, TypeVar

    StepArgs = ParamSpec("StepArgs", default=...)
    Result = TypeVar("Result", default=Any)
else:
    from typing import ParamSpec, TypeVar

    StepArgs = ParamSpec("StepArgs")
    Result = TypeVar("Result")
InitArgs = ParamSpec("InitArgs")
AnyState = TypeVar("AnyState")


class StepOptions(TypedDict, total=False):
    """The options that a train step and an evaluation share."""

    memory: Memory | Policy | str | None
    comm: Comm | None
    axes: Axes | str | Sequence[str] | None
    mesh: Any
    in_specs: Mapping[str | int, Any] | None
    state: str | int | Sequence[str | int] | None
    static_argnums: int | Sequence[int]
    static_argnames: str | Sequence[str]


class TrainStepOptions(StepOptions, total=False):
    """The options of `shard_train_step`, for its two overloads (tests/test_typed.py compares them)."""

    stage: int
    microbatches: int | Microbatches
    donate: bool


class EvalStepOptions(StepOptions, total=False):
    """The options of `shard_eval_step` but `like`, for its two overloads."""

    weight_dtype: Any
