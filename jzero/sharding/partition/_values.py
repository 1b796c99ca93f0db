# SPDX-License-Identifier: Apache-2.0
"""`DeviceValue`: a value of the step on one device; and functions of two layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from jzero.ir._layout import AxisCut, Dim, Layout, fits
from jzero.tracing._types import Atom, Aval, Eqn, Var


class Hint(NamedTuple):
    """What the readers of a value want.

    Attributes:
      layout: in which they want it; without cuts if they do not care.
      is_firm: whether all of them want it along dims that the value has. Readers that sum over other dims may
        have rows along these, and their operand stays partial.
      leaf: the leaf that the value becomes, element by element.
    """

    layout: Layout
    is_firm: bool = True
    leaf: str = ""


@dataclasses.dataclass(eq=False, slots=True)
class DeviceValue:
    """A value on one device.

    Attributes:
      aval: its global type.
      layout: the layout in which it was computed.
      atoms: variables that hold it, by layout.
      rows: the axes over which it is batch-sharded.
      displaced: of `rows`, those along another dim than the batch dim, since an all-to-all.
      firm: the axes over which it stays sharded although it is state, by the user's specs.
      make: `make(frame, layout)` writes it in any layout at little cost; without it, it must be converted.
      fill: the value of all its elements, if that is a known constant.
      origin: the input of which it is a view, by index.
      hint: in which layout its readers want it.
      leaf: the name of the leaf that it becomes.
      spread: where a partial sum of activations is scattered without a hint: along the dim beside the summed
        one.
      looked_up: whether a partial sum is a look-up of which each device has its shard's part.
      is_activation: whether a partial sum belongs to a forward pass, and so is no gradient.
      outer: the same value in the enclosing frame.
      view: an equation and the state that it reads, which is gathered instead of the result.
      cast: the cast that made it and its operand, if that is a partial sum.
      casts: of state, its casts by dtype: equal casts share a gather.
      scopes: of a gather of state, the pass that it serves.
      own: the axes over which it is device-varying, [Note: device-varying values].
      sum: writes its sum over all devices, if that is not an all-reduce of `atoms`.
    """

    aval: Aval
    layout: Layout
    atoms: dict[Layout, Atom] = dataclasses.field(default_factory=dict)
    rows: frozenset[str] = frozenset()
    firm: frozenset[str] = frozenset()
    displaced: frozenset[str] = frozenset()
    make: Callable[..., Atom] | None = None
    fill: Any = None
    origin: int | None = None
    hint: Hint | None = None
    leaf: str = ""
    spread: Layout | None = None
    looked_up: bool = False
    is_activation: bool = False
    outer: DeviceValue | None = None
    view: tuple[Eqn, DeviceValue] | None = None
    cast: tuple[Eqn, DeviceValue] | None = None
    casts: dict[tuple[Any, bool], DeviceValue] = dataclasses.field(default_factory=dict)
    scopes: dict[Layout, int] = dataclasses.field(default_factory=dict)
    own: frozenset[str] = frozenset()
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
        """The axes over which it is a partial sum."""
        return frozenset(p.axis for p in self.layout.partial)


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
    """`layout`, with a cut of another layout's dim added; None if it does not fit."""
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
    """`layout`, and as many cuts (over some axes) of another value's layout as fit beside its own.

    `dims` are pairs of a dim of it and one of the other value, as factors make them the same.
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
