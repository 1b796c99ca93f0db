# SPDX-License-Identifier: Apache-2.0
"""Weights stored quantized: a program takes rows of bytes, gathers them, and dequantizes where it uses them.

Slices of stacks are slices of rows. Casts, transposes and slices of matrices wait until a row is dequantized,
so that rows are gathered. What else is done to a shard before it is gathered is done to this device's part,
dequantized.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jzero._blocks import Blocks
from jzero.ir import _rules
from jzero.ir._loops import Scan
from jzero.ir._writer import JaxprWriter
from jzero.sharding.passes import _quantize, _waits
from jzero.sharding.passes._chains import with_size_of
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var


class View(NamedTuple):
    """A cast, transpose, squeeze or slice that waits until its operand is dequantized."""

    eqn: Eqn  # its operand may have another size along `dim` by then, as it may be gathered
    dim: int | None  # that the parts cut; None for a leaf that is not sharded
    result: int  # which result, by number


@dataclasses.dataclass(frozen=True)
class QuantizedRows:
    """A leaf `[..., n, d]` as rows of bytes `[..., parts, bytes]`."""

    blocks: Blocks  # the format
    dtype: str  # as which it is dequantized
    part: tuple[int, ...]  # the shape of one part of a row
    dim: int | None  # that the parts cut; None for a leaf that is not sharded
    num_stacked: int  # how many dims stand before a row
    views: tuple[View, ...] = ()  # what is done to it when it is dequantized
    # The dim that the parts cut, behind the views; None if there are none.
    dim_now: int | None = None
    gathered: bool = False  # all parts are there

    @property
    def rows_dim(self) -> int:
        """The dim of the rows that is sharded."""
        assert self.dim is not None
        return min(self.dim, self.num_stacked)

    @property
    def cut_dim(self) -> int | None:
        """The dim of the value, with views applied, that the parts cut."""
        return self.dim_now if self.moves else self.dim

    @property
    def moves(self) -> bool:
        """Whether views do more than cast."""
        return any(view.eqn.primitive.name != _CAST for view in self.views)

    def keeps(self, d: int) -> bool:
        """Whether a dim belongs to a row, or is the sharded one, which slices of a stack do not cut."""
        return d >= self.num_stacked or d == self.dim


def dequantize_weights(
    jaxpr: Jaxpr, leaves: Mapping[int, tuple[QuantizedRows, Sequence[int]]]
) -> Jaxpr:
    """Takes rows of bytes for some arguments; `leaves` has, by index, their form and local shape."""
    if not leaves or not jaxpr.eqns:
        return jaxpr
    ins, quantized = [*jaxpr.invars], dict[Var, _Rows]()
    for i, (form, shape) in leaves.items():
        ins[i] = _jaxpr.var_like(None, shape, jnp.dtype(jnp.uint8))
        quantized[jaxpr.invars[i]] = _Rows(ins[i], form)
    eqns, outs = _Program(jaxpr, quantized, jaxpr.eqns[0]).run()
    return _jaxpr.replaced(jaxpr, invars=ins, eqns=eqns, outvars=outs)


@dataclasses.dataclass(frozen=True)
class _Rows:
    rows: Var
    form: QuantizedRows


class _Program:
    """A program some of whose values are rows of bytes.

    Dequantizing waits for `token`, what was computed latest: the compiler would else dequantize long before
    the use, or before a loop for all of its iterations.
    """

    def __init__(
        self, jaxpr: Jaxpr, quantized: Mapping[Var, _Rows], source: Eqn, token: Var | None = None
    ):
        self.jaxpr, self.quantized, self.token = jaxpr, dict(quantized), token
        self.writer = JaxprWriter(source)
        self.dequantized = dict[_Rows, Atom]()
        self.gathered = dict[tuple[Var, str], Var]()
        self.before = dict[Var, Var]()  # of rows behind a barrier, the rows: gathered once for all

    def run(self) -> tuple[list[Eqn], list[Atom]]:
        for eqn in self.jaxpr.eqns:
            self.writer.source = eqn
            self._equation(self.writer, eqn)
            if _waits.takes_time(eqn) and (done := _waits.done(eqn)) is not None:
                self.token = done
        outs = [*map(self.read, self.jaxpr.outvars)]
        assert not self.writer.consts, "what a pass writes has no constants"
        return self.writer.eqns, outs

    def read(self, atom: Atom) -> Atom:
        """A value, dequantized; of a shard, this device's part."""
        if not _jaxpr.is_literal(atom) and atom in self.quantized and atom not in self.writer.names:
            each, outer = self.quantized[atom], self.writer.source
            self.writer.source = _jaxpr.within_scope(outer, _waits.QUANTIZED)
            plain = dataclasses.replace(each.form, views=(), dim_now=None)
            x = self._dequantized(dataclasses.replace(each, form=plain))
            for view in each.form.views:
                x = self._viewed(x, view)
            self.writer.names[atom], self.writer.source = x, outer
        return self.writer.read(atom)

    def _dequantized(self, each: _Rows) -> Atom:
        if each not in self.dequantized:
            tokens = [] if self.token is None else [_waits.write_token(self.writer, self.token)]
            rows = _waits.write_behind(self.writer, each.rows, tokens)
            (self.dequantized[each],) = self.writer.trace(_dequantized, rows, static=(each.form,))
        return self.dequantized[each]

    def _viewed(self, x: Atom, view: View) -> Atom:
        eqn, writer, source = view.eqn, self.writer, self.writer.source
        if eqn.primitive.name == _CAST:  # The value may have become a slice of a stack since.
            outs = [_jaxpr.var_like(eqn.outvars[0].aval, x.aval.shape)]
        elif view.dim is None:
            outs = [*map(_jaxpr.new_var, eqn.outvars)]
        else:
            factor, size = _rules.factor_of(eqn, 0, view.dim), x.aval.shape[view.dim]
            assert factor is not None, eqn
            return with_size_of(writer, eqn, factor, size, [x], source)[view.result]
        return writer.clone(eqn, [x], outs, source)[view.result]

    def _equation(self, writer: JaxprWriter, eqn: Eqn) -> None:
        first = None if not eqn.invars or _jaxpr.is_literal(eqn.invars[0]) else eqn.invars[0]
        each = None if first is None else self.quantized.get(first)
        found = None if each is None else self._views(writer, eqn, each)
        if found is not None:
            self.quantized |= zip(eqn.outvars, found, strict=True)
        elif eqn.primitive.name == "optimization_barrier":
            self._barrier(writer, eqn)
        elif eqn.primitive.name in _INNER and any(map(self._rows_of, eqn.invars)):
            writer.eqns.append(_INNER[eqn.primitive.name](self, eqn))
        else:
            ins = [*map(self.read, eqn.invars)]
            same = all(a is b for a, b in zip(ins, eqn.invars, strict=True))
            writer.eqns.append(eqn if same else eqn.replace(invars=ins))

    def _rows_of(self, atom: Atom) -> _Rows | None:
        return None if _jaxpr.is_literal(atom) else self.quantized.get(atom)

    def _barrier(self, writer: JaxprWriter, eqn: Eqn) -> None:
        ins, outs = list[Atom](), list[Var]()
        for x, out in zip(eqn.invars, eqn.outvars, strict=True):
            each = self._rows_of(x)
            ins.append(self.read(x) if each is None else each.rows)
            outs.append(out if each is None else _jaxpr.new_var(each.rows))
            if each is not None:
                self.quantized[out] = dataclasses.replace(each, rows=outs[-1])
                self.before[outs[-1]] = self.before.get(each.rows, each.rows)
        writer.clone(eqn, ins, outs)

    # -- views -----------------------------------------------------------------------------------------
    def _views(self, writer: JaxprWriter, eqn: Eqn, each: _Rows) -> list[_Rows] | None:
        """Results that are still rows: gathers, slices of stacks, views to apply later; None for others."""
        name, form = eqn.primitive.name, each.form
        if _waits.is_gather(eqn):
            along = eqn.params["all_gather_dimension"] == form.cut_dim
            return [self._gathered(writer, eqn, each)] if along else None
        if not form.moves and (rows := self._of_stack(writer, eqn, each)) is not None:
            return [rows]
        dims = _cut_dims(eqn, form.cut_dim) if name in _VIEWS else None
        if dims is None:
            return None
        return [
            _Rows(
                each.rows,
                dataclasses.replace(
                    form, views=(*form.views, View(eqn, form.cut_dim, k)), dim_now=dim
                ),
            )
            for k, dim in enumerate(dims)
        ]

    def _of_stack(self, writer: JaxprWriter, eqn: Eqn, each: _Rows) -> _Rows | None:
        name, form, (out, *_) = eqn.primitive.name, each.form, eqn.outvars
        if name == "squeeze" and not any(map(form.keeps, eqn.params["dimensions"])):
            gone = eqn.params["dimensions"]
            dim = None if form.dim is None else form.dim - sum(d < form.dim for d in gone)
            num = form.num_stacked - len(gone)
            form = dataclasses.replace(form, dim=dim, num_stacked=num, dim_now=dim)
            (rows,) = writer.trace(_squeezed, each.rows, static=(gone,))
            return _Rows(_jaxpr.variable(rows), form)
        shape = eqn.invars[0].aval.shape
        if name not in ("slice", "dynamic_slice") or any(
            n != m and form.keeps(d)
            for d, (n, m) in enumerate(zip(shape, out.aval.shape, strict=True))
        ):
            return None
        sliced = self._sliced if name == "slice" else self._sliced_dynamically
        return _Rows(_jaxpr.variable(sliced(writer, eqn, each)), form)

    def _gathered(self, writer: JaxprWriter, eqn: Eqn, each: _Rows) -> _Rows:
        shape, d = [*each.rows.aval.shape], each.form.rows_dim
        shape[d] *= eqn.params["axis_size"]
        params = {**eqn.params, "all_gather_dimension": d}
        key = self.before.get(each.rows, each.rows), str(params)
        if key not in self.gathered:
            rows = _jaxpr.var_like(each.rows.aval, shape)
            (self.gathered[key],) = writer.clone(eqn, [each.rows], [rows], params=params)
        return _Rows(self.gathered[key], dataclasses.replace(each.form, gathered=True))

    def _sliced(self, writer: JaxprWriter, eqn: Eqn, each: _Rows) -> Atom:
        num, shape, params = each.form.num_stacked, each.rows.aval.shape, eqn.params
        strides = params["strides"] or [1] * len(params["start_indices"])
        cut = [d for d in range(num) if not each.form.keeps(d)]
        starts, limits, steps = [0] * (num + 2), [*shape], [1] * (num + 2)
        for d in cut:
            starts[d], limits[d] = params["start_indices"][d], params["limit_indices"][d]
            steps[d] = strides[d]
        static = tuple(starts), tuple(limits), tuple(steps)
        return writer.trace(_slice, each.rows, static=static)[0]

    def _sliced_dynamically(self, writer: JaxprWriter, eqn: Eqn, each: _Rows) -> Atom:
        num, sizes = each.form.num_stacked, [*each.rows.aval.shape]
        indices = [*map(self.read, eqn.invars[1:])]
        zero = _jaxpr.scalar(0, indices[0].aval.dtype)
        starts = [zero if each.form.keeps(d) else indices[d] for d in range(num)] + [zero, zero]
        for d in range(num):
            if not each.form.keeps(d):
                sizes[d] = eqn.params["slice_sizes"][d]
        out = _jaxpr.var_like(each.rows.aval, sizes)
        params = {**eqn.params, "slice_sizes": tuple(sizes)}
        return writer.clone(eqn, [each.rows, *starts], [out], params=params)[0]

    # -- programs inside -------------------------------------------------------------------------------
    def scan(self, eqn: Eqn) -> Eqn:
        scan, quantized = Scan.of(eqn), dict[Var, _Rows]()
        consts, xs = list[tuple[Atom, Var]](), list[tuple[Atom, Var]]()
        for const in scan.consts:
            consts.append(self._entering(const.outer, const.inner, quantized))
        for port in scan.xs:
            each = self._rows_of(port.stack)
            stacked = each is not None and each.form.num_stacked and not each.form.moves
            if each is None or not stacked or each.form.dim == 0:
                xs.append((self.read(port.stack), port.row))
                continue
            form = each.form
            dim = None if form.dim is None else form.dim - 1
            row = _jaxpr.var_like(each.rows.aval, each.rows.aval.shape[1:])
            num = form.num_stacked - 1
            form = dataclasses.replace(form, dim=dim, num_stacked=num, dim_now=dim)
            quantized[port.row] = _Rows(row, form)
            xs.append((each.rows, row))
        token = next((p.before for p in scan.carries if _waits.is_float(p.before)), None)
        eqns, outs = _Program(scan.body, quantized, eqn, token).run()
        num = len(scan.carries)
        return dataclasses.replace(
            scan,
            eqns=tuple(eqns),
            consts=tuple(
                p._replace(outer=x, inner=y) for p, (x, y) in zip(scan.consts, consts, strict=True)
            ),
            carries=tuple(
                p._replace(init=self.read(p.init), after=x)
                for p, x in zip(scan.carries, outs[:num], strict=True)
            ),
            xs=tuple(p._replace(stack=x, row=y) for p, (x, y) in zip(scan.xs, xs, strict=True)),
            ys=tuple(p._replace(row=x) for p, x in zip(scan.ys, outs[num:], strict=True)),
        ).equation()

    def while_loop(self, eqn: Eqn) -> Eqn:
        loop, quantized = _jaxpr.while_parts(eqn), dict[Var, _Rows]()
        first, last = loop.num_cond_consts, loop.num_cond_consts + loop.num_body_consts
        own, carry = loop.body.invars[: last - first], loop.body.invars[last - first :]
        pairs = zip(eqn.invars[first:last], own, strict=True)
        consts = [self._entering(x, y, quantized) for x, y in pairs]
        ins = [*map(self.read, eqn.invars[:first]), *(x for x, _ in consts)]
        ins += map(self.read, eqn.invars[last:])
        token = next((x for x in carry if _waits.is_float(x)), None)
        body = self._body(eqn, loop.body, quantized, [*(y for _, y in consts), *carry], token)
        closed = eqn.params["body_jaxpr"].replace(jaxpr=body)
        return eqn.replace(invars=ins, params=eqn.params | {"body_jaxpr": closed})

    def cond(self, eqn: Eqn) -> Eqn:
        choice, *operands = eqn.invars
        branches = list[Any]()
        for closed in eqn.params["branches"]:
            branch, quantized = _jaxpr.open_jaxpr(closed)[0], dict[Var, _Rows]()
            pairs = zip(operands, branch.invars, strict=True)
            ins = [self._entering(x, y, quantized)[1] for x, y in pairs]
            branches.append(closed.replace(jaxpr=self._body(eqn, branch, quantized, ins, None)))
        given = [self._entering(x, _jaxpr.new_var(x), {})[0] for x in operands]
        params = eqn.params | {"branches": tuple(branches)}
        return eqn.replace(invars=[self.read(choice), *given], params=params)

    def _entering(self, outer: Atom, inner: Var, quantized: dict[Var, _Rows]) -> tuple[Atom, Var]:
        """A value for an inner jaxpr: rows that it gathers itself, or dequantized here."""
        each = self._rows_of(outer)
        if each is None or each.form.gathered or each.form.dim is None:
            return self.read(outer), inner
        rows = _jaxpr.new_var(each.rows)
        quantized[inner] = dataclasses.replace(each, rows=rows)
        return each.rows, rows

    def _body(
        self, holder: Eqn, jaxpr: Jaxpr, quantized: Mapping[Var, _Rows], ins: Sequence[Var],
        token: Var | None,
    ) -> Jaxpr:  # fmt: skip
        eqns, outs = _Program(jaxpr, quantized, holder, token).run()
        return _jaxpr.replaced(jaxpr, invars=[*ins], eqns=eqns, outvars=outs)


_INNER = {"scan": _Program.scan, "while": _Program.while_loop, "cond": _Program.cond}


_CAST = "convert_element_type"
_VIEWS = frozenset({_CAST, "transpose", "squeeze", "slice", "split"})


def _cut_dims(eqn: Eqn, dim: int | None) -> Sequence[int | None] | None:
    """The dim of each result that the parts cut; None if the view cannot wait until rows are dequantized."""
    out = eqn.outvars[0].aval
    if eqn.primitive.name == _CAST and (
        out.weak_type or not jnp.issubdtype(out.dtype, jnp.floating)
    ):
        return None
    if dim is None:
        return [None] * len(eqn.outvars)
    factor = _rules.factor_of(eqn, 0, dim)
    return None if factor is None or None in factor.outs else factor.outs


# -- traced ------------------------------------------------------------------------------------------------
def _dequantized(form: QuantizedRows, rows: jax.Array) -> jax.Array:
    return _quantize.dequantize_rows(rows, form.part, form.dim, form.dtype, form.blocks)


def _squeezed(dims: tuple[int, ...], rows: jax.Array) -> jax.Array:
    return lax.squeeze(rows, dims)


def _slice(
    starts: tuple[int, ...], limits: tuple[int, ...], steps: tuple[int, ...], rows: jax.Array
) -> jax.Array:
    return lax.slice(rows, starts, limits, steps)
