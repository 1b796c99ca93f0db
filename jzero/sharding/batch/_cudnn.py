# SPDX-License-Identifier: Apache-2.0
"""cuDNN's attention on rows, and the sum of the gradient of a bias that they share."""

from __future__ import annotations

from collections.abc import Sequence

from jzero.ir._factors import Factor
from jzero.sharding.batch._body import Body
from jzero.sharding.batch._rows import FULL, Form, Rows, is_padded
from jzero.sharding.batch._values import BatchValue, values_of
from jzero.tracing._types import Eqn


def on_rows(
    body: Body, eqn: Eqn, ins: list[BatchValue], factors: Sequence[Factor]
) -> list[BatchValue] | None:
    """The call on each device's part of the batch; None if its rows are along another dim, or not apart."""
    for factor in factors:
        held = [v.form for v, d in zip(ins, factor.ins, strict=True) if d is not None]
        rows = next((form for form in held if isinstance(form, Rows) and form.dim == 0), None)
        if rows is None or factor.groups and is_padded(rows, factor.groups, body.num):
            continue

        def form_of(dim: int | None, rows: Rows = rows) -> Form:
            return FULL if dim is None else rows

        forms = [*map(form_of, factor.outs)]
        reason = "attention reads it beside rows of the batch"
        atoms = [body.at(v, form_of(d), reason) for v, d in zip(ins, factor.ins, strict=True)]
        outs = body.emit(eqn, atoms, forms)
        # What has no rows is the gradient of a bias that they share.
        summed = [
            body.reduce(out, "sum") if form is FULL else out
            for form, out in zip(forms, outs, strict=True)
        ]
        return values_of(eqn.outvars, forms, summed)
    return None
