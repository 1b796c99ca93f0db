"""Equations of the whole-batch step on one device: along a factor of theirs, or on gathered operands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero._errors import StepError, message
from jzero.sharding.analysis import _rules
from jzero.sharding.batch import _factors
from jzero.sharding.batch._body import Body, Handler, OfSum, Value, size_of
from jzero.sharding.batch._cheapest import cheapest, elsewhere, run_factor
from jzero.sharding.batch._factors import SCATTER_REDUCES, Factor
from jzero.sharding.batch._rows import FULL, OWN, SUM, Form, Rows, even_rows, reshaped
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._jaxpr import Atom, Eqn

MOST_CONSTANT = 2**20  # elements of a constant that is evaluated to see what it is
LARGE = 2**20  # elements of a value that waits to be needed, and is not made whole to be reduced


class NotRowByRow(Exception):
    """A loop along the batch cannot run on each device's rows alone."""


def run(body: Body, jaxpr: Any, env: dict[Any, Value]) -> list[Value]:
    """Writes a flat jaxpr's equations into `body`; `env` has its inputs."""

    def read(atom: Atom) -> Value:
        return _literal(atom) if _jaxpr.is_literal(atom) else env[atom]

    outer = body.source
    for eqn in jaxpr.eqns:
        body.source = eqn
        ins = [read(atom) for atom in eqn.invars]
        outs = _apply(body, eqn, ins)
        _note_facts(eqn, ins, outs)
        env.update(zip(eqn.outvars, outs, strict=True))
    body.source = outer
    return [read(atom) for atom in jaxpr.outvars]


def whole(atom: Atom) -> Value:
    """A value that is there whole."""
    return Value(atom.aval, FULL, {FULL: atom})


def rows_of(aval: Any, rows: Rows, atom: Atom) -> Value:
    """A value of which this device's rows are there."""
    return Value(aval, rows, {rows: atom})


def _literal(atom: _jaxpr.Literal) -> Value:
    value = whole(atom)
    value.fill = atom.val if np.ndim(atom.val) == 0 else None
    value.constant = lambda: np.asarray(atom.val, atom.aval.dtype)
    return value


def _apply(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value]:
    name = eqn.primitive.name
    handler = body.table.handlers.get(name)
    if handler is not None:
        outs = handler(body, eqn, ins)
        if outs is not None:
            return outs
    if _jaxpr.has_side_effects(eqn):
        return body.table.effect(body, eqn, ins)
    if any(value.form in (OWN, SUM) for value in ins):
        return on_own(body, eqn, ins)
    if not any(isinstance(value.form, Rows) for value in ins):
        return _on_whole(body, eqn, ins)
    outs = by_factor(body, eqn, ins, _factors.factors_of(eqn))
    if outs is not None:
        _note_growth(body, eqn, ins, outs)
    if outs is None and name in body.table.along:
        outs = body.table.along[name](body, eqn, ins)
    if outs is None:
        found = elsewhere(body, eqn, ins)
        outs = None if found is None else run_factor(body, eqn, ins, *found[1:])
    return gathered(body, eqn, ins) if outs is None else outs


# -- whole values ------------------------------------------------------------------------------------


def _on_whole(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value]:
    out = eqn.outvars[0].aval if eqn.outvars else None
    if len(eqn.outvars) == 1 and size_of(out) > 1 and _may_wait(eqn, ins):
        return [Value(out, FULL, {}, make=maker(body, eqn, ins))]
    outs = _reduced_in_rows(body, eqn, ins) or on_whole(body, eqn, ins)
    _note_sum(body, eqn, ins, outs)
    return outs


def _note_sum(body: Body, eqn: Eqn, ins: list[Value], outs: list[Value]) -> None:
    """What is made of a sum over the devices can be made of a scattered one, if its rows are needed."""
    sums = [value.of_sum for value in ins if value.of_sum is not None]
    if len(outs) != 1 or not sums or outs[0].of_sum is not None or not outs[0].atoms:
        return

    def in_rows(rows: Rows) -> Atom | None:
        with body.at_source(eqn):
            return _made_in_rows(body, eqn, ins, rows)

    outs[0].of_sum = OfSum(in_rows, any(found.is_gradient for found in sums))


def _reduced_in_rows(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value] | None:
    """The reduction of a large value that waits to be needed: each device makes and reduces its rows."""
    if not (_reduces_waiting(eqn, ins) and size_of(ins[0].aval) >= LARGE and body.exchanges):
        return None
    for factor in _factors.factors_of(eqn):
        dim = factor.ins[0]
        size = 0 if dim is None else ins[0].aval.shape[dim]
        if factor.reduces is not None and dim is not None and size and size % body.num == 0:
            return run_factor(body, eqn, ins, factor, even_rows(dim, size, body.num))
    return None


def _reduces_waiting(eqn: Eqn, ins: list[Value]) -> bool:
    rule = _rules.rule_for(eqn)
    return rule is not None and rule.reduces is not None and ins[0].is_lazy


def on_whole(body: Body, eqn: Eqn, ins: list[Value], reason: str = "") -> list[Value]:
    """The equation on whole operands, now."""
    atoms = body.emit(eqn, [body.at(v, FULL, reason) for v in ins], [FULL] * len(eqn.outvars))
    return [
        Value(var.aval, FULL, {FULL: atom}) for var, atom in zip(eqn.outvars, atoms, strict=True)
    ]


def _may_wait(eqn: Eqn, ins: list[Value]) -> bool:
    """Whether its result is made where it is needed: there it may be rows only, and cheap to make."""
    name, size = eqn.primitive.name, size_of(eqn.outvars[0].aval)
    if name == "iota":
        return True
    if name == "random_bits":
        return ins[0].aval.ndim == 0
    if name == "broadcast_in_dim":
        return all(v.is_lazy or size_of(v.aval) < size for v in ins)
    if _reduces_waiting(eqn, ins):
        return True
    if name in SCATTER_REDUCES:  # The gradient of a look-up.
        return ins[0].is_lazy and all(size_of(v.aval) < size for v in ins[1:])
    if name not in _rules.RULES or name in ("dynamic_slice", "dynamic_update_slice", "sort", "pad"):
        return False
    return any(v.is_lazy for v in ins) and all(v.is_lazy or size_of(v.aval) < size for v in ins)


def maker(body: Body, eqn: Eqn, ins: list[Value]) -> Callable[[Value, Form], Atom]:
    def make(value: Value, form: Form) -> Atom:
        if isinstance(form, Rows):
            atom = _made_in_rows(body, eqn, ins, form)
            return body.take(body.at(value, FULL), form) if atom is None else atom
        outs = _reduced_in_rows(body, eqn, ins)
        return (outs or on_whole(body, eqn, ins))[0].atoms[FULL]

    return make


def _note_growth(body: Body, eqn: Eqn, ins: list[Value], outs: list[Value]) -> None:
    """What is made of smaller rows can be made in other forms too, of these moved: `x[None]`, of [B, B]."""
    name = eqn.primitive.name
    if len(outs) != 1 or not isinstance(outs[0].form, Rows) or outs[0].make is not None:
        return
    grows = (
        name == "broadcast_in_dim" or name in _rules.ELEMENTWISE or name == "convert_element_type"
    )
    size = outs[0].nbytes
    small = all(v.is_lazy or body.num * v.cheapest_bytes < size for v in ins)
    if grows and small:
        outs[0].make = maker(body, eqn, ins)
        outs[0].grown_from = sum(0 if v.is_lazy else v.cheapest_bytes for v in ins)


def _made_in_rows(body: Body, eqn: Eqn, ins: list[Value], rows: Rows) -> Atom | None:
    """The rows of an equation's result alone; None if they cannot be made without the rest."""
    name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
    if name in body.table.in_rows:
        atom = body.table.in_rows[name](body, eqn, ins, rows)
        if atom is not None:
            return atom
    if name == "reshape":
        if len(ins) > 1 or eqn.params.get("dimensions") is not None:
            return None
        before = reshaped(shape, ins[0].aval.shape, rows, body.num)
        return None if before is None else reshape_rows(body, eqn, body.at(ins[0], before), rows)
    for factor in _factors.factors_of(eqn):
        if factor.outs == (rows.dim,):
            outs = run_factor(body, eqn, ins, factor, rows)
            return outs[0].atoms[rows]
    if name == "broadcast_in_dim":  # A dim that the operand does not have.
        sizes = eqn.params["shape"]
        local = (*sizes[: rows.dim], rows.size, *sizes[rows.dim + 1 :])
        return body.emit(eqn, [body.at(v, FULL) for v in ins], [rows], shape=local)[0]
    return None


def _note_facts(eqn: Eqn, ins: list[Value], outs: list[Value]) -> None:
    """What is known of constants: which number fills them, and how to evaluate them."""
    if len(outs) != 1 or eqn.primitive.name in ("random_bits", "random_seed", "random_wrap"):
        return
    out = outs[0]
    if any(out is value for value in ins):
        return
    if eqn.primitive.name in ("broadcast_in_dim", "convert_element_type", "reshape", "copy"):
        out.fill = ins[0].fill
    known = all(value.constant is not None for value in ins) and out.form is FULL
    if known and _can_be_evaluated(eqn):
        operands = [value.constant for value in ins]

        def evaluate(found: list[np.ndarray] = []) -> np.ndarray:  # noqa: B006
            if not found:
                with jax.ensure_compile_time_eval():
                    arrays = [constant() for constant in operands if constant is not None]
                    found.append(np.asarray(_jaxpr.bind(eqn, *arrays)[0]))
            return found[0]

        out.constant = evaluate


def _can_be_evaluated(eqn: Eqn) -> bool:
    aval = eqn.outvars[0].aval
    plain = not (
        _jaxpr.inner_jaxprs(eqn) or _jaxpr.has_side_effects(eqn) or "callback" in eqn.primitive.name
    )
    extended = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    return plain and not extended and size_of(aval) <= MOST_CONSTANT


# -- rows --------------------------------------------------------------------------------------------


def by_factor(
    body: Body, eqn: Eqn, ins: list[Value], factors: Sequence[Factor]
) -> list[Value] | None:
    """The equation on rows, along the factor that moves least; None if there is none."""
    found = cheapest(body, eqn, ins, factors)
    return None if found is None else run_factor(body, eqn, ins, *found[1:])


def gathered(body: Body, eqn: Eqn, ins: list[Value], reason: str = "") -> list[Value]:
    """The equation on whole operands, their rows gathered; results are cut into rows again."""
    reason = reason or f"no rule for {eqn.primitive.name} along the batch"
    outs = on_whole(body, eqn, ins, reason)
    cut = [v for v in ins if isinstance(v.form, Rows)]
    return [_cut_again(body, out, cut) for out in outs]


def _cut_again(body: Body, out: Value, cut: Sequence[Value]) -> Value:
    """What was made of gathered rows as rows again, lest all that follows be done by every device."""
    shape = out.aval.shape
    for value in cut:
        assert isinstance(value.form, Rows)
        dim = value.form.dim
        size = value.aval.shape[dim]
        same = [d for d in (dim, *range(len(shape))) if d < len(shape) and shape[d] == size]
        if not same and len(shape) == value.aval.ndim and shape[dim] >= body.num:
            same = [dim]
        if same:
            rows = even_rows(same[0], shape[same[0]], body.num)
            return Value(out.aval, rows, {rows: body.at(out, rows), FULL: out.atoms[FULL]})
    return out


# -- values of single rows -----------------------------------------------------------------------------


def on_own(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value]:
    """An equation on values of one row of the batch, inside a loop along it."""
    form: Form = OWN
    if any(value.form is SUM for value in ins):
        adds = eqn.primitive.name in ("add", "add_any")
        takes_away = eqn.primitive.name == "sub" and ins[0].form is SUM and ins[1].form is not SUM
        dtype = eqn.params.get("new_dtype")  # the same one if a Python number becomes an array
        stays = eqn.primitive.name == "convert_element_type" and dtype == ins[0].aval.dtype
        if not (adds or takes_away or stays):
            raise NotRowByRow
        form = SUM
    atoms = [v.atoms[v.form] if v.form in (OWN, SUM) else body.at(v, FULL, "a loop along the batch reads it")
             for v in ins]  # fmt: skip
    outs = body.emit(eqn, atoms, [FULL] * len(eqn.outvars))
    return [Value(var.aval, form, {form: out}) for var, out in zip(eqn.outvars, outs, strict=True)]


def reshape_rows(body: Body, eqn: Eqn, x: Atom, rows: Rows) -> Atom:
    """The rows `x`, as rows of the reshaped value."""
    sizes = eqn.params["new_sizes"]
    local = (*sizes[: rows.dim], rows.size, *sizes[rows.dim + 1 :])
    return body.emit(eqn, [x], [rows], new_sizes=local)[0]


def _identity(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value]:
    return ins


def _over_vmapped(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value]:
    """A collective over an axis that `jax.vmap` has made a dim: a plain reduction of that dim."""
    reduce = functools.partial(_VMAPPED[eqn.primitive.name], axis=tuple(eqn.params["axes"]))
    return [_instead(body, reduce, value) for value in ins]


def _instead(body: Body, fn: Callable[[Any], Any], value: Value) -> Value:
    """`fn(value)` in the place of the equation."""
    shape = jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype)
    traced = _jaxpr.trace_here(fn, shape)
    flat, _ = _rewrite.flatten_calls(traced.jaxpr, traced.consts)
    eqns = [e.replace(source_info=body.source.source_info) for e in flat.eqns]
    (out,) = run(body, flat._replace(eqns=eqns), {flat.invars[0]: value})
    return out


def _reshape_permuted(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value] | None:
    """A reshape that permutes dims first, as gradients of vmapped convolutions do, is two equations."""
    order, sizes = eqn.params.get("dimensions"), eqn.params["new_sizes"]
    if order is None or not isinstance(ins[0].form, Rows):
        return None
    return [_instead(body, lambda x: jax.lax.transpose(x, order).reshape(sizes), ins[0])]


def _lax_sum(x: Any, axis: tuple[int, ...]) -> Any:
    return jnp.sum(x, axis, dtype=x.dtype)


_VMAPPED: dict[str, Any] = {"psum": _lax_sum, "pmax": jnp.max, "pmin": jnp.min}


def _constrain(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value] | None:
    """Kept: it may speak of automatic axes; of data axes the rest of jzero drops it."""
    (value,) = ins
    if value.form in (OWN, SUM):
        return ins
    form = value.form
    (out,) = body.emit(eqn, [body.at(value, form)], [form])
    return [Value(value.aval, form, {form: out})]


def _sum(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value] | None:
    """A sum over dims of size 1 is none: what waits for the devices' sum may go on waiting behind it."""
    (value,), axes = ins, eqn.params["axes"]
    if value.form is not FULL or value.is_lazy or any(value.aval.shape[d] != 1 for d in axes):
        return None
    out = eqn.outvars[0].aval
    (atom,) = body.inline(_squeezed, (axes,), value.atoms[FULL])
    return [Value(out, FULL, {FULL: atom})]


def _squeezed(axes: tuple[int, ...], x: Any) -> Any:
    return jax.lax.squeeze(x, axes)


def _barrier(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value]:
    forms = [value.at_hand for value in ins]
    if SUM in forms:
        raise NotRowByRow
    atoms = body.emit(eqn, [body.at(v, f) for v, f in zip(ins, forms, strict=True)], forms)
    return [Value(v.aval, f, {f: a}) for v, f, a in zip(ins, forms, atoms, strict=True)]


def _refuse_shard_map(body: Body, eqn: Eqn, ins: list[Value]) -> list[Value]:
    raise StepError(message(
        "shard_train_step", f"the step calls jax.shard_map itself ({_jaxpr.summary(eqn)})",
        "jzero runs the step inside a shard_map of its own, over the same devices.",
        "Write that part for the whole batch, without shard_map; or write the whole step for one device, "
        "with collectives, and pass axis_name=."))  # fmt: skip


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(_rules.IDENTITIES, _identity),
    "sharding_constraint": _constrain,
    "optimization_barrier": _barrier,
    "reduce_sum": _sum,
    "reshape": _reshape_permuted,
    "shard_map": _refuse_shard_map,
    **dict.fromkeys(["psum", "pmax", "pmin"], _over_vmapped),
}
