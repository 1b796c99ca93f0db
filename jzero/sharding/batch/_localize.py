# SPDX-License-Identifier: Apache-2.0
"""The whole-batch step rewritten as the step of one device, which has some rows of the batch.

`localize` takes the jaxpr that plain `jax.jit` would compile, at whole-batch shapes, and rewrites it for
devices that each hold some rows of the arguments. Nothing is guessed: every value is FULL or ROWS, and an
equation either has a factor (`_factors.py`) that says what becomes of the rows, or a rule along the batch
(`_along.py`), or its operands are gathered. What is summed over rows is summed over the devices where it is
summed. So the result is exact for every step, and an operation without a rule costs time and is listed.

What comes out is a jaxpr with collectives, as an expert would have written the step for one device; the
rest of jzero takes it as such.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jzero.sharding.batch import (
    _along,
    _control,
    _effects,
    _equations,
    _lookups,
    _opaque,
    _ranks,
    _sums,
)
from jzero.sharding.batch._body import OUTPUT, BatchRules, Body, Movement
from jzero.sharding.batch._equations import run
from jzero.sharding.batch._rows import FULL, Form, Rows, is_padded
from jzero.sharding.batch._values import BatchValue, var_in, whole
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Var

BATCH_RULES = BatchRules(
    _equations.HANDLERS
    | _along.HANDLERS
    | _lookups.HANDLERS
    | _sums.HANDLERS
    | _control.HANDLERS
    | _effects.HANDLERS
    | _opaque.HANDLERS,
    _along.ALONG | _ranks.ALONG,
    _along.IN_ROWS | _lookups.IN_ROWS,
    _effects.once,
)


def _nowhere() -> _jaxpr.Eqn:
    """Where equations come from that are written for a step without any."""
    return _jaxpr.trace_here(lambda x: -x, jax.ShapeDtypeStruct((), jnp.int32)).jaxpr.eqns[0]


class Localized(NamedTuple):
    """The step of one device.

    Attributes:
      jaxpr: its equations; inputs and outputs are those of the whole step.
      consts: values of its constants.
      outputs: for each output, its rows, or FULL.
      of_rows: whether it has rows of the batch, which are gathered if JAX has no array in such parts.
      movements: rows that are gathered, and why.
    """

    jaxpr: _rewrite.Flat
    consts: list[ArrayLike]
    outputs: list[Form]
    of_rows: list[bool]
    movements: list[Movement]


def localize(
    flat: _rewrite.Flat, consts: Sequence[ArrayLike], forms: Sequence[Form], given: Sequence[Form],
    num_new: int, axes: dict[str, int], exchanges: bool = True, keeps_padding: bool = False,
) -> Localized:  # fmt: skip
    """Rewrites a whole-batch step.

    Args:
      flat: its jaxpr, calls replaced by their equations.
      consts: values of its constants.
      forms: what each input shall be: FULL, or rows.
      given: in which form the device gets it: the same, or FULL.
      num_new: how many of the outputs are the state, which is the same on all devices.
      axes: names and sizes of the data axes.
      exchanges: whether devices may send each other parts of their rows; microbatches cannot.
      keeps_padding: whether an output may have padded rows; JAX has no array in such parts.
    """
    source = flat.eqns[0] if flat.eqns else _nowhere()
    body = Body(tuple(axes), math.prod(axes.values()), source, BATCH_RULES, exchanges=exchanges)
    env: dict[Var, BatchValue] = {}
    for var in flat.constvars:
        env[var] = whole(var)
    invars = []
    for var, form, got in zip(flat.invars, forms, given, strict=True):
        atom = var_in(var.aval, got)
        invars.append(atom)
        env[var] = BatchValue(var.aval, form, {got: atom})
    for var, form, got in zip(flat.invars, forms, given, strict=True):
        if form != got:
            assert isinstance(form, Rows)
            env[var].atoms[form] = body.take(env[var].atoms[FULL], form)
    values = run(body, flat, env)
    if flat.eqns:
        body.source = flat.eqns[-1]
    outs, outputs, of_rows, movements = [], [], [], body.movements
    for i, value in enumerate(values):
        form = value.at_hand if i >= num_new else FULL
        of_rows.append(isinstance(form, Rows))
        if isinstance(form, Rows):
            padded = is_padded(form, value.aval.shape[form.dim], body.num)
            if form.outer > 1 or (padded and not keeps_padding):
                form = FULL
        body.movements = []
        outs.append(body.at(value, form, "it is returned"))
        outputs.append(form)
        # Not the line of the last equation.
        movements += [
            dataclasses.replace(m, operation=OUTPUT, where=str(i)) for m in body.movements
        ]
    eqns = body.without_unread(outs)
    jaxpr = _rewrite.Flat([*flat.constvars, *body.constvars], invars, outs, eqns)
    return Localized(jaxpr, [*consts, *body.consts], outputs, of_rows, movements)
