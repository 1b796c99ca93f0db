# SPDX-License-Identifier: Apache-2.0
"""Lone products: matrix products that only a sum over the devices reads, and that need not wait for it.

The gradient of a matrix is one. Its sum may be taken part by part as the product is made, so that the
product is never whole; but not where each device first adds up what the turns of a loop make.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jzero.ir import _rules
from jzero.ir._regions import variables
from jzero.sharding.analysis import _frames
from jzero.sharding.analysis._frames import Frame
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn, Var


def note_lone_products(frame: Frame, reduce_once: bool, own: Collection[Var] = ()) -> None:
    """Fills `lone_products` of the frame and those below: each product, and the sum that reads it.

    Args:
      frame: of the step.
      reduce_once: a step's own loop over microbatches adds gradients up on each device.
      own: what each microbatch hands to a later loop. No sum may stand for it.
    """
    _flow(frame, [False] * len(frame.jaxpr.outvars), reduce_once)
    for var in own:
        frame.lone_products.pop(var, None)


def _flow(frame: Frame, outs: Sequence[bool], reduce_once: bool) -> None:
    """`outs` says which results are added up on each device before they are reduced."""
    pairs = zip(frame.jaxpr.outvars, outs, strict=True)
    added = {atom for atom, is_added in pairs if is_added and not _jaxpr.is_literal(atom)}
    reads = _frames.num_reads(frame.jaxpr)
    sums: dict[Var, Eqn] = {}  # of what is reduced, alone
    for index, eqn in reversed(list(enumerate(frame.jaxpr.eqns))):
        asked = [out in added for out in eqn.outvars]
        name, alone = eqn.primitive.name, len(eqn.invars) == 1
        for child in frame.children.get(index, ()):
            _flow(child, _of_child(frame, child, eqn, asked, reduce_once), reduce_once)
        if name in _frames.REDUCTIONS and alone:
            sums |= dict.fromkeys(variables(eqn.invars), eqn)
        elif name == "dot_general":
            (out,) = eqn.outvars
            if reads.get(out) == 1 and out in sums and sums[out].outvars[0] not in added:
                frame.lone_products[out] = sums[out]
        elif any(asked) and (name in _rules.ADDS or (_rules.sum_waits(eqn) and alone)):
            added.update(variables(eqn.invars))


def _of_child(
    frame: Frame, child: Frame, eqn: Eqn, asked: list[bool], reduce_once: bool
) -> list[bool]:
    """Which results of a jaxpr inside an equation are added up."""
    num_outs = len(child.jaxpr.outvars)
    if eqn.primitive.name == "scan":
        scan = _jaxpr.scan_parts(eqn)
        waits = frame.pass_of(eqn) is not None or reduce_once
        sums = _frames.running_sums(child, scan.num_consts, scan.num_carry) if waits else ()
        return [i in sums for i in range(num_outs)]
    if _jaxpr.call_parts(eqn) is not None:
        return asked
    return [False] * num_outs
