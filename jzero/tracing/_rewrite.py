# SPDX-License-Identifier: Apache-2.0
"""Rewrites jaxprs: inlines calls, cuts parts out, drops equations, takes the body of a `shard_map`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero.tracing import _jaxpr, _lines
from jzero.tracing._jaxpr import Atom, Eqn, Jaxpr, Var


class Flat(NamedTuple):
    """A jaxpr of jzero's own, put together from others: what `_types.Jaxpr` asks for, and no more."""

    constvars: list[Var]
    invars: list[Var]
    outvars: list[Atom]
    eqns: list[Eqn]


def flatten_calls(
    jaxpr: Jaxpr, consts: Sequence[Any], opened: Callable[[Eqn], bool] = lambda eqn: False
) -> tuple[Flat, list[Any]]:
    """The jaxpr with every call (`jit`, custom derivatives) replaced by the equations inside it.

    Loops stay, and `jax.checkpoint` bodies of a backward pass that are not `opened`. Equations keep their
    scopes.
    """
    constvars, all_consts, eqns = list(jaxpr.constvars), list(consts), []

    def inline(inner: Jaxpr, env: dict[Var, Atom], outer: Eqn | None) -> list[Atom]:
        def read(atom: Atom) -> Atom:
            return atom if _jaxpr.is_literal(atom) else env[atom]

        for eqn in inner.eqns:
            new = eqn.replace(invars=[read(atom) for atom in eqn.invars])
            if outer is not None:
                source = _lines.with_line_of(eqn, outer).source_info
                stack = outer.source_info.name_stack + source.name_stack
                new = new.replace(source_info=source.replace(name_stack=stack))
            stays = _jaxpr.is_rematted(eqn) and not opened(eqn)
            call, args = None if stays else _jaxpr.call_parts(eqn), new.invars
            if call is None and (call := _jaxpr.branch_of_steps(eqn)) is not None:
                args = args[1:]
            if call is None:
                # Fresh variables, because a jaxpr may be called twice.
                fresh = [_jaxpr.new_var(var) for var in eqn.outvars]
                eqns.append(new.replace(outvars=fresh))
                env |= zip(eqn.outvars, fresh, strict=True)
            else:
                body, body_consts = call
                fresh = [_jaxpr.new_var(var) for var in body.constvars]
                constvars.extend(fresh)
                all_consts.extend(body_consts)
                ins = zip([*body.constvars, *body.invars], [*fresh, *args], strict=True)
                env |= zip(eqn.outvars, inline(body, dict(ins), new), strict=True)
        return [read(atom) for atom in inner.outvars]

    outvars = inline(jaxpr, {var: var for var in [*jaxpr.constvars, *jaxpr.invars]}, None)
    return Flat(constvars, list(jaxpr.invars), outvars, eqns), all_consts


def select_branches(
    jaxpr: Flat, consts: Sequence[Any], cheap: Callable[[Eqn], bool]
) -> tuple[Flat, list[Any]]:
    """The jaxpr with `cond`s of two branches replaced by both branches and `select_n`s of their results.

    Only if all equations of both branches are `cheap` and without side effects.
    """
    constvars, all_consts, eqns = list(jaxpr.constvars), list(consts), []
    for eqn in jaxpr.eqns:
        branches = _jaxpr.cond_parts(eqn) if eqn.primitive.name == "cond" else []
        bodies = [select_branches(*flatten_calls(*branch), cheap) for branch in branches]
        inner = [e for body, _ in bodies for e in body.eqns]
        if len(bodies) != 2 or any(_jaxpr.has_side_effects(e) or not cheap(e) for e in inner):
            eqns.append(eqn)
            continue
        index, *operands = eqn.invars
        returned = []
        for body, body_consts in bodies:
            fresh = [_jaxpr.new_var(var) for var in body.constvars]
            constvars += fresh
            all_consts += body_consts
            env = dict(zip([*body.constvars, *body.invars], [*fresh, *operands], strict=True))
            eqns += [e.replace(invars=_renamed(e.invars, env)) for e in body.eqns]
            returned.append(_renamed(body.outvars, env))
        for out, no, yes in zip(eqn.outvars, *returned, strict=True):
            eqns.append(_jaxpr.equation(lax.select_n_p, [index, no, yes], [out], eqn))
    return Flat(constvars, jaxpr.invars, jaxpr.outvars, eqns), all_consts


def _renamed(atoms: Sequence[Atom], env: Mapping[Var, Atom]) -> list[Atom]:
    return [atom if _jaxpr.is_literal(atom) else env.get(atom, atom) for atom in atoms]


class Excerpt(NamedTuple):
    """A function cut out of a jaxpr; `reads` are the variables that are its arguments."""

    reads: list[Var]
    run: Callable[..., list[Any]]


def excerpt(
    jaxpr: Jaxpr, wanted: Sequence[Atom], given: Sequence[Var] = (), effects: bool = True
) -> Excerpt:
    """The part of `jaxpr` that computes `wanted` from `given`, any of its variables; see `behind`."""
    eqns, needed = behind(jaxpr.eqns, wanted, given, effects)
    reads = [var for var in [*jaxpr.constvars, *jaxpr.invars, *given] if var in needed]
    whole = _jaxpr.replaced(jaxpr, constvars=[], invars=reads, outvars=list(wanted), eqns=eqns)
    return Excerpt(reads, lambda *args: _jaxpr.evaluate(whole, (), *args))


def boxed(eqns: Sequence[Eqn], reads: Sequence[Var], gives: Sequence[Var]) -> Eqn:
    """One call in the place of equations that read `reads` and compute `gives`."""
    new = {var: _jaxpr.new_var(var) for var in [*reads, *(x for eqn in eqns for x in eqn.outvars)]}
    body = [
        eqn.replace(invars=_renamed(eqn.invars, new), outvars=[new[x] for x in eqn.outvars])
        for eqn in eqns
    ]

    def within(inner: Jaxpr) -> Jaxpr:
        return _jaxpr.replaced(
            inner, invars=[new[x] for x in reads], outvars=[new[x] for x in gives], eqns=body,
            effects=_jaxpr.effects_of(body), debug_info=inner.debug_info.with_unknown_names(),  # type: ignore[attr-defined]
        )  # fmt: skip

    # A call with as many operands and results, whose body is replaced: its parameters have no types.
    run = jax.jit(lambda *_: [jnp.zeros(()) for _ in gives])
    (call,) = _jaxpr.trace_here(run, *(0.0 for _ in reads)).jaxpr.eqns
    call = _jaxpr.with_inner(call, within)
    return call.replace(
        invars=[*reads], outvars=[*gives], effects=_jaxpr.effects_of(body),
        source_info=eqns[0].source_info,
    )  # fmt: skip


def without_unread(
    eqns: Sequence[Eqn], wanted: Sequence[Atom], costs: Callable[[Eqn], bool]
) -> list[Eqn]:
    """Drops the equations with `costs` that neither `wanted` nor an effect needs, and what reads them.

    Other unneeded equations stay: that a loss reads a parameter tells its role, even if nobody reads the
    loss.
    """
    live = set(map(id, behind(eqns, wanted)[0]))
    gone: set[Atom] = set()
    kept = []
    for eqn in eqns:
        reads = any(not _jaxpr.is_literal(atom) and atom in gone for atom in eqn.invars)
        if id(eqn) not in live and (reads or costs(eqn)):
            gone.update(eqn.outvars)
        else:
            kept.append(eqn)
    return kept


def without(jaxpr: Flat, instead: Callable[[Eqn], Sequence[Atom] | None]) -> Flat:
    """Drops the equations for whose results `instead` returns other atoms; None keeps an equation."""
    new, eqns = dict[Var, Atom](), list[Eqn]()
    for eqn in jaxpr.eqns:
        eqn = eqn.replace(invars=_renamed(eqn.invars, new))
        found = instead(eqn)
        if found is None:
            eqns.append(eqn)
        else:
            new |= zip(eqn.outvars, found, strict=True)
    return jaxpr._replace(outvars=_renamed(jaxpr.outvars, new), eqns=eqns)


def without_repeats(jaxpr: Flat, may: Callable[[Eqn], bool]) -> Flat:
    """Drops repeated equations, if they `may` be dropped."""
    seen = dict[Any, list[Var]]()

    def first(eqn: Eqn) -> list[Var] | None:
        key = _what_it_computes(eqn) if may(eqn) else None
        found = eqn.outvars if key is None else seen.setdefault(key, eqn.outvars)
        return None if found is eqn.outvars else found

    return without(jaxpr, first)


def _what_it_computes(eqn: Eqn) -> Any:
    """A key that is equal for equations that compute the same; None if a parameter cannot be hashed."""
    ins = [
        (np.asarray(a.val).tobytes(), a.aval.dtype, a.aval.shape) if _jaxpr.is_literal(a) else a
        for a in eqn.invars
    ]
    key = eqn.primitive, *ins, *sorted(eqn.params.items())
    try:
        hash(key)
    except TypeError:
        return None
    return key, *(str(out.aval) for out in eqn.outvars)


def behind(
    eqns: Sequence[Eqn], wanted: Sequence[Atom], known: Collection[Var] = (), effects: bool = True
) -> tuple[list[Eqn], set[Var]]:
    """The equations that compute `wanted` from `known`, in order, and all variables that they read.

    With `effects`, all equations with side effects are among them.
    """
    needed, found = {atom for atom in wanted if not _jaxpr.is_literal(atom)}, []
    for eqn in reversed(eqns):
        made = needed.intersection(eqn.outvars)
        acts = effects and eqn.effects and _jaxpr.has_side_effects(eqn)
        if acts or made.difference(known):
            found.append(eqn)
            needed.update(_jaxpr.variables_read(eqn))
    return found[::-1], needed


class DeviceBody(NamedTuple):
    jaxpr: Jaxpr  # `axis_index` is left only inside loops and branches.
    used: set[int]  # Indices of the function's arguments that something reads.
    axes: list[str]  # The mesh axes of the index inputs, which follow the others.
    constants: list[Any]  # All arrays that are neither arguments nor in the jaxpr's text.
    run: Callable[
        [Sequence[Any], Sequence[Any]], list[Any]
    ]  # (arguments, indices); unused ones may be None
    consts: list[Any]  # Of the jaxpr's `constvars`.
    inputs: list[
        int | tuple[Any]
    ]  # For each other input the argument's index, or its value in a tuple.


def program_key(jaxpr: Any) -> Hashable | None:
    """Equal for jaxprs that compute the same; None if nobody can tell, as for one with constants."""
    text = str(jaxpr)
    if re.search(r"lambda\s+[^;\s]", text):  # Constants are printed before a semicolon.
        return None
    # JAX hides addresses of functions (callbacks), and NumPy shortens large arrays: these are in the key, too
    # (test_offload_params.py::test_programs_that_differ_in_a_callback_alone).
    unclear = re.compile(r" at 0x|\.\.\.")
    if not unclear.search(text):
        return text
    inner = _jaxpr.walk(_jaxpr.open_jaxpr(jaxpr)[0])
    eqns = [eqn for eqn in inner if eqn.primitive.name not in _jaxpr.CALLS]
    plain = [p for eqn in eqns for p in eqn.params.values() if not _jaxpr.jaxprs_in([p])]
    key = (text, *(p for p in plain if unclear.search(str(p))))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def body_of_shard_map(fn: Callable[..., Any], *args: Any) -> DeviceBody:
    """The body of `fn`, which consists of one `jax.shard_map`."""
    closed = jax.make_jaxpr(fn)(*args)
    outer, outer_consts = _jaxpr.open_jaxpr(closed)
    (eqn,) = outer.eqns
    flat, consts = flatten_calls(*_jaxpr.open_jaxpr(eqn.params["jaxpr"]))
    eqns, read = behind(flat.eqns, flat.outvars)
    asked = [e for e in eqns if e.primitive.name == "axis_index"]
    jaxpr = _jaxpr.replaced(
        outer,
        constvars=flat.constvars,
        invars=[*flat.invars, *(e.outvars[0] for e in asked)],
        outvars=flat.outvars,
        eqns=[e for e in eqns if e not in asked],
        debug_info=closed.jaxpr.debug_info.with_unknown_names(),
    )
    # Constants may have become operands of the `shard_map`.
    known = dict(zip(outer.constvars, outer_consts, strict=True))
    places = {var: i for i, var in enumerate(outer.invars)}
    pairs = zip(eqn.invars, flat.invars, strict=True)
    used = {
        places[a] for a, var in pairs if not _jaxpr.is_literal(a) and a in places and var in read
    }

    def input_of(atom: Atom) -> int | tuple[Any]:
        if _jaxpr.is_literal(atom):
            return (_jaxpr.literal(atom),)
        return (known[atom],) if atom in known else places[atom]

    inputs = [*map(input_of, eqn.invars)]

    def run(arguments: Sequence[Any], indices: Sequence[Any]) -> list[Any]:
        values = [x[0] if isinstance(x, tuple) else arguments[x] for x in inputs]
        return _jaxpr.evaluate(jaxpr, consts, *values, *indices)

    asks = [e.params["axis_name"] for e in asked]
    constants = [*outer_consts, *consts]
    return DeviceBody(jaxpr, used, asks, constants, run, consts, inputs)
