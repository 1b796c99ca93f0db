"""Loops: each operation gives a loop that computes the same, to the bit, in every form of a `scan`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jzero.ir._loops import Scan, ScanBuilder, opened, pipelined
from jzero.tracing import _jaxpr

pytestmark = pytest.mark.usefixtures("float64")

LENGTHS = [1, 2, 5]


def values(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape)) for shape in shapes]


def iteration(w: Any, carry: Any, x: Any) -> tuple[Any, Any]:
    a, b = carry
    made = jnp.tanh(x["x"] @ w) * x["y"]
    return (a * 0.5 + made, b + jnp.sum(made, axis=0)), {"z": a + made, "row": x["y"]}


def both(length: int, reverse: bool) -> tuple[Callable[..., Any], list[Any]]:
    w, a, b, x, y = values(length, (4, 4), (3, 4), (4,), (length, 3, 4), (length, 3, 4))

    def fn(w: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
        body = functools.partial(iteration, w)
        return lax.scan(body, (a, b), {"x": x, "y": y}, reverse=reverse)

    return fn, [w, a, b, x, y]


def no_carry(length: int, reverse: bool) -> tuple[Callable[..., Any], list[Any]]:
    x, w = values(length, (length, 3), (3,))
    return lambda x, w: lax.scan(lambda c, x: (c, (x * w, w)), (), x, reverse=reverse), [x, w]


def no_stacks(length: int, reverse: bool) -> tuple[Callable[..., Any], list[Any]]:
    (x,) = values(length, (3,))
    body = lambda c, _: ((jnp.sin(c[0]) + c[1], c[0]), None)  # noqa: E731
    return lambda x: lax.scan(body, (x, x), None, length, reverse), [x]


def nested(length: int, reverse: bool) -> tuple[Callable[..., Any], list[Any]]:
    x, c = values(length, (length, 2, 3), (3,))

    def body(c: Any, x: Any) -> tuple[Any, Any]:
        c, y = lax.scan(lambda c, x: (c * 0.9 + x, jnp.cos(c) * x), c, x, reverse=not reverse)
        return c + 1, (y, c)

    return lambda x, c: lax.scan(body, c, x, reverse=reverse), [x, c]


def through(length: int, reverse: bool) -> tuple[Callable[..., Any], list[Any]]:
    """A carry that an iteration's slice becomes, one that stays, and literals."""
    x, c = values(length, (length, 3), (3,))
    body = lambda c, x: ((x, c[1], 2.0), (c[0], x, 1.0))  # noqa: E731
    return lambda x, c: lax.scan(body, (c, c, 1.0), x, reverse=reverse), [x, c]


FORMS = [both, no_carry, no_stacks, nested, through]


def check(
    fn: Callable[..., Any], args: list[Any], change: Callable[[Any, Scan], list[Any]]
) -> None:
    """`change(jaxpr, scan)` gives the equations in the place of the last loop of `fn`."""
    traced = _jaxpr.trace_here(fn, *args)
    jaxpr = traced.jaxpr
    place = max(i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "scan")
    eqns = [*jaxpr.eqns]
    eqns[place : place + 1] = change(jaxpr, Scan.of(eqns[place]))
    new = _jaxpr.replaced(jaxpr, eqns=eqns)
    run = lambda program: jax.jit(lambda *xs: _jaxpr.evaluate(program, traced.consts, *xs))(*args)  # noqa: E731
    for was, now in zip(run(jaxpr), run(new), strict=True):
        assert was.dtype == now.dtype
        np.testing.assert_array_equal(was, now)


forms = pytest.mark.parametrize("form", FORMS)
lengths = pytest.mark.parametrize("length", LENGTHS)
directions = pytest.mark.parametrize("reverse", [False, True])


@forms
@lengths
@directions
def test_taken_apart_and_put_together(form, length, reverse):
    fn, args = form(length, reverse)
    check(fn, args, lambda jaxpr, scan: ScanBuilder(scan).build().equations())


@pytest.mark.slow(but=10)
@forms
@lengths
@directions
def test_opened_it_has_no_stacks(form, length, reverse):
    def change(jaxpr, scan):
        found = opened(scan)
        assert not found.xs
        assert not found.ys
        return found.equations()

    fn, args = form(length, reverse)
    check(fn, args, change)


@lengths
@directions
@pytest.mark.parametrize(
    ("form", "name"), [(both, "dot_general"), (no_carry, "mul"), (through, "")]
)
def test_pipelined_an_iteration_makes_what_the_next_one_needs(form, name, length, reverse):
    def change(jaxpr, scan):
        ahead = [out for eqn in scan.eqns if eqn.primitive.name == name for out in eqn.outvars][:1]
        found = pipelined(scan, ahead)
        assert found.length == length - 1
        for eqns, num in [(found.before, 1), (found.eqns, 1), (found.after, 0)]:
            names = [eqn.primitive.name for eqn in eqns]
            assert name != "dot_general" or names.count(name) == num
        return found.equations()

    fn, args = form(length, reverse)
    check(fn, args, change)


def test_turns_that_print_keep_their_order(capfd):
    def body(c: Any, x: Any) -> tuple[Any, Any]:
        jax.debug.callback(lambda c: print(int(c)), c, ordered=True)
        return c + 1, jnp.sin(x)

    def printed(change: Callable[[Scan], list[Any]]) -> list[str]:
        traced = _jaxpr.trace_here(lambda x: lax.scan(body, 0, x), jnp.ones(3))
        (eqn,) = traced.jaxpr.eqns
        new = _jaxpr.replaced(traced.jaxpr, eqns=change(Scan.of(eqn)))
        jax.block_until_ready(
            jax.jit(lambda x: _jaxpr.evaluate(new, traced.consts, x))(jnp.ones(3))
        )
        jax.effects_barrier()
        return capfd.readouterr().out.split()

    def sine(scan: Scan) -> list[Any]:
        return [eqn.outvars[0] for eqn in scan.eqns if eqn.primitive.name == "sin"]

    assert printed(lambda scan: scan.equations()) == ["0", "1", "2"]
    assert printed(lambda scan: opened(scan).equations()) == ["0", "1", "2"]
    assert printed(lambda scan: pipelined(scan, sine(scan)).equations()) == ["0", "1", "2"]
