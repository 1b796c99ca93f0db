"""Traces a step as one device sees it, and finds out how it says where gradients are reduced.

Three ways (docs/design.md, section 3), tried in this order; the user never says which:

* **typed**: an untouched single-device step under JAX's varying-axes typing; AD places the reductions.
* **written**: the step has collectives of its own over the data axes; they are obeyed as written.
* **marked**: typing refused the step; gradients are marked where `jax.grad` takes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jzero import _grad, _jaxpr, _rewrite, _whole
from jzero._differences import without_differences
from jzero._errors import StepError, message
from jzero.batch._body import Movement
from jzero.batch._localize import localize
from jzero.batch._rows import Form, Rows
from jzero.sharding import _frames
from jzero.sharding._frames import Frame

TYPED, WRITTEN, MARKED, WHOLE = "typed", "written", "marked", "whole batch"


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A step's jaxpr, analysed: the frames, and what the trace found out.

    Attributes:
      frame: the root frame; its inputs are the state's leaves, then the other arguments'.
      out_tree: the tree of what the step returned.
      out_avals: shapes and dtypes of the leaves, as one device sees them.
      reductions: 'whole batch', 'typed', 'written' or 'marked'.
      outputs: of a whole-batch step, in which form it returns each of its outputs.
      movements: of a whole-batch step, the rows that it gathers.
    """

    frame: Frame
    out_tree: Any
    out_avals: list[Any]
    reductions: str
    outputs: tuple[Form, ...] = ()
    movements: tuple[Movement, ...] = ()


def trace_whole(
    flat_step: Callable[..., Any], avals: Sequence[Any], forms: Sequence[Form], given: Sequence[Form],
    num_state: int, axes: dict[str, int], offloads: bool, automatic: dict[str, int],
) -> TracedStep | None:  # fmt: skip
    """Traces `flat_step(*leaves)` at the shapes of the whole batch, and rewrites it for one device.

    Args:
      flat_step: the step as a function of leaves.
      avals: shapes of the leaves, whole.
      forms: what each leaf shall be on the devices: FULL, or rows.
      given: in which form the devices get it: the same, or FULL.
      num_state: how many leaves are the state's.
      axes: names (as the step uses them) and sizes of the data axes.
      offloads: also replace `p + (n - p)` by `n` (`_differences.py`).
      automatic: names and sizes of the mesh's other axes.

    Returns:
      None if the step has collectives of its own over the data axes, and so is one device's already.

    Raises:
      StepError: the step calls `jax.shard_map` itself, or has ordered effects.
      Exception: whatever the step itself raises when traced.
    """
    try:
        traced = _jaxpr.trace_whole(flat_step, avals, automatic)
    except NameError as error:
        if "unbound axis name" in str(error):
            return None
        raise
    flat, consts = _rewrite.flatten_calls(traced.jaxpr, traced.consts)
    flat = without_differences(flat) if offloads else flat
    found = localize(flat, consts, forms, given, num_state, axes)
    varying = [frozenset(axes) if isinstance(form, Rows) else _frames.NOWHERE for form in given]
    frame = _frames.build_frames(found.jaxpr, found.consts, varying, _frames.Outer())
    return TracedStep(
        frame, traced.out_tree, traced.out_avals, WHOLE, tuple(found.outputs), tuple(found.movements)
    )


def trace_step(
    flat_step: Callable[..., Any], avals: Sequence[Any], varying: Sequence[bool],
    keys: Sequence[bool], axes: dict[str, int], explicit_axis: bool, flat: bool, offloads: bool,
    automatic: dict[str, int],
) -> TracedStep:  # fmt: skip
    """Traces `flat_step(*leaves)` and analyses it.

    Args:
      flat_step: the step as a function of leaves.
      avals: per-device shapes of the leaves.
      varying: whether a leaf differs between devices.
      keys: leaves that are PRNG keys to be folded with the device's index.
      axes: names (as the step uses them) and sizes of the data axes.
      explicit_axis: the user named the axis, so the step is expected to have collectives.
      flat: replace calls by what they call.
      offloads: with `flat`, also replace `p + (n - p)` by `n` (`_differences.py`).
      automatic: names and sizes of the mesh's other axes.

    Raises:
      StepError: the step cannot be made right; the message has the edit.
      Exception: whatever the step itself raises when traced.
    """

    def folded(*leaves: Any) -> Any:
        with _whole.data_axes(axes):
            return flat_step(*(
                _whole.fold_device_index(leaf) if key else leaf
                for leaf, key in zip(leaves, keys, strict=True)
            ))  # fmt: skip

    # One device is no special case: its plan and its refusals are those of many.
    in_varying = [
        frozenset(axes) if vary or key else _frames.NOWHERE
        for vary, key in zip(varying, keys, strict=True)
    ]

    def attempt(way: str) -> TracedStep:
        with _grad.marking() if way == MARKED else contextlib.nullcontext():
            traced = _jaxpr.trace(
                folded, avals, axes, varying, typed=way == TYPED,
                salt=way if way == MARKED else "", automatic=automatic,
            )  # fmt: skip
        return _analysed(traced, way, in_varying, flat, offloads)

    return _first_that_works(attempt, explicit_axis)


def _first_that_works(attempt: Callable[[str], TracedStep], explicit_axis: bool) -> TracedStep:
    written = attempt(WRITTEN) if explicit_axis else None
    if written is not None and has_collectives(written.frame):
        return written
    try:
        typed = attempt(TYPED)
    except Exception as error:
        refusal = error
    else:
        if written is None and has_collectives(typed.frame):
            written = attempt(WRITTEN)
            if has_collectives(written.frame):
                return written
        # Collectives that are not written, AD has put there.
        if not _diverging_reductions(typed.frame):
            return typed
        refusal = StepError("a reduction inside a branch that not all devices take")
    marked = attempt(MARKED)  # If the step is at fault, this raises its error and not the typing's.
    if has_collectives(marked.frame):
        return attempt(WRITTEN) if not has_marks(marked.frame) else marked
    if not has_marks(marked.frame) and _has_backward_pass(marked.frame):
        raise StepError(message(
            "shard_train_step",
            f"JAX's varying-axes typing refuses this step ({_first_line(refusal)}), and no call of "
            "jax.grad or jax.value_and_grad was seen in it",
            "jzero must see where gradients are taken to reduce them over the devices.",
            "If the step uses `from jax import grad`, a grad function made outside it, or jax.vjp, "
            "call jzero.grad or jzero.value_and_grad there instead.",
        )) from refusal  # fmt: skip
    return marked


def _analysed(
    traced: _jaxpr.Traced, way: str, in_varying: list[frozenset[str]], flat: bool = False,
    offloads: bool = False,
) -> TracedStep:  # fmt: skip
    outer = _frames.Outer(average_losses=way != WRITTEN)
    jaxpr, consts = traced.jaxpr, traced.consts
    if flat:
        jaxpr, consts = _rewrite.flatten_calls(jaxpr, consts)
        jaxpr = without_differences(jaxpr) if offloads else jaxpr
    frame = _frames.build_frames(jaxpr, consts, in_varying, outer)
    return TracedStep(frame, traced.out_tree, traced.out_avals, way)


def has_collectives(frame: Frame) -> bool:
    """Whether the step has collectives of its own, written outside of any backward pass."""
    return any(
        eqn.primitive.name in _frames.COLLECTIVES
        and eqn.primitive.name != "axis_index"
        and not _jaxpr.in_scope(eqn, _frames.TOTAL)
        and f.pass_of(eqn) != "backward"
        for f, _, eqn in frame.walk()
    )


def has_marks(frame: Frame) -> bool:
    """Whether a gradient was marked as to be reduced."""
    return any(eqn.primitive.name == _frames.MARK for _, _, eqn in frame.walk())


def _has_backward_pass(frame: Frame) -> bool:
    """Whether a gradient was taken at all; if none was (every weight is frozen), none is reduced."""
    return any(f.pass_of(eqn) == "backward" for f, _, eqn in frame.walk())


def _diverging_reductions(frame: Frame) -> bool:
    """Whether a reduction must finish inside a branch or loop that not all devices take together."""
    for f, index, eqn in frame.walk():
        name = eqn.primitive.name
        if name == "cond" and f.reads(eqn)[0]:
            children = f.children[index]
        elif name == "while" and any(f.children[index][0].out_varying):
            children = f.children[index]
        else:
            continue
        if any(_finishes_reduction(child) for child in children):
            return True
    return False


def _finishes_reduction(frame: Frame) -> bool:
    for f, _, eqn in frame.walk():
        waits = any(_frames.is_unreduced(f, atom) for atom in eqn.invars)
        if waits and not all(out in f.unreduced for out in eqn.outvars):
            return True
    return False


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]


def check_not_per_example(
    step: TracedStep, flat_step: Callable[..., Any], whole: Sequence[Any],
    varying: Sequence[bool], axes: dict[str, int], automatic: dict[str, int],
) -> None:  # fmt: skip
    """Refuses gradients of single examples: example i of one device is not example i of another.

    Asked only if a reduction was vmapped: one whose shape follows the batch's size is of examples.

    Args:
      step: the traced step.
      flat_step: the step as a function of leaves.
      whole: the leaves' shapes at the whole batch.
      varying: which leaves hold the batch.
      axes: names and sizes of the data axes.
      automatic: those of the mesh's other axes.
    """
    reductions = _reductions(step.frame)
    if step.reductions == WRITTEN or not any(_jaxpr.is_vmapped(eqn) for eqn in reductions):
        return
    one = dict.fromkeys(axes, 1)
    with _grad.marking() if step.reductions == MARKED else contextlib.nullcontext():
        traced = _jaxpr.trace(
            flat_step, whole, one, varying, typed=step.reductions == TYPED, salt="whole",
            automatic=automatic,
        )  # fmt: skip
    in_varying = [frozenset(axes) if vary else _frames.NOWHERE for vary in varying]
    at_whole = _reductions(_analysed(traced, step.reductions, in_varying).frame)
    shapes, whole_shapes = (
        [out.aval.shape for eqn in eqns for out in eqn.outvars] for eqns in (reductions, at_whole)
    )
    if math.prod(axes.values()) > 1 and shapes != whole_shapes:
        raise StepError(message(
            "shard_train_step",
            "the step takes a gradient for every single example (vmap of jax.grad), and reduces it",
            "Gradients are reduced over the devices where JAX makes them, and example i of one "
            "device is not example i of another: per-example clipping would be wrong.",
            "Write the step for one device's examples, reduce what is made of them with "
            "jax.lax.pmean(..., 'batch'), and pass axis_name='batch'.",
        ))  # fmt: skip


def _reductions(frame: Frame) -> list[_jaxpr.Eqn]:
    names = {*_frames.REDUCTIONS, _frames.MARK}
    return [
        eqn for f, _, eqn in frame.walk()
        if eqn.primitive.name in names and any(f.reads(eqn)) and not any(map(f.varies, eqn.outvars))
        and not _jaxpr.in_scope(eqn, _frames.TOTAL)
    ]  # fmt: skip


def global_shapes(
    flat_step: Callable[..., Any], avals: Sequence[Any], axes: dict[str, int],
    automatic: dict[str, int],
) -> list[tuple[int, ...]] | None:  # fmt: skip
    """Output shapes at the whole batch, to tell per-example outputs from averages; None if unknown."""
    try:
        one = dict.fromkeys(axes, 1)
        traced = _jaxpr.trace(
            flat_step, avals, one, [False] * len(avals), typed=False, automatic=automatic
        )
    except Exception:
        return None
    return [aval.shape for aval in traced.out_avals]


def is_float(aval: Any) -> bool:
    """Whether a leaf can be averaged."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)
