"""What a layout means: the elements that each device holds, as an oracle for layouts and conversions."""

import functools
from collections import Counter

import numpy as np

from jzero.ir._layout import Layout


def positions(layout, device):
    """For each dim the value's indices that a device (its index on each axis) holds; -1 is padding."""
    found = []
    for dim in layout.dims:
        at, own = np.arange(dim.size), np.full(dim.size, True)
        for axis, outer in dim.cuts:
            inner = dim.size // (outer * layout.num([axis])) or 1
            own &= at // inner % layout.num([axis]) == device[axis]
        if dim.pad is not None:
            block, rest = np.divmod(at, dim.size // dim.pad.outer or 1)
            at = np.where(rest < dim.pad.true, block * dim.pad.true + rest, -1)
        found.append(at[own])
    return found


def held_by(layout, value, device, padding=0):
    """What a device holds of the value; of a partial sum the axis's first device holds all."""
    own = positions(layout, device)
    true = functools.reduce(np.logical_and.outer, (at >= 0 for at in own), np.array(True))
    held = np.where(true, value[np.ix_(*own)], np.asarray(padding, value.dtype))
    first = all(device[p.axis] == 0 for p in layout.partial if p.op == "sum")
    return held if first else np.zeros_like(held)


def swapped(layout, axis, other):
    """With two axes of as many devices in each other's place; the other one may have none."""
    new = {axis: other, other: axis}
    cuts = [[c._replace(axis=new.get(c.axis, c.axis)) for c in d.cuts] for d in layout.dims]
    dims = tuple(d._replace(cuts=tuple(c)) for d, c in zip(layout.dims, cuts, strict=True))
    partial = tuple(p._replace(axis=new.get(p.axis, p.axis)) for p in layout.partial)
    return Layout(dims, layout.mesh, partial)


def received(steps):
    """Bytes that reach each device in the steps of a conversion, by axis."""
    total = Counter[str]()
    for axis, nbytes in (each for step in steps for each in step.received):
        total[axis] += nbytes
    return dict(total)
