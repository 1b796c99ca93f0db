# SPDX-License-Identifier: Apache-2.0
"""The plan of an import or an export: pairs of tensors and leaves, each read as the other.

By the rules of a layout every tensor and every leaf must have a counterpart of a fitting shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jzero._errors import CheckpointError, message
from jzero.weights._axes import Dims, Rearranged, Side, axes_of, fused, merged, shape_of, solve
from jzero.weights._complete import Expected
from jzero.weights._layout import (
    LAYER,
    PART,
    TensorKey,
    TensorShape,
    WeightLayout,
    WeightRule,
    numbered,
)

_HEADS = {"h", "k"}  # axes of heads, and of the elements of one
NamedShapes = Mapping[str, TensorShape]
# Reads a part of an array by its name, by a slice of each dim.
ReadNamed = Callable[[str, tuple[slice, ...]], np.ndarray]


class Made(NamedTuple):
    """An array that is made of others."""

    name: str
    shape: TensorShape
    sources: list[str]  # names of arrays of one dtype
    read: Callable[[slice, ReadNamed], np.ndarray]  # some of its rows
    is_copy: bool = False  # of one source, without change


class Pair(NamedTuple):
    """Tensors and leaves that have the same values."""

    tensors: list[str]  # of one layer, or of all layers that are in one leaf
    leaves: list[str]  # one, or those that `n` counts
    tensor: Side  # a layer's tensors, concatenated along their first dim; `i` counts the layers
    leaf: Side
    sizes: Mapping[str, int]  # of all axes
    lengths: Sequence[int]  # of the first dims of a layer's tensors

    @classmethod
    def same(cls, tensor: str, leaf: str, shape: TensorShape) -> Pair:
        sizes = {f"d{i}": size for i, size in enumerate(shape)}
        side = Side("", tuple((axis,) for axis in sizes))
        return cls([tensor], [leaf], side, side, sizes, [*shape[:1]] or [1])

    def as_leaves(self) -> Iterator[Made]:
        move = Rearranged(self.tensor, self.leaf, self.sizes)

        def made(number: int, name: str) -> Made:
            def read(rows: slice, by_name: ReadNamed) -> np.ndarray:
                return move.read(number, rows, lambda at, index: self._joined(at, index, by_name))

            return Made(name, shape_of(self.leaf.dims, self.sizes), self.tensors, read)

        return itertools.starmap(made, enumerate(self.leaves))

    def as_tensors(self) -> Iterator[Made]:
        move = Rearranged(self.leaf, self.tensor, self.sizes)
        inner = shape_of(self.tensor.dims, self.sizes)[1:]
        starts = [0, *itertools.accumulate(self.lengths)]

        def made(number: int, name: str) -> Made:
            layer, part = divmod(number, len(self.lengths))

            def read(rows: slice, by_name: ReadNamed) -> np.ndarray:
                of_all = slice(starts[part] + rows.start, starts[part] + rows.stop)
                return move.read(layer, of_all, lambda i, index: by_name(self.leaves[i], index))

            shape = (self.lengths[part], *inner) if self.tensor.dims else ()
            is_copy = self.leaf == self.tensor and len(self.tensors) == len(self.leaves) == 1
            return Made(name, shape, self.leaves, read, is_copy)

        return itertools.starmap(made, enumerate(self.tensors))

    def _joined(self, layer: int, index: tuple[slice, ...], by_name: ReadNamed) -> np.ndarray:
        num, start, parts = len(self.lengths), 0, []
        names = self.tensors[layer * num : (layer + 1) * num]
        if num == 1:
            return by_name(names[0], index)
        for name, length in zip(names, self.lengths, strict=True):
            low, high = max(index[0].start - start, 0), min(index[0].stop - start, length)
            if low < high:
                parts.append(by_name(name, (slice(low, high), *index[1:])))
            start += length
        return np.concatenate(parts)


def dtypes_of(
    who: str, arrays: Iterable[Made], of_sources: Mapping[str, Any], kind: str, edit: str
) -> list[Any]:
    """The common dtype of each array's sources."""
    found = [sorted({of_sources[x] for x in array.sources}, key=str) for array in arrays]
    bad = [
        f"{array.name} would be of {kind} of {' and '.join(map(str, dtypes))}"
        for array, dtypes in zip(arrays, found, strict=True) if len(dtypes) > 1
    ]  # fmt: skip
    if bad:
        raise CheckpointError(message(who, bad, "It has one dtype.", edit))
    return [dtypes[0] for dtypes in found]


class Plan(NamedTuple):
    """The pairs by which a layout makes arrays of others."""

    pairs: list[Pair]  # in the order of the layout's rules
    equal: list[
        tuple[str, str]
    ]  # tensors; the second has no leaf, and must have the first's values


class _Unfit(Exception):
    """Tensors and leaves whose shapes do not fit."""


class Planner:
    """Makes the plan for the tensors of a file, for the leaves of a tree, or for both.

    Without `tensors` they are made of the leaves. Without `leaves` these are made of the tensors: they have
    the layout's names, below `prefix`.
    """

    def __init__(
        self, who: str, layout: WeightLayout, expected: Expected, *, tensors: NamedShapes | None = None,
        leaves: NamedShapes | None = None, prefix: str = "",
    ):  # fmt: skip
        self._who, self._layout, self._prefix, self._expected = who, layout, prefix, expected
        self._tensors, self._leaves = tensors, leaves
        matched, named = layout.match_tensors(tensors or ()), layout.match_leaves(leaves or ())
        self._of_tensors, self._of_leaves = matched.found, named.found
        self._unfit = set[str]()
        self._numbered = (named if tensors is None else matched).num_layers
        self._bad = [f"tensor {name} is not in the layout" for name in matched.left]
        self._bad += [f"leaf {name} is not in the layout" for name in named.left]

    def plan(self) -> Plan:
        num, used, pairs = self._num_layers(), set[str](), list[Pair]()
        for rule, matched, named in zip(
            self._layout.rules, self._of_tensors, self._of_leaves, strict=True
        ):
            found: Mapping[TensorKey, str] = matched
            if self._leaves is None:
                # The first rule for some tensors counts. A tied head needs its own tensor.
                if used & {*found.values()} or (rule.optional and not found):
                    continue
                if rule.tied and self._expected.lacks(found.values()):
                    continue
                is_stacked = rule.is_layer and "{i}" not in rule.leaf_names[0]
            else:
                if not named:
                    continue
                is_stacked = rule.is_layer and all(layer is None for layer, _ in named)
                if rule.tied and not found:
                    found = self._tied_to(rule)
            used |= {*found.values()}
            pairs += self._pairs(rule, found, named, num, is_stacked)
        origins: dict[str, str] = {}  # what each array is made of
        for pair in pairs:
            made, (source, *_) = pair.leaves, pair.tensors
            if self._tensors is None:
                made, (source, *_) = pair.tensors, pair.leaves
            self._bad += [
                f"{name} would be of {origins[name]}, and of {source}" for name in made if name in origins
            ]  # fmt: skip
            origins |= dict.fromkeys(made, source)
        equal = self._equal(used)
        self._find_missing(used | {second for _, second in equal}, origins)
        self._refuse()
        return Plan(pairs, equal)

    def _pairs(
        self, rule: WeightRule, found: Mapping[TensorKey, str],
        named: Mapping[TensorKey, str], num: int, is_stacked: bool,
    ) -> Iterator[Pair]:  # fmt: skip
        """The pairs of a rule: one for all layers if they are in one leaf, else one for each layer."""
        layers: Sequence[int | None] = range(num) if rule.is_layer else [None]
        rows = [None] if is_stacked else layers
        if self._tensors is None:
            found = _names(layers, rule.tensors_of)
        if self._leaves is None:
            named = _names(rows, lambda layer: rule.leaves_of(layer, self._prefix))
        wrong = [*_wrong("tensor", found, rule.tensor_names, layers)]
        wrong += _wrong("leaf", named, rule.leaf_names, rows)
        self._bad += wrong
        for row in [] if wrong else rows:
            tensors = [
                found[layer, part]
                for layer in (layers if is_stacked else [row])
                for part in range(len(rule.tensor_names))
            ]
            leaves = [named[row, part] for part in range(len(rule.leaf_names))]
            try:
                yield self._pair(rule, tensors, leaves, is_stacked)
            except _Unfit as error:
                self._bad.append(str(error))
                self._unfit |= {*tensors}

    def _pair(
        self, rule: WeightRule, tensors: list[str], leaves: list[str], is_stacked: bool
    ) -> Pair:
        of_tensor, lengths = self._joined_shape(rule, tensors)
        of_leaf = None if self._leaves is None else _one_shape(leaves, self._leaves)
        num = len(rule.tensor_names)
        rank = len(of_leaf or ()) - is_stacked if of_tensor is None else len(of_tensor)
        for left, right in _options(rule, rank, is_stacked):
            tensor = Side(LAYER if is_stacked else "", left)
            leaf = Side(PART if len(leaves) > 1 else "", right)
            sizes = {PART: max(num, len(leaves))} if num + len(leaves) > 2 else {}
            sizes |= {LAYER: len(tensors) // num} if is_stacked else {}
            shapes = [(left, of_tensor), (right, of_leaf)]
            fits = all(shape is None or solve(sizes, dims, shape) for dims, shape in shapes * 2)
            if fits and sizes.keys() >= {*tensor.axes, *leaf.axes}:
                if (wanted := self._expected.head_dim) and _HEADS <= {*axes_of(left)}:
                    if sizes["k"] != wanted:
                        raise _Unfit(f"{leaves[0]} {[*(of_leaf or ())]} has heads of {sizes['k']}, and "
                                     f"config says {wanted}")  # fmt: skip
                total = (shape_of(left, sizes) or (1,))[0]
                lengths = lengths or self._known_lengths(rule, tensors[:num], total)
                sizes = {axis: sizes[axis] for axis in tensor.axes}
                return Pair(tensors, leaves, tensor, leaf, sizes, lengths)
        if is_stacked and self._tensors is not None and of_leaf is not None:
            dims, num_layers = _options(rule, rank, True), len(tensors) // num
            at = [right.index((LAYER,)) for _, right in dims if len(right) == len(of_leaf)]
            if at and of_leaf[at[0]] != num_layers:
                raise _Unfit(
                    f"{leaves[0]} {[*of_leaf]} has {of_leaf[at[0]]} layers in its dim {at[0]}, and the files "
                    f"have {num_layers}; a rule whose axes have {LAYER} says which dim counts them"
                )
        shown = ((tensors[0], of_tensor), (leaves[0], of_leaf))
        said = " and ".join(f"{name} {list(shape)}" for name, shape in shown if shape is not None)
        raise _Unfit(f"{said} do not fit: {rule.axes or 'their shapes are the same'}")

    def _joined_shape(
        self, rule: WeightRule, tensors: Sequence[str]
    ) -> tuple[TensorShape | None, list[int]]:
        """The shape of a layer's tensors, concatenated along their first dim, and their lengths.

        None if tensors are to be made of leaves.
        """
        if self._tensors is None:
            return None, []
        num = len(rule.tensor_names)
        shapes = [_one_shape(tensors[part::num], self._tensors) for part in range(num)]
        if num == 1:
            return shapes[0], [*shapes[0][:1]] or [1]
        if not all(shapes) or len({x[1:] for x in shapes}) > 1:
            raise _Unfit(f"{' + '.join(tensors[:num])} differ in more than their first dim")
        lengths = [x[0] for x in shapes]
        if _is_counted(rule) and len({*lengths}) > 1:
            raise _Unfit(f"{' + '.join(tensors[:num])} have first dims of {lengths}: {rule.axes}")
        return (sum(lengths), *shapes[0][1:]), lengths

    def _known_lengths(self, rule: WeightRule, names: Sequence[str], total: int) -> list[int]:
        """Lengths of tensors that are to be made of one leaf."""
        if len(names) == 1 or (_is_counted(rule) and total % len(names) == 0):
            return [total // len(names)] * len(names)
        lengths = [shape[0] for name in names if (shape := self._expected.shape(name))]
        if len(lengths) < len(names) or sum(lengths) != total:
            raise _Unfit(f"{' + '.join(names)} are {total} rows of one leaf, and how many each has is not "
                         "known: pass config, the model's config.json")  # fmt: skip
        return lengths

    def _num_layers(self) -> int:
        """How many layers are numbered from 0, or stacked in each leaf."""
        if self._numbered or self._tensors is None:
            return self._numbered or self._num_stacked()
        for rule in self._layout.rules:
            if rule.is_layer and not rule.optional:
                said = [f"no tensor of a layer is there, as {rule.tensors_of(0)[0]} would be"]
                if base := self._layout.other_base(self._tensors):
                    said.append(
                        f"names begin with {base}: take WeightLayout.extended(base={base!r})"
                    )
                self._refuse(*said)
        return 0

    def _num_stacked(self) -> int:
        for rule, found in zip(self._layout.rules, self._of_leaves, strict=True):
            if rule.is_layer and (name := found.get((None, 0))):
                dims, shape = rule.dims()[1] if rule.axes else (), (self._leaves or {})[name]
                at = dims.index((LAYER,)) if (LAYER,) in dims else 0
                return shape[at] if len(shape) > at else 0
        return 0

    def _tied_to(self, rule: WeightRule) -> Mapping[TensorKey, str]:
        at = [x.tensors for x in self._layout.rules].index(rule.tied)
        return self._of_tensors[at]

    def _equal(self, used: set[str]) -> list[tuple[str, str]]:
        """Tied tensors that a file has although the tree has no leaf for them."""
        return [
            (first, second)
            for rule, found in zip(self._layout.rules, self._of_tensors, strict=True) if rule.tied
            for second in found.values() if second not in used
            for first in self._tied_to(rule).values()
        ]  # fmt: skip

    def _find_missing(self, used: set[str], made: Iterable[str]) -> None:
        matched = dict.fromkeys(name for found in self._of_tensors for name in found.values())
        self._bad += [f"tensor {name} has no leaf" for name in matched if name not in used]
        for rule in self._layout.rules if self._tensors is None else ():
            names = rule.tensors_of(0 if rule.is_layer else None)
            if not rule.optional and not {*names} & {*made, *self._unfit}:
                self._bad.append(f"leaf {rule.leaf_names[0]} is missing, of tensor {names[0]}")

    def _refuse(self, *first: str) -> None:
        if bad := [*dict.fromkeys([*first, *self._bad])]:
            like = "" if self._tensors is None else ", or say which leaves there are (like)"
            raise CheckpointError(message(
                self._who, bad,
                f"Tensors and leaves are counterparts by the layout {self._layout.name}.",
                "Take the layout of its family, or extend it with rules (WeightLayout.extended)"
                f"{like}.", "names"))  # fmt: skip


def _options(rule: WeightRule, rank: int, is_stacked: bool) -> Iterator[tuple[Dims, Dims]]:
    """Possible dims of tensors and leaves: heads merged into one dim, or with dims of their own."""
    same: Dims = tuple((f"d{i}",) for i in range(rank))
    left, right = rule.dims() if rule.axes else (same, same)
    if not is_stacked:  # `i` is the dim of a leaf that has all layers.
        right = tuple(x for group in right if (x := tuple(a for a in group if a != LAYER)))
    elif LAYER not in axes_of(right):
        right = ((LAYER,), *right)
    yield from (fused(left, option) for option in dict.fromkeys([merged(right, left), right]))


def _is_counted(rule: WeightRule) -> bool:
    """Whether its tensors are equal parts of the leaf."""
    return PART in axes_of(rule.dims()[0])


def _names(
    layers: Iterable[int | None], of_layer: Callable[[int | None], Iterable[str]]
) -> dict[TensorKey, str]:
    return {(i, part): name for i in layers for part, name in enumerate(of_layer(i))}


def _wrong(
    kind: str, found: Mapping[TensorKey, str], paths: Sequence[str],
    layers: Iterable[int | None],
) -> Iterator[str]:  # fmt: skip
    """A rule's names that are missing, and those that are too many."""
    wanted = {(i, part): numbered(path, i) for i in layers for part, path in enumerate(paths)}
    yield from (f"{kind} {wanted[key]} is missing" for key in wanted if key not in found)
    yield from (f"{kind} {found[key]} is one too many" for key in found if key not in wanted)


def _one_shape(names: Sequence[str], shapes: NamedShapes) -> TensorShape:
    first = shapes[names[0]]
    for name in names:
        if shapes[name] != first:
            raise _Unfit(f"{names[0]} is {list(first)}, and {name} {list(shapes[name])}")
    return first
