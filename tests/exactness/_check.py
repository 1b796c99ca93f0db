"""One family, sharded in one setting, against one device with the whole batch in the same process."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp

import jzero
from small import grouped

from . import _compare, _family

# Families that are refused in microbatches, some only where these do not divide the rows, and the text.
_UPDATES_INSIDE = (
    r"accumulate > 1, and .* uses a gradient, loss or sum of the whole batch inside a loop"
)
_ROWS_INSIDE = r"accumulate > 1, and a (gather of the batch's rows|maximum) over .* inside a loop"
NOT_IN_MICROBATCHES = {
    **dict.fromkeys(
        ("several_updates_in_one_step", "ppo_over_time_and_rows", "armijo",
         "optax_backtracking_linesearch", "optax_lbfgs", "conjugate_gradients",
         "fixed_point_of_the_batch"), _UPDATES_INSIDE),
    **dict.fromkeys(
        ("while_until_all_rows_converge", "cond_for_each_row", "drawn_from_many_distributions",
         "tied_loss_in_chunks_of_tokens"), _ROWS_INSIDE),
    "resnet_with_batch_norm": r"begins a loop over the microbatches(?s:.*)4 times is the most",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a family is sharded.

    Attributes:
      stage: 0 to 3.
      axes: sizes of the data axes.
      dtype: of the training.
      accumulate: microbatches on each device.
    """

    stage: int = 3
    axes: tuple[int, ...] = (8,)
    dtype: str = "float64"
    accumulate: int = 1

    def __str__(self) -> str:
        axes = "x".join(map(str, self.axes))
        parts = f", {self.accumulate} microbatches" if self.accumulate > 1 else ""
        return f"stage {self.stage}, {axes} devices, {self.dtype}{parts}"


def applies(family: _family.Family, setting: Setting) -> bool:
    """Whether the family can be asked for this: its dtype, and room for its other mesh axis."""
    devices = family.automatic * functools.reduce(lambda a, b: a * b, setting.axes)
    own = setting.accumulate == 1 or "accumulate" not in family.options
    return setting.dtype in family.exact_dtypes and devices <= jax.device_count() and own


def check(name: str, setting: Setting) -> tuple[str, list[str], float]:
    """Trains a family: "equal", "refused" with its text, or "differs" with what, where and how much at most.

    JAX's 64-bit types are enabled by the caller, for float64.
    """
    family = _family.get(name)
    dtype = jnp.dtype(setting.dtype)
    try:
        actual = _compare.train(family, sharded(family, setting), dtype)
    except jzero.JzeroError as error:
        return "refused", [str(error)], 0.0
    expected = _compare.train(family, _compare.reference(family), dtype)
    found = _compare.differences(expected, actual, dtype)
    return "differs" if found else "equal", found, _compare.largest_difference(expected, actual)


def verdict(name: str, setting: Setting) -> str | None:
    """What is wrong with the family in this setting, or None: it is equal, or refused as it says."""
    family = _family.get(name)
    result, found, _ = check(name, setting)
    allowed = [family.refused] if family.refused else []
    if setting.accumulate > 1 and name in NOT_IN_MICROBATCHES:
        allowed.append(NOT_IN_MICROBATCHES[name])
    if result == "refused" and any(re.search(text, found[0]) for text in allowed):
        return None
    if result == "equal" and not family.refused:
        return None
    return f"{name}, {setting}: {result}. " + "; ".join(found[:4])


def sharded(family: _family.Family, setting: Setting) -> Any:
    """The family's step on a mesh of virtual devices."""
    names = tuple("ab"[: len(setting.axes)]) if len(setting.axes) > 1 else ("data",)
    sizes, kinds = (*setting.axes,), (jax.sharding.AxisType.Auto,)
    axes = (*names, *(("model",) if family.automatic > 1 else ()))
    sizes += (family.automatic,) if family.automatic > 1 else ()
    num = functools.reduce(lambda a, b: a * b, sizes)
    mesh = jax.make_mesh(sizes, axes, kinds * len(axes), devices=jax.devices()[:num])
    options = {**family.options}
    if setting.accumulate > 1:
        options["accumulate"] = setting.accumulate
    return jzero.shard_train_step(
        family.step,
        stage=setting.stage,
        mesh=mesh,
        in_specs=family.in_specs(names if len(names) > 1 else names[0]),
        **grouped(axis_names=names, min_shard_bytes=0, **options),
    )
