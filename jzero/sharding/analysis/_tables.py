# SPDX-License-Identifier: Apache-2.0
"""Finds tables in which a step looks up rows, and the dims of them that the look-ups keep.

An embedding `[vocabulary, d]` that is sharded along d need not be gathered: devices look up all tokens in
their own columns, and exchange them (all-to-all) for all columns of their own rows. The gradient takes the
way back. Both move rows `[tokens, d]`, which are few compared with a large vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from jzero.ir import _rules
from jzero.ir._dataflow import backward
from jzero.ir._regions import Edge, Region, ValueIn, holder
from jzero.sharding.analysis._frames import Frame
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn

# The dims of a value that all its readers in a pass keep; None if it has none.
KeptDims = frozenset[int] | None
NO_DIM: frozenset[int] = frozenset()
Tables = Mapping[ValueIn, frozenset[int]]


def kept_dims(eqn: Eqn, num: int = 1) -> dict[int, int]:
    """The dims of a table that a look-up takes whole, each with its dim in the result.

    Empty for any other equation, and if a device's rows (of `num` that share them) are more than half as
    large as the table.
    """
    if eqn.primitive.name != "gather" or eqn.params["dimension_numbers"].operand_batching_dims:
        return {}
    row_bytes, table_bytes = (_rules.size_in_bytes(x.aval) for x in (eqn.outvars[0], eqn.invars[0]))
    if 2 * row_bytes > num * table_bytes:
        return {}
    found = {
        factor.ins[0]: factor.outs[0] for factor in _rules.factors_of(eqn) if factor.ins[1] is None
    }
    return {of: dim for of, dim in found.items() if of is not None and dim is not None}


def looked_up(program: Frame, num: int) -> Tables:
    """Values in which passes only look up rows, with the dims that all look-ups keep; see `kept_dims`."""
    if not any(kept_dims(eqn, num) for _, eqn in program.walk()):
        return {}
    found = backward(program, {}, functools.partial(_step, num), _join, None, _across)
    return {value: dims for value, dims in found.items() if dims}


def _join(a: KeptDims, b: KeptDims) -> KeptDims:
    if a is None or b is None:
        return b if a is None else a
    return a & b


def _step(num: int, region: Region, eqn: Eqn, outs: Sequence[KeptDims]) -> Sequence[KeptDims]:
    assert isinstance(region, Frame)
    if any(region.varies(out) for out in eqn.outvars):
        return [frozenset(kept_dims(eqn, num)), *[NO_DIM] * len(eqn.invars)][: len(eqn.invars)]
    asked = [kept for kept in outs if kept is not None]
    if not asked or eqn.primitive.name in (*_rules.IDENTITIES, "optimization_barrier"):
        return outs if asked else [None] * len(eqn.invars)
    maps, dims = _rules.dims_of(eqn), frozenset.intersection(*asked)
    if maps is None:
        return [NO_DIM] * len(eqn.invars)
    return [frozenset(dim for dim, out in enumerate(places) if out in dims) for places in maps]


def _across(eqn: Eqn, edge: Edge, kept: KeptDims) -> KeptDims:
    # Operands of loops and branches of a pass are gathered.
    in_pass = holder(edge.source[0], eqn).pass_of(eqn) is not None
    passes = _jaxpr.call_parts(eqn) is not None or not (in_pass or edge.shift)
    return kept if kept is None or passes else NO_DIM
