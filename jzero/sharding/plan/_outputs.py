# SPDX-License-Identifier: Apache-2.0
"""What a step returns: the state in its structure, and outputs, one for all devices or one per example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jzero._errors import StateError, StepError, counted, describe_leaf, message
from jzero.sharding.plan import _stored_layout, _trace
from jzero.sharding.plan._stored_layout import Shard, StoredLayout
from jzero.tracing import _call
from jzero.tracing._modules import arrays_of
from jzero.tracing._objects import Mutated
from jzero.tracing._returned import Returned, new_state

WHO = _call.WHO


def global_shapes(
    traced: _trace.TracedStep, flat_step: Any, avals: list[Any], axes: dict[str, int],
    num_state: int, automatic: dict[str, int],
) -> list[tuple[int, ...]] | None:  # fmt: skip
    """Output shapes at the whole batch; None if no output can be per-example, or the step fails there."""
    outs = zip(traced.out_avals[num_state:], traced.frame.out_varying[num_state:], strict=True)
    if not any(axes and aval.shape for aval, axes in outs):
        return None
    try:
        found = _trace.trace_at_global_shapes(flat_step, avals, axes, automatic)
    except Exception:
        return None
    return [aval.shape for aval in found.out_avals]


def output_layouts(
    traced: _trace.TracedStep, globals_: list[tuple[int, ...]] | None, num_state: int,
    axis_names: tuple[str, ...],
) -> list[StoredLayout]:  # fmt: skip
    layouts: list[StoredLayout] = []
    pairs = []
    paths = output_paths(traced.out_tree, num_state)
    for i, aval in enumerate(traced.out_avals[num_state:], num_state):
        dims = [] if globals_ is None else [
            dim for dim, (local, whole) in enumerate(zip(aval.shape, globals_[i], strict=True))
            if local != whole
        ]  # fmt: skip
        if len(dims) > 1 and traced.frame.out_varying[i]:
            pairs.append(describe_leaf(paths[i - num_state], globals_[i], aval.dtype))  # type: ignore[index]
        per_example = dims and traced.frame.out_varying[i]
        layouts.append(Shard(dims[0], axis_names) if per_example else _stored_layout.REPLICATED)
    if pairs:
        raise StepError(message(
            WHO, [f"{leaf} has several dims that follow the batch" for leaf in pairs],
            "A device has only its own examples, and cannot compare them with those of another.",
            "Return what has one entry per example, and compare outside of the step."))  # fmt: skip
    return layouts


def check_reduced(
    traced: _trace.TracedStep, layouts: Sequence[StoredLayout], num_new: int, state_tree: Any,
    axes: Sequence[str],
) -> None:  # fmt: skip
    """What a step written for one device returns is the same on all of them, or one entry per example.

    Nothing is averaged for its author: a mean of what devices made of their rows is another training.
    """
    axis = repr(axes[0] if len(axes) == 1 else tuple(axes))
    state = _call.structure_paths(state_tree, "the new state")
    paths = [*state[:num_new], *output_paths(traced.out_tree, num_new)]
    stored = [*[_stored_layout.REPLICATED] * num_new, *layouts]
    bad = [
        (path, aval) for path, aval, layout, varies in zip(
            paths, traced.out_avals, stored, traced.frame.out_varying, strict=True
        )
        if varies and layout == _stored_layout.REPLICATED
    ]  # fmt: skip
    # Keys, or one device's key of an array of them.
    shapes = [x.shape[1:] if x.shape[:1] == (1,) else x.shape for _, x in bad]
    keys = [_call.is_single_key(x.dtype, shape) for (_, x), shape in zip(bad, shapes, strict=True)]
    edits = [] if all(keys) else [
        f"Reduce gradients before the update, and statistics and metrics: jax.lax.pmean(grads, {axis}); "
        f"counts by jax.lax.psum(count, {axis})."
    ]  # fmt: skip
    if any(keys):
        edits.append(
            "A key that comes back belongs to the state: pass one key, say so by state=, and draw "
            "from jzero.fold_device_index(key). Or drop the collectives and Axes(axis_name=), and write the "
            "step for the whole batch."
        )
    if bad:
        found = [
            f"{describe_leaf(path, aval.shape, aval.dtype)} differs between devices"
            for path, aval in bad
        ]
        raise StepError(message(
            WHO, found,
            "A step with collectives of its own reduces what it returns itself; jzero averages nothing.",
            " ".join(edits), shown=8))  # fmt: skip


def output_paths(out_tree: Any, num_state: int = 0) -> list[str]:
    """Paths of what a step returns, without the state's leaves, which come first."""
    return _call.structure_paths(out_tree, "output")[num_state:]


def check_outputs(
    traced: _trace.TracedStep | _trace.WholeBatch, avals: list[Any], tree: Any
) -> None:
    """A step must return its state, alone or first, with every leaf's shape and dtype."""
    outs = jax.tree.unflatten(traced.out_tree, traced.out_avals)
    outs = arrays_of(outs)
    state = jax.tree.unflatten(tree, avals)
    is_found = isinstance(outs, Returned)
    new = outs.state if isinstance(outs, Mutated) else outs
    if not is_found and jax.tree.structure(new_state(new, state)) != tree:
        raise StateError(message(
            WHO, _structure_difference(outs, tree),
            "step_fn returns the new state, alone or first in a tuple, with the structure it got.",
            "Return (new_state, metrics). To evaluate, use jzero.shard_eval_step(fn, like=train_step).",
        ))  # fmt: skip
    paths = _call.leaf_paths(state, "state")
    bad = [
        f"{describe_leaf(path, old.shape, old.dtype)} became {aval.dtype}{list(aval.shape)}"
        for path, old, aval in zip(paths, avals, traced.out_avals, strict=False)
        if (old.shape, old.dtype) != (aval.shape, aval.dtype)
    ]
    if bad:
        raise StateError(message(
            WHO, bad, "A step must keep every state leaf's shape and dtype.",
            "Cast it back (.astype) before returning, or initialise it with the new dtype.",
        ))  # fmt: skip


def _structure_difference(outs: Any, tree: Any) -> str:
    first = outs[0] if isinstance(outs, (tuple, list)) and outs else outs
    old = set(_call.structure_paths(tree, "state"))
    new = set(_call.leaf_paths(first, "state"))
    if not isinstance(outs, (tuple, list)) or not (old & new):
        leaves = counted(tree.num_leaves, "leaf", "leaves")
        return f"step_fn returned {_shape_of(outs)}, and the state is a tree of {leaves}"
    missing, extra = sorted(old - new)[:4], sorted(new - old)[:4]
    parts = [
        f"{kind} {', '.join(paths)}"
        for kind, paths in (("missing", missing), ("new", extra))
        if paths
    ]
    return f"the state's structure changes: {'; '.join(parts) or 'its containers differ'}"


def _shape_of(tree: Any) -> str:
    kind = type(tree).__name__
    if tree is None:
        return "None"
    kind = "array" if isinstance(tree, jax.ShapeDtypeStruct) else kind
    return f"a {kind} of {len(tree)}" if isinstance(tree, (tuple, list)) else f"one {kind}"
