"""One device's step while it is being written: values, and equations that make and move them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero import _jaxpr, _rewrite
from jzero._jaxpr import Atom, Eqn
from jzero.batch._rows import FULL, Form, Rows, is_padded, local_shape
from jzero.sharding import _rules

OUTPUT = "output"  # in the place of a primitive, of what is gathered because it is returned


@dataclasses.dataclass(frozen=True)
class Movement:
    """Rows that are gathered because an operation needs them whole; see `describe`.

    Attributes:
      operation: the primitive.
      where: the user's line, `file.py:12 (train_step)`; of an output, its path.
      nbytes: of the whole value.
      times: how often a step does it.
      reason: what the operation needs.
    """

    operation: str
    where: str
    nbytes: int
    times: int
    reason: str

    def __str__(self) -> str:
        times = f", {self.times} times a step" if self.times > 1 else ""
        return f"{self.operation} at {self.where}: {self.reason}{times}"


@dataclasses.dataclass(eq=False)
class Value:
    """A value of the whole-batch step, and the forms in which this device has it.

    Attributes:
      aval: type of the whole.
      form: what it is; FULL also of what nobody has asked for yet.
      atoms: the variables that hold it, by form.
      make: writes the equation that makes it in a form; of values that are made where they are needed (an
        iota, a broadcast, random bits), so that a device makes its own rows only.
      asked: of a body's inputs, forms that it asked for and was not given, and why.
      fill: the number that all its elements are, if that is known.
      constant: evaluates it, if it depends on nothing but constants.
      columns: of an array of indices, which values stand along its last dim.
    """

    aval: Any
    form: Form
    atoms: dict[Form, Atom]
    make: Callable[[Value, Form], Atom] | None = None
    asked: dict[Form, str] | None = None
    fill: Any = None
    constant: Callable[[], np.ndarray] | None = None
    columns: dict[int, Value] | None = None

    @property
    def is_lazy(self) -> bool:
        """Whether it is made where it is needed."""
        return self.form is FULL and FULL not in self.atoms

    @property
    def at_hand(self) -> Form:
        """The form in which it is there already."""
        if self.is_lazy and self.atoms:
            return next(iter(self.atoms))
        return self.form

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return _rules.size_in_bytes(self.aval)


def var_in(aval: Any, form: Form) -> Any:
    """A new variable for what a device has of a value in this form."""
    return _jaxpr.var_like(aval, local_shape(aval.shape, form) if isinstance(form, Rows) else None)


class Table(NamedTuple):
    """What equations are rewritten by, beside their factors.

    Attributes:
      handlers: asked first, by the name of the primitive; None means: not this time.
      along: asked if no factor has the rows.
      in_rows: makes one device's rows of a value that waits to be needed.
      effect: for equations that do more than compute.
    """

    handlers: Mapping[str, Handler]
    along: Mapping[str, Handler]
    in_rows: Mapping[str, MadeInRows]
    effect: Callable[[Body, Eqn, list[Value]], list[Value]]


class Body:
    """Equations of one frame of the step, for one device."""

    def __init__(self, axes: tuple[str, ...], num: int, table: Table, times: int = 1):
        self.axes, self.num, self.table, self.times = axes, num, table, times
        self.eqns: list[Eqn] = []
        self.constvars: list[Any] = []
        self.consts: list[Any] = []
        self.movements: list[Movement] = []
        self.source: Any = None  # the equation that is being rewritten
        self.turn: Atom | None = None  # what the next ordered effect waits for
        self._index: Atom | None = None
        self._outer: Body | None = None

    def inside(self, times: int = 1) -> Body:
        """A loop's or a branch's body in this one."""
        inner = Body(self.axes, self.num, self.table, self.times * times)
        inner.source, inner._outer = self.source, self
        return inner

    def in_scope(self, name: str) -> bool:
        """Whether the equation that is being rewritten, or a loop around it, was made under this name."""
        inside = _jaxpr.in_scope(self.source, name)
        return inside or (self._outer is not None and self._outer.in_scope(name))

    # -- writing equations -----------------------------------------------------------------------

    def emit(
        self, eqn: Eqn, ins: Sequence[Atom], forms: Sequence[Form], **overrides: Any
    ) -> list[Atom]:
        """Writes `eqn` on other operands; `forms` are those of its results."""
        outs = [var_in(out.aval, form) for out, form in zip(eqn.outvars, forms, strict=True)]
        params = {**eqn.params, **overrides} if overrides else eqn.params
        source = self.source.source_info
        self.eqns.append(
            eqn.replace(invars=list(ins), outvars=outs, params=params, source_info=source)
        )
        return outs

    def inline(self, fn: Callable[..., Any], static: tuple[Any, ...], *ins: Atom) -> list[Atom]:
        """Writes the equations of `fn(*static, *ins)`."""
        types = tuple(
            (a.aval.shape, a.aval.dtype, getattr(a.aval, "weak_type", False)) for a in ins
        )
        flat, consts = _traced(fn, static, types, jax.config.jax_enable_x64)  # type: ignore[attr-defined]
        fresh = [_jaxpr.new_var(var) for var in flat.constvars]
        self.constvars += fresh
        self.consts += consts
        env = dict(zip([*flat.constvars, *flat.invars], [*fresh, *ins], strict=True))

        def read(atom: Atom) -> Atom:
            return atom if _jaxpr.is_literal(atom) else env[atom]

        for eqn in flat.eqns:
            outs = [_jaxpr.new_var(var) for var in eqn.outvars]
            self.eqns.append(eqn.replace(
                invars=[read(a) for a in eqn.invars], outvars=outs, source_info=self.source.source_info
            ))  # fmt: skip
            env |= zip(eqn.outvars, outs, strict=True)
        return [read(atom) for atom in flat.outvars]

    def _collective(self, name: str, ins: Sequence[Atom], outs: list[Any], **params: Any) -> Atom:
        primitive = _jaxpr.PRIMITIVES[name]
        self.eqns.append(_jaxpr.equation(primitive, ins, outs, self.source, **params))
        return outs[0]

    def reduce(self, x: Atom, kind: str) -> Atom:
        """The sum, maximum or minimum of `x` over the devices."""
        if x.aval.dtype == np.bool_:
            (x,) = self.inline(_as_integers, (), x)
            (x,) = self.inline(_as_booleans, (), self.reduce(x, kind))
            return x
        narrow, wide = x.aval.dtype, _SENT_AS.get(str(x.aval.dtype))
        if wide is not None:  # Sums of integers wrap alike in both.
            (x,) = self.inline(_cast, (wide,), x)
            return self.inline(_cast, (narrow,), self.reduce(x, kind))[0]
        out = _jaxpr.var_like(x.aval, x.aval.shape, x.aval.dtype)
        name = {"sum": "psum", "max": "pmax", "min": "pmin"}[kind]
        return self._collective(name, [x], [out], axes=self.axes, axis_index_groups=None)

    def _all_gather(self, x: Atom) -> Atom:
        """`x` of all devices, along a new first dim."""
        narrow, wide = x.aval.dtype, _SENT_AS.get(str(x.aval.dtype))
        if wide is not None:
            (x,) = self.inline(_cast, (wide,), x)
            return self.inline(_cast, (narrow,), self._all_gather(x))[0]
        out = _jaxpr.var_like(None, (self.num, *x.aval.shape), x.aval.dtype)
        return self._collective(
            "all_gather", [x], [out], all_gather_dimension=0, axis_name=self.axes,
            axis_index_groups=None, axis_size=self.num, tiled=False,
        )  # fmt: skip

    @property
    def index(self) -> Atom:
        """This device's place among all."""
        if self._index is None:
            out = _jaxpr.var_like(None, (), np.dtype(np.int32))
            name = self.axes if len(self.axes) > 1 else self.axes[0]
            self._index = self._collective("axis_index", [], [out], axis_name=name)
        return self._index

    def gather(self, x: Atom, rows: Rows, aval: Any) -> Atom:
        """The whole of a value of which `x` are this device's rows."""
        is_key = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
        data = self.inline(_key_data, (), x)[0] if is_key else x
        (whole,) = self.inline(_joined, (rows, aval.shape[rows.dim]), self._all_gather(data))
        if is_key:
            (whole,) = self.inline(_wrapped, (aval.dtype,), whole)
        return whole

    def take(self, whole: Atom, rows: Rows) -> Atom:
        """This device's rows of a whole value."""
        return self.inline(_taken, (rows, self.num), whole, self.index)[0]

    def mask(self, x: Atom, rows: Rows, size: int, neutral: str) -> Atom:
        """`x`, with what changes no 'sum', 'max' or 'min' where it holds padding."""
        if not is_padded(rows, size, self.num):
            return x
        return self.inline(masked, (rows, size, self.num, neutral), x, self.index)[0]

    def without_unread(self, outs: Sequence[Atom]) -> list[Eqn]:
        """The equations, without collectives that nobody needs: a loss that is not read is not summed up."""
        return _rewrite.without_unread(
            self.eqns, outs, lambda eqn: eqn.primitive in _jaxpr.COLLECTIVES
        )

    # -- values in other forms -------------------------------------------------------------------

    def at(self, value: Value, form: Form, reason: str = "") -> Atom:
        """The variable that holds `value` in a form; written now if there is none.

        `reason` is why rows are gathered, if they must be.
        """
        if form in value.atoms:
            return value.atoms[form]
        if value.asked is not None:
            value.asked.setdefault(form, reason)
            atom = var_in(value.aval, form)  # A place-holder: the body will be run again.
        elif value.make is not None:
            atom = value.make(value, form)
        elif form is FULL:
            assert isinstance(value.form, Rows), (value.form, reason)
            self.note_movement(value, reason)
            atom = self.gather(value.atoms[value.form], value.form, value.aval)
        else:
            assert isinstance(form, Rows)
            atom = self.take(self.at(value, FULL, reason or "rows along another dim"), form)
        value.atoms[form] = atom
        return atom

    def note_movement(self, value: Value, reason: str) -> None:
        """Remembers that rows are gathered, for the report."""
        where, name = _jaxpr.summary(self.source), self.source.primitive.name
        self.movements.append(Movement(name, where, value.nbytes, self.times, reason))


# XLA:CPU gathers other numbers of some of these, and reduces none of 2 bits (0.10.2).
_SENT_AS = {
    **dict.fromkeys(["int2", "int4"], "int8"), **dict.fromkeys(["uint2", "uint4"], "uint8"),
    "float4_e2m1fn": "bfloat16",
}  # fmt: skip


def _cast(dtype: Any, x: Any) -> Any:
    return x.astype(dtype)


@functools.lru_cache(maxsize=4096)
def _traced(
    fn: Callable[..., Any], static: tuple[Any, ...], types: tuple[Any, ...], x64: bool
) -> Any:
    del x64  # Another one gives other dtypes.
    avals = [jax.ShapeDtypeStruct(s, d, weak_type=w) for s, d, w in types]
    traced = _jaxpr.trace_here(functools.partial(fn, *static), *avals)
    return _rewrite.flatten_calls(traced.jaxpr, traced.consts)


def row_numbers(rows: Rows, num: int, index: Any) -> Any:
    """Which rows of the whole dim this device has: int32[rows.size]."""
    blocks = jnp.arange(rows.outer, dtype=jnp.int32)[:, None] * (num * rows.inner)
    return (blocks + index * rows.inner + jnp.arange(rows.inner, dtype=jnp.int32)[None]).reshape(-1)


def _taken(rows: Rows, num: int, x: Any, index: Any) -> Any:
    dim, outer, inner = rows
    more = outer * num * inner - x.shape[dim]
    if more:  # The last rows again, and not zeros, which a step may divide by.
        last = lax.slice_in_dim(x, x.shape[dim] - 1, x.shape[dim], axis=dim)
        x = lax.concatenate([x, *[last] * more], dim)
    if outer == 1:
        return lax.dynamic_slice_in_dim(x, index * inner, inner, dim)
    shape = x.shape
    parts = x.reshape(*shape[:dim], outer, num, inner, *shape[dim + 1 :])
    own = lax.dynamic_index_in_dim(parts, index, dim + 1, keepdims=False)
    return own.reshape(*shape[:dim], rows.size, *shape[dim + 1 :])


def _joined(rows: Rows, size: int, parts: Any) -> Any:
    num, *shape = parts.shape
    dim, outer, inner = rows
    blocks = parts.reshape(num, *shape[:dim], outer, inner, *shape[dim + 1 :])
    whole = jnp.moveaxis(blocks, 0, dim + 1)
    whole = whole.reshape(*shape[:dim], num * rows.size, *shape[dim + 1 :])
    return lax.slice_in_dim(whole, 0, size, axis=dim)


def masked(rows: Rows, size: int, num: int, neutral: str, x: Any, index: Any) -> Any:
    """`x` with what changes no 'sum', 'max' or 'min' where it holds padding."""
    if not is_padded(rows, size, num):
        return x
    opposite = {"max": "min", "min": "max"}
    fill = 0 if neutral == "sum" else _rules.extreme(x.dtype, opposite[neutral])
    inside = lax.broadcast_in_dim(row_numbers(rows, num, index) < size, x.shape, (rows.dim,))
    return jnp.where(inside, x, jnp.asarray(fill, x.dtype))


def _as_integers(x: Any) -> Any:
    return x.astype(jnp.int32)


def _as_booleans(x: Any) -> Any:
    return x.astype(jnp.bool_)


def _key_data(keys: Any) -> Any:
    return jax.random.key_data(keys)


def _wrapped(dtype: Any, data: Any) -> Any:
    return jax.random.wrap_key_data(data, impl=dtype._impl.name)


def size_of(aval: Any) -> int:
    """How many elements there are."""
    return math.prod(aval.shape)


Handler = Callable[[Body, Eqn, list[Value]], list[Value] | None]
MadeInRows = Callable[[Body, Eqn, list[Value], Rows], Atom | None]
