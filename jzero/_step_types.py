# SPDX-License-Identifier: Apache-2.0
"""What a checker of types knows of a step: its arguments, its result, and the options it is made with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from jax.sharding import PartitionSpec

from jzero._policy import Policy

if TYPE_CHECKING:
    # Of typing only since Python 3.13: with these defaults a bare `ShardedTrainStep` is one of any step.
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
    """What may be said of any step, beside the function: as the options have it that are called so."""

    max_gather_bytes: int
    tile_bytes: int | None
    mesh: Any
    axis_names: str | Sequence[str] | None
    static_argnums: int | Sequence[int]
    static_argnames: str | Sequence[str]
    in_specs: Mapping[str | int, Any] | None
    state_argnums: int | Sequence[int] | None
    state_argnames: str | Sequence[str]
    gather: str | None


class TrainStepOptions(StepOptions, total=False):
    """The options of `shard_train_step`, for its two forms (tests/test_typed.py compares them)."""

    stage: int
    accumulate: int
    reduce: str | None
    accumulate_dtype: Any
    reduce_dtype: Any
    gather_dtype: Any
    prefetch_bytes: int | None
    min_shard_bytes: int
    full: str | None
    param_axes: str | Sequence[str] | None
    optimizer_axes: str | Sequence[str] | None
    auto_specs: Mapping[str, PartitionSpec] | None
    offload: Policy
    offload_params: Policy
    offload_activations: Policy
    layer_major: bool
    donate: bool
    axis_name: str | None


class EvalStepOptions(StepOptions, total=False):
    """The options of `shard_eval_step` but `like`, for its two forms."""

    offload_params: Policy | None
    weight_dtype: Any
