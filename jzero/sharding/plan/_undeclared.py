# SPDX-License-Identifier: Apache-2.0
"""What the equations of a step say of its state, where nobody said which arguments that is."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jzero.ir import _rules
from jzero.ir._dataflow import forward
from jzero.ir._regions import Edge, EdgeKind, Region, ValueIn
from jzero.ir._rules import Cost
from jzero.sharding.plan._trace import TracedStep
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._modules import arrays_of
from jzero.tracing._returned import (
    Like,
    holds_floats,
    holds_optimizer_state,
    may_be_batch,
    results_like,
)
from jzero.tracing._types import Eqn, Jaxpr


def _split(arrays: Mapping[str, Any], are_split: Iterable[bool]) -> dict[str, Any]:
    """The arguments that have a sharded leaf."""
    left = iter(are_split)
    of = {name: itertools.islice(left, len(jax.tree.leaves(tree))) for name, tree in arrays.items()}
    return {name: arrays[name] for name, its in of.items() if any(list(its))}


def like_state(
    traced: TracedStep, state: Any, arrays: Mapping[str, Any], are_split: Iterable[bool]
) -> dict[str, list[range]]:
    """Arguments that a step may update as state, such as an average of the parameters, or moments.

    They are sharded, their floats have shapes that the state has, and they come back, computed of themselves,
    of the state and of another argument. A hidden state of a recurrent network may be all of this, by chance.

    `are_split`: for each of the arguments' leaves, whether its rows are sharded.

    Returns:
      For each, the numbers of the leaves of those results.
    """
    shapes = {leaf.shape for leaf in jax.tree.leaves(state)}
    split = _split(arrays, are_split)
    suspects = {name: tree for name, tree in split.items() if _has_only(tree, shapes)}
    if not suspects:
        return {}
    outs = jax.tree.unflatten(traced.out_tree, traced.out_avals)
    num_state = len(jax.tree.leaves(state))
    sources = _sources(traced.frame.jaxpr, _owners([("", state), *arrays.items()]))
    found: dict[str, list[range]] = {}
    for name, tree in suspects.items():
        for at, node in results_like(outs, tree):
            numbers = range(at, at + len(jax.tree.leaves(node)))
            of = set[str]().union(*(sources[i] for i in numbers))
            if at >= num_state and {"", name} < of:  # The state comes first.
                found.setdefault(name, []).append(numbers)
    return found


def _has_only(tree: Any, shapes: Collection[tuple[int, ...]]) -> bool:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.shape]
    return bool(leaves) and all(
        leaf.shape in shapes and jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves
    )


def independent(
    traced: _jaxpr.Traced,
    inputs: Sequence[tuple[str, Any]],
    names: Iterable[str],
    state: Iterable[str],
) -> list[str]:
    """Those of the arguments `names` that nothing which the step returns like them is computed of.

    `inputs`: its arguments by name, in the order of the jaxpr's inputs.
    `state`: those that are state beyond doubt; a leaf of their new values is no update of another one.
    """
    flat, _ = _rewrite.flatten_calls(traced.jaxpr, traced.consts)
    sources = _sources(flat, _owners(inputs))
    outs = jax.tree.unflatten(traced.out_tree, traced.out_avals)
    outs, trees = arrays_of(outs), dict(inputs)
    others = [trees[name] for name in state]
    return [
        name for name in names
        if not any(
            name in sources[at + i]
            for at, node in results_like(outs, trees[name], *others)
            for i in range(len(jax.tree.leaves(node)))
        )
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Flow:
    """What a step whose state was found makes its results of; each found out once."""

    jaxpr: Jaxpr  # outputs begin with the new state
    # The arguments that were found to be the state, by name, as shapes.
    state: Sequence[tuple[str, Any]]
    arrays: Mapping[str, Any]  # the others

    @functools.cached_property
    def owners(self) -> list[str]:
        """The argument that each input belongs to."""
        return _owners([*self.state, *self.arrays.items()])

    @functools.cached_property
    def reached(self) -> list[frozenset[int]]:
        """The inputs that each output is reached from by operations that keep elements apart."""
        return _reached(self.jaxpr, [frozenset({i}) for i in range(len(self.owners))])

    @functools.cached_property
    def sources(self) -> list[set[str]]:
        """The arguments that each output depends on."""
        return _sources(self.jaxpr, self.owners)


def computed_anew(flow: Flow, led: Collection[str]) -> list[str]:
    """Arguments of the state whose new value is one to which nothing was added, as gradients are.

    None of its arrays of floats is reached from its new value by operations that keep elements apart, nor is
    one of another argument, as from an average of the parameters. Where the loss has a term of the parameters
    themselves, as weight decay is, gradients reach them too.

    `led`: arguments that are the step's state beyond doubt.
    """
    owners, reached = flow.owners, flow.reached
    leaves = [leaf for _, tree in flow.state for leaf in jax.tree.leaves(tree)]
    moments = {name for name, tree in flow.state if holds_optimizer_state(tree)}
    trained = {
        i: owners[i] for i, leaf in enumerate(leaves) if holds_floats(leaf) and owners[i] not in moments
    }  # fmt: skip
    kept = {
        name for i, name in trained.items()
        if i in reached[i] or any(trained.get(j, name) != name for j in reached[i])
    } | {*led}  # fmt: skip
    anew = [name for name, _ in flow.state if name in {*trained.values()} - kept]
    if kept and anew:
        # A step that updates something may forget an old value, or find a direction anew (spectral norms).
        depend = {n for i, n in trained.items() if n in flow.sources[i]} if not moments else ()
        anew = [name for name in anew if name in depend]
    return anew


class Misread(NamedTuple):
    """What the equations say against a state that was found by structure, shapes and dtypes."""

    # An argument (such as a frozen teacher), and the one like it that its new value is an update of.
    instead: Mapping[str, str]
    batch: Sequence[str]  # arguments with rows; what comes back is no update of them
    # Arguments that change by themselves, as a batch that is augmented, or an environment.
    unclear: Sequence[str]


def misread(flow: Flow) -> Misread:
    """Arguments that were taken for state, beside an optimizer's, and are none."""
    trees = {name: tree for name, tree in flow.state if not holds_optimizer_state(tree)}
    if len(trees) == len(flow.state):
        return Misread({}, (), ())
    jaxpr, owners, arrays, reached = flow.jaxpr, flow.owners, flow.arrays, flow.reached
    # Keys, counters, labels.
    given = {name for name, tree in arrays.items() if not holds_floats(tree)}
    instead, batch, unclear = dict[str, str](), [], []
    for name, tree in trees.items():
        ours = [i for i, owner in enumerate(owners) if owner == name]
        first, kept = ours[0] if ours else 0, any(i in reached[i] for i in ours)
        alone = all(flow.sources[i] <= {name, *given} for i in ours)
        others = [x for x in arrays if Like(tree)(arrays[x])]
        of_others = {
            x for x in others if any(owners.index(x) + i - first in reached[i] for i in ours)
        }
        if not kept and len(of_others) == 1:
            instead[name] = of_others.pop()
        elif may_be_batch(tree) and (alone or not kept):
            batch.append(name)
        elif alone and any(jaxpr.outvars[i] is not jaxpr.invars[i] for i in ours):
            unclear.append(name)
    return Misread(instead, batch, unclear)


# Each element of a result depends on many elements of an operand.
_MIXING = _rules.named(Cost.PRODUCT, Cost.REDUCTION, Cost.ALONG) - {"rev", "sort"} | {
    "gather", "reduce_window", "reduce_window_sum", "select_and_gather_add", "select_and_scatter_add",
}  # fmt: skip
# They join parts, or take one, also over devices.
_PARTS = _rules.named(Cost.PART, Cost.JOIN) | {
    "all_gather", "all_to_all", "ppermute", "reduce_scatter",
}  # fmt: skip


def _reached(jaxpr: Jaxpr, given: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """Which inputs each output is reached from by operations that keep elements apart.

    Those that jzero does not look into, such as a kernel, reach all that they read.
    """
    program = Region(jaxpr, [])
    pairs = zip(jaxpr.invars, given, strict=True)
    start: dict[ValueIn, frozenset[int]] = {(program, var): of for var, of in pairs}
    found = forward(program, start, _through, frozenset.union, _NOTHING, _across)
    ends = (_NOTHING if _jaxpr.is_literal(x) else found.get((program, x)) for x in jaxpr.outvars)
    return [end or _NOTHING for end in ends]


_NOTHING = frozenset[int]()


def _across(eqn: Eqn, edge: Edge, of: frozenset[int]) -> frozenset[int]:
    return _NOTHING if edge.kind is EdgeKind.PREDICATE else of


def _through(region: Region, eqn: Eqn, ins: Sequence[frozenset[int]]) -> Sequence[frozenset[int]]:
    name, num = eqn.primitive.name, len(eqn.outvars)
    if name in _MIXING:
        return [_NOTHING] * num
    if _jaxpr.inner_jaxprs(eqn) or name in _PARTS:
        return [_NOTHING.union(*ins)] * num
    if name.startswith("scatter"):
        return [ins[0]]
    if name == "optimization_barrier" or name.startswith("psum"):
        return ins
    sizes = [getattr(atom.aval, "size", 0) for atom in eqn.invars]
    return [
        _NOTHING.union(*(x for x, size in zip(ins, sizes, strict=True) if size == out.aval.size))
        for out in eqn.outvars
    ]


def _owners(inputs: Iterable[tuple[str, Any]]) -> list[str]:
    return [name for name, tree in inputs for _ in jax.tree.leaves(tree)]


def _sources(jaxpr: Jaxpr, owners: Sequence[str]) -> list[set[str]]:
    known: dict[Any, frozenset[str]] = {
        var: frozenset([owner]) for var, owner in zip(jaxpr.invars, owners, strict=True)
    }

    def read(atom: Any) -> frozenset[str]:
        return frozenset() if _jaxpr.is_literal(atom) else known.get(atom, frozenset())

    for eqn in jaxpr.eqns:
        of = frozenset[str]().union(*map(read, eqn.invars))
        known |= dict.fromkeys(eqn.outvars, of)
    return [set(read(atom)) for atom in jaxpr.outvars]
