# SPDX-License-Identifier: Apache-2.0
"""Sums over the devices that parameters are multiplied with: the queues of a mixture's experts."""

from __future__ import annotations

from jzero.ir import _rules
from jzero.ir._factors import Factor
from jzero.sharding.batch._body import BatchRule, Body
from jzero.sharding.batch._cheapest import factors_of, run_factor
from jzero.sharding.batch._rows import FULL, Rows, even_rows
from jzero.sharding.batch._values import BatchValue
from jzero.tracing._types import Eqn


def _product(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue] | None:
    """A product of a sum over rows and a value that is none, such as a parameter.

    The sum is scattered along a dim that only it has, and each device does its part of the product: the same
    bytes, sooner or later. A backward pass's sums are gradients, which stay whole until rows of them are
    needed (`BatchValue.of_sum`), as those of a parameter never are.
    """
    sums = [v for v in ins if v.of_sum is not None]
    if len(sums) != 1 or any(v.form is not FULL for v in ins) or body.pass_of(eqn) == "backward":
        return None
    if sums[0].of_sum is None or sums[0].of_sum.is_gradient:
        return None
    own = ins.index(sums[0])
    found: list[tuple[int, Factor, Rows]] = []
    for factor in factors_of(eqn):
        dim = factor.ins[own]
        alone = [d for d in factor.ins if d is not None] == [dim]
        size = 0 if dim is None else sums[0].aval.shape[dim]
        if dim is not None and alone and factor.outs != (None,) and size and size % body.num == 0:
            found.append((size, factor, even_rows(dim, size, body.num)))
    if not found:
        return None
    _, factor, rows = max(found, key=lambda x: x[0])
    value = sums[0]
    atom = body.at(value, rows)
    # From here on it has rows: what a loop hands out of it is these, and not the whole.
    value.form, value.atoms, value.of_sum, value.is_queue = rows, {rows: atom}, None, True
    return run_factor(body, eqn, ins, factor, rows)


HANDLERS: dict[str, BatchRule] = dict.fromkeys(_rules.named(_rules.Cost.PRODUCT), _product)
