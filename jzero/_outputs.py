"""What a step returns: the state in its structure, and outputs that are averaged or one per example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jzero import _call, _trace
from jzero._errors import StateError, StepError, describe_leaf, message
from jzero.sharding import _layout
from jzero.sharding._layout import Layout, Shard
from jzero.sharding._plan import Plan

WHO = _call.WHO


def global_shapes(
    traced: _trace.TracedStep, flat_step: Any, avals: list[Any], axes: dict[str, int],
    num_state: int, automatic: dict[str, int],
) -> list[tuple[int, ...]] | None:  # fmt: skip
    """Output shapes at the whole batch, asked only if some output may hold one entry per example."""
    outs = zip(traced.out_avals[num_state:], traced.frame.out_varying[num_state:], strict=True)
    if not any(axes and aval.shape for aval, axes in outs):
        return None
    return _trace.global_shapes(flat_step, avals, axes, automatic)


def output_layouts(
    traced: _trace.TracedStep, globals_: list[tuple[int, ...]] | None, num_state: int,
    axis_names: tuple[str, ...], alone: bool,
) -> list[Layout]:  # fmt: skip
    """Layouts of the outputs beside the state: averaged ones are full, per-example ones concatenated."""
    layouts: list[Layout] = []
    bad, pairs = [], []
    paths = output_paths(traced.out_tree, num_state)
    for i, aval in enumerate(traced.out_avals[num_state:], num_state):
        dims = [] if globals_ is None else [
            dim for dim, (local, whole) in enumerate(zip(aval.shape, globals_[i], strict=True))
            if local != whole
        ]  # fmt: skip
        if not traced.frame.out_varying[i]:
            layouts.append(_layout.FULL)
        elif len(dims) > 1:
            layouts.append(_layout.FULL)
            pairs.append(describe_leaf(paths[i - num_state], globals_[i], aval.dtype))  # type: ignore[index]
        elif dims:
            layouts.append(Shard(dims[0], axis_names))
        else:
            layouts.append(_layout.FULL)
            if not _trace.is_float(aval) and not alone:
                bad.append(describe_leaf(paths[i - num_state], aval.shape, aval.dtype))
    if pairs and not alone:
        raise StepError(message(
            WHO, [f"{leaf} has several dims that follow the batch" for leaf in pairs],
            "A device has only its own examples, and cannot compare them with those of another.",
            "Return what has one entry per example, and compare outside of the step."))  # fmt: skip
    if bad:
        raise StepError(message(
            WHO, [f"{leaf} differs between devices" for leaf in bad],
            "Outputs that differ between devices are averaged, and an integer has no average.",
            "Return it as a float (.astype(jnp.float32)): a count becomes the mean count per device.",
        ))  # fmt: skip
    return layouts


def output_paths(out_tree: Any, num_state: int = 0) -> list[str]:
    """Paths of what a step returns, without the state's leaves, which come first."""
    outs = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
    return _call.leaf_paths(outs, "output")[num_state:]


def check_outputs(traced: _trace.TracedStep, avals: list[Any], tree: Any) -> None:
    """The step must return its state, alone or first, with every leaf's shape and dtype kept."""
    outs = jax.tree.unflatten(traced.out_tree, traced.out_avals)
    new = outs
    if isinstance(outs, (tuple, list)) and outs and jax.tree.structure(outs[0]) == tree:
        new = outs[0]
    elif jax.tree.structure(outs) != tree:
        raise StateError(message(
            WHO, _structure_difference(outs, tree),
            "step_fn returns the new state, alone or first in a tuple, with the structure it got.",
            "Return (new_state, metrics).",
        ))  # fmt: skip
    paths = _call.leaf_paths(new, "state")
    bad = [
        f"{describe_leaf(path, old.shape, old.dtype)} became {aval.dtype}{list(aval.shape)}"
        for path, old, aval in zip(paths, avals, jax.tree.leaves(new), strict=True)
        if (old.shape, old.dtype) != (aval.shape, aval.dtype)
    ]
    if bad:
        raise StateError(message(
            WHO, bad, "A step must keep every state leaf's shape and dtype.",
            "Cast it back (.astype) before returning, or initialise it with the new dtype.",
        ))  # fmt: skip


def _structure_difference(outs: Any, tree: Any) -> str:
    first = outs[0] if isinstance(outs, (tuple, list)) and outs else outs
    old = set(_call.leaf_paths(jax.tree.unflatten(tree, range(tree.num_leaves)), "state"))
    new = set(_call.leaf_paths(first, "state"))
    if not isinstance(outs, (tuple, list)) or not (old & new):
        return f"step_fn returned {_shape_of(outs)}, and the state is a {_shape_of_tree(tree)}"
    missing, extra = sorted(old - new)[:4], sorted(new - old)[:4]
    parts = [
        f"{kind} {', '.join(paths)}"
        for kind, paths in (("missing", missing), ("new", extra))
        if paths
    ]
    return f"the state's structure changes: {'; '.join(parts) or 'its containers differ'}"


def _shape_of(tree: Any) -> str:
    kind = type(tree).__name__
    return f"a {kind} of {len(tree)}" if isinstance(tree, (tuple, list)) else f"one {kind}"


def _shape_of_tree(tree: Any) -> str:
    return f"tree of {tree.num_leaves} leaves"


def check_varying_state(plan: Plan, traced: _trace.TracedStep, averaged: Sequence[bool]) -> None:
    """Statistics may be averaged; a parameter or an integer that differs between devices may not."""
    differing = [
        (leaf, new, aval)
        for leaf, new, aval, mean in zip(
            plan.leaves, traced.frame.jaxpr.outvars, traced.out_avals, averaged, strict=False
        )
        if mean
    ]
    integers = [
        describe_leaf(leaf.path, leaf.shape, leaf.dtype)
        for leaf, _, aval in differing
        if not _trace.is_float(aval)
    ]
    if integers:
        raise StateError(message(
            WHO, [f"the new {leaf} differs between devices" for leaf in integers],
            "The state must be the same on all devices, and an integer has no average.",
            "Compute it from the state, or from values reduced with jax.lax.psum.",
        ))  # fmt: skip
    updates = [
        describe_leaf(leaf.path, leaf.shape, leaf.dtype)
        for leaf, new, _ in differing
        if new in traced.frame.local_gradients
    ]
    if updates:
        raise StepError(message(
            WHO, [f"the update of {leaf} differs between devices" for leaf in updates],
            "Gradients must be reduced over the data axes before a parameter is updated.",
            "Reduce the gradients with jax.lax.pmean before the update.",
        ))  # fmt: skip
