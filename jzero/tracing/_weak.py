# SPDX-License-Identifier: Apache-2.0
"""Weakly typed leaves of a state, such as Python's numbers, that a step returns with another type.

[Note: weak types] `jax.jit` compiles such a step twice: for `0`, and for the array that is returned.
`lax.scan` promotes its carry instead. jzero promotes where that computes the same: it traces both programs,
which may differ only in casts of the promoted leaves. Otherwise there are two programs, as with `jax.jit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.tracing import _array_memory, _call, _jaxpr, _rewrite
from jzero.tracing._differences import CAST
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var

_MAX_BYTES = 2**20  # Larger constants are not compared.


class PromotedState(Exception):
    """Raised while a step is traced whose state must be promoted to the types `state`."""

    def __init__(self, state: list[jax.ShapeDtypeStruct]):
        self.state = state


def check(old: Sequence[Any], new: Sequence[Any]) -> None:
    """Raises `PromotedState` if a weakly typed leaf of a state has another type among the new ones."""
    types = [_promoted(x, y) for x, y in zip(old, new, strict=True)]
    if any(map(_is_other, types, old)):
        raise PromotedState(types)


def _promoted(x: Any, y: Any) -> jax.ShapeDtypeStruct:
    """The promoted type of a leaf that a step takes as `x` and returns as `y`."""
    before = _call.abstract_leaf(x)
    try:
        after = _call.abstract_leaf(y)
    except (TypeError, ValueError):
        return before  # Refused elsewhere.
    same = before.dtype == after.dtype and after.weak_type
    if not before.weak_type or same or before.shape != after.shape:
        return before
    if jnp.result_type(x, y) != after.dtype:
        return before
    return jax.ShapeDtypeStruct(before.shape, after.dtype)


def _is_other(shape: jax.ShapeDtypeStruct, x: Any) -> bool:
    return bool(shape.dtype != x.dtype or shape.weak_type != x.weak_type)


def strong(leaves: Sequence[Any], shapes: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
    """The leaves of a state, cast to `shapes` where these are strongly typed; None stays."""
    return [
        _strong(x, shape.dtype) if is_weak(x) and not shape.weak_type else x
        for x, shape in zip(leaves, shapes, strict=True)
    ]


def is_weak(x: Any) -> bool:
    if _call.is_python_number(x):
        return not isinstance(x, bool)
    return bool(getattr(x, "weak_type", False))


def _strong(x: Any, dtype: Any) -> Any:
    if isinstance(x, jax.Array):
        return _array_memory.strong_view(x) if x.dtype == dtype else jnp.asarray(x, dtype)
    # JAX rounds like XLA; a NumPy array is on no device.
    return np.asarray(jnp.asarray(x).astype(dtype))


def computes_the_same(
    weak: _jaxpr.Traced, promoted: _jaxpr.Traced, state: Sequence[jax.ShapeDtypeStruct]
) -> bool:
    """Whether two traces of a step differ only in casts of its state to the types `state` of `promoted`.

    The results of `promoted` must have these types again.
    """
    again = zip(promoted.out_avals, state, strict=False)
    types = [[(x.shape, x.dtype) for x in traced.out_avals] for traced in (weak, promoted)]
    return (
        types[0] == types[1]
        and not any(_is_other(x, y) for x, y in again)
        and _is_same(weak.jaxpr, weak.consts, promoted.jaxpr, promoted.consts)
    )


def _is_same(a: Jaxpr, a_consts: Sequence[Any], b: Jaxpr, b_consts: Sequence[Any]) -> bool:
    first, first_consts = _rewrite.flatten_calls(a, a_consts)
    second, second_consts = _rewrite.flatten_calls(b, b_consts)
    sizes = [len(consts) + len(flat.invars)
             for flat, consts in ((first, first_consts), (second, second_consts))]  # fmt: skip
    if sizes[0] != sizes[1] or not all(map(_is_one_constant, first_consts, second_consts)):
        return False
    env: dict[Var, Atom] = dict(
        zip([*first.constvars, *first.invars], [*second.constvars, *second.invars], strict=True)
    )

    def there(atom: Atom) -> Atom:
        return atom if _jaxpr.is_literal(atom) else env[atom]

    bare = _rewrite.without(
        second, lambda eqn: eqn.invars if _is_no_cast(eqn, eqn.invars) else None
    )
    others = iter(bare.eqns)
    for eqn in first.eqns:
        operands = [*map(there, eqn.invars)]
        if _is_no_cast(eqn, operands):
            (env[eqn.outvars[0]],) = operands
            continue
        other = next(others, None)
        if other is None or not _is_alike(eqn, other, operands):
            return False
        env |= zip(eqn.outvars, other.outvars, strict=True)
    return next(others, None) is None and all(map(_is_one, map(there, first.outvars), bare.outvars))


def _is_no_cast(eqn: Eqn, operands: Sequence[Atom]) -> bool:
    """Whether it is a cast to the operand's own dtype."""
    plain = eqn.primitive.name == CAST and eqn.params.get("sharding") is None
    return bool(plain and operands[0].aval.dtype == eqn.outvars[0].aval.dtype)


def _is_alike(eqn: Eqn, other: Eqn, operands: Sequence[Atom]) -> bool:
    """Whether two equations are the same, given the first one's operands in the second one's jaxpr."""
    sizes = [(len(x.invars), len(x.outvars)) for x in (eqn, other)]
    if eqn.primitive is not other.primitive or sizes[0] != sizes[1]:
        return False
    # Types count: with a promoted operand that is not cast it may be another operation.
    types = [[_type_of(atom) for atom in (*x.invars, *x.outvars)] for x in (eqn, other)]
    return (
        all(map(_is_one, operands, other.invars))
        and types[0] == types[1]
        and eqn.params.keys() == other.params.keys()
        and all(_is_one_param(name, x, other.params[name]) for name, x in eqn.params.items())
    )


def _type_of(atom: Atom) -> tuple[Any, Any]:
    return getattr(atom.aval, "shape", None), getattr(atom.aval, "dtype", atom.aval)


def _is_one(x: Atom, y: Atom) -> bool:
    """Whether two atoms of one jaxpr are the same, or the same number."""
    if not (_jaxpr.is_literal(x) and _jaxpr.is_literal(y)):
        return x is y
    a, b = np.asarray(_jaxpr.literal(x), x.aval.dtype), np.asarray(_jaxpr.literal(y), y.aval.dtype)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _is_one_param(name: str, x: Any, y: Any) -> bool:
    if name == "weak_type":
        return True
    if isinstance(x, tuple | list) and isinstance(y, tuple | list):
        return len(x) == len(y) and all(map(_is_one_param, [name] * len(x), x, y))
    if hasattr(x, "eqns") and hasattr(y, "eqns"):
        return _is_same(*_jaxpr.open_jaxpr(x), *_jaxpr.open_jaxpr(y))
    try:
        return x is y or bool(x == y)
    except (TypeError, ValueError):  # Arrays.
        return False


def _is_one_constant(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if _call.marks([x]) != _call.marks([y]) or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return False
    is_here = all(getattr(each, "is_fully_addressable", True) for each in (x, y))
    is_small = x.size * x.dtype.itemsize <= _MAX_BYTES
    return is_here and is_small and np.asarray(x).tobytes() == np.asarray(y).tobytes()
