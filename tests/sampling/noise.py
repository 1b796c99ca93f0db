"""What rounding alone does to a program: one device's step, with each rounded value an ulp to either side.

Random rounding, as of Verrou and CADNA: what moves with it is not determined by the program. It stands for
another order of addition, a fused product, and (in casts to a narrower float, an ulp of that float) for
rounding parts of a sum in the place of the whole.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

NUM_SIGNS = 4099
# What rounds no value.
EXACT = {
    *(
        "broadcast_in_dim",
        "concatenate",
        "copy",
        "dynamic_slice",
        "dynamic_update_slice",
        "gather",
        "pad",
    ),
    *(
        "reshape",
        "rev",
        "select_n",
        "slice",
        "sort",
        "split",
        "squeeze",
        "top_k",
        "transpose",
        "scatter",
    ),
    *(
        "abs",
        "neg",
        "sign",
        "max",
        "min",
        "clamp",
        "floor",
        "round",
        "reduce_max",
        "reduce_min",
        "cummax",
    ),
    *("real", "imag", "complex", "iota", "bitcast_convert_type", "optimization_barrier"),
}
INLINED = {"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint"}


def signs(seed: int) -> np.ndarray:
    """-1, 0 or 1 for each rounded element, repeated after so many."""
    return np.random.default_rng(seed).integers(-1, 2, NUM_SIGNS).astype(np.float32)


def randomly_rounded(step: Callable[..., Any]) -> Callable[..., Any]:
    """`f(signs, *args)`: the step, with each value that it rounds moved by an ulp in that direction."""

    def rounded(signs: jax.Array, *args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
        outs = _run(closed, jax.tree.leaves(args), _Rounding(signs))
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    return rounded


class _Rounding:
    """Moves values, each by signs that begin elsewhere."""

    def __init__(self, signs: jax.Array):
        self.signs, self.count = signs, 0

    def __call__(self, value: Any) -> Any:
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return value
        self.count += 1
        eps = jnp.finfo(value.dtype).eps
        signs = jnp.resize(jnp.roll(self.signs, 97 * self.count), value.shape)
        return value * (1 + signs.astype(value.dtype) * jnp.asarray(eps, value.dtype))


def _run(closed: Any, args: list[Any], rounding: _Rounding) -> list[Any]:
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values |= zip(closed.jaxpr.invars, args, strict=True)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for eqn in closed.jaxpr.eqns:
        outs = _equation(eqn, [read(atom) for atom in eqn.invars], rounding)
        values |= zip(eqn.outvars, outs, strict=True)
    return [read(atom) for atom in closed.jaxpr.outvars]


def _equation(eqn: Any, args: list[Any], rounding: _Rounding) -> list[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name in INLINED:
        return _run(_closed(params.get("call_jaxpr", params.get("jaxpr"))), args, rounding)
    if name == "cond":
        branches = [_function(branch, rounding) for branch in params["branches"]]
        return list(lax.switch(args[0], branches, *args[1:]))
    if name == "while":
        return _while(params, args, rounding)
    if name == "scan":
        return _scan(params, args, rounding)
    outs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
    outs = list(outs) if eqn.primitive.multiple_results else [outs]
    return outs if name in EXACT or _widens(eqn) else [rounding(out) for out in outs]


def _closed(jaxpr: Any) -> Any:
    return jaxpr if hasattr(jaxpr, "consts") else core.ClosedJaxpr(jaxpr, [])


def _function(closed: Any, rounding: _Rounding) -> Callable[..., list[Any]]:
    return lambda *args: _run(closed, list(args), rounding)


def _while(params: Any, args: list[Any], rounding: _Rounding) -> list[Any]:
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    goes_on, turn = (
        _function(params["cond_jaxpr"], rounding),
        _function(params["body_jaxpr"], rounding),
    )
    of_cond, of_body = args[:num_cond], args[num_cond : num_cond + num_body]
    return list(
        lax.while_loop(
            lambda carry: goes_on(*of_cond, *carry)[0],
            lambda carry: turn(*of_body, *carry),
            args[num_cond + num_body :],
        )
    )


def _scan(params: Any, args: list[Any], rounding: _Rounding) -> list[Any]:
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    turn = _function(params["jaxpr"], rounding)

    def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = turn(*args[:num_consts], *carry, *x)
        return outs[:num_carry], outs[num_carry:]

    carry, xs = args[num_consts : num_consts + num_carry], args[num_consts + num_carry :]
    carry, ys = lax.scan(body, carry, xs, length=params["length"], reverse=params["reverse"])
    return [*carry, *ys]


def _widens(eqn: Any) -> bool:
    """Whether it is a cast that rounds nothing."""
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    return not jnp.issubdtype(old, jnp.inexact) or jnp.promote_types(old, new) == new
