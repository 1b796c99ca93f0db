"""cuDNN's attention, as `jax.nn.dot_product_attention(implementation="cudnn")` calls it: rows are apart.

Source: `jax/_src/cudnn/fused_attention_stablehlo.py` (0.10.2, 0.12), whose own partitioning splits the batch
so, and sums the gradient of a bias that the batch shares.
"""

from __future__ import annotations

from jzero import _jaxpr
from jzero.batch._factors import Factor

NAMES = ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")
_PACKED = slice(6, 10)  # Operands: offsets of packed sequences, tables of pages; empty if unused.


def factors(eqn: _jaxpr.Eqn) -> list[Factor]:
    """The batch, dim 0 of what has it. Not if bits are drawn for all of it, or if sequences share a row."""
    params, operands = eqn.params, [atom.aval for atom in eqn.invars]
    shared = any(aval.size for aval in operands[_PACKED])
    if params["dropout_rate"] > 0 or shared or params.get("score_mod") is not None:
        return []
    batch = operands[0].shape[:1]
    ins, outs = (
        tuple(0 if aval.shape[:1] == batch else None for aval in avals)
        for avals in (operands, [var.aval for var in eqn.outvars])
    )
    if None not in outs:
        return [Factor(ins, outs)]
    return [Factor(ins, outs, "sum", groups=batch[0])]  # Padding would be summed up with the rows.
