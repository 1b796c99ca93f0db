# SPDX-License-Identifier: Apache-2.0
"""Opaque calls: callbacks, FFI calls and kernels, whose computation JAX does not know.

A device runs one on its own rows if the step promises that rows are independent (`jzero.per_example`), or if
the call itself proves it; that it *could* run on fewer rows proves nothing. Else the rows are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

from jzero.ir import _pallas
from jzero.ir._factors import Factor, Params
from jzero.ir._regions import Region
from jzero.tracing import _jaxpr, _local
from jzero.tracing._types import Aval, Eqn

PROMISE = "nothing says that its rows are apart; jzero.per_example promises it"
_NOT_COVERED = (
    "jzero.per_example does not cover it: rows lie along several dims, a result has none, another dim "
    "is as long, or a kernel's grid does not have them"
)
_UNEVEN = "its rows are apart along another dim, or in blocks that {} devices do not divide"
_ATTENTION = "its rows are apart without dropout and packed sequences, along its batch"
_PACKED = slice(6, 10)  # Operands: offsets of packed sequences, tables of pages; empty if unused.

CALLS = ("pure_callback", "ffi_call")  # Their parameters hold the types of their results.
KERNEL = "pallas_call"
ATTENTION = ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")
NAMES = frozenset({*CALLS, KERNEL, *ATTENTION})


def factors(eqn: Eqn, rows: Sequence[int | None], scopes: Sequence[str]) -> list[Factor]:
    """The dims along which an opaque call is known to treat its rows independently.

    `rows` is each operand's batch dim or None, `scopes` are the call's `scopes_of`.
    """
    promised = _local.PER_EXAMPLE in scopes
    if eqn.primitive.name == KERNEL:
        return _pallas.factors(eqn, promised)
    if eqn.primitive.name in ATTENTION:
        return _of_attention(eqn)
    return _promised(eqn, rows, "transpose" in scopes) if promised else []


def why_gathered(eqn: Eqn, found: Sequence[Factor], scopes: Sequence[str], num: int) -> str:
    """The reason why a call gathers rows, for the report."""
    if eqn.primitive.name in ATTENTION:
        return _ATTENTION
    if eqn.primitive.name == KERNEL and found:
        return _UNEVEN.format(num)
    return _NOT_COVERED if _local.PER_EXAMPLE in scopes else PROMISE


def scopes_of(region: Region, eqn: Eqn) -> list[str]:
    """The name scopes of an equation, and of the loops, branches and calls that it is in."""
    own = _jaxpr.scopes(eqn)
    return own if region.around is None else [*scopes_of(*region.around), *own]


def _promised(eqn: Eqn, rows: Sequence[int | None], is_transposed: bool) -> list[Factor]:
    """The batch dim, if it is the same in all operands and results that have one."""
    ins = [atom.aval for atom in eqn.invars]
    with_rows = [aval for aval, dim in zip(ins, rows, strict=True) if dim is not None]
    without = [aval for aval, dim in zip(ins, rows, strict=True) if dim is None]
    held = {(d, aval.shape[d]) for aval, d in zip(ins, rows, strict=True) if d is not None}
    if len(held) != 1:
        return []
    ((dim, size),) = held

    def has_rows(aval: Aval) -> bool:
        return dim < len(aval.shape) and aval.shape[dim] == size

    types = eqn.params["result_avals"]
    if not all(map(has_rows, types)):
        return []
    # [Note: as long as the batch] If another operand, or another dim, is as long as the batch, the shapes do
    # not say which ones have rows (test_opaque.py::test_what_shapes_contradict_is_gathered).
    shapes = [x.shape for x in (*with_rows, *types)]
    if any(size in x.shape for x in without) or any(
        size in (*s[:dim], *s[dim + 1 :]) for s in shapes
    ):
        return []
    # In a backward pass the gradient of an operand that all rows share may be as long by chance
    # (test_a_gradient_that_looks_like_rows_is_refused).
    if is_transposed and any(all(t.shape != x.shape for x in with_rows) for t in types):
        return []

    def local(size: int, num: int) -> Params:
        shapes = [(*t.shape[:dim], size, *t.shape[dim + 1 :]) for t in types]
        avals = [_jaxpr.var_like(t, s).aval for t, s in zip(types, shapes, strict=True)]
        return {"result_avals": tuple(avals)}

    dims = tuple(dim if has_rows(aval) else None for aval in ins)
    return [Factor(dims, (dim,) * len(types), local=local)]


def _of_attention(eqn: Eqn) -> list[Factor]:
    """The batch of cuDNN's attention, `jax.nn.dot_product_attention(implementation="cudnn")`.

    It has none if dropout draws bits for the whole batch, or if sequences share a row. A result without rows
    is the gradient of a bias that rows share: a sum, to which padding must not be added.

    Source: `jax/_src/cudnn/fused_attention_stablehlo.py` (0.10.2, 0.12), whose own partitioning splits the
    batch so, and sums that gradient.
    """
    params, (size, *_) = eqn.params, eqn.invars[0].aval.shape
    packed = any(atom.aval.size for atom in eqn.invars[_PACKED])
    if params["dropout_rate"] > 0 or packed or params.get("score_mod") is not None:
        return []
    ins, outs = ([0 if x.aval.shape[:1] == (size,) else None for x in xs]
                 for xs in (eqn.invars, eqn.outvars))  # fmt: skip
    return [Factor(tuple(ins), tuple(outs), groups=size if None in outs else 0)]
