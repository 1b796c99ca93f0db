# SPDX-License-Identifier: Apache-2.0
"""Tensors and leaves are bound by the rules of a layout: every one of both, with shapes that fit, or none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jzero._errors import CheckpointError, message
from jzero.weights._layout import LAYER, PART, NameKey, TensorShape, WeightLayout, WeightRule, _each
from jzero.weights._moves import Dims, Rearranged, Side, fused, merged, parse, shape_of, solve

NamedShapes = Mapping[str, TensorShape]
# Reads a part of an array by its name: a slice of each dim.
ReadNamed = Callable[[str, tuple[slice, ...]], np.ndarray]
_SHOWN = 20


class MadeArray(NamedTuple):
    """An array that is made of others.

    Attributes:
      name: what it will be called.
      shape: its own.
      sources: the names of those that it may be made of; all have one dtype.
      read: some of its rows; it is given what reads these.
    """

    name: str
    shape: TensorShape
    sources: list[str]
    read: Callable[[slice, ReadNamed], np.ndarray]


class Bound(NamedTuple):
    """What a layout makes of some arrays.

    Attributes:
      arrays: in the order of the layout's rules.
      equal: pairs of tensors of which the second has no leaf, and must have the first's values.
    """

    arrays: list[MadeArray]
    equal: list[tuple[str, str]]


class _Pair(NamedTuple):
    """The tensors and leaves of a rule, in the order of their grids; and the lengths of tensors in a row."""

    tensors: list[str]
    leaves: list[str]
    tensor: Side
    leaf: Side
    sizes: Mapping[str, int]
    lengths: Sequence[int]

    def as_leaves(self) -> list[MadeArray]:
        move = Rearranged(self.tensor, self.leaf, self.sizes)
        shape = shape_of(self.leaf.dims, self.sizes)

        def array(number: int, name: str) -> MadeArray:
            def read(rows: slice, by_name: ReadNamed) -> np.ndarray:
                return move.read(number, rows, lambda at, index: self._in_row(at, index, by_name))

            return MadeArray(name, shape, self._of_layer(self.tensors, number, self.leaves), read)

        return [array(*each) for each in enumerate(self.leaves)]

    def as_tensors(self) -> list[MadeArray]:
        move = Rearranged(self.leaf, self.tensor, self.sizes)
        first, *rest = shape_of(self.tensor.dims, self.sizes) or (1,)
        lengths = [*self.lengths] or [first]

        def array(number: int, name: str) -> MadeArray:
            at, part = divmod(number, len(lengths))
            start = sum(lengths[:part])

            def read(rows: slice, by_name: ReadNamed) -> np.ndarray:
                of_all = slice(start + rows.start, start + rows.stop)
                return move.read(at, of_all, lambda i, index: by_name(self.leaves[i], index))

            shape = (lengths[part], *rest) if self.tensor.dims else ()
            return MadeArray(name, shape, self._of_layer(self.leaves, number, self.tensors), read)

        return [array(*each) for each in enumerate(self.tensors)]

    def _of_layer(self, sources: list[str], number: int, made: list[str]) -> list[str]:
        """Those that an array may be made of: of its layer, where both sides have each by itself."""
        layers = self.sizes[LAYER] if LAYER in self.leaf.grid else 1
        at, each = number * layers // len(made), len(sources) // layers
        return sources[at * each : (at + 1) * each]

    def _in_row(self, at: int, index: tuple[slice, ...], by_name: ReadNamed) -> np.ndarray:
        """Of tensors that are one after the other along their first dim."""
        if not self.lengths:
            return by_name(self.tensors[at], index)
        num, start, parts = len(self.lengths), 0, []
        for name, length in zip(self.tensors[at * num : (at + 1) * num], self.lengths, strict=True):
            low, high = max(index[0].start - start, 0), min(index[0].stop - start, length)
            if low < high:
                parts.append(by_name(name, (slice(low, high), *index[1:])))
            start += length
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def into_leaves(
    who: str, layout: WeightLayout, tensors: NamedShapes, leaves: NamedShapes | None, prefix: str
) -> Bound:
    """The leaves that a file's tensors become: these, or if None as the layout calls them, below `prefix`.

    Raises:
      CheckpointError: every tensor and leaf that has no counterpart, or another shape.
    """
    binder = _Binder(who, layout, tensors, leaves)
    of_tensors, unknown = layout.match_tensors(tensors)
    of_leaves, strange = layout.match_leaves(leaves) if leaves is not None else ([], [])
    binder.bad += [f"tensor {name} is not in the layout" for name in unknown]
    binder.bad += [f"leaf {name} is not in the layout" for name in strange]
    num, used, missing = binder.num_layers(of_tensors, tensors), set[str](), list[str]()
    taken: dict[str, str] = {}
    for number, rule in enumerate(layout.rules):
        found = of_tensors[number]
        if leaves is None:
            # Of rules for the same tensors the first one counts; a tied head comes with its tensor only.
            if used & {*found.values()} or (rule.optional and not found):
                continue
            own = ["/".join(filter(None, [prefix, x])) for x in rule.leaf_names(num)]
            names: list[str] | None = own
            unrolled = rule.is_unrolled
            first = _each(rule.tensors)[0]
            binder.bad += [
                f"leaf {name} would be of tensor {taken[name]}, and of {first}"
                for name in own if name in taken
            ][:1]  # fmt: skip
            taken |= dict.fromkeys(own, first)
        else:
            if not of_leaves[number]:
                continue
            names = binder.in_order(rule, of_leaves[number], num)
            unrolled = any(layer is not None for layer, _ in of_leaves[number])
            if rule.tied and not found:
                found = of_tensors[_rule_of(layout, rule.tied)]
        sources = _ordered(rule.tensors, found, num if rule.is_layer else None)
        if sources is None:
            there = {*found.values()}
            missing += [
                x for x in rule.tensor_names(num) if not there & {x, x.removeprefix(layout.base)}
            ]
        elif names is not None:
            binder.pair(rule, sources, names, unrolled, num)
        used |= {*found.values()}
    binder.bad += [f"tensor {name} is missing" for name in dict.fromkeys(missing)]
    equal = _equal(layout, of_tensors, used) if leaves is not None else []
    used |= {name for _, name in equal}
    matched = dict.fromkeys(name for found in of_tensors for name in found.values())
    binder.bad += [f"tensor {name} has no leaf" for name in matched if name not in used]
    return Bound([x for pair in binder.done() for x in pair.as_leaves()], equal)


def into_tensors(
    who: str,
    layout: WeightLayout,
    leaves: NamedShapes,
    expected: Callable[[str], TensorShape | None],
) -> Bound:
    """The tensors that leaves become; `expected` knows the shapes of some.

    Raises:
      CheckpointError: every leaf that has no counterpart, or another shape.
    """
    binder = _Binder(who, layout, None, leaves, expected)
    of_leaves, unknown = layout.match_leaves(leaves)
    binder.bad += [f"leaf {name} is not in the layout" for name in unknown]
    num = binder.num_layers(of_leaves) or _num_stacked(layout, of_leaves, leaves)
    made: dict[str, WeightRule] = {}
    for rule, found in zip(layout.rules, of_leaves, strict=True):
        names = rule.tensor_names(num) if found else []
        if twice := [name for name in names if name in made]:
            binder.bad.append(
                f"tensor {twice[0]} is in {_each(rule.leaves)[0]} and in another leaf"
            )
        elif found and (ordered := binder.in_order(rule, found, num)) is not None:
            unrolled = any(layer is not None for layer, _ in found)
            binder.pair(rule, names, ordered, unrolled, num)
        made |= dict.fromkeys(names, rule)
    binder.bad += [
        f"leaf {_each(rule.leaves)[0]} is missing, of tensor {name}"
        for rule in layout.rules
        for name in rule.tensor_names(num)[:1]
        if not (rule.optional or name in made)
    ]
    return Bound([x for pair in binder.done() for x in pair.as_tensors()], [])


class _Unfit(Exception):
    """Tensors and leaves whose shapes do not fit."""


class _Binder:
    """Collects pairs, and all that is wrong."""

    def __init__(
        self, who: str, layout: WeightLayout, tensors: NamedShapes | None, leaves: NamedShapes | None,
        expected: Callable[[str], TensorShape | None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._layout, self._tensors, self._leaves = layout, tensors, leaves
        self._who, self._expected = who, expected
        self._pairs: list[_Pair] = []
        self.bad: list[str] = []

    def done(self) -> list[_Pair]:
        if self.bad:
            raise CheckpointError(message(
                self._who, self.bad,
                f"Tensors and leaves are counterparts by the layout {self._layout.name}.",
                "Take the layout of its family, extend it with rules (WeightLayout.extended), or say which "
                "leaves there are (like).", "names", shown=_SHOWN))  # fmt: skip
        return self._pairs

    def num_layers(
        self, by_rule: Sequence[Mapping[NameKey, str]], tensors: Iterable[str] | None = None
    ) -> int:
        """How many are numbered, from 0 and all of them; of tensors there is one at least, if rules have any.

        Raises:
          CheckpointError: they are others, so that no rule can be held against them.
        """
        numbers = {layer for found in by_rule for layer, _ in found if layer is not None}
        num = max(numbers, default=-1) + 1
        if len(numbers) < num:  # A number in a name is no reason for as many names.
            first = next(i for i in itertools.count() if i not in numbers)
            self.bad.insert(0, f"layer {first} is missing: layers are numbered up to {num - 1}")
            self.done()
        of_layers = [rule for rule in self._layout.rules if rule.is_layer and not rule.optional]
        if tensors is not None and not num and of_layers:
            wanted = of_layers[0].tensor_names(1)[0]
            self.bad.insert(0, f"no tensor of a layer is there, as {wanted} would be")
            if base := self._layout.other_base(tensors):
                self.bad.insert(
                    1, f"names begin with {base}: take WeightLayout.extended(base={base!r})"
                )
            self.done()
        return num

    def in_order(
        self, rule: WeightRule, found: Mapping[NameKey, str], num: int
    ) -> list[str] | None:
        """The leaves of a rule; None if one is missing, which is noted."""
        stacked = all(layer is None for layer, _ in found)
        ordered = _ordered(rule.leaves, found, None if stacked else num)
        if ordered is None:
            paths = [*rule.leaf_names(1)]
            keys = [(i, n) for i in ([None] if stacked else range(num)) for n in range(len(paths))]
            self.bad += [
                f"leaf {_each(rule.leaves)[n].replace('{i}', str(i))} is missing"
                for i, n in keys if (i, n) not in found
            ]  # fmt: skip
            self.bad += [f"leaf {found[key]} is one too many" for key in found if key not in keys]
        return ordered

    def pair(
        self, rule: WeightRule, tensors: list[str], leaves: list[str], unrolled: bool, num: int
    ) -> None:
        """Notes a pair, or what is wrong with it."""
        try:
            self._pairs.append(self._pair(rule, tensors, leaves, unrolled, num))
        except _Unfit as error:
            self.bad.append(str(error))

    def _pair(
        self, rule: WeightRule, tensors: list[str], leaves: list[str], unrolled: bool, num: int
    ) -> _Pair:
        of_tensor, lengths = self._tensor_shape(rule, tensors)
        of_leaf = None if self._leaves is None else _one_shape(leaves, self._leaves)
        stacked = rule.is_layer and not unrolled
        rank = len(of_leaf or ()) - stacked if of_tensor is None else len(of_tensor)
        for tensor, leaf in _options(rule, unrolled, rank):
            sizes = {LAYER: num} | ({PART: rule.num_parts} if rule.num_parts > 1 else {})
            shapes = [(tensor.dims, of_tensor), (leaf.dims, of_leaf)]
            fits = all(shape is None or solve(sizes, dims, shape) for dims, shape in shapes * 2)
            if fits and sizes.keys() >= {*tensor.axes, *leaf.axes}:
                sizes = {axis: sizes[axis] for axis in tensor.axes}
                if of_tensor is None and _in_a_row(rule):
                    lengths = self._known_lengths(rule, shape_of(tensor.dims, sizes)[0])
                return _Pair(tensors, leaves, tensor, leaf, sizes, lengths)
        known = ((tensors[0], of_tensor), (leaves[0], of_leaf))
        said = " and ".join(f"{name} {list(shape)}" for name, shape in known if shape is not None)
        raise _Unfit(f"{said} do not fit: {rule.axes or 'their shapes are the same'}")

    def _tensor_shape(
        self, rule: WeightRule, tensors: Sequence[str]
    ) -> tuple[TensorShape | None, Sequence[int]]:
        """The shape of one, or of all that are in a row; and the lengths of these."""
        if self._tensors is None:
            return None, ()
        if not _in_a_row(rule):
            return _one_shape(tensors, self._tensors), ()
        num = len(_each(rule.tensors))
        parts = [_one_shape(tensors[i::num], self._tensors) for i in range(num)]
        if len({part[1:] for part in parts}) > 1 or not all(parts):
            raise _Unfit(f"{' + '.join(tensors[:num])} differ in more than their first dim")
        lengths = [part[0] for part in parts]
        return (sum(lengths), *parts[0][1:]), lengths

    def _known_lengths(self, rule: WeightRule, total: int) -> list[int]:
        names = [name.replace("{i}", "0") for name in _each(rule.tensors)]
        shapes = [self._expected(name) for name in names]
        lengths = [shape[0] for shape in shapes if shape]
        if len(lengths) < len(names) or sum(lengths) != total:
            raise _Unfit(f"{' + '.join(names)} are {total} rows of one leaf, and how many each has is not "
                         "known: pass config, the model's config.json")  # fmt: skip
        return lengths


def _options(rule: WeightRule, unrolled: bool, rank: int) -> Iterator[tuple[Side, Side]]:
    """What tensors and leaves may be: heads in one dim, or in dims of their own."""
    same: Dims = tuple((f"d{i}",) for i in range(rank))
    left, right = parse(rule.axes) if rule.axes else (same, same)
    if unrolled:  # `i` says where layers are in a leaf that has them all.
        right = tuple(x for group in right if (x := tuple(a for a in group if a != LAYER)))
    inner = {*Side((), left).axes}, {*Side((), right).axes}
    if rule.is_layer and not unrolled and LAYER not in inner[1]:
        right = ((LAYER,), *right)
    parts = [PART] * (rule.num_parts > 1 and PART in inner[0] | inner[1])
    tensor_grid = (*[LAYER] * rule.is_layer, *([] if PART in inner[0] else parts))
    leaf_grid = (*[LAYER] * unrolled, *([] if PART in inner[1] else parts))
    for option in dict.fromkeys([merged(right, left), right]):
        dims = fused(left, option)
        yield Side(tensor_grid, dims[0]), Side(leaf_grid, dims[1])


def _in_a_row(rule: WeightRule) -> bool:
    return len(_each(rule.tensors)) > 1 and PART not in Side((), parse(rule.axes)[1]).axes


def _one_shape(names: Sequence[str], shapes: NamedShapes) -> TensorShape:
    first = shapes[names[0]]
    for name in names:
        if shapes[name] != first:
            raise _Unfit(f"{names[0]} is {list(first)}, and {name} {list(shapes[name])}")
    return first


def _ordered(names: Any, found: Mapping[NameKey, str], layers: int | None) -> list[str] | None:
    """Those of all layers (None: they have none), and no others; None if one is missing."""
    rows: Sequence[int | None] = [None] if layers is None else range(layers)
    keys = [(i, n) for i in rows for n in range(len(_each(names)))]
    return [found[key] for key in keys] if {*keys} == found.keys() else None


def _num_stacked(
    layout: WeightLayout, of_leaves: Sequence[Mapping[NameKey, str]], leaves: NamedShapes
) -> int:
    """The layers of a tree that has them all in each leaf."""
    for rule, found in zip(layout.rules, of_leaves, strict=True):
        if rule.is_layer and (name := found.get((None, 0))):
            dims = parse(rule.axes)[1] if rule.axes else ()
            at = dims.index((LAYER,)) if (LAYER,) in dims else 0
            return leaves[name][at] if len(leaves[name]) > at else 0
    return 0


def _rule_of(layout: WeightLayout, tensor: str) -> int:
    return next(i for i, rule in enumerate(layout.rules) if rule.tensors == tensor)


def _equal(
    layout: WeightLayout, of_tensors: Sequence[Mapping[NameKey, str]], used: set[str]
) -> list[tuple[str, str]]:
    """Tied tensors that a file has all the same, and a tree has not."""
    return [
        (tied, name)
        for rule, found in zip(layout.rules, of_tensors, strict=True)
        if rule.tied
        for name in found.values()
        if name not in used
        for tied in of_tensors[_rule_of(layout, rule.tied)].values()
    ]
