# SPDX-License-Identifier: Apache-2.0
"""The step as it is partitioned: of the whole batch, or of one device if it has collectives of its own."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jzero._errors import (
    BatchError,
    JzeroError,
    OptionError,
    StepError,
    describe_leaf,
    first_of,
    message,
)
from jzero.ir._work import Repeated
from jzero.sharding.partition._movement import REPLICATED, Movement
from jzero.sharding.partition._writer import OUTPUT
from jzero.sharding.plan import _outputs, _stored_layout, _trace, _undeclared
from jzero.sharding.plan._config import StepConfig
from jzero.sharding.plan._extra_work import Extra, RowsOf, extra_work
from jzero.sharding.plan._stored_layout import StoredLayout
from jzero.sharding.plan._trace import TracedStep
from jzero.tracing import _call, _jaxpr, _reading, _weak
from jzero.tracing._call import BatchSpecs
from jzero.tracing._modules import arrays_of
from jzero.tracing._returned import Found, as_given, holds_floats, holds_optimizer_state, of_batch
from jzero.tracing._signature import Signature
from jzero.tracing._state_arguments import parts

# A note on errors of a step with collectives of its own.
_OF_ROWS = (
    "jzero: a step with collectives of its own sees the rows of one device, and, unlike under jax.pmap, "
    "keeps their dim: take keys[0] of a key for each device, and pass a batch as [rows, ...] and a state "
    "without replicas. in_specs={'<argument>': jax.P()} replicates what is not batch."
)


@dataclasses.dataclass(frozen=True)
class LocalStep:
    """What is partitioned of a step."""

    traced: TracedStep
    specs: tuple[P, ...]  # how each leaf of the arguments is sharded
    outputs: tuple[StoredLayout, ...]  # layouts of what the step returns beside the state
    # For each leaf of the arguments, the dim along which microbatches cut it.
    row_dims: tuple[int | None, ...]
    # Arguments that are keys, and folded with the device's index if the step is one device's.
    keys: tuple[bool, ...]
    # With rows, but replicated, as the devices do not divide them.
    whole_arguments: tuple[str, ...] = ()
    # From the flops of a step and what is repeated of them, what is worth a line.
    extra_work: Callable[[float, Sequence[Repeated]], tuple[Extra, ...]] = lambda *_: ()


@dataclasses.dataclass(frozen=True)
class FlatStep:
    """A step as a function of leaves, `fn(*state leaves, *argument leaves)`, and their shapes."""

    fn: Callable[..., Any]
    plain: Callable[..., Any]  # the same, without asking which of its results are its state
    state: list[Any]  # shapes of the state's leaves
    state_tree: Any  # their structure
    arrays: dict[str, Any]  # trees of shapes of the other arguments, by name
    array_avals: list[Any]  # their leaves
    in_specs: Mapping[str, Any]  # what the user said of how arguments are sharded
    signature: Signature  # how the step is called


def local_step(step: FlatStep, config: StepConfig) -> LocalStep:
    """Steps with collectives of their own over the data axes are one device's; others the whole batch's."""
    try:
        found = of_whole_batch(step, config)
    except _reading.Unclear as unclear:
        _read_beside_state(unclear, step, config)
        raise
    if found is None:
        found = of_one_device(step, config)
    elif not step.signature.declared and not config.evaluates:
        _read_updated(found, step, config)
    if step.signature.found and not config.evaluates:
        _check_updates(found.traced, step)
    return found


def _read_beside_state(unclear: _reading.Unclear, step: FlatStep, config: StepConfig) -> None:
    """Raises Elsewhere, to read again, if only batch or arguments that nothing updates were unclear."""
    found, batch = unclear.found, of_batch(unclear.found, unclear.arguments)
    left = [name for name in (*found.unclear, *found.alike) if name not in batch]
    if left and found.state:
        traced = _as_written(step, step.plain, config)
        assert traced is not None  # It was traced so before.
        state = step.signature.state_names[0], jax.tree.unflatten(step.state_tree, step.state)
        independent = _undeclared.independent(
            traced, [state, *step.arrays.items()], left, found.state
        )
        left = [name for name in left if name not in independent]
    if found.state and not left:
        raise _reading.Elsewhere(found.state) from None


def _check_updates(traced: TracedStep, step: FlatStep) -> None:
    """Retries a step whose batch was taken for state, and refuses gradients that were."""
    state = jax.tree.unflatten(step.state_tree, step.state)
    outs = jax.tree.unflatten(traced.out_tree, traced.out_avals)
    outs = as_given(arrays_of(outs))
    names = step.signature.state_names
    named = list(zip(names, [value for _, value in parts(state)], strict=True))
    led = names[:1] if _reading.leads(step.signature, outs, state, step.arrays) else ()
    flow = _undeclared.Flow(traced.frame.jaxpr, named, step.arrays)
    wrong = _undeclared.misread(flow)
    if wrong.unclear:
        unclear = tuple(wrong.unclear)
        sure = tuple([name for name in names if name not in unclear])
        _reading.refuse(step.signature, {**dict(named), **step.arrays}, Found(sure, unclear))
    if wrong.instead or wrong.batch:
        kept = [wrong.instead.get(name, name) for name in names if name not in wrong.batch]
        raise _reading.Elsewhere(step.signature.in_order(kept))
    if anew := _undeclared.computed_anew(flow, led):
        _reading.refuse_anew(step.signature, anew)


def promoted(step: FlatStep, state: list[Any], config: StepConfig) -> FlatStep:
    """The step with these types of its state, if it computes the same and has no collectives of its own."""
    strong = dataclasses.replace(step, state=state)
    weak, new = [_as_written(x, x.fn, config) for x in (step, strong)]
    if weak is None or new is None:
        return step
    return strong if _weak.computes_the_same(weak, new, state) else step


def _as_written(
    step: FlatStep, fn: Callable[..., Any], config: StepConfig, on_mesh: bool = False
) -> _jaxpr.Traced | None:
    """The trace of a function of all leaves of a step; None if it has collectives of its own.

    Its constraints are over all axes if it runs `on_mesh`, else over those that are no data axes.
    """
    avals = [*step.state, *step.array_avals]
    axes = {name: config.mesh.shape[name] for name in config.mesh.axis_names}
    automatic = axes if on_mesh and config.automatic else config.automatic
    return _trace.trace_plainly(fn, avals, axes, automatic, config.axis_name is not None)


def _read_updated(found: LocalStep, step: FlatStep, config: StepConfig) -> None:
    """Retries a step that updates another argument as state; hidden states are batch-sharded."""

    def has_rows(name: str, results: range) -> bool:
        replicated = dataclasses.replace(step, in_specs={**step.in_specs, name: P()})
        local = of_whole_batch(replicated, config)
        return local is not None and any(local.traced.of_rows[i] for i in results)

    state = jax.tree.unflatten(step.state_tree, step.state)
    are_split = [bool(spec) for spec in _batch_specs(step, config).specs]
    suspects = _undeclared.like_state(found.traced, state, step.arrays, are_split)
    updated = [
        name for name, results in suspects.items()
        if any(not has_rows(name, numbers) for numbers in results)
    ]  # fmt: skip
    if updated:
        outs = jax.tree.unflatten(found.traced.out_tree, found.traced.out_avals)
        _reading.read_updated(step.signature, outs, state, step.arrays, updated)


def _batch_specs(step: FlatStep, config: StepConfig) -> BatchSpecs:
    return _call.batch_specs(
        step.arrays, step.in_specs, config.axes, config.options.microbatches.num
    )


def of_whole_batch(step: FlatStep, config: StepConfig) -> LocalStep | None:
    """The step at the shapes of the whole batch; None if it has collectives of its own."""
    axes, split = _step_axes(config), _batch_specs(step, config)
    parts = split.parts(config.axes, config.options.microbatches.num)
    num_state, num_new = len(step.state), 0 if config.evaluates else len(step.state)
    avals = [*step.state, *step.array_avals]
    batch = _trace.trace_whole(
        step.fn, avals, [*[P()] * num_state, *split.specs], parts, config.options.needs_masters,
        config.axes | config.automatic, config.automatic, config.axis_name is not None,
    )  # fmt: skip
    if batch is None:
        return None
    # An evaluation has the axis name of its training.
    if config.axis_name is not None and not config.evaluates:
        raise OptionError(message(
            _call.WHO,
            f"Axes(axis_name={config.axis_name!r}), and the step has no collectives over it",
            "It is the name by which a step written for jax.pmap calls the data axis; this one is written "
            "for the whole batch.", "Drop axis_name; Axes(batch=) names axes of the mesh."))  # fmt: skip
    if not config.evaluates:
        _outputs.check_outputs(batch, step.state, step.state_tree)
    given = batch.given[num_state:]
    paths = _call.argument_paths(step.arrays)
    named = [
        describe_leaf(path, aval.shape, aval.dtype)
        for path, aval in zip(paths, step.array_avals, strict=True)
    ]
    if split.are_of_several_dims and (found := config.options.not_of_several_dims):
        raise _refusal(found, split.specs, named)
    undivided = tuple(
        leaf for leaf, own, spec in zip(named, given, split.specs, strict=True) if own != spec
    )
    of_rows = [
        RowsOf(leaf, aval.shape[dim], math.prod(parts[axis] for axis in names), names, f"{spec}")
        for leaf, aval, spec in zip(named, step.array_avals, split.specs, strict=True)
        for dim, names in enumerate(map(_call.spec_axes, spec))
        if names
    ]
    traced = _trace.analysed(batch, axes, parts, split.are_of_several_dims)
    return LocalStep(
        traced,
        tuple(given),
        tuple(map(_stored_layout.of_spec, traced.outputs[num_new:])),
        tuple(_call.microbatch_dim(spec, split.row_axes) for spec in split.specs),
        (False,) * len(given),
        undivided,
        functools.partial(extra_work, rows=of_rows, config=config),
    )


def _refusal(options: Sequence[str], specs: Sequence[P], named: Sequence[str]) -> StepError:
    pairs = zip(named, specs, strict=True)
    leaf, spec = next((leaf, spec) for leaf, spec in pairs if sum(map(bool, spec)) > 1)
    return StepError(message(
        _call.WHO, f"{', '.join(options)}, where in_specs shards several dims of {leaf} ({spec})",
        "Several dims can be sharded only where a step sends nothing quantized.",
        f"Drop {first_of(options, 6)}, or shard one dim of each argument, over all data axes."))  # fmt: skip


def with_paths(movements: Sequence[Movement], out_tree: Any) -> tuple[Movement, ...]:
    """Movements of a step, with paths of outputs instead of their numbers."""
    paths = _outputs.output_paths(out_tree)
    return tuple(
        dataclasses.replace(m, where=paths[int(m.where)]) if m.operation == OUTPUT else m
        for m in movements
    )


def check_movements(movements: Sequence[Movement], most: int) -> None:
    """Refuses a step that gathers more rows at once than `Comm(max_gather_bytes=)`."""
    rows = [m for m in movements if m.reason != REPLICATED]
    bad = sorted((m for m in rows if m.nbytes > most), key=lambda m: -m.nbytes)
    if bad:
        raise StepError(message(
            _call.WHO, [f"{m} ({m.nbytes} bytes)" for m in bad],
            "An operation that needs the rows of all devices gathers them, and "
            f"Comm(max_gather_bytes={most}) is the most of one value that every device may gather.",
            "Write it so that it stays batch-sharded (per row, or by sums over the batch); carry a model "
            "that is only read in the state, and return it unchanged; or permit it with "
            f"Comm(max_gather_bytes={bad[0].nbytes}).", things="operations", shown=8))  # fmt: skip


def of_one_device(step: FlatStep, config: StepConfig) -> LocalStep:
    """The step at the shapes of one device's shard of the batch."""
    if step.signature.declared or config.evaluates:
        return _of_one_device(step, config)
    state = jax.tree.unflatten(step.state_tree, step.state)
    failed = None
    if not holds_floats(state) or any(map(holds_optimizer_state, step.arrays.values())):
        failed = _read_global(step, config)
    try:
        return _of_one_device(step, config)
    except Exception as error:  # It may be that of state which was split.
        if failed is None:
            _read_global(step, config)
        elif isinstance(error, BatchError):
            raise failed from None
        raise


def _read_global(step: FlatStep, config: StepConfig) -> Exception | None:
    """Reads a step by what it returns of global arguments: on a part of its state it may fail.

    Returns:
      What the step raises itself.

    Raises:
      Elsewhere, StepError: as `_reading.read` does.
    """
    avals = [*step.state, *step.array_avals]
    try:
        _trace.trace_at_global_shapes(step.fn, avals, _step_axes(config), config.automatic)
    except (_reading.Elsewhere, StepError):
        raise
    except Exception as error:  # What it meets at the shapes of one device says more.
        error.add_note(_OF_ROWS)
        return error
    return None


def _of_one_device(step: FlatStep, config: StepConfig) -> LocalStep:
    options, axes = config.options, _step_axes(config)
    specs, local, keys = _on_one_device(step, config)
    num_state, num_new = len(step.state), 0 if config.evaluates else len(step.state)
    varying = [False] * num_state + [any(map(_call.spec_axes, spec)) for spec in specs]
    try:
        traced = _trace.trace_written(
            step.fn,
            local,
            varying,
            [False] * num_state + list(keys),
            axes,
            has_masters=options.needs_masters,
            automatic=config.automatic,
        )
    except Exception as error:
        if not isinstance(error, JzeroError):
            error.add_note(_OF_ROWS)
        raise
    avals = [*step.state, *step.array_avals]
    if not config.evaluates:
        _outputs.check_outputs(traced, step.state, step.state_tree)
    shapes = _outputs.global_shapes(traced, step.fn, avals, axes, num_new, config.automatic)
    outputs = _outputs.output_layouts(traced, shapes, num_new, config.axis_names)
    _outputs.check_reduced(traced, outputs, num_new, step.state_tree, tuple(axes))
    dims = tuple(_call.microbatch_dim(spec, config.axis_names) for spec in specs)
    return LocalStep(traced, tuple(specs), tuple(outputs), dims, keys)


def _on_one_device(
    step: FlatStep, config: StepConfig
) -> tuple[list[P], list[jax.ShapeDtypeStruct], tuple[bool, ...]]:
    """Specs of arguments, local shapes of all leaves, and which arguments are keys for all devices."""
    specs = _call.argument_specs(
        step.arrays, step.in_specs, config.batch_axes, config.options.microbatches.num
    )
    local = [
        _call.local_aval(aval, spec, config.batch_axes)
        for aval, spec in zip(step.array_avals, specs, strict=True)
    ]
    keys = tuple(
        not any(spec) and _call.is_single_key(aval.dtype, aval.shape)
        for aval, spec in zip(step.array_avals, specs, strict=True)
    )
    return specs, [*step.state, *local], keys


def as_traced(step: FlatStep, config: StepConfig, on_mesh: bool = False) -> _jaxpr.Traced:
    """The trace of a step as it is written, of the whole batch or of one device; `on_mesh` it can be run."""
    traced = _as_written(step, step.fn, config, on_mesh)
    if traced is not None:
        return traced
    _, local, keys = _on_one_device(step, config)
    keys = (*[False] * len(step.state), *keys)
    return _trace.trace_on_device(step.fn, local, keys, _step_axes(config), config.automatic)


def _step_axes(config: StepConfig) -> dict[str, int]:
    """Names, as the step uses them, and sizes of the data axes."""
    return {
        name: math.prod(config.batch_axes[axis] for axis in axes)
        for name, axes in config.step_axes.items()
    }
