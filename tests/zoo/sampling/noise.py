"""What rounding alone does to a program: one device's step, with its values rounded otherwise.

Random rounding, as of Verrou and CADNA: each rounded value moves an ulp to either side; what moves with it
is not determined by the program. It stands for another order of addition, a fused product, and (in casts to a
narrower float, an ulp of that float) for rounding parts of a sum in the place of the whole.

Sums in parts: as they are, but in another order. Random rounding moves rows apart that are equal, and so it
never meets what only equal rows do: a variance of exactly 0, where the gradient of its root is NaN.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero.tracing import _jaxpr

NUM_SIGNS = 4099
# What rounds no value.
EXACT = set(
    "abs bitcast_convert_type broadcast_in_dim clamp complex concatenate copy cummax cummin dynamic_slice "
    "dynamic_update_slice floor gather imag iota max min neg optimization_barrier pad real reduce_max "
    "reduce_min reshape rev round scatter select_n sign slice sort split squeeze top_k transpose".split()
)


def signs(seed: int) -> np.ndarray:
    """-1, 0 or 1 for each rounded element, repeated after so many."""
    return np.random.default_rng(seed).integers(-1, 2, NUM_SIGNS).astype(np.float32)


def randomly_rounded(step: Callable[..., Any]) -> Callable[..., Any]:
    """`f(signs, *args)`: the step, with each value that it rounds moved by an ulp in that direction."""

    def rounded(signs: jax.Array, *args: Any) -> Any:
        return _Equations(_RandomRounding(signs)).step(step, *args)

    return rounded


def summed_in_parts(step: Callable[..., Any], num_parts: int) -> Callable[..., Any]:
    """The step, with each sum made of the sums of so many parts, added one after the other."""

    def total(eqn: Any, *args: Any) -> list[Any]:
        if eqn.primitive.name != "reduce_sum" or not eqn.params["axes"]:
            return _jaxpr.bind(eqn, *args)
        parts = jnp.array_split(args[0], num_parts, min(eqn.params["axes"]))
        # XLA would make one sum of them again, and a product of the sum of what is all equal.
        sums = [_jaxpr.bind(eqn, lax.optimization_barrier(x))[0] for x in parts if x.size]
        return [functools.reduce(operator.add, sums)]

    return functools.partial(_Equations(total).step, step)


class _RandomRounding:
    """Moves what an equation rounds, each time by signs that begin elsewhere."""

    def __init__(self, signs: jax.Array):
        self.signs, self.count = signs, 0

    def __call__(self, eqn: Any, *args: Any) -> list[Any]:
        outs = _jaxpr.bind(eqn, *args)
        exact = eqn.primitive.name in EXACT or _widens(eqn)
        return outs if exact else [self.moved(out) for out in outs]

    def moved(self, value: Any) -> Any:
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return value
        self.count += 1
        eps = jnp.asarray(jnp.finfo(value.dtype).eps, value.dtype)
        signs = jnp.resize(jnp.roll(self.signs, 97 * self.count), value.shape)
        return value * (1 + signs.astype(value.dtype) * eps)


class _Equations:
    """Runs equations, those of calls, loops and branches too, each as `run(eqn, *args)` has it."""

    def __init__(self, run: Callable[..., list[Any]]):
        self.run = run

    def step(self, step: Callable[..., Any], *args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
        outs = self.function(*_jaxpr.open_jaxpr(closed))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    def function(self, jaxpr: Any, consts: Sequence[Any]) -> Callable[..., list[Any]]:
        def run(*args: Any) -> list[Any]:
            values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

            def read(atom: Any) -> Any:
                return atom.val if _jaxpr.is_literal(atom) else values[atom]

            for eqn in jaxpr.eqns:
                values |= zip(eqn.outvars, self.equation(eqn, *map(read, eqn.invars)), strict=True)
            return [read(atom) for atom in jaxpr.outvars]

        return run

    def equation(self, eqn: Any, *args: Any) -> list[Any]:
        if call := _jaxpr.call_parts(eqn):
            return self.function(*call)(*args)
        if eqn.primitive.name == "cond":
            branches = [self.function(*branch) for branch in _jaxpr.cond_parts(eqn)]
            return list(lax.switch(args[0], branches, *args[1:]))
        if eqn.primitive.name == "while":
            return self.while_loop(_jaxpr.while_parts(eqn), args)
        if eqn.primitive.name == "scan":
            return self.scan(_jaxpr.scan_parts(eqn), args)
        return self.run(eqn, *args)

    def while_loop(self, loop: _jaxpr.WhileParts, args: Sequence[Any]) -> list[Any]:
        goes_on = self.function(loop.cond, loop.cond_consts)
        turn = self.function(loop.body, loop.body_consts)
        num = loop.num_cond_consts + loop.num_body_consts
        of_cond, of_body = args[: loop.num_cond_consts], args[loop.num_cond_consts : num]

        def body(carry: list[Any]) -> list[Any]:
            on = goes_on(*of_cond, *carry)[0]  # of each row, where the loop is of rows, by vmap
            on = [jnp.expand_dims(on, range(on.ndim, jnp.ndim(leaf))) for leaf in carry]
            return list(map(jnp.where, on, turn(*of_body, *carry), carry))

        return lax.while_loop(lambda c: jnp.any(goes_on(*of_cond, *c)[0]), body, list(args[num:]))

    def scan(self, loop: _jaxpr.ScanParts, args: Sequence[Any]) -> list[Any]:
        turn = self.function(loop.body, loop.body_consts)
        num = loop.num_consts + loop.num_carry

        def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = turn(*args[: loop.num_consts], *carry, *x)
            return outs[: loop.num_carry], outs[loop.num_carry :]

        init, xs = list(args[loop.num_consts : num]), list(args[num:])
        carry, ys = lax.scan(body, init, xs, length=loop.length, reverse=loop.reverse)
        return [*carry, *ys]


def _widens(eqn: Any) -> bool:
    """Whether it is a cast that rounds nothing."""
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    return not jnp.issubdtype(old, jnp.inexact) or jnp.promote_types(old, new) == new
