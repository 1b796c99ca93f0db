# SPDX-License-Identifier: Apache-2.0
"""Partitions a step: the jaxpr of the whole batch becomes one device's, with explicit collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jzero.ir._layout import Layout, replicated
from jzero.sharding.partition._errors import cannot
from jzero.sharding.partition._writer import DeviceWriter, Move
from jzero.tracing import _jaxpr
from jzero.tracing._types import Jaxpr, Var


@dataclasses.dataclass(frozen=True)
class Input:
    """A leaf of the state, or an argument, where the program begins.

    Attributes:
      layout: on the devices, padded if it is.
      rows: the axes over which it differs because rows of the batch do; none for state.
      firm: the axes over which it stays sharded, though it is state.
    """

    layout: Layout
    rows: frozenset[str] = frozenset()
    firm: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Program:
    """One device's program.

    Attributes:
      jaxpr: with explicit collectives; `consts` are the values of its `constvars`.
      ins, outs: layouts of its arguments and of its results.
      moves: every conversion that communicates.
    """

    jaxpr: Jaxpr
    consts: list[Any]
    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    moves: tuple[Move, ...]


def partition(
    jaxpr: Jaxpr, consts: Sequence[Any], mesh: Mapping[str, int], ins: Sequence[Input],
    outs: Sequence[Layout | None],
) -> Program:  # fmt: skip
    """One device's program of a step.

    Args:
      jaxpr: the whole-batch step, calls flattened.
      consts: values of its `constvars`.
      mesh: the axes, and how many devices each has.
      ins: for each argument.
      outs: for each result its layout; None where the partitioner chooses.

    Raises:
      CannotPartitionError: it has no exact program for it.
    """
    if not jaxpr.eqns:
        raise cannot("a step without equations")
    moves: dict[Var, Move] = {}
    writer = DeviceWriter(jaxpr.eqns[0], mesh, moves)
    invars = [_jaxpr.var_like(v.aval, each.layout.local_shape)
              for v, each in zip(jaxpr.invars, ins, strict=True)]  # fmt: skip
    for var, own, each in zip(jaxpr.invars, invars, ins, strict=True):
        writer.names[var] = writer.convert(own, each.layout, replicated(var.aval.shape, mesh))
    writer.copy(jaxpr.eqns)
    results = []
    layouts = [
        replicated(atom.aval.shape, mesh) if out is None else out
        for atom, out in zip(jaxpr.outvars, outs, strict=True)
    ]
    writer.source = jaxpr.eqns[-1]
    for atom, layout in zip(jaxpr.outvars, layouts, strict=True):
        whole = replicated(atom.aval.shape, mesh)
        results.append(writer.convert(writer.read(atom), whole, layout))
    writer.constvars += jaxpr.constvars
    writer.consts += consts
    closed = writer.close(template(), invars, results)
    return Program(
        closed, writer.consts, tuple(each.layout for each in ins), tuple(layouts),
        tuple(moves.values()),
    )  # fmt: skip


def template() -> Any:
    """Any jaxpr, in the place of whose parts others stand."""
    found: Any = _jaxpr.trace_here(lambda: ()).jaxpr
    return _jaxpr.replaced(found, debug_info=found.debug_info.with_unknown_names())
