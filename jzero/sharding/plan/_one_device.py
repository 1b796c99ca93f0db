# SPDX-License-Identifier: Apache-2.0
"""A whole-batch step as one device runs it that has its rows of the batch, and the state whole.

It is what the partitioner writes for a state that is replicated: rows and their sums, and nothing of ZeRO.
The interpreter takes it, and shards the state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jzero.ir._layout import Layout, replicated
from jzero.sharding.partition._movement import Movement, is_of_rows, movement_of
from jzero.sharding.partition._partition import DeviceInput, DeviceProgram, partition
from jzero.sharding.partition._values import Hint
from jzero.sharding.passes._before_loops import before_loops
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Eqn, Jaxpr


class OneDevice(NamedTuple):
    """The step of one device.

    Attributes:
      jaxpr: its inputs and outputs are those of the whole step.
      consts: values of its constants.
      outputs: for each output the dim of its rows; None if it is whole.
      of_rows: whether it has rows of the batch, which are gathered where JAX has no array in such parts.
      movements: rows that move, and why.
    """

    jaxpr: Jaxpr
    consts: list[Any]
    outputs: tuple[int | None, ...]
    of_rows: tuple[bool, ...]
    movements: tuple[Movement, ...]


def on_one_device(
    flat: _rewrite.Flat, consts: Sequence[Any], rows: Sequence[int | None], num_new: int,
    axes: Mapping[str, int], exchanges: bool = True, once: bool = True,
    automatic: bool = False,
) -> OneDevice:  # fmt: skip
    """The whole batch's step as one of the devices runs it.

    Args:
      flat: its jaxpr, calls replaced by their equations.
      consts: values of its constants.
      rows: for each input the dim of its rows; None for what is whole.
      num_new: how many of the outputs are the state, which is the same on all devices.
      axes: names and sizes of the data axes. Each collective is over all of them.
      exchanges: whether devices may be sent what others are not; microbatches may not.
      once: sums that a loop of the step's adds up are taken once, behind it.
      automatic: whether XLA shards over axes beside these.
    """
    name, mesh = _one_axis(axes)
    ins = [_input(replicated(x.aval.shape, mesh), dim, name)
           for x, dim in zip(flat.invars, rows, strict=True)]  # fmt: skip
    new = [replicated(x.aval.shape, mesh) for x in flat.outvars[:num_new]]
    outs: list[Layout | None] = [*new, *[None] * (len(flat.outvars) - num_new)]
    program = partition(
        flat, consts, mesh, ins, outs, [Hint(x, leaf="new") if x.dims else None for x in new], once,
        exchanges=exchanges, automatic=frozenset() if automatic else None, at_once=True,
    )  # fmt: skip
    jaxpr = before_loops(program.jaxpr, "psum")
    return _of(dataclasses.replace(program, jaxpr=jaxpr), axes)


def on_slices(
    flat: _rewrite.Flat, dims: Sequence[int | None], axes: Mapping[str, int]
) -> OneDevice:
    """A part of a step as one of the devices runs it of its slices of some inputs, which may be padded.

    Args:
      flat: its equations.
      dims: for each input the dim of the slices; None for what is whole.
      axes: names and sizes of the axes.
    """
    name, mesh = _one_axis(axes)
    layouts = [replicated(x.aval.shape, mesh) for x in flat.invars]
    ins = [
        DeviceInput(layout)
        if dim is None
        else DeviceInput(layout.cut(dim, name), frozenset([name]))
        for layout, dim in zip(layouts, dims, strict=True)
    ]
    outs = [None] * len(flat.outvars)
    return _of(partition(flat, [], mesh, ins, outs, keeps_padding=True), axes)


def _one_axis(axes: Mapping[str, int]) -> tuple[str, dict[str, int]]:
    """An axis in the place of all of them: what is cut is cut over all, and each collective is over all."""
    name = "+".join(axes)
    return name, {name: math.prod(axes.values())}


def _of(program: DeviceProgram, axes: Mapping[str, int]) -> OneDevice:
    name, _ = _one_axis(axes)
    places = [layout.place(name) for layout in program.outs]
    return OneDevice(
        _over(program.jaxpr, name, tuple(axes)),
        program.consts,
        tuple(None if place is None else place[0] for place in places),
        program.of_rows,
        tuple(map(movement_of, filter(is_of_rows, program.moves))),
    )


def _input(layout: Layout, dim: int | None, axis: str) -> DeviceInput:
    if dim is None:
        return DeviceInput(layout)
    layout = layout.cut(dim, axis)
    # JAX has no arrays in unequal parts: what the devices do not divide comes whole.
    return DeviceInput(layout, frozenset([axis]), comes_whole=layout.dims[dim].pad is not None)


def _over(jaxpr: Jaxpr, name: str, axes: tuple[str, ...]) -> Jaxpr:
    """The program, in which these axes stand in the place of one."""
    return _jaxpr.replaced(jaxpr, eqns=[_renamed(eqn, name, axes) for eqn in jaxpr.eqns])


def _renamed(eqn: Eqn, name: str, axes: tuple[str, ...]) -> Eqn:
    if _jaxpr.axes_of(eqn) != (name,):
        return _jaxpr.with_inner(eqn, lambda inner: _over(inner, name, axes))
    if "axes" in eqn.params:
        return eqn.replace(params=eqn.params | {"axes": axes})
    return eqn.replace(params=eqn.params | {"axis_name": axes if len(axes) > 1 else axes[0]})
