# SPDX-License-Identifier: Apache-2.0
"""Layouts: how a value is laid out over the axes of a mesh, and what a conversion between layouts costs.

A dim of `size` elements is `[outer, n, inner]` for each axis of `n` devices that cuts it: device i of the axis
holds the i-th `inner` elements of each of `outer` blocks. With one block these are contiguous shards; with as
many blocks as time steps, a batch merged with time; with as many as the devices of other axes, nested shards.

DTensor's words: an axis with a `Cut` is `Shard(dim)`, one with a `Partial` is `Partial(op)`, one with neither
is `Replicate`. A layout prints as `[16@data, 10+6@data, 40@4,data, 8] sum(model)`: a dim of 16 sharded over
`data`; one of 10 that is padded to 16; one of `[4, data, the rest]`; a replicated one; to be summed over `model`.

[Note: padding] A padded dim is `outer` blocks whose last elements are not the value's. They hold anything: what
reduces the dim masks them. Padding is at the end of the dim (`outer` is 1) until a reshape merges dims.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jax.sharding import PartitionSpec

Op = Literal["sum", "max", "min"]
Kind = Literal[
    "gather", "scatter", "exchange", "reduce", "permute",  # collectives
    "slice", "mask", "pad", "unpad",  # local
]  # fmt: skip
LOCAL: frozenset[Kind] = frozenset({"slice", "mask", "pad", "unpad"})


class Cut(NamedTuple):
    """`outer` blocks of a dim, each divided among the devices of `axis`."""

    axis: str
    outer: int


class Pad(NamedTuple):
    """`outer` blocks of a dim, each of which begins with `true` elements of the value."""

    outer: int
    true: int


class Partial(NamedTuple):
    """The value is the sum (max, min) over the devices of `axis` of what they hold.

    `linear` names operands (of a loop's body, its carries) that the sum contains only linearly: they may be
    partial sums over the same axis, too. Whoever makes one of them whole must make whole what is linear in it.
    """

    axis: str
    op: Op = "sum"
    linear: frozenset[str] = frozenset()


class Dim(NamedTuple):
    """`size` elements, padding included; the cuts are ordered by `outer`."""

    size: int
    cuts: tuple[Cut, ...] = ()
    pad: Pad | None = None

    @property
    def true(self) -> int:
        return self.size if self.pad is None else self.pad.outer * self.pad.true

    def put(self, *cuts: Cut) -> Dim:
        return self._replace(cuts=tuple(sorted((*self.cuts, *cuts), key=lambda cut: cut.outer)))

    def drop(self, axes: Collection[str]) -> Dim:
        return self._replace(cuts=tuple(cut for cut in self.cuts if cut.axis not in axes))


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How a value of one shape is laid out over a mesh: for each dim its cuts and padding, and partial sums.

    An axis cuts one dim, or has a partial sum, or neither. Axes of one device have neither. `mesh` is
    `(axis, devices)` from the outermost axis to the innermost.
    """

    dims: tuple[Dim, ...]
    mesh: tuple[tuple[str, int], ...]
    partial: tuple[Partial, ...] = ()

    def __post_init__(self) -> None:
        used = [cut.axis for dim in self.dims for cut in dim.cuts] + [p.axis for p in self.partial]
        assert len(used) == len(set(used)), f"an axis is used twice: {self}"
        assert all(fits(dim.size, _digits(self, dim.cuts)) for dim in self.dims), f"{self}"

    # -- what it is ---------------------------------------------------------------------------------
    def __str__(self) -> str:
        dims = ", ".join(self._dim_text(dim) for dim in self.dims)
        sums = (
            f" {p.op}({p.axis}{'; linear in ' * bool(p.linear)}{', '.join(sorted(p.linear))})"
            for p in self.partial
        )
        return f"[{dims}]{''.join(sums)}"

    def _dim_text(self, dim: Dim) -> str:
        text, at = str(dim.size), 1
        if dim.pad is not None:
            text = f"{dim.pad.true}+{dim.size // dim.pad.outer - dim.pad.true}"
            text = text if dim.pad.outer == 1 else f"{dim.pad.outer}*({text})"
        parts: list[str] = []
        for cut in dim.cuts:
            parts += [str(cut.outer // at)] * (cut.outer != at) + [cut.axis]
            at = cut.outer * self.num([cut.axis])
        return f"{text}@{','.join(parts)}" if parts else text

    def num(self, axes: Collection[str]) -> int:
        """How many devices the axes have."""
        return math.prod(n for axis, n in self.mesh if axis in axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The value's shape, without padding."""
        return tuple(dim.true for dim in self.dims)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what one device holds, with padding."""
        return tuple(dim.size // self.num([c.axis for c in dim.cuts]) for dim in self.dims)

    def place(self, axis: str) -> tuple[int, int] | None:
        """The dim that the axis cuts, and into how many blocks."""
        found = (
            (d, c.outer) for d, dim in enumerate(self.dims) for c in dim.cuts if c.axis == axis
        )
        return next(found, None)

    def local_outer(self, axis: str) -> int:
        """The blocks of an axis's cut among the elements that one device holds."""
        dim, outer = self._place(axis)
        return outer // self.num([c.axis for c in self.dims[dim].cuts if c.outer < outer])

    def _place(self, axis: str) -> tuple[int, int]:
        place = self.place(axis)
        assert place is not None, f"{axis!r} cuts no dim of {self}"
        return place

    def is_used(self, axis: str) -> bool:
        return self.place(axis) is not None or any(p.axis == axis for p in self.partial)

    def positions(
        self, device: Mapping[str, int]
    ) -> tuple[np.ndarray[Any, np.dtype[np.int64]], ...]:
        """For each dim the value's indices that a device (its place on each axis) holds; -1 is padding."""
        found = []
        for dim in self.dims:
            at = np.arange(dim.size)
            own = np.ones(dim.size, bool)
            for (outer, n), cut in zip(_digits(self, dim.cuts), dim.cuts, strict=True):
                own &= at // (dim.size // (outer * n) or 1) % n == device[cut.axis]
            if dim.pad is not None:
                block, rest = np.divmod(at, dim.size // dim.pad.outer or 1)
                at = np.where(rest < dim.pad.true, block * dim.pad.true + rest, -1)
            found.append(at[own])
        return tuple(found)

    def block(
        self, value: np.ndarray[Any, Any], device: Mapping[str, int], padding: Any = 0
    ) -> Any:
        """What a device holds of the value: of a partial sum all is on the axis's first device."""
        own = self.positions(device)
        true = functools.reduce(np.logical_and.outer, (at >= 0 for at in own), np.array(True))
        held = np.where(true, value[np.ix_(*own)], np.asarray(padding, value.dtype))
        return held * np.asarray(
            all(device[p.axis] == 0 for p in self.partial if p.op == "sum"), value.dtype
        )

    # -- other layouts ------------------------------------------------------------------------------
    def _with(self, dims: Mapping[int, Dim]) -> Layout:
        return dataclasses.replace(
            self, dims=tuple(dims.get(d, dim) for d, dim in enumerate(self.dims))
        )

    def cut(self, dim: int, axis: str, outer: int | None = None) -> Layout:
        """Also sharded along a dim, by default within the shards that it has; padded as far as needed."""
        if self.num([axis]) == 1:
            return self
        old = self.dims[dim]
        if outer is None:
            outer = old.cuts[-1].outer * self.num([old.cuts[-1].axis]) if old.cuts else 1
        new = old.put(Cut(axis, outer))
        if not fits(new.size, digits := _digits(self, new.cuts)):
            pad = old.pad or Pad(new.cuts[0].outer, old.size // new.cuts[0].outer)
            assert old.size % pad.outer == 0, f"{self} has no {pad.outer} blocks along {dim}"
            step = math.lcm(pad.outer, *(at * n for at, n in digits)) // pad.outer
            new = Dim(pad.outer * step * -(-pad.true // step), new.cuts, pad)
        return self._with({dim: new})

    def without(self, axes: Collection[str]) -> Layout:
        """Replicated over the axes, and without padding that only they needed."""
        found = self._drop(axes)
        return found._unpadded(
            d for d, dim in enumerate(found.dims) if fits(dim.true, _digits(found, dim.cuts))
        )

    def replaced(self, axis: str, by: str) -> Layout:
        """With another axis of as many devices in the place of one."""
        assert self.num([axis]) == self.num([by]), f"{axis!r} and {by!r} differ in size"
        rename = {axis: by, by: axis}
        dims = (
            dim._replace(cuts=tuple(c._replace(axis=rename.get(c.axis, c.axis)) for c in dim.cuts))
            for dim in self.dims
        )
        partial = (p._replace(axis=rename.get(p.axis, p.axis)) for p in self.partial)
        return Layout(tuple(dims), self.mesh, tuple(partial))

    def summed(self, *partial: Partial) -> Layout:
        """Also a partial sum (max, min) over axes."""
        new = (p for p in partial if self.num([p.axis]) > 1)
        return dataclasses.replace(self, partial=(*self.partial, *new))

    def _drop(self, axes: Collection[str]) -> Layout:
        return self._with({d: dim.drop(axes) for d, dim in enumerate(self.dims)})

    def _settled(self, axes: Collection[str]) -> Layout:
        return dataclasses.replace(
            self, partial=tuple(p for p in self.partial if p.axis not in axes)
        )

    def _unpadded(self, dims: Iterable[int]) -> Layout:
        """Without padding along the dims, and without the cuts that need it."""
        new = {}
        for d in dims:
            cuts = [
                c
                for c in self.dims[d].cuts
                if self.dims[d].true % (c.outer * self.num([c.axis])) == 0
            ]
            new[d] = Dim(self.dims[d].true, tuple(cuts))
        return self._with(new)

    def transpose(self, order: Sequence[int]) -> Layout:
        return dataclasses.replace(self, dims=tuple(self.dims[d] for d in order))

    def broadcast(self, shape: Sequence[int], dims: Sequence[int]) -> Layout:
        """As `lax.broadcast_in_dim`: dim i becomes dim `dims[i]`; what is repeated must not be cut."""
        new = [Dim(n) for n in shape]
        for old, d in zip(self.dims, dims, strict=True):
            assert old.true == shape[d] or old == Dim(1), f"{self} is cut where it is repeated"
            new[d] = old if old.true == shape[d] else new[d]
        return dataclasses.replace(self, dims=tuple(new))

    def reshape(self, shape: Sequence[int]) -> Layout:
        """After a reshape: each cut where it is in the flat order. See `reshapable`."""
        found, axes, pads = self._reshaped(shape)
        assert not axes and not pads, f"{self} has no layout as {tuple(shape)}"
        return found

    def reshapable(self, shape: Sequence[int]) -> Layout:
        """This layout without the cuts and the padding that a reshape has no place for."""
        layout = self
        while True:
            _, axes, pads = layout._reshaped(shape)
            if not axes and not pads:
                return layout
            layout = layout.without(axes)._unpadded(pads)

    def _reshaped(self, shape: Sequence[int]) -> tuple[Layout, set[str], set[int]]:
        dims: list[Dim] = []
        axes: set[str] = set()
        pads: set[int] = set()
        for olds, news in _groups(self.shape, shape):
            group = [self.dims[d] for d in olds]
            padded = [d for d in olds if self.dims[d].pad is not None]
            new = _padding_moved(group, [shape[d] for d in news])
            if new is None:
                pads |= set(padded)
                continue
            for k, dim in enumerate(group):
                for cut in dim.cuts:
                    at, n = math.prod(d.size for d in group[:k]) * cut.outer, self.num([cut.axis])
                    found = (_at(new, e, at) for e in range(len(new)))
                    place = next(
                        (
                            (e, outer)
                            for e, outer in enumerate(found)
                            if outer and new[e].size and new[e].size % (outer * n) == 0
                        ),
                        None,
                    )
                    if place is None:
                        axes.add(cut.axis)
                    else:
                        new[place[0]] = new[place[0]].put(Cut(cut.axis, place[1]))
            dims += new
        return dataclasses.replace(self, dims=tuple(dims)), axes, pads

    def spec(self) -> PartitionSpec | None:
        """Of the padded value; None if no PartitionSpec says it (dealt out, or a partial sum)."""
        chains = [_runs(_digits(self, dim.cuts)) for dim in self.dims]
        if self.partial or any(len(c) > 1 or (c and c[0][0] != 1) for c in chains):
            return None
        names = [tuple(cut.axis for cut in dim.cuts) for dim in self.dims]
        return PartitionSpec(*(n[0] if len(n) == 1 else n or None for n in names))


def replicated(shape: Sequence[int], mesh: Mapping[str, int]) -> Layout:
    return Layout(tuple(Dim(n) for n in shape), tuple(mesh.items()))


def from_spec(shape: Sequence[int], mesh: Mapping[str, int], spec: PartitionSpec) -> Layout:
    """The layout of a `PartitionSpec`, padded along the dims that the axes do not divide."""
    layout = replicated(shape, mesh)
    for d, names in enumerate(spec):
        for axis in (names,) if isinstance(names, str) else names or ():
            layout = layout.cut(d, axis)
    return layout


def agree(a: Layout, b: Layout) -> bool:
    """Whether each device holds the same in both: no conversion is needed."""
    return _plain(a) == _plain(b)


def added(a: Layout, b: Layout) -> Layout | None:
    """The layout of `a + b` (of the larger, the smaller) computed in place; None if one must be converted.

    Two partial sums are added term by term, and contain linearly what either does.
    """
    if not agree(a, b):
        return None
    linear = {p.axis: p.linear for p in b.partial}
    partial = (p._replace(linear=p.linear | linear[p.axis]) for p in a.partial)
    return dataclasses.replace(a, partial=tuple(partial))


def _plain(layout: Layout) -> Layout:
    partial = tuple(sorted(p._replace(linear=frozenset()) for p in layout.partial))
    return layout if layout.partial == partial else dataclasses.replace(layout, partial=partial)


# -- a dim's arithmetic -------------------------------------------------------------------------------
def fits(size: int, digits: Iterable[tuple[int, int]]) -> bool:
    """Whether a dim can be `[outer, n, inner]` for each `(outer, n)`, in their order, at once."""
    at = 1
    for outer, n in digits:
        if outer % at:
            return False
        at = outer * n
    return size % at == 0


def _digits(layout: Layout, cuts: Iterable[Cut]) -> list[tuple[int, int]]:
    return [(cut.outer, layout.num([cut.axis])) for cut in cuts]


def _runs(digits: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """With neighbours as one."""
    runs: list[tuple[int, int]] = []
    for outer, n in digits:
        if runs and runs[-1][0] * runs[-1][1] == outer:
            runs[-1] = (runs[-1][0], runs[-1][1] * n)
        else:
            runs.append((outer, n))
    return runs


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[range, range]]:
    """The fewest dims of both shapes that hold the same elements, from the first to the last."""
    assert math.prod(old) == math.prod(new), f"{tuple(old)} and {tuple(new)} differ in size"
    i = j = 0
    while i < len(old) and j < len(new) and math.prod(old):
        a, b = i + 1, j + 1
        while math.prod(old[i:a]) != math.prod(new[j:b]):
            if math.prod(old[i:a]) < math.prod(new[j:b]):
                a += 1
            else:
                b += 1
        if a == len(old) or b == len(new) or {*old[a:], *new[b:]} == {1}:
            a, b = (len(old), len(new)) if {*old[a:], *new[b:]} <= {1} else (a, b)
        yield range(i, a), range(j, b)
        i, j = a, b
    if i < len(old) or j < len(new):
        yield range(i, len(old)), range(j, len(new))


def _at(dims: Sequence[Dim], dim: int, at: int) -> int:
    """How many blocks of a dim make `at` blocks of the whole in its flat order; 0 if none do."""
    before = math.prod(d.size for d in dims[:dim])
    return 0 if before == 0 or at % before else at // before


def _padding_moved(old: Sequence[Dim], shape: Sequence[int]) -> list[Dim] | None:
    """The dims of a reshape's result, not cut yet. None if no dim of it can have the padding.

    The operand is `[pad.outer blocks before, block, after]` in the flat order, and the value's elements come
    first in each block, so any dim that begins with as many blocks can have the padding.
    """
    new = [Dim(n) for n in shape]
    padded = [k for k, dim in enumerate(old) if dim.pad is not None]
    if not padded:
        return new
    (k, *more), found = padded, list[tuple[bool, int, Dim]]()
    pad = old[k].pad or Pad(1, 0)
    begin = math.prod(d.size for d in old[:k]) * pad.outer
    block = old[k].size // pad.outer * math.prod(d.size for d in old[k + 1 :])
    for e, n in enumerate(shape):
        outer, after = _at(new, e, begin), math.prod(shape[e + 1 :])
        if outer and after and n % outer == 0 and block % after == 0 and not more:
            dim = Dim(outer * block // after, (), Pad(outer, n // outer))
            found.append((n == outer, e, dim))  # Last: a dim whose blocks have one element.
    if not found:
        return None
    _, e, new[e] = min(found)
    return new


# -- conversions --------------------------------------------------------------------------------------
class Step(NamedTuple):
    """One collective, or one local operation, of a conversion.

    Attributes:
      kind: gather, scatter (a sum of which each device needs its shard), exchange (all-to-all: an axis cuts
        another place than before), reduce, permute; local are slice, mask (a replicated value as a partial
        sum: zeros but on the first device), pad and unpad.
      axes: over which axes, in their order in the dim.
      before, after: the layouts.
      received: bytes that reach each device, by axis. What comes from a device that differs in several axes
        counts for the outermost of them in the mesh.
    """

    kind: Kind
    axes: tuple[str, ...]
    before: Layout
    after: Layout
    received: tuple[tuple[str, int], ...]


def received(steps: Iterable[Step]) -> dict[str, int]:
    """Bytes that reach each device, by axis."""
    total: dict[str, int] = defaultdict(int)
    for axis, nbytes in itertools.chain.from_iterable(step.received for step in steps):
        total[axis] += nbytes
    return dict(total)


@functools.lru_cache(maxsize=2**14)
def conversion(
    source: Layout, target: Layout, itemsize: int, prices: tuple[tuple[str, float], ...] = ()
) -> tuple[Step, ...]:
    """The cheapest steps from layout to layout: least bytes, then least collectives, then least steps.

    `prices` weighs the bytes of an axis (seconds per byte of its links); 1 where it says nothing.
    """
    assert source.shape == target.shape and source.mesh == target.mesh, f"{source}, {target}"
    price, goal, count = dict(prices), _plain(target), itertools.count()
    Entry = tuple[tuple[float, int, int], int, Layout, tuple[Step, ...]]
    queue: list[Entry] = [((0.0, 0, 0), next(count), _plain(source), ())]
    seen: set[Layout] = set()
    while queue:
        cost, _, layout, steps = heapq.heappop(queue)
        if layout == goal:
            return steps
        if layout in seen:
            continue
        seen.add(layout)
        for kind, axes, after in _moves(layout, goal):
            if (after := _plain(after)) not in seen:
                step = Step(
                    kind, axes, layout, after, _received(kind, axes, layout, after, itemsize)
                )
                paid = cost[0] + sum(price.get(axis, 1.0) * n for axis, n in step.received)
                total = (paid, cost[1] + (kind not in LOCAL), cost[2] + 1)
                heapq.heappush(queue, (total, next(count), after, (*steps, step)))
    raise AssertionError(f"no way from {source} to {target}")


def _received(
    kind: Kind, axes: Sequence[str], before: Layout, after: Layout, itemsize: int
) -> tuple[tuple[str, int], ...]:
    """A device has its own part of what an operation makes, or reduces; the others' parts are received."""
    if kind in LOCAL:
        return ()
    if kind == "permute":
        outermost = next(axis for axis, _ in before.mesh if axis in axes)
        return ((outermost, math.prod(before.local_shape) * itemsize),)
    nbytes = math.prod((after if kind == "gather" else before).local_shape) * itemsize
    nbytes *= 2 if kind == "reduce" else 1  # Scattered, then gathered.
    found, inner, num = [], 1, before.num(axes)
    for axis, n in reversed(before.mesh):
        if axis in axes:
            found.append((axis, -(-nbytes * (n - 1) * inner // num)))
            inner *= n
    return tuple(reversed(found))


def _moves(now: Layout, goal: Layout) -> Iterator[tuple[Kind, tuple[str, ...], Layout]]:
    """What may come next: gathers of any shards, and all that makes a part as it is in the goal."""
    due = [p for p in now.partial if p not in goal.partial]
    for d, dim in enumerate(now.dims):
        for cuts in _neighbours(now, dim):
            axes = tuple(cut.axis for cut in cuts)
            yield "gather", axes, now._drop(axes)
            moved = _put(now._drop(axes), goal, axes)
            if moved is not None and _exchanges(now, moved, d, axes):
                yield "exchange", axes, moved
        new = (
            Dim(dim.true, dim.cuts)
            if dim.pad
            else dim._replace(size=goal.dims[d].size, pad=goal.dims[d].pad)
        )
        pad = dim.pad or new.pad
        if pad and dim.pad != new.pad and fits(pad.outer, _digits(now, dim.cuts)):
            yield ("unpad" if dim.pad else "pad"), (), now._with({d: new})
    for op in sorted({p.op for p in due}):
        axes = tuple(p.axis for p in due if p.op == op)
        yield from (("reduce", some, now._settled(some)) for some in _subsets(axes))
    for dim in goal.dims:
        for cuts in _neighbours(goal, dim):
            axes = tuple(cut.axis for cut in cuts)
            sums = all(Partial(axis) in due for axis in axes)
            if sums or not any(map(now.is_used, axes)):
                moved = _put(now._settled(axes), goal, axes)
                if moved is not None:
                    yield ("scatter" if sums else "slice"), axes, moved
    for p in goal.partial:
        if not now.is_used(p.axis):
            yield "mask", (p.axis,), now.summed(p)
    if (moving := _permuted(now, goal)) is not None:
        yield "permute", moving, goal


def _subsets(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    sizes = range(1, len(axes) + 1)
    return itertools.chain.from_iterable(itertools.combinations(axes, k) for k in sizes)


def _neighbours(layout: Layout, dim: Dim) -> Iterator[tuple[Cut, ...]]:
    """Cuts that follow each other immediately, so that one collective serves them all."""
    for i, j in itertools.combinations(range(len(dim.cuts) + 1), 2):
        if len(_runs(_digits(layout, dim.cuts[i:j]))) == 1:
            yield dim.cuts[i:j]


def _put(layout: Layout, goal: Layout, axes: Sequence[str]) -> Layout | None:
    """With axes where the goal has them: neighbours in one dim, in this order. None if that cannot be."""
    places = [goal.place(axis) for axis in axes]
    dim = places[0][0] if places[0] is not None else -1
    cuts = [Cut(axis, p[1]) for axis, p in zip(axes, places, strict=True) if p and p[0] == dim]
    if len(cuts) < len(axes) or layout.dims[dim][::2] != goal.dims[dim][::2]:
        return None
    digits = _digits(layout, cuts)
    new = layout.dims[dim].put(*cuts)
    fit = len(_runs(digits)) == 1 and fits(new.size, _digits(layout, new.cuts))
    return layout._with({dim: new}) if fit else None


def _exchanges(now: Layout, moved: Layout, dim: int, axes: Sequence[str]) -> bool:
    """Whether an all-to-all does it: within one dim, what is cut and what is joined must not overlap."""
    if moved.place(axes[0]) == now.place(axes[0]):
        return False
    cuts = {*now.dims[dim].cuts, *moved.dims[dim].cuts}
    return fits(moved.dims[dim].size, sorted(_digits(now, cuts)))


def _permuted(now: Layout, goal: Layout) -> tuple[str, ...] | None:
    """The axes over which devices pass on their blocks whole; None if other blocks are needed."""
    if now == goal or now.partial != goal.partial:
        return None
    for a, b in zip(now.dims, goal.dims, strict=True):
        if a[::2] != b[::2] or _runs(_digits(now, a.cuts)) != _runs(_digits(goal, b.cuts)):
            return None
    return tuple(axis for axis, _ in now.mesh if now.place(axis) != goal.place(axis))


def sources(step: Step) -> list[tuple[int, int]]:
    """Of a permute: `(from, to)` of each device, counted along the step's axes; a device keeps what it can."""
    holds, needs = defaultdict(list), defaultdict(list)
    sizes = dict(step.before.mesh)
    for i, at in enumerate(itertools.product(*(range(sizes[axis]) for axis in step.axes))):
        device = dict(zip(step.axes, at, strict=True))
        holds[_start(step.before, device)].append(i)
        needs[_start(step.after, device)].append(i)
    pairs = []
    for start, targets in needs.items():
        stay = set(targets) & set(holds[start])
        pairs += [(i, i) for i in stay]
        pairs += zip(
            (i for i in holds[start] if i not in stay),
            (i for i in targets if i not in stay),
            strict=True,
        )
    return sorted(pairs, key=lambda pair: pair[1])


def _start(layout: Layout, device: Mapping[str, int]) -> tuple[int, ...]:
    """Where in each dim a device's block begins, as far as these axes say."""
    return tuple(
        sum(
            device[cut.axis] * (dim.size // (cut.outer * layout.num([cut.axis])))
            for cut in dim.cuts
            if cut.axis in device
        )
        for dim in layout.dims
    )
