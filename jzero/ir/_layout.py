# SPDX-License-Identifier: Apache-2.0
"""Layouts: how a value is laid out over the axes of a mesh, and the cost of converting one to another.

An axis of `n` devices cuts a dim as `[outer, n, inner]`: its device i holds the i-th `inner` elements of each
of `outer` blocks. One block gives contiguous shards, a block per time step a batch merged with time, a block
per device of other axes nested shards.

In DTensor's words: an axis with an `AxisCut` is `Shard(dim)`, with a `Partial` it is `Partial(op)`, with
neither `Replicate`. `[16@data, 10+6@data, 40@4,data, 8] sum(model)` is how a layout prints: a dim of 16
sharded over `data`; one of 10 padded to 16; one that is `[4, data, inner]`; a replicated one; to be summed
over `model`.

[Note: padding] A padded dim is `pad.outer` blocks; each begins with `pad.true` of the value's elements. The
rest is anything, even NaN: whoever reduces the dim masks it. Dims dealt out or merged have several blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jax.sharding import PartitionSpec

from jzero.targets._links import AxisTimes

Digits = list[tuple[int, int]]  # `(outer, n)` of cuts: the dim's index in mixed radix.
LOCAL = frozenset({"slice", "mask", "pad", "unpad"})  # Kinds of steps that move nothing.


class AxisCut(NamedTuple):
    axis: str
    outer: int


class Pad(NamedTuple):
    outer: int
    true: int


class Partial(NamedTuple):
    """The value is the sum (max, min) over the devices of `axis` of what they hold."""

    axis: str
    op: str = "sum"


class Dim(NamedTuple):
    """A dim of `size` elements, padding included; its cuts are ordered by `outer`."""

    size: int
    cuts: tuple[AxisCut, ...] = ()
    pad: Pad | None = None

    @property
    def true(self) -> int:
        return self.size if self.pad is None else self.pad.outer * self.pad.true

    def put(self, *cuts: AxisCut) -> Dim:
        return self._replace(cuts=tuple(sorted((*self.cuts, *cuts), key=lambda cut: cut.outer)))


@dataclasses.dataclass(frozen=True)
class Layout:
    """The dims of a value with their cuts and padding, and its partial sums.

    `mesh` lists `(axis, devices)` from the outermost axis to the innermost. An axis of one device never cuts
    a dim and has no partial sum; any other cuts one dim, or has a partial sum, or neither.
    """

    dims: tuple[Dim, ...]
    mesh: tuple[tuple[str, int], ...]
    partial: tuple[Partial, ...] = ()

    def __post_init__(self) -> None:
        cut = [dim for dim in self.dims if dim.cuts]
        if not cut and not self.partial:
            return
        axes = [c.axis for dim in cut for c in dim.cuts] + [p.axis for p in self.partial]
        assert len(axes) == len(set(axes)), f"an axis is used twice: {self}"
        assert all(fits(d.size, self.digits(d.cuts)) for d in cut), f"cuts overlap: {self}"

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:  # A table of layouts asks for it again and again.
        return hash((self.dims, self.mesh, self.partial))

    def __str__(self) -> str:
        sums = [f" {p.op}({p.axis})" for p in self.partial]
        return f"[{', '.join(map(self._dim_text, self.dims))}]{''.join(sums)}"

    def _dim_text(self, dim: Dim) -> str:
        text, at, parts = str(dim.size), 1, list[str]()
        if dim.pad is not None:
            text = f"{dim.pad.true}+{dim.size // dim.pad.outer - dim.pad.true}"
            text = text if dim.pad.outer == 1 else f"{dim.pad.outer}*({text})"
        for cut in dim.cuts:
            parts += [str(cut.outer // at)] * (cut.outer != at) + [cut.axis]
            at = cut.outer * self.num([cut.axis])
        return f"{text}@{','.join(parts)}" if parts else text

    # -- what devices hold ----------------------------------------------------------------------------
    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The value's shape, without padding."""
        return tuple([dim.true for dim in self.dims])

    @functools.cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what one device holds, with padding."""
        return tuple([self.local_outer(d, dim.size) for d, dim in enumerate(self.dims)])

    @functools.cached_property
    def axes(self) -> frozenset[str]:
        return frozenset([cut.axis for dim in self.dims for cut in dim.cuts])

    @functools.cached_property
    def is_replicated(self) -> bool:
        return not self.partial and not any(dim.cuts or dim.pad for dim in self.dims)

    def num(self, axes: Collection[str]) -> int:
        return math.prod([n for axis, n in self.mesh if axis in axes])

    def place(self, axis: str) -> tuple[int, int] | None:
        """`(dim, outer)` of the axis's cut, if it has one."""
        for d, dim in enumerate(self.dims):
            for cut in dim.cuts:
                if cut.axis == axis:
                    return d, cut.outer
        return None

    def local_outer(self, dim: int, outer: int) -> int:
        """How many of a dim's `outer` blocks are on one device."""
        cuts = self.dims[dim].cuts
        return outer // self.num([cut.axis for cut in cuts if cut.outer < outer]) if cuts else outer

    def digits(self, cuts: Iterable[AxisCut]) -> Digits:
        return [(cut.outer, self.num([cut.axis])) for cut in cuts]

    # -- other layouts of the same value --------------------------------------------------------------
    def cut(self, dim: int, axis: str, outer: int | None = None) -> Layout:
        """This layout, sharded along a dim, too: by default within its shards, and padded if necessary."""
        old = self.dims[dim]
        if self.num([axis]) == 1:
            return self
        if outer is None:
            outer = old.cuts[-1].outer * self.num([old.cuts[-1].axis]) if old.cuts else 1
        new = old.put(AxisCut(axis, outer))
        if not fits(new.size, digits := self.digits(new.cuts)):
            pad = old.pad or Pad(new.cuts[0].outer, old.size // new.cuts[0].outer)
            assert old.true == pad.outer * pad.true, f"{self} has no {pad.outer} blocks along {dim}"
            step = math.lcm(pad.outer, *(at * n for at, n in digits)) // pad.outer
            new = Dim(pad.outer * step * -(-pad.true // step), new.cuts, pad)
        return self.with_dims({dim: new})

    def shard(self, dim: int, axes: Iterable[str]) -> Layout:
        return functools.reduce(lambda layout, axis: layout.cut(dim, axis), axes, self)

    def without(self, axes: Collection[str]) -> Layout:
        """This layout without the axes' cuts, and without padding that only they needed."""
        found = self._drop(axes)
        unpadded = [fits(dim.true, found.digits(dim.cuts)) for dim in found.dims]
        return found._unpadded(itertools.compress(itertools.count(), unpadded))

    def without_cuts(self) -> Layout:
        return self._drop([axis for axis, _ in self.mesh])

    def with_partial(self, *partial: Partial) -> Layout:
        new = tuple(p for p in partial if self.num([p.axis]) > 1)
        return dataclasses.replace(self, partial=(*self.partial, *new))

    def reduced(self, axes: Collection[str]) -> Layout:
        kept = tuple(p for p in self.partial if p.axis not in axes)
        return dataclasses.replace(self, partial=kept)

    def with_dims(self, new: Mapping[int, Dim]) -> Layout:
        dims = tuple(new.get(d, dim) for d, dim in enumerate(self.dims))
        return dataclasses.replace(self, dims=dims)

    def _drop(self, axes: Collection[str]) -> Layout:
        cuts = [tuple(cut for cut in dim.cuts if cut.axis not in axes) for dim in self.dims]
        return self.with_dims({d: self.dims[d]._replace(cuts=c) for d, c in enumerate(cuts)})

    def _unpadded(self, dims: Iterable[int]) -> Layout:
        """This layout without the padding of `dims`, and without cuts that need it."""
        new = {}
        for d in dims:
            size, cuts = self.dims[d].true, self.dims[d].cuts
            new[d] = Dim(size, tuple(c for c in cuts if fits(size, self.digits([c]))))
        return self.with_dims(new)

    # -- layouts of other values ----------------------------------------------------------------------
    def reshape(self, shape: Sequence[int]) -> Layout:
        """The layout after a reshape of every device's block, which must be possible: see `reshapable`."""
        found, lost = self._reshaped(shape)
        assert not any(lost), f"{self} has no layout as {tuple(shape)}"
        return found

    def reshapable(self, shape: Sequence[int]) -> Layout:
        """This layout without the cuts and the padding that a reshape cannot keep."""
        layout = self
        while any(lost := layout._reshaped(shape)[1]):
            layout = layout.without(lost[0])._unpadded(lost[1])
        return layout

    def _reshaped(self, shape: Sequence[int]) -> tuple[Layout, tuple[set[str], set[int]]]:
        """A cut keeps its position in the flat order. Also returns the axes and padded dims that are lost."""
        dims, axes, pads = list[Dim](), set[str](), set[int]()
        for olds, news in dim_groups(self.shape, shape):
            group = [self.dims[d] for d in olds]
            new = _padding_moved(group, [shape[d] for d in news])
            if new is None:
                pads |= {d for d in olds if self.dims[d].pad is not None}
                continue
            for k, cut in ((k, cut) for k, dim in enumerate(group) for cut in dim.cuts):
                at, n = math.prod(d.size for d in group[:k]) * cut.outer, self.num([cut.axis])
                outers = [_blocks(new, e, at) for e in range(len(new))]
                fit = (e for e, at in enumerate(outers) if at and new[e].size % (at * n) == 0)
                if (e := next(fit, None)) is None:
                    axes.add(cut.axis)
                else:
                    new[e] = new[e].put(AxisCut(cut.axis, outers[e]))
            dims += new
        return dataclasses.replace(self, dims=tuple(dims)), (axes, pads)

    def spec(self) -> PartitionSpec | None:
        """The PartitionSpec of the padded value; None if it is partial, or cut in several blocks."""
        if self.partial or any(_runs([(1, 1), *self.digits(d.cuts)])[1:] for d in self.dims):
            return None
        names = [tuple(cut.axis for cut in dim.cuts) for dim in self.dims]
        return PartitionSpec(*(n[0] if len(n) == 1 else n or None for n in names))


def replicated(shape: Sequence[int], mesh: Mapping[str, int]) -> Layout:
    return _replicated(tuple(shape), tuple(mesh.items()))


@functools.lru_cache(maxsize=2**12)
def _replicated(shape: tuple[int, ...], mesh: tuple[tuple[str, int], ...]) -> Layout:
    return Layout(tuple(map(Dim, shape)), mesh)


def from_spec(shape: Sequence[int], mesh: Mapping[str, int], spec: PartitionSpec) -> Layout:
    """The layout of a `PartitionSpec`, padded along the dims that the axes do not divide."""
    layout = replicated(shape, mesh)
    for d, names in enumerate(spec):
        layout = layout.shard(d, (names,) if isinstance(names, str) else names or ())
    return layout


def _plain(layout: Layout) -> Layout:
    partial = tuple(sorted(layout.partial))
    return layout if layout.partial == partial else dataclasses.replace(layout, partial=partial)


# -- index arithmetic ---------------------------------------------------------------------------------
def fits(size: int, digits: Digits) -> bool:
    """Whether a dim can be `[outer, n, inner]` for all `(outer, n)` at once, from the outermost in."""
    ends = [1, *(outer * n for outer, n in digits)]
    starts = [*(outer for outer, _ in digits), size]
    return all(start % end == 0 for start, end in zip(starts, ends, strict=True))


def _runs(digits: Digits) -> Digits:
    """Merges adjacent digits."""
    runs: Digits = []
    for outer, n in digits:
        if runs and math.prod(runs[-1]) == outer:
            outer, n = runs[-1][0], runs.pop()[1] * n
        runs.append((outer, n))
    return runs


def dim_groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[range, range]]:
    """The smallest groups of dims of both shapes that hold the same elements, in order."""
    assert math.prod(old) == math.prod(new), f"{tuple(old)} and {tuple(new)} differ in size"
    i, j = (0, 0) if math.prod(old) else (len(old), len(new))
    if not math.prod(old):
        yield range(i), range(j)
    while i < len(old) or j < len(new):
        a, b = i + 1, j + 1
        while (x := math.prod(old[i:a])) != (y := math.prod(new[j:b])):
            a, b = a + (x < y), b + (x > y)
        if a >= len(old) or b >= len(new):  # Only dims of 1 can be left.
            a, b = len(old), len(new)
        yield range(i, a), range(j, b)
        i, j = a, b


def _blocks(dims: Sequence[Dim], dim: int, at: int) -> int:
    """The `outer` along `dim` of a cut whose `outer` in the flat order is `at`; 0 if there is none."""
    before = math.prod(d.size for d in dims[:dim])
    return 0 if before == 0 or dims[dim].size == 0 or at % before else at // before


def _padding_moved(old: Sequence[Dim], shape: Sequence[int]) -> list[Dim] | None:
    """The dims after a reshape, not cut yet; None if none of them can have the padding.

    In the flat order the operand consists of blocks that begin with the value's elements. A new dim can have
    the padding if as many blocks begin there, each of a whole number of its elements.
    """
    new = [Dim(n) for n in shape]
    padded = [(k, dim.pad) for k, dim in enumerate(old) if dim.pad is not None]
    if len(padded) != 1:
        return None if padded else new
    ((k, pad),) = padded
    begin = math.prod(dim.size for dim in old[:k]) * pad.outer
    block = math.prod(dim.size for dim in old[k:]) // pad.outer
    found = []
    for e, n in enumerate(shape):
        outer, after = _blocks(new, e, begin), math.prod(shape[e + 1 :])
        if outer and after and n % outer == 0 and block % after == 0:
            found.append((n == outer, e, Dim(outer * block // after, (), Pad(outer, n // outer))))
    if not found:
        return None
    _, e, new[e] = min(found)  # Blocks of one element only where there is no other.
    return new


# -- conversions --------------------------------------------------------------------------------------
class LayoutStep(NamedTuple):
    """One collective or local operation of a conversion.

    `gather`, `scatter` (a partial sum to shards), `exchange` (all-to-all: a cut moves to another place),
    `reduce` and `permute` (whole blocks move) communicate. `slice`, `mask` (a replicated value to a partial
    sum: the first device keeps it), `pad` and `unpad` are local. `axes` are in their order in the dim.
    `received` counts bytes per device by axis; what comes from a device that differs in several axes counts
    for the outermost of them.
    """

    kind: str
    axes: tuple[str, ...]
    before: Layout
    after: Layout
    received: tuple[tuple[str, int], ...]


Prices = tuple[tuple[str, AxisTimes], ...]
_BYTES = AxisTimes(0, 1, 1)


def price_of(steps: Iterable[LayoutStep], prices: Prices) -> int:
    moved = ((step.kind, axis, n) for step in steps for axis, n in step.received)
    return sum(times_along(prices, axis).of(kind, n) for kind, axis, n in moved)


def times_along(prices: Prices, axis: str) -> AxisTimes:
    """The times of collectives along an axis; by default, their bytes."""
    return dict(prices).get(axis, _BYTES)


class NoWayError(LookupError):
    """No conversion between two layouts moves nothing along a given axis."""


@functools.lru_cache(maxsize=2**14)
def conversion(
    source: Layout, target: Layout, itemsize: int, prices: Prices = (), still: str = "",
) -> tuple[LayoutStep, ...]:  # fmt: skip
    """The cheapest steps from `source` to `target` (Dijkstra), without communication along `still`.

    Cheapest is the least `price_of`; then the fewest collectives whose axes are not in the mesh's order (they
    would send everything over the outer axes, whose links are slower), the fewest collectives, bytes over
    outer axes, and steps; then the first of `_moves`. An axis moves only to its place in the target, or
    becomes replicated; a partial sum may be scattered anywhere.

    Raises:
      NoWayError: every conversion communicates along `still`.
    """
    assert (source.shape, source.mesh) == (target.shape, target.mesh), f"{source} to {target}"
    goal, order = _plain(target), itertools.count()
    queue = [((0, 0, 0, 0, 0), next(order), _plain(source), tuple[LayoutStep, ...]())]
    seen: set[Layout] = set()
    # A value that is gathered and reduced can be cut to any goal, so only `still` can empty the queue.
    while queue and (found := heapq.heappop(queue))[2] != goal:
        (paid, unordered, collectives, outer, _), _, now, steps = found
        if now in seen:
            continue
        seen.add(now)
        for kind, axes, after in _moves(now, goal):
            if still in axes and kind not in LOCAL:
                continue
            step = LayoutStep(
                kind, axes, now, _plain(after), _received(kind, axes, now, after, itemsize)
            )
            cost = (
                paid + price_of([step], prices), unordered + _is_out_of_order(step),
                collectives + (kind not in LOCAL), outer + _over_outer_axes(step), len(steps) + 1,
            )  # fmt: skip
            heapq.heappush(queue, (cost, next(order), step.after, (*steps, step)))
    if found[2] != goal:
        raise NoWayError(f"nothing makes {target} of {source} and moves nothing along {still!r}")
    return found[3]


def _received(
    kind: str, axes: Sequence[str], before: Layout, after: Layout, itemsize: int
) -> tuple[tuple[str, int], ...]:
    """Bytes by axis; a device receives an equal part from each other device."""
    nbytes = math.prod((after if kind == "gather" else before).local_shape) * itemsize
    moved = [(axis, n) for axis, n in before.mesh if axis in axes and kind not in LOCAL]
    if kind == "permute":
        return ((moved[0][0], nbytes),)
    nbytes *= 2 if kind == "reduce" else 1  # As a scatter and a gather.
    inner = [math.prod(n for _, n in moved[i:]) for i in range(1, len(moved) + 1)]
    parts = zip(moved, inner, strict=True)
    return tuple((axis, -(-nbytes * (n - 1) * k // before.num(axes))) for (axis, n), k in parts)


def _is_out_of_order(step: LayoutStep) -> bool:
    places = [axis for axis, _ in step.before.mesh if axis in step.axes]
    return step.kind in ("gather", "scatter", "exchange") and places != [*step.axes]


def _over_outer_axes(step: LayoutStep) -> int:
    """Received bytes, weighted by the number of axes inside the one that they cross."""
    inner = {axis: i for i, (axis, _) in enumerate(reversed(step.before.mesh))}
    return sum(inner[axis] * nbytes for axis, nbytes in step.received)


def _moves(now: Layout, goal: Layout) -> Iterator[tuple[str, tuple[str, ...], Layout]]:
    """Candidate next steps `(kind, axes, layout)`: any gather, and every step that brings the goal closer."""
    for d, (dim, wanted) in enumerate(zip(now.dims, goal.dims, strict=True)):
        for axes in _neighbours(now, dim):
            yield "gather", axes, (gathered := now._drop(axes))
            moved = _put(gathered, goal, axes)
            if moved is not None and _exchanges(now, moved, d, axes):
                yield "exchange", axes, moved
        pad = dim.pad or wanted.pad
        if pad and dim[::2] != wanted[::2] and fits(pad.outer, now.digits(dim.cuts)):
            new = Dim(dim.true, dim.cuts) if dim.pad else wanted._replace(cuts=dim.cuts)
            yield ("unpad" if dim.pad else "pad"), (), now.with_dims({d: new})
    left = [p for p in now.partial if p not in goal.partial]
    for op in {p.op: None for p in left}:
        axes = tuple(p.axis for p in left if p.op == op)
        some = (itertools.combinations(axes, k + 1) for k in range(len(axes)))
        yield from (("reduce", s, now.reduced(s)) for s in itertools.chain.from_iterable(some))
        for d, s in itertools.product(range(len(now.dims)), axes if op == "sum" else ()):
            new = now.dims[d].put(
                AxisCut(s, math.prod(([(1, 1), *now.digits(now.dims[d].cuts)])[-1]))
            )
            if fits(new.size, now.digits(new.cuts)):  # Less to move later.
                yield "scatter", (s,), now.reduced([s]).with_dims({d: new})
    used = {cut.axis for dim in now.dims for cut in dim.cuts} | {p.axis for p in now.partial}
    for dim in goal.dims:
        for axes in _neighbours(goal, dim):
            sums = all(Partial(axis) in left for axis in axes)
            moved = _put(now.reduced(axes), goal, axes) if sums or not used & {*axes} else None
            if moved is not None:
                yield ("scatter" if sums else "slice"), axes, moved
    for p in goal.partial:
        if p.axis not in used:
            yield "mask", (p.axis,), now.with_partial(p)
    if now != goal and now.partial == goal.partial and _blocks_of(now) == _blocks_of(goal):
        moving = tuple(axis for axis, _ in now.mesh if now.place(axis) != goal.place(axis))
        yield "permute", moving, goal


def _neighbours(layout: Layout, dim: Dim) -> Iterator[tuple[str, ...]]:
    """Runs of adjacent axes of a dim, for which one collective suffices."""
    for i, j in itertools.combinations(range(len(dim.cuts) + 1), 2):
        if len(_runs(layout.digits(dim.cuts[i:j]))) == 1:
            yield tuple(cut.axis for cut in dim.cuts[i:j])


def _put(layout: Layout, goal: Layout, axes: Sequence[str]) -> Layout | None:
    """`layout` with the goal's cuts of `axes`; None if they are not adjacent there, or do not fit yet."""
    place = goal.place(axes[0])
    if place is None or tuple(axes) not in _neighbours(goal, goal.dims[place[0]]):
        return None
    dim, wanted = layout.dims[place[0]], goal.dims[place[0]]
    new = dim.put(*(cut for cut in wanted.cuts if cut.axis in axes))
    fit = dim[::2] == wanted[::2] and fits(new.size, layout.digits(new.cuts))
    return layout.with_dims({place[0]: new}) if fit else None


def _exchanges(now: Layout, moved: Layout, dim: int, axes: Sequence[str]) -> bool:
    """Whether an all-to-all makes `moved`: within one dim, the old and new cuts must not overlap."""
    digits = sorted(now.digits({*now.dims[dim].cuts, *moved.dims[dim].cuts}))
    return moved.place(axes[0]) != now.place(axes[0]) and fits(moved.dims[dim].size, digits)


def _blocks_of(layout: Layout) -> list[tuple[int, Pad | None, Digits]]:
    """Equal for layouts that divide a value into the same blocks, on whichever devices."""
    return [(dim.size, dim.pad, _runs(layout.digits(dim.cuts))) for dim in layout.dims]


def permutation(step: LayoutStep) -> list[tuple[int, int]]:
    """The `(source, destination)` pairs of a permute, in linear device indices along its axes."""
    holders, users = defaultdict(list), defaultdict(list)
    sizes = [step.before.num([axis]) for axis in step.axes]
    for i, at in enumerate(itertools.product(*map(range, sizes))):
        device = dict(zip(step.axes, at, strict=True))
        holders[_start(step.before, device)].append(i)
        users[_start(step.after, device)].append(i)
    return [p for start in users for p in zip(holders[start], users[start], strict=True)]


def _start(layout: Layout, device: Mapping[str, int]) -> tuple[int, ...]:
    """Where a device's block begins in each dim, along the axes that `device` has."""
    return tuple(
        sum(
            device[axis] * (dim.size // (outer * layout.num([axis])))
            for axis, outer in dim.cuts
            if axis in device
        )
        for dim in layout.dims
    )
