# SPDX-License-Identifier: Apache-2.0
"""`DeviceValue`: a value of the step on one device; and functions of two layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from jzero.ir._layout import AxisCut, Dim, Layout, fits
from jzero.tracing._types import Atom, Aval, Eqn, Var


class Hint(NamedTuple):
    """What the readers of a value want."""

    layout: Layout  # without cuts if they do not care
    # No reader sums over other dims first. One that does may have rows along these, and stays partial.
    is_direct: bool = True
    leaf: str = ""  # that the value becomes, element by element


@dataclasses.dataclass(eq=False, slots=True)
class DeviceValue:
    """A value of the step on one device."""

    aval: Aval  # its global type
    layout: Layout  # in which it was computed
    # Variables that hold it, by layout.
    atoms: dict[Layout, Atom] = dataclasses.field(default_factory=dict)
    rows: frozenset[str] = frozenset()  # axes over which it is batch-sharded
    # The axes in `rows` that an all-to-all has moved to another dim than the batch dim.
    exchanged: frozenset[str] = frozenset()
    # `make(frame, layout)` writes it in any layout at little cost. Without it, it must be converted.
    make: Callable[..., Atom] | None = None
    fill: Any = None  # the value of all elements, if that is a known constant
    origin: int | None = None  # the input that it is a view of, by index
    hint: Hint | None = None
    leaf: str = ""  # the leaf that it becomes
    # Where a partial sum of activations is reduce-scattered without a hint.
    scatter_to: Layout | None = None
    looked_up: bool = False  # A partial sum of look-ups: each device found those in its shard.
    is_activation: bool = False  # a partial sum of a forward pass, and so no gradient
    outer: DeviceValue | None = None  # the same value in the enclosing frame
    # An equation and the state that it reads: the state is gathered instead of the result.
    view: tuple[Eqn, DeviceValue] | None = None
    # The cast that made it and its operand, if that is a partial sum.
    cast: tuple[Eqn, DeviceValue] | None = None
    # Casts of state by dtype: equal casts share a gather.
    casts: dict[tuple[Any, bool], DeviceValue] = dataclasses.field(default_factory=dict)
    # The pass of `jax.grad` that each gather of state serves.
    scopes: dict[Layout, int] = dataclasses.field(default_factory=dict)
    # Axes over which it is device-varying, [Note: device-varying values].
    own: frozenset[str] = frozenset()
    # Writes its sum over all devices, if that is no all-reduce of `atoms`.
    sum: Callable[[Var], DeviceValue] | None = None

    @property
    def is_state(self) -> bool:
        """Whether its global value is the same on all devices, however it is sharded."""
        return not self.rows and not self.own and not self.layout.partial

    @property
    def is_zero(self) -> bool:
        return self.fill is not None and bool(self.fill == 0)

    @property
    def partial_axes(self) -> frozenset[str]:
        return frozenset(p.axis for p in self.layout.partial)


def place_of(layout: Layout, axis: str) -> tuple[int, int]:
    """The dim that an axis cuts, and the `outer` of its cut."""
    place = layout.place(axis)
    assert place is not None
    return place


def sized(dim: Dim, size: int) -> Dim:
    """The same cuts of a dim of another size, unless it is padded."""
    return dim if dim.pad is not None else dim._replace(size=size)


def next_outer(layout: Layout, dim: Dim) -> int | None:
    """The `outer` of a cut within the contiguous shards of a dim; None if the dim has no such shards."""
    at = 1
    for cut in dim.cuts:
        if cut.outer != at:
            return None
        at *= layout.num([cut.axis])
    return at


def put(layout: Layout, d: int, want: Dim, cut: AxisCut) -> Layout | None:
    """`layout`, with one cut of another layout's dim added; None if it does not fit."""
    own = layout.dims[d]
    if layout.place(cut.axis) is not None or own.true != want.true:
        return None
    if own[::2] != want[::2]:  # With another padding, the devices would hold other elements.
        if own.cuts:
            return None
        own = want._replace(cuts=())
    new = own.put(cut)
    return layout.with_dims({d: new}) if fits(new.size, layout.digits(new.cuts)) else None


def followed(
    layout: Layout, want: Layout, dims: Iterable[tuple[int | None, int | None]],
    axes: Collection[str] | None = None,
) -> Layout:  # fmt: skip
    """`layout`, with as many cuts (over `axes`) of another value's layout as fit beside its own.

    `dims` are pairs of a dim of it and the same dim of the other value.
    """
    for d, e in dims:
        if d is not None and e is not None:
            for cut in want.dims[e].cuts:
                if axes is None or cut.axis in axes:
                    layout = put(layout, d, want.dims[e], cut) or layout
    return layout


def joined(layout: Layout, want: Layout, axes: Collection[str] | None = None) -> Layout:
    """`followed` for two layouts of one value."""
    return followed(layout, want, ((d, d) for d in range(len(want.dims))), axes)


def common(a: Layout, b: Layout) -> Layout:
    """The cuts and partial sums that both layouts have."""
    dims = []
    for x, y in zip(a.dims, b.dims, strict=True):
        cuts = tuple(cut for cut in x.cuts if cut in y.cuts) if x[::2] == y[::2] else ()
        pad = x.pad is not None and cuts
        dims.append(x._replace(cuts=cuts) if pad or x.pad is None and x == y else Dim(x.true, cuts))
    found = Layout(tuple(dims), a.mesh)
    both = tuple(p for p in a.partial if p in b.partial)
    return dataclasses.replace(found, partial=both)
