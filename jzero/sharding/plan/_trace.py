# SPDX-License-Identifier: Apache-2.0
"""Traces a step: at the shapes of the whole batch, or, if it has collectives of its own, at one device's.

A step without collectives over the data axes means what `jax.jit` makes of it: it is traced once, by plain
`jax.make_jaxpr`, and partitioned. A step written for `jax.pmap` or
`jax.shard_map` says itself what is local and what is reduced, and is obeyed as written.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.tree_util import PyTreeDef
from jax.typing import ArrayLike

from jzero._errors import JzeroError, StepError, message
from jzero.ir import _rules, _starts
from jzero.ir._regions import Region
from jzero.ir._rows import NO_ROWS, RowDims, row_dims
from jzero.ir._work import Repeated, repeated
from jzero.sharding.analysis import _frames
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.partition._run import shard_map_error
from jzero.sharding.plan._sorted_in_blocks import sorted_in_blocks
from jzero.tracing import _call, _jaxpr, _keys, _lines, _reading, _rewrite, _traces, _weak
from jzero.tracing._differences import without_differences
from jzero.tracing._types import Atom, Aval, Eqn, Jaxpr

# The step as a function of leaves; it returns what it likes.
StepOfLeaves: TypeAlias = Callable[..., Any]
WHOLE, WRITTEN = "whole batch", "written"
# Whether a step is being traced.
_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("inside", default=False)


@contextlib.contextmanager
def _step_being_traced() -> Iterator[None]:
    """Calls of other sharded steps are refused meanwhile."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


class WholeBatch(NamedTuple):
    """A step at the shapes of the whole batch."""

    out_tree: PyTreeDef
    out_avals: list[jax.ShapeDtypeStruct]
    jaxpr: _rewrite.Flat  # of global arrays, calls replaced by their equations
    consts: list[ArrayLike]  # values of its constants
    # How each input is sharded over the data axes; `P()` for the state's leaves.
    specs: tuple[P, ...]
    # `specs` without dims that the devices do not divide: each device is passed all of these.
    given: tuple[P, ...]

    @property
    def dims(self) -> list[RowDims]:
        """The batch dims of each input."""
        return [_dims_of(spec) for spec in self.specs]

    def repeated(self, device: _rewrite.Flat | Jaxpr, num: int) -> tuple[float, list[Repeated]]:
        """The flops of the step, and those that `num` devices (or microbatches) repeat."""
        return repeated(self.jaxpr, device, self.consts, self.dims, num)


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A step's jaxpr, analysed."""

    # The root frame, of one device's step, or of the whole batch's as the partitioner takes it. Its inputs
    # are the state's leaves, then the other arguments'.
    frame: Frame
    out_tree: PyTreeDef
    out_avals: list[jax.ShapeDtypeStruct]
    # How each output of a whole-batch step is sharded over the data axes.
    outputs: tuple[P, ...] = ()
    # Which outputs of a whole-batch step have rows of the batch, gathered ones included.
    of_rows: tuple[bool, ...] = ()
    whole_batch: WholeBatch | None = None  # None of a step with collectives of its own


def trace_whole(
    flat_step: StepOfLeaves, avals: Sequence[jax.ShapeDtypeStruct], specs: Sequence[P],
    parts: Mapping[str, int], has_masters: bool, mesh_axes: dict[str, int],
    automatic: dict[str, int], is_named: bool,
) -> WholeBatch | None:  # fmt: skip
    """Traces `flat_step(*leaves)` at the shapes of the whole batch; None if it has collectives of its own.

    specs: how each leaf is sharded over the data axes; parts: into how many parts each of these splits it.
    has_masters: also replace `p + (n - p)` by `n` (`_differences.py`).
    mesh_axes: names and sizes of all axes of the mesh, which sharding constraints may name.
    is_named: the user has named the axis of the step's collectives.
    """
    traced = trace_plainly(flat_step, avals, mesh_axes, automatic, is_named)
    if traced is None:
        return None
    _check_refs(traced.jaxpr)
    flat, consts = _rewrite.flatten_calls(_starts.in_bounds(traced.jaxpr), traced.consts)
    flat = _rewrite.without_repeats(flat, _is_of_scalars)
    flat = without_differences(flat) if has_masters else flat
    given = [_divided(spec, aval.shape, parts) for spec, aval in zip(specs, avals, strict=True)]
    flat = sorted_in_blocks(flat, consts, [*map(_dims_of, given)], _blocks(given, parts))
    return WholeBatch(
        traced.out_tree, traced.out_avals, flat, consts, tuple(specs), tuple(given),
    )  # fmt: skip


def _blocks(specs: Sequence[P], parts: Mapping[str, int]) -> int:
    """The number of blocks in which rows are sharded along dim 0; 1 if arguments differ in it."""
    split = {
        (dim, math.prod(parts[axis] for axis in _call.spec_axes(entry)))
        for spec in specs
        for dim, entry in enumerate(spec)
        if entry
    }
    (dim, num), *others = split or {(0, 1)}
    return 1 if dim or others else num


def _is_of_scalars(eqn: Eqn) -> bool:
    """Whether an equation outside of both passes computes with scalars only, as schedules do."""
    if _jaxpr.autodiff_pass(eqn) is not None or not _rules.is_elementwise(eqn):
        return False
    return not any(atom.aval.shape for atom in (*eqn.invars, *eqn.outvars))


def _dims_of(spec: P) -> RowDims:
    return frozenset(dim for dim, entry in enumerate(spec) if entry)


def _divided(spec: P, shape: Sequence[int], parts: Mapping[str, int]) -> P:
    """The spec, without dims that the devices do not divide."""
    return P(*(
        entry if shape[d] % math.prod(parts[axis] for axis in _call.spec_axes(entry)) == 0 else None
        for d, entry in enumerate(spec)
    ))  # fmt: skip


def analysed(
    whole: WholeBatch, axes: dict[str, int], parts: Mapping[str, int], of_several_dims: bool
) -> TracedStep:
    """A whole-batch step, to be partitioned. Its jaxpr says what is rows; a wrong guess costs only time."""
    outvars = whole.jaxpr.outvars
    program = Region(whole.jaxpr, whole.consts)  # type: ignore[arg-type]
    rows, everywhere = row_dims(program, whole.dims), frozenset(axes)
    frame = _frames.frames_of(
        program, lambda region, x: everywhere if rows.get((region, x)) else _frames.NOWHERE
    )
    every = {x: dims for (region, x), dims in rows.items() if region is program}
    of_rows = [not _jaxpr.is_literal(x) and bool(every.get(x)) for x in outvars]
    found = _dims_by_axis(program, whole.specs, parts) if of_several_dims else {tuple(parts): every}
    dims = [
        {axes: NO_ROWS if _jaxpr.is_literal(x) else each.get(x, NO_ROWS)
         for axes, each in found.items()} for x in outvars
    ]  # fmt: skip
    outputs = [_spec_of(own, x.aval.shape, parts) for own, x in zip(dims, outvars, strict=True)]
    return TracedStep(frame, whole.out_tree, whole.out_avals, tuple(outputs), tuple(of_rows), whole)


def _dims_by_axis(
    program: Region, specs: Sequence[P], axes: Collection[str]
) -> dict[tuple[str, ...], dict[Atom, RowDims]]:
    """The batch dims of values over each axis, outside of loops and branches."""
    split = [[*map(_call.spec_axes, spec)] for spec in specs]
    found = dict[tuple[str, ...], dict[Atom, RowDims]]()
    for axis in axes:
        dims = [frozenset(d for d, own in enumerate(names) if axis in own) for names in split]
        rows = row_dims(program, dims)
        found[(axis,)] = {x: each for (region, x), each in rows.items() if region is program}
    return found


def _spec_of(
    dims: Mapping[tuple[str, ...], RowDims], shape: Sequence[int], parts: Mapping[str, int]
) -> P:
    """The spec of a result: each axis shards the first batch dim that the devices divide."""
    split = [list[str]() for _ in shape]
    for axes, own in dims.items():
        for dim in sorted(own):
            num = math.prod(parts[axis] for axis in (*split[dim], *axes))
            if shape[dim] % num == 0:
                split[dim] += axes
                break
    last = max((d + 1 for d, names in enumerate(split) if names), default=0)
    return P(*(names[0] if len(names) == 1 else (*names,) or None for names in split[:last]))


@_step_being_traced()
def trace_plainly(
    flat_step: StepOfLeaves, avals: Sequence[jax.ShapeDtypeStruct], mesh_axes: dict[str, int],
    automatic: dict[str, int], is_named: bool,
) -> _jaxpr.Traced | None:  # fmt: skip
    """The trace of a step as it is written; None if it has collectives of its own over the data axes.

    With `is_named` it has, and it may fail before the first one: it may fit one device's rows alone.
    """
    try:
        try:
            return _traces.trace_whole(flat_step, avals, automatic)
        except (RuntimeError, ValueError) as error:
            return _trace_otherwise(error, flat_step, avals, mesh_axes)
    except (JzeroError, _reading.Elsewhere, _weak.PromotedState):
        raise
    except Exception as error:
        if is_named or (isinstance(error, NameError) and "unbound axis name" in str(error)):
            return None
        raise


def _trace_otherwise(
    error: Exception, flat_step: StepOfLeaves, avals: Sequence[jax.ShapeDtypeStruct],
    mesh_axes: dict[str, int],
) -> _jaxpr.Traced:  # fmt: skip
    """The trace of a step that could not be traced in a mesh of its Auto axes.

    A constraint that names a data axis wants it in the mesh. A `jax.shard_map` of the step's own wants its
    own mesh. Without any it is an equation, which is refused with its line.
    """
    if not _is_of_shard_map(error):
        try:
            return _traces.trace_whole(flat_step, avals, mesh_axes)
        except ValueError as other:
            if not _is_of_shard_map(other):
                raise _explained(other) from other.__cause__
    try:
        return _traces.trace_whole(flat_step, avals, {})
    except (RuntimeError, ValueError):  # Constraints need a mesh.
        raise shard_map_error() from None


def _is_of_shard_map(error: Exception) -> bool:
    return "passed to shard_map" in str(error)


# What JAX says of layouts that are for Explicit axes alone, or of a mesh of such axes.
_OF_EXPLICIT_AXES = (
    "axis names that are of type Auto or Manual",
    "can only refer to Auto axes",
    "should match the mesh of sharding",
    "should match the aval mesh",
)


def _explained(error: ValueError) -> Exception:
    """The error for unknown axes, and for layouts over Explicit axes, [Note: Explicit axes]."""
    if "is not found in mesh" in f"{error}":
        return StepError(message(
            "shard_train_step", f"a layout at {_lines.line_of_error(error)}: {f'{error}'.rstrip('.')}",
            "Constraints of a step name axes of its mesh.",
            "Pass the mesh that has them by mesh=, with its data axes by axes=; or drop what says that "
            "the batch is sharded: it is."))  # fmt: skip
    if not any(text in f"{error}" for text in _OF_EXPLICIT_AXES):
        return error
    return StepError(message(
        "shard_train_step", f"a layout over Explicit mesh axes at {_lines.line_of_error(error)}",
        "A step is traced over Auto axes, whatever types those of its mesh have.",
        "Write jax.lax.with_sharding_constraint(x, jax.P(...)) instead of jax.reshard, out_sharding= and "
        "NamedShardings; drop constraints over data axes alone."))  # fmt: skip


def check_outermost() -> None:
    """Refuses the call of a sharded step inside another one."""
    if _inside.get():
        raise StepError(message(
            "shard_train_step", "a sharded step is called inside of another one",
            "One shard_map runs on all devices, and none inside it.",
            "Call the function that it was made from there: step.__wrapped__."))  # fmt: skip


def trace_written(
    flat_step: StepOfLeaves, avals: Sequence[jax.ShapeDtypeStruct], varying: Sequence[bool],
    keys: Sequence[bool], axes: dict[str, int], has_masters: bool,
    automatic: dict[str, int],
) -> TracedStep:  # fmt: skip
    """Traces `flat_step(*leaves)` as one device sees it, with its collectives as they are written.

    varying: whether a leaf differs between devices; keys: whether it is a PRNG key that is folded with the
    device's index.
    """
    traced = trace_on_device(flat_step, avals, keys, axes, automatic)
    # One device is no special case: its plan and its refusals are those of many.
    in_varying = [
        frozenset(axes) if vary or key else _frames.NOWHERE
        for vary, key in zip(varying, keys, strict=True)
    ]
    jaxpr, consts = _starts.in_bounds(traced.jaxpr), traced.consts
    _check_refs(jaxpr)
    if has_masters:
        jaxpr, consts = _rewrite.flatten_calls(jaxpr, consts)
        jaxpr = without_differences(jaxpr)
    frame = _frames.build_frames(jaxpr, consts, in_varying)
    _check_axes(frame)
    return TracedStep(frame, traced.out_tree, traced.out_avals)


@_step_being_traced()
def trace_on_device(
    flat_step: StepOfLeaves, avals: Sequence[jax.ShapeDtypeStruct], keys: Sequence[bool],
    axes: dict[str, int], automatic: dict[str, int],
) -> _jaxpr.Traced:  # fmt: skip
    """The trace of a step with collectives of its own, as one device sees it; see `trace_written`."""

    @functools.wraps(flat_step)
    def folded(*leaves: jax.Array) -> Any:
        with _keys.data_axes(axes):
            return flat_step(*(
                _keys.fold_device_index(leaf) if key else leaf
                for leaf, key in zip(leaves, keys, strict=True)
            ))  # fmt: skip

    return _traced_in(folded, avals, axes, automatic)


def _traced_in(
    flat_step: StepOfLeaves, avals: Sequence[jax.ShapeDtypeStruct], axes: dict[str, int],
    automatic: dict[str, int],
) -> _jaxpr.Traced:  # fmt: skip
    """The trace of a step with collectives over these axes; explains other axes and Explicit ones."""
    try:
        return _traces.trace(flat_step, avals, axes, automatic)
    except ValueError as error:
        raise _explained(error) from error.__cause__
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise StepError(message(
            "shard_train_step", f"the step names an axis that the mesh has not ({error})",
            f"The data axes are {tuple(axes)}; a step with collectives of its own is one device's.",
            "Pass axes=jzero.Axes(axis_name=...), the name that jax.pmap had; or drop the collectives and "
            "write the step for the whole batch.")) from error  # fmt: skip


def _check_refs(jaxpr: Jaxpr) -> None:
    """Refuses mutable arrays: reads depend on writes that are no operands."""
    found = [_lines.summary(eqn) for eqn in _jaxpr.ref_equations(jaxpr)]
    if found:
        raise StepError(message(
            "shard_train_step", found,
            "jzero follows values from equation to equation, and a jax.Ref changes beside them.",
            "Return new arrays: x = x.at[i].set(y), or a carry of jax.lax.scan.",
            things="equations with a jax.Ref", shown=4))  # fmt: skip


def _check_axes(frame: Frame) -> None:
    """Refuses collectives over dims that a `jax.vmap` of the step has named."""
    inner = [
        eqn for _, eqn in frame.walk()
        if eqn.primitive.name in _frames.COLLECTIVES
        and any(isinstance(axis, int) for axis in _jaxpr.axes_of(eqn))
    ]  # fmt: skip
    if inner:
        raise StepError(message(
            "shard_train_step",
            [f"a {eqn.primitive.name} over a dim that jax.vmap(axis_name=) has named{_lines.at_line(eqn)}"
             for eqn in inner],
            "A step with collectives of its own may name the data axes only.",
            "Reduce that dim with jnp.sum, jnp.mean or jnp.max outside of the vmap.",
            things="collectives", shown=8))  # fmt: skip


def trace_at_global_shapes(
    flat_step: StepOfLeaves, avals: Sequence[jax.ShapeDtypeStruct], axes: dict[str, int],
    automatic: dict[str, int],
) -> _jaxpr.Traced:  # fmt: skip
    """The trace of a step with collectives of its own, as if one device had the whole batch."""
    return _traced_in(flat_step, avals, dict.fromkeys(axes, 1), automatic)


def is_float(aval: Aval) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)
