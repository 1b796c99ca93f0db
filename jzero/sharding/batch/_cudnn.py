# SPDX-License-Identifier: Apache-2.0
"""cuDNN's attention, as `jax.nn.dot_product_attention(implementation="cudnn")` calls it: rows are apart.

Source: `jax/_src/cudnn/fused_attention_stablehlo.py` (0.10.2, 0.12), whose own partitioning splits the batch
so, and sums the gradient of a bias that the batch shares.
"""

from __future__ import annotations

from jzero.sharding.batch._body import Body
from jzero.sharding.batch._rows import FULL, Form, Rows, is_padded
from jzero.sharding.batch._values import BatchValue, values_of
from jzero.tracing._types import Aval, Eqn

NAMES = ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")
_PACKED = slice(6, 10)  # Operands: offsets of packed sequences, tables of pages; empty if unused.


def on_rows(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue] | None:
    """The call on each device's part of the batch, dim 0 of what has it.

    None if bits are drawn for all of it, if sequences share a row, or if its rows are along another dim.
    """
    params = eqn.params
    packed = any(value.aval.size for value in ins[_PACKED])
    if params["dropout_rate"] > 0 or packed or params.get("score_mod") is not None:
        return None
    batch = ins[0].aval.shape[:1]
    held = [v.form for v in ins if v.aval.shape[:1] == batch]
    rows = next((form for form in held if isinstance(form, Rows) and form.dim == 0), None)
    if rows is None:
        return None

    def form_of(aval: Aval) -> Form:
        return rows if aval.shape[:1] == batch else FULL

    forms = [form_of(var.aval) for var in eqn.outvars]
    if FULL in forms and is_padded(rows, batch[0], body.num):
        return None  # Padding would be summed up with the rows.
    reason = "attention reads it beside rows of the batch"
    outs = body.emit(eqn, [body.at(v, form_of(v.aval), reason) for v in ins], forms)
    # What has no rows is the gradient of a bias that they share.
    summed = [
        body.reduce(out, "sum") if form is FULL else out
        for form, out in zip(forms, outs, strict=True)
    ]
    return values_of(eqn.outvars, forms, summed)
