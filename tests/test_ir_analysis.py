"""An analysis in ten lines, over every kind of program in a program: of which arguments a value is made."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jzero.ir._dataflow import forward
from jzero.ir._regions import Region


def made_of(step, w, x):
    """Each equation's name, and the arguments that its results depend on: `sin(x)`."""
    traced = jax.make_jaxpr(step)(w, x)
    program = Region(traced.jaxpr, traced.consts)
    nothing, names = frozenset[str](), map(frozenset, "wx")
    starts = zip([(program, v) for v in program.jaxpr.invars], names, strict=True)

    def of_operands(region, eqn, facts):
        """Of an equation that holds no programs; one that depends on what it computes asks `_rules`."""
        return [nothing.union(*facts)] * len(eqn.outvars)

    # Values that may be one or another: of two branches, of the turns of a loop.
    either = frozenset.union
    facts = forward(program, dict(starts), of_operands, either, nothing)
    return {
        f"{eqn.primitive.name}({''.join(sorted(facts.get((region, out), '')))})"
        for region, eqn in program.walk()
        for out in eqn.outvars
    }


@jax.custom_vjp
def rounded(x):
    return jnp.round(x)


rounded.defvjp(lambda x: (rounded(x), None), lambda _, g: (jnp.cos(g),))


def scanned(w, x):
    """`tan` has the first element of a turn's carry alone, which the turn before made of w and x."""
    return lax.scan(lambda c, row: (c * jnp.sin(row), jnp.tan(c)), w[0], x)


def looped(w, x):
    """The number of turns depends on w, and so does what they make of x."""
    start = (jnp.zeros(()), x, x[0])
    return lax.while_loop(
        lambda c: c[0] < w[0], lambda c: (c[0] + 1, jnp.sin(c[1]), jnp.tan(x[0])), start
    )


def counted(w, x):
    """That number known, x is all that there is."""
    return lax.fori_loop(0, 3, lambda i, c: (jnp.sin(c[0]), c[1] * jnp.tan(c[0])), (x, w))


def branched(w, x):
    return jnp.exp(lax.cond(w[0] > 0, jnp.sin, jnp.tan, x))


def again(w, x):
    return jax.grad(lambda w: jax.checkpoint(lambda w: jnp.sum(jnp.sin(x) * jnp.tan(w)))(w))(w)


def ruled(w, x):
    return jnp.tan(rounded(w)), rounded(x), jax.grad(lambda x: jnp.sum(rounded(x) * w))(x)


EXPECTED = {
    scanned: "sin(x) tan(wx) scan(wx)",
    looped: "lt(w) sin(wx) tan(x) while(w) while(wx)",
    counted: "sin(x) tan(x) mul(wx)",
    branched: "gt(w) sin(x) tan(x) cond(wx) exp(wx)",
    again: "sin(x) tan(w)",
    ruled: "tan(w) round(w) round(x) cos(w)",
}


@pytest.mark.parametrize("step", EXPECTED)
def test_what_depends_on_which_argument(step):
    found, asked = made_of(step, jnp.ones(3), jnp.ones(3)), EXPECTED[step].split()
    names = {each.partition("(")[0] for each in asked}
    assert {each for each in found if each.partition("(")[0] in names} == {*asked}
