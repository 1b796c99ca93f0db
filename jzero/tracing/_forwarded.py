# SPDX-License-Identifier: Apache-2.0
"""Which outputs of a function are its inputs, also through loops and calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn, Jaxpr


def restored(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)`, where an output that is an argument is the same object.

    `nnx.jit`, `nnx.remat` and `nnx.scan` return all variables of the module that they are given.
    """
    traced = _jaxpr.trace_here(fn, *args)
    outs = _jaxpr.evaluate(traced.jaxpr, traced.consts, *args)
    numbers = forwarded(traced.jaxpr)
    leaves = [x if i is None else args[i] for x, i in zip(outs, numbers, strict=True)]
    return jax.tree.unflatten(traced.out_tree, leaves)


def forwarded(jaxpr: Jaxpr) -> list[int | None]:
    """For each output the index of the input that it is, or None."""
    known: dict[Any, int] = {var: i for i, var in enumerate(jaxpr.invars)}

    def number(atom: Any) -> int | None:
        return None if _jaxpr.is_literal(atom) else known.get(atom)

    for eqn in jaxpr.eqns:
        for out, source in _pairs(eqn):
            if (found := number(eqn.invars[source])) is not None:
                known[eqn.outvars[out]] = found
    return [number(atom) for atom in jaxpr.outvars]


def _pairs(eqn: Eqn) -> Iterator[tuple[int, int]]:
    """`(result, operand)` indices of an equation's results that are its operands."""
    if eqn.primitive.name == "scan":
        parts = _jaxpr.scan_parts(eqn)
        first = parts.num_consts + parts.num_carry
        for out, source in enumerate(forwarded(parts.body)):
            is_carry = out < parts.num_carry and source == parts.num_consts + out
            if source is not None and (is_carry or (out >= parts.num_carry and source >= first)):
                yield out, source
    elif eqn.primitive.name in _jaxpr.CALLS:
        body = _jaxpr.call_parts(eqn)
        assert body is not None
        yield from ((out, i) for out, i in enumerate(forwarded(body[0])) if i is not None)
