# SPDX-License-Identifier: Apache-2.0
"""Equations of the whole-batch step on one device: along a factor of theirs, or on gathered operands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jzero._errors import StepError, message
from jzero.ir import _rules
from jzero.ir._factors import Factor
from jzero.ir._rules import Cost
from jzero.sharding.batch._body import BatchRule, Body
from jzero.sharding.batch._cheapest import cheapest, elsewhere, factors_of, run_factor
from jzero.sharding.batch._rows import (
    FULL,
    OWN,
    Form,
    PartialSum,
    Rows,
    even_rows,
    is_of_iteration,
)
from jzero.sharding.batch._values import BatchValue, literal, values_of
from jzero.sharding.batch._waiting import (
    maker,
    may_wait,
    note_growth,
    note_sum,
    on_whole,
    reduced_in_rows,
)
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var

MOST_CONSTANT = 2**20  # elements of a constant that is evaluated to see what it is


class NotRowByRow(Exception):
    """A loop along the batch cannot run on each device's rows alone."""


def run(body: Body, jaxpr: Jaxpr, env: dict[Var, BatchValue]) -> list[BatchValue]:
    """Writes a flat jaxpr's equations into `body`; `env` has its inputs."""

    def read(atom: Atom) -> BatchValue:
        return literal(atom) if _jaxpr.is_literal(atom) else env[atom]

    outer = body.source
    for eqn in jaxpr.eqns:
        body.source = eqn
        ins = [read(atom) for atom in eqn.invars]
        outs = _apply(body, eqn, ins)
        _note_facts(eqn, ins, outs)
        env.update(zip(eqn.outvars, outs, strict=True))
    body.source = outer
    return [read(atom) for atom in jaxpr.outvars]


def _apply(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue]:
    name = eqn.primitive.name
    handler = body.rules.handlers.get(name)
    if handler is not None:
        outs = handler(body, eqn, ins)
        if outs is not None:
            return outs
    if _jaxpr.has_side_effects(eqn):
        return body.rules.effect(body, eqn, ins)
    if any(is_of_iteration(value.form) for value in ins):
        return on_own(body, eqn, ins)
    if not any(isinstance(value.form, Rows) for value in ins):
        return _on_whole(body, eqn, ins)
    outs = by_factor(body, eqn, ins, factors_of(eqn))
    if outs is not None:
        note_growth(body, eqn, ins, outs)
    if outs is None and name in body.rules.along:
        outs = body.rules.along[name](body, eqn, ins)
    if outs is None:
        found = elsewhere(body, eqn, ins)
        outs = None if found is None else run_factor(body, eqn, ins, *found[1:])
    return gathered(body, eqn, ins) if outs is None else outs


# -- whole values ------------------------------------------------------------------------------------


def _on_whole(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue]:
    avals = [out.aval for out in eqn.outvars]
    if len(avals) == 1 and avals[0].size > 1 and may_wait(eqn, ins):
        return [BatchValue(avals[0], FULL, {}, make=maker(body, eqn, ins))]
    outs = reduced_in_rows(body, eqn, ins) or on_whole(body, eqn, ins)
    note_sum(body, eqn, ins, outs)
    return outs


def _note_facts(eqn: Eqn, ins: list[BatchValue], outs: list[BatchValue]) -> None:
    """What is known of constants: which number fills them, and how to evaluate them."""
    if len(outs) != 1 or eqn.primitive.name in ("random_bits", "random_seed", "random_wrap"):
        return
    out = outs[0]
    if any(out is value for value in ins):
        return
    if _rules.costs(eqn, Cost.COPY, Cost.VIEW, Cost.PART, Cost.REPEAT, Cost.CAST):
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
    return plain and not extended and aval.size <= MOST_CONSTANT


# -- rows --------------------------------------------------------------------------------------------


def by_factor(
    body: Body, eqn: Eqn, ins: list[BatchValue], factors: Sequence[Factor]
) -> list[BatchValue] | None:
    """The equation on rows, along the factor that moves least; None if there is none."""
    found = cheapest(body, eqn, ins, factors)
    return None if found is None else run_factor(body, eqn, ins, *found[1:])


def gathered(body: Body, eqn: Eqn, ins: list[BatchValue], reason: str = "") -> list[BatchValue]:
    """The equation on whole operands, their rows gathered; results are cut into rows again."""
    reason = reason or f"no rule for {eqn.primitive.name} along the batch"
    outs = on_whole(body, eqn, ins, reason)
    cut = [v for v in ins if isinstance(v.form, Rows)]
    return [_cut_again(body, out, cut) for out in outs]


def _cut_again(body: Body, out: BatchValue, cut: Sequence[BatchValue]) -> BatchValue:
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
            return BatchValue(out.aval, rows, {rows: body.at(out, rows), FULL: out.atoms[FULL]})
    return out


# -- values of single rows -----------------------------------------------------------------------------


def on_own(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue]:
    """An equation on values of one row of the batch, inside a loop along it."""
    form = _partial_sum(eqn, ins) or OWN
    atoms = [
        v.atoms[v.form]
        if is_of_iteration(v.form)
        else body.at(v, FULL, "a loop along the batch reads it")
        for v in ins
    ]
    outs = body.emit(eqn, atoms, [FULL] * len(eqn.outvars))
    return values_of(eqn.outvars, [form] * len(outs), outs)


# [Note: sums of a loop over rows]
# In a loop along the batch, each device runs the iterations of its own rows, and what an iteration changes
# is summed over the devices behind the loop. That is the whole loop's result only if each carry's next value
# is its own previous one, once, plus or minus terms that no carry's changes reach: then all iterations'
# terms commute. So a partial sum knows its carry; two of them are never added, none is negated, scaled,
# selected, or read, and none comes out in another carry's place or is returned by an iteration. Where that
# does not hold, all devices run all iterations (test_loops.py).


def _partial_sum(eqn: Eqn, ins: list[BatchValue]) -> Form | None:
    """The partial sum that the equation's result is; None if it reads none."""
    sums = [value.form for value in ins if isinstance(value.form, PartialSum)]
    if not sums:
        return None
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    adds = name in _rules.ADDS or (name == "sub" and ins[0].form is sums[0])
    # To the same dtype if a Python number becomes an array.
    stays = name == "convert_element_type" and out.dtype == ins[0].aval.dtype
    if len(sums) > 1 or not (adds or stays):
        raise NotRowByRow
    return sums[0]


def _identity(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue]:
    return ins


def _over_vmapped(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue]:
    """A collective over an axis that `jax.vmap` has made a dim: a plain reduction of that dim."""
    reduce = functools.partial(_VMAPPED[eqn.primitive.name], axis=tuple(eqn.params["axes"]))
    return [_instead(body, reduce, value) for value in ins]


def _instead(body: Body, fn: Callable[[jax.Array], jax.Array], value: BatchValue) -> BatchValue:
    """`fn(value)` in the place of the equation."""
    shape = jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype)
    traced = _jaxpr.trace_here(fn, shape)
    flat, _ = _rewrite.flatten_calls(traced.jaxpr, traced.consts)
    eqns = [e.replace(source_info=body.source.source_info) for e in flat.eqns]
    (out,) = run(body, flat._replace(eqns=eqns), {flat.invars[0]: value})
    return out


def _reshape_permuted(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue] | None:
    """A reshape that permutes dims first, as gradients of vmapped convolutions do, is two equations."""
    order, sizes = eqn.params.get("dimensions"), eqn.params["new_sizes"]
    if order is None or not isinstance(ins[0].form, Rows):
        return None
    return [_instead(body, lambda x: jax.lax.transpose(x, order).reshape(sizes), ins[0])]


def _lax_sum(x: jax.Array, axis: tuple[int, ...]) -> jax.Array:
    return jnp.sum(x, axis, dtype=x.dtype)


_VMAPPED: dict[str, Callable[..., jax.Array]] = {"psum": _lax_sum, "pmax": jnp.max, "pmin": jnp.min}


def _constrain(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue] | None:
    """Kept: it may speak of automatic axes; of data axes the rest of jzero drops it."""
    (value,) = ins
    if is_of_iteration(value.form):
        return ins
    form = value.form
    (out,) = body.emit(eqn, [body.at(value, form)], [form])
    return [BatchValue(value.aval, form, {form: out})]


def _sum(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue] | None:
    """A sum over dims of size 1 is none: what waits for the devices' sum may go on waiting behind it."""
    (value,), axes = ins, eqn.params["axes"]
    if value.form is not FULL or value.is_lazy or any(value.aval.shape[d] != 1 for d in axes):
        return None
    out = eqn.outvars[0].aval
    (atom,) = body.inline(_squeezed, (axes,), value.atoms[FULL])
    return [BatchValue(out, FULL, {FULL: atom})]


def _squeezed(axes: tuple[int, ...], x: jax.Array) -> jax.Array:
    return jax.lax.squeeze(x, axes)


def _barrier(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue]:
    forms = [value.at_hand for value in ins]
    if any(isinstance(form, PartialSum) for form in forms):
        raise NotRowByRow
    atoms = body.emit(eqn, [body.at(v, f) for v, f in zip(ins, forms, strict=True)], forms)
    return values_of(eqn.outvars, forms, atoms)


def _refuse_shard_map(body: Body, eqn: Eqn, ins: list[BatchValue]) -> list[BatchValue]:
    raise shard_map_error(f" ({_jaxpr.summary(eqn)})")


def shard_map_error(where: str = "") -> StepError:
    """For a step that calls `jax.shard_map`."""
    return StepError(message(
        "shard_train_step", f"the step calls jax.shard_map itself{where}",
        "jzero runs the step inside a shard_map of its own, over the same devices.",
        "Write that part for the whole batch, without shard_map; or write the whole step for one device, "
        "with collectives, and pass axis_name=."))  # fmt: skip


HANDLERS: dict[str, BatchRule] = {
    **dict.fromkeys(_rules.IDENTITIES, _identity),
    "sharding_constraint": _constrain,
    "optimization_barrier": _barrier,
    "reduce_sum": _sum,
    "reshape": _reshape_permuted,
    "shard_map": _refuse_shard_map,
    **dict.fromkeys(["psum", "pmax", "pmin"], _over_vmapped),
}
