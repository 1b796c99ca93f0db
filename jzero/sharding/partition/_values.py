# SPDX-License-Identifier: Apache-2.0
"""`DeviceValue`: a value of the step on one device; and what is made of two layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jzero.ir._layout import AxisCut, Dim, Layout, fits
from jzero.tracing._types import Atom, Aval, Eqn, Var


class Hint(NamedTuple):
    """What follows a value.

    Attributes:
      layout: that it wants; without cuts if it asks for none.
      is_firm: whether all of what wants it does so along dims that the value has: a sum over others waits for
        whoever reads it, which may have rows along these.
      leaf: the leaf that is made of the value, element by element.
    """

    layout: Layout
    is_firm: bool = True
    leaf: str = ""


@dataclasses.dataclass(eq=False, slots=True)
class DeviceValue:
    """A value on one device.

    Attributes:
      aval: its type, whole.
      layout: its own layout: that in which it was made.
      atoms: what there is of it, by layout.
      rows: the axes over which it differs because rows of the batch do.
      displaced: of `rows`, those that are no longer along rows, but along another dim, since an exchange.
      firm: the axes over which it stays sharded though it is state, as the user's specs say.
      make: `make(frame, layout)` writes it in any layout at little cost; else it must be converted.
      fill: all its elements, if they are one that is known.
      origin: the input of which it is a view, by index.
      hint: in which layout what follows wants it.
      leaf: the name of the leaf that what follows makes of it.
      spread: where a sum of activations is scattered that nobody has asked of: beside the dim that it summed.
      looked_up: whether a partial sum is what devices have looked up in their rows, and no sum of the step's.
      is_activation: whether a partial sum is one of a forward pass, and so no gradient.
      outer: the same value in the frame around.
      view: an equation and the state that it reads, which is gathered in its place.
      cast: the cast that made it, and of what, if that is a partial sum.
      casts: of state, what it is in other dtypes: equal casts share a gather.
      scopes: of gathers of state that serve one pass only, which.
      own: the axes along which each device has a value of its own, [Note: values of a device's own].
      sum: writes its sum over all devices, where that is not made of what each has of it.
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
        """Whether it is the same on all devices but for how it is stored."""
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
    """Where another axis would cut what each device has in contiguous shards; None if it has no such."""
    at = 1
    for cut in dim.cuts:
        if cut.outer != at:
            return None
        at *= layout.num([cut.axis])
    return at


def put(layout: Layout, d: int, want: Dim, cut: AxisCut) -> Layout | None:
    """`layout`, also cut as a dim of another one is; None if it cannot be."""
    own = layout.dims[d]
    if layout.place(cut.axis) is not None or own.true != want.true:
        return None
    if own[::2] != want[::2]:  # Another padding would give the devices other parts.
        if own.cuts:
            return None
        own = want._replace(cuts=())
    new = own.put(cut)
    return layout.with_dims({d: new}) if fits(new.size, layout.digits(new.cuts)) else None


def joined(layout: Layout, want: Layout, axes: frozenset[str] | None = None) -> Layout:
    """`layout`, and as many of the cuts of `want` (over some axes) as fit beside its own."""
    for d, dim in enumerate(want.dims):
        for cut in dim.cuts:
            if axes is None or cut.axis in axes:
                layout = put(layout, d, dim, cut) or layout
    return layout


def common(a: Layout, b: Layout) -> Layout:
    """The cuts that both have; no partial sums but those that both are."""
    dims = []
    for x, y in zip(a.dims, b.dims, strict=True):
        cuts = tuple(cut for cut in x.cuts if cut in y.cuts) if x[::2] == y[::2] else ()
        pad = x.pad is not None and cuts
        dims.append(x._replace(cuts=cuts) if pad or x.pad is None and x == y else Dim(x.true, cuts))
    found = Layout(tuple(dims), a.mesh)
    both = tuple(p for p in a.partial if p in b.partial)
    return dataclasses.replace(found, partial=both)
