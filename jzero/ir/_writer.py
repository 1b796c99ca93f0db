# SPDX-License-Identifier: Apache-2.0
"""`JaxprWriter`: writes equations, each with the source line of the equation that it replaces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jzero.tracing import _jaxpr, _rewrite, _traces
from jzero.tracing._types import Atom, Aval, Eqn, Jaxpr, Primitive, Var

Traceable: TypeAlias = Callable[..., jax.Array | tuple[jax.Array, ...]]
# Shape, dtype, and whether it is weak.
ArrayType: TypeAlias = tuple[tuple[int, ...], np.dtype[np.generic], bool]


class JaxprWriter:
    """Writes equations, one after the other, into `eqns`.

    They get the line and scopes of `source` by default. `names` maps variables of the original program to
    atoms of the new one. `constvars` and `consts` are constants of functions that were traced.
    """

    def __init__(self, source: Eqn, names: Mapping[Var, Atom] | None = None):
        self.source, self.names = source, dict(names or {})
        self.eqns: list[Eqn] = []
        self.constvars: list[Var] = []
        self.consts: list[ArrayLike] = []
        self._once: dict[Hashable, Atom] = {}

    def read(self, atom: Atom) -> Atom:
        return atom if _jaxpr.is_literal(atom) else self.names.get(atom, atom)

    def add(
        self, primitive: Primitive, ins: Sequence[Atom], outs: Sequence[Var] | None = None,
        source: Eqn | None = None, **params: Any,
    ) -> list[Var]:  # fmt: skip
        """Writes `outs = primitive(*ins)`; JAX infers the types of the results by default.

        It infers those of collectives only where their axes are bound, so these must be given.
        """
        if outs is None:
            outs = [_jaxpr.var_like(t) for t in _jaxpr.result_types(primitive, ins, params)]
        self.eqns.append(_jaxpr.equation(primitive, ins, outs, source or self.source, **params))
        return [*outs]

    def clone(
        self, eqn: Eqn, ins: Sequence[Atom] | None = None, outs: Sequence[Var] | None = None,
        source: Eqn | None = None, params: Mapping[str, Any] | None = None,
    ) -> list[Var]:  # fmt: skip
        """Writes a copy of an equation with other operands, results, parameters or line."""
        parts: dict[str, Any] = {} if source is None else {"source_info": source.source_info}
        if params is not None:
            parts["params"] = params
        parts["invars"] = [*map(self.read, eqn.invars)] if ins is None else [*ins]
        parts["outvars"] = [*map(_jaxpr.new_var, eqn.outvars)] if outs is None else [*outs]
        self.eqns.append(eqn.replace(**parts))
        return [*parts["outvars"]]

    def copy(self, eqns: Iterable[Eqn], source: Eqn | None = None) -> None:
        """Clones equations with fresh results, recorded in `names`; at the line of `source`."""
        for eqn in eqns:
            self.names |= zip(eqn.outvars, self.clone(eqn, source=source), strict=True)

    def keep(self, eqns: Iterable[Eqn]) -> None:
        """Clones equations that keep their result variables."""
        for eqn in eqns:
            self.clone(eqn, outs=eqn.outvars)

    def renamed(self, eqn: Eqn) -> Eqn:
        """The equation reading the names of this writer; itself if nothing changes."""
        ins = [*map(self.read, eqn.invars)]
        if all(a is b for a, b in zip(ins, eqn.invars, strict=True)):
            return eqn
        return eqn.replace(invars=ins)

    def write(
        self, jaxpr: Jaxpr, consts: Sequence[Any], ins: Sequence[Atom], source: Eqn | None = None
    ) -> list[Atom]:
        """Writes the equations of a jaxpr, its calls inlined, and returns its results."""
        return self._flat(*_rewrite.flatten_calls(jaxpr, consts), ins, source)

    def trace(self, fn: Traceable, *ins: Atom, static: tuple[Hashable, ...] = ()) -> list[Atom]:
        """Writes the equations of `fn(*static, *ins)`; the trace is cached by function and types."""
        weak = [bool(getattr(a.aval, "weak_type", False)) for a in ins]
        types = tuple((a.aval.shape, a.aval.dtype, w) for a, w in zip(ins, weak, strict=True))
        x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]
        return self._flat(*_traced(fn, static, types, x64), ins, self.source)

    def _flat(
        self, flat: _rewrite.Flat, consts: Sequence[Any], ins: Sequence[Atom], source: Eqn | None
    ) -> list[Atom]:
        fresh = [_jaxpr.new_var(var) for var in flat.constvars]
        self.constvars += fresh
        self.consts += consts
        outer = self.names
        pairs = zip([*flat.constvars, *flat.invars], [*fresh, *ins], strict=True)
        self.names = dict(pairs)
        self.copy(flat.eqns, source)
        outs, self.names = [*map(self.read, flat.outvars)], outer
        return outs

    def close(self, like: Jaxpr, ins: Sequence[Var], outs: Sequence[Atom]) -> Jaxpr:
        """The written equations as a function of `ins` and `constvars`; `like` is any jaxpr."""
        constvars = [*self.constvars]
        return _jaxpr.replaced(
            like, constvars=constvars, invars=[*ins], outvars=[*outs], eqns=[*self.eqns],
            effects=_jaxpr.effects_of(self.eqns), consts=[*self.consts],
        )  # fmt: skip

    # -- values that are often made --------------------------------------------------------------------

    def full(self, value: Any, like: Aval, source: Eqn | None = None) -> Atom:
        """A constant array, written once; a scalar is a literal."""
        scalar = _jaxpr.scalar(value, like.dtype)
        if not like.shape:
            return scalar
        data = np.asarray(value, like.dtype).tobytes()
        key = like.shape, str(like.dtype), like.weak_type, data
        if key not in self._once:
            self._once[key] = self.broadcast(scalar, _jaxpr.var_like(like), (), source)
        return self._once[key]

    def broadcast(self, x: Atom, out: Var, dims: tuple[int, ...], source: Eqn | None = None) -> Var:
        params: dict[str, Any] = dict(
            shape=out.aval.shape, broadcast_dimensions=dims, sharding=None
        )
        return self.add(lax.broadcast_in_dim_p, [x], [out], source, **params)[0]

    def reshape(self, x: Atom, shape: Sequence[int], out: Var | None = None) -> Var:
        out = _jaxpr.var_like(x.aval, shape) if out is None else out
        params: dict[str, Any] = dict(new_sizes=out.aval.shape, dimensions=None, sharding=None)
        return self.add(lax.reshape_p, [x], [out], **params)[0]

    def slice(
        self, x: Atom, starts: Sequence[int], limits: Sequence[int], out: Var | None = None
    ) -> Var:
        shape = [limit - start for start, limit in zip(starts, limits, strict=True)]
        out = _jaxpr.var_like(x.aval, shape) if out is None else out
        params: dict[str, Any] = dict(
            start_indices=tuple(starts), limit_indices=tuple(limits), strides=None
        )
        return self.add(lax.slice_p, [x], [out], **params)[0]

    def first_element(self, x: Atom) -> Atom:
        num = len(x.aval.shape)
        if not num:
            return x
        element, out = self.slice(x, (0,) * num, (1,) * num), _jaxpr.var_like(x.aval, ())
        return self.add(lax.squeeze_p, [element], [out], dimensions=tuple(range(num)))[0]

    def swapped(self, stack: Atom, out: Var | None = None) -> Var:
        first, second, *row = stack.aval.shape
        out = _jaxpr.var_like(stack.aval, (second, first, *row)) if out is None else out
        order = (1, 0, *range(2, stack.aval.ndim))
        return self.add(lax.transpose_p, [stack], [out], permutation=order)[0]

    def row(self, stack: Atom, at: Atom) -> Var:
        """`stack[at]`, for an index in bounds."""
        shape = stack.aval.shape
        row = _jaxpr.var_like(stack.aval, (1, *shape[1:]))
        starts = [at, *[_jaxpr.scalar(0, at.aval.dtype)] * (len(shape) - 1)]
        self.add(lax.dynamic_slice_p, [stack, *starts], [row], slice_sizes=row.aval.shape)
        return self.reshape(row, shape[1:])

    def with_row(self, stack: Atom, row: Atom, at: Atom, out: Var | None = None) -> Var:
        """`stack.at[at].set(row)`, for an index in bounds."""
        shape, new = stack.aval.shape, _jaxpr.var_like(stack.aval) if out is None else out
        rows = self.reshape(row, (1, *shape[1:]), _jaxpr.var_like(stack.aval, (1, *shape[1:])))
        starts = [at, *[_jaxpr.scalar(0, at.aval.dtype)] * (len(shape) - 1)]
        return self.add(lax.dynamic_update_slice_p, [stack, rows, *starts], [new])[0]


@functools.lru_cache(maxsize=4096)
def _traced(
    fn: Traceable, static: tuple[Hashable, ...], types: tuple[ArrayType, ...], x64: bool
) -> tuple[_rewrite.Flat, list[ArrayLike]]:
    del x64  # Part of the cache key: it changes dtypes.
    avals = [jax.ShapeDtypeStruct(s, d, weak_type=w) for s, d, w in types]
    # Without a mesh, because a cached trace may be used under another one.
    traced = _traces.trace_whole(functools.partial(fn, *static), avals, {})
    return _rewrite.flatten_calls(traced.jaxpr, traced.consts)
