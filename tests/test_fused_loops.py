"""Loops over layers take over what stands around them: the values stay, and stacks are read in slices."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jzero.ir._regions import variables
from jzero.sharding.cut import _fused_loops, _growing_loop, _over_iterations
from jzero.tracing import _jaxpr, _lines, _rewrite

pytestmark = pytest.mark.usefixtures("float64")

TURNS = 4
TOLERANCES = {"float64": 1e-12, "float32": 2e-6}  # Sums are taken in another order.


def values(*shapes, dtype=np.float64):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def takes_slices(eqn, stack):
    """Whether it is a loop that reads of a stack `[iterations, ...]` only each iteration's slice."""
    if not _growing_loop.is_loop(eqn):
        return False
    stacks = _jaxpr.scan_stacks(eqn)
    others = eqn.invars[: len(eqn.invars) - len(stacks)]
    return stack in variables(stacks) and stack not in variables(others)


def whole_readers_of(jaxpr, stack):
    """What else reads a stack than loops that take slices of it.

    Where equations follow from the stack that treat its turns apart, those that read the last of them, or
    that make an output.
    """
    follow, found, outs = {stack}, [], set(variables(jaxpr.outvars))
    length = stack.aval.shape[0]
    for eqn in jaxpr.eqns:
        read = follow.intersection(variables(eqn.invars))
        if all(takes_slices(eqn, v) and v.aval.shape[0] == length for v in read):
            continue
        gives = _over_iterations.stacked(eqn, length) or [False] * len(eqn.invars)
        pairs = zip(eqn.invars, gives, strict=True)
        if any(not _jaxpr.is_literal(a) and a in read and not given for a, given in pairs):
            found.append(eqn)
        elif outs.intersection(eqn.outvars):
            found.append(eqn)
        else:
            follow.update(eqn.outvars)
    return found


def told_of(eqns):
    """`cumsum at step.py:12 (loss), dot_general at ...`, for messages."""
    return ", ".join(dict.fromkeys(e.primitive.name + _lines.at_line(e) for e in eqns))


class Rewritten:
    """A function's jaxpr, of which the first `num` arguments are leaves; before, sunk, and after."""

    def __init__(self, fn, *args, num=1):
        closed = jax.make_jaxpr(fn)(*args)
        flat, self.consts = _rewrite.flatten_calls(*_jaxpr.open_jaxpr(closed))
        names = {"debug_info": closed.jaxpr.debug_info.with_unknown_names()}
        self.args = args
        self.old = _jaxpr.replaced(_jaxpr.open_jaxpr(closed)[0], **flat._asdict(), **names)
        self.leaves = self.old.invars[:num]
        self.sunk = _fused_loops.sink(self.old, self.leaves)
        self.new = _fused_loops.fused(self.old, self.leaves)

    def run(self, jaxpr):
        return _jaxpr.evaluate(jaxpr, self.consts, *self.args)

    def check(self, exact=False, sunk_exact=True):
        """All values are what they were, those of `sink` to the bit; inputs and outputs are the same."""
        expected = self.run(self.old)
        for jaxpr, equal in ((self.sunk, sunk_exact), (self.new, exact)):
            assert jaxpr.invars == self.old.invars
            assert [id(v) for v in jaxpr.outvars] == [id(v) for v in self.old.outvars]
            for x, y in zip(self.run(jaxpr), expected, strict=True):
                assert x.dtype == y.dtype
                close = 0.0 if equal else TOLERANCES.get(str(x.dtype), 0.0)
                np.testing.assert_allclose(as_float64(x), as_float64(y), rtol=close, atol=close)
        return self

    @property
    def loops(self):
        return [e for e in self.new.eqns if _growing_loop.is_loop(e)]

    def whole_readers(self):
        return [e for v in self.leaves for e in whole_readers_of(self.new, v)]

    def readers_of_made(self):
        """Who reads more than a scalar of each turn of what loops make, besides loops."""
        made = {v for e in self.loops for v in _growing_loop.stacks_made(e) if v.aval.size > TURNS}
        return [
            e.primitive.name
            for e in self.new.eqns
            if not _growing_loop.is_loop(e)
            and any(not _jaxpr.is_literal(a) and a in made for a in e.invars)
        ]

    def outside(self):
        """The equations around the loops."""
        return [e.primitive.name for e in self.new.eqns if not _growing_loop.is_loop(e)]


def as_float64(x):
    return np.asarray(x).astype(np.float64)


def through(stacks, x=None, reverse=False):
    """A loop over one stack or several; its carry depends on their order."""
    x = jnp.float64(0.5) if x is None else x

    def body(x, slices):
        total = sum(jnp.sum(s.astype(jnp.float64) ** 2) for s in jax.tree.leaves(slices))
        return jnp.sin(x * 3) + total, x

    return lax.scan(body, x, stacks, reverse=reverse)


SINKING = {
    "cast and back": lambda w, s, v: w.astype(jnp.bfloat16).astype(jnp.float32),
    "with ones": lambda w, s, v: w + jnp.full(w.shape, s) * jnp.ones_like(w),
    "with a row": lambda w, s, v: w * jnp.sin(jnp.arange(6.0))[None, None],
    "transposed": lambda w, s, v: w.transpose(0, 2, 1),
    "other dims split": lambda w, s, v: w.reshape(TURNS, 5, 2, 3),
    "broadcast": lambda w, s, v: jnp.broadcast_to(w[:, :, None], (TURNS, 5, 7, 6)),
    "sliced": lambda w, s, v: w[:, 1:4, ::2],
    "padded": lambda w, s, v: jnp.pad(w, ((0, 0), (1, 2), (0, 0))),
    "put together": lambda w, s, v: jnp.concatenate([w, v, jnp.zeros((TURNS, 1, 6))], 1),
    "normalised": lambda w, s, v: w / jnp.sqrt(jnp.sum(w**2, (1, 2), keepdims=True)),
    "masked": lambda w, s, v: jnp.where(
        lax.broadcasted_iota(jnp.int32, w.shape, 2) < s.astype(jnp.int32), w, 0
    ),
    "flat and back": lambda w, s, v: (w.ravel() * 2).reshape(w.shape),
    "a list": lambda w, s, v: [w.astype(jnp.float32), w, (v * s, w[:, 0])],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SINKING)
def test_what_follows_from_slices_is_made_in_the_loop(name):
    def fn(w, v, s):
        return through(SINKING[name](w, s, v))

    (w, v), s = values((TURNS, 5, 6), (TURNS, 5, 6)), jnp.float64(3.0)
    found = Rewritten(fn, w, v, s, num=2).check(exact=True)
    assert found.whole_readers() == []
    (loop,) = found.loops
    taken = set(_jaxpr.scan_stacks(loop))
    assert taken <= set(found.leaves)
    # Nothing around the loop makes a stack.
    eqns = [e for e in found.new.eqns if e is not loop]
    assert all(out.aval.shape[:1] != (TURNS,) for e in eqns for out in e.outvars)


STAYING = {
    "cumsum": lambda w: jnp.cumsum(w, 0),
    "transpose": lambda w: w.transpose(1, 0),
    "broadcast_in_dim": lambda w: w * lax.broadcast_in_dim(w[:, 0], (TURNS, TURNS), (1,)),
    "concatenate": lambda w: jnp.concatenate([w[1:], w[:1]]),
    "reduce_max": lambda w: w / jnp.max(jnp.abs(w)),
    "dot_general": lambda w: jnp.matmul(jnp.ones((TURNS, TURNS)), w, precision="highest"),
    "reshape": lambda w: w.reshape(2, 2, TURNS).transpose(1, 0, 2).reshape(TURNS, TURNS),
}  # fmt: skip


@pytest.mark.parametrize("name", STAYING)
def test_who_reads_a_whole_stack_is_named(name):
    found = Rewritten(lambda w: through(STAYING[name](w * 2)), *values((TURNS, TURNS)))
    # Outside of a loop the compiler multiplies by the reciprocal of a scalar that divides.
    told = told_of(found.check(sunk_exact=name != "reduce_max").whole_readers())
    assert f"{'slice' if name == 'concatenate' else name} at " in told
    assert "test_fused_loops.py:" in told


ABSORBED = {
    "sums of squares": lambda g, s: (jnp.sum(g**2), jnp.sum(jnp.abs(g.astype(jnp.float32)))),
    "over the turns alone": lambda g, s: (jnp.sum(g, 0), jnp.max(g, 0)),
    "over some dims": lambda g, s: jnp.sum(g, (0, 2)),
    "max": lambda g, s: (jnp.max(jnp.abs(g)), jnp.min(g), jnp.max(-g, (0, 1))),
    "finite": lambda g, s: (jnp.all(jnp.isfinite(g)), jnp.any(jnp.isnan(g / s))),
    "bits": lambda g, s: lax.reduce_and(jnp.round(9 * g).astype(jnp.uint8), (0, 1, 2)),
    "vdot": lambda g, s: (jnp.vdot(g, g), jnp.linalg.norm(g.ravel())),
    "masked": lambda g, s: jnp.sum(jnp.where(jnp.arange(6)[None, None] < 4, g, 0)),
    "of each turn, twice": lambda g, s: jnp.max(jnp.sqrt(jnp.sum(g**2, (1, 2)))),
    "normalised by turn": lambda g, s: jnp.sum(
        jnp.abs(g / jnp.sqrt(jnp.sum(g**2, (1, 2), keepdims=True)))
    ),
    "bfloat16": lambda g, s: jnp.max(g.astype(jnp.bfloat16)),
}  # fmt: skip


def gradients(w, x, reverse=True):
    """A loop whose carry and stack depend on the order of the turns."""
    return lax.scan(lambda x, w: (jnp.sin(x) + w, jnp.cos(x) * w), x, w, reverse=reverse)


@pytest.mark.slow(but=["bits"])
@pytest.mark.parametrize("name", ABSORBED)
def test_what_reads_stacks_that_a_loop_makes_is_done_in_the_loop(name):
    def fn(w, x, s):
        end, made = gradients(w, x)
        return end, ABSORBED[name](made, s)

    w, x = values((TURNS, 5, 6), (5, 6))
    found = Rewritten(fn, w, x, jnp.float64(3.0)).check()
    assert found.readers_of_made() == []
    # No stack is handed out but of scalars.
    (loop,) = found.loops
    assert all(v.aval.size == TURNS for v in _growing_loop.stacks_made(loop))
    old = [e.primitive.name for e in found.old.eqns]
    assert len(found.outside()) < len(old) - 1 or "reduce" not in "".join(found.outside())


def test_turns_that_meet_other_turns_stay_outside():
    """A column of a stack as a row: every turn reads it whole."""

    def across(stack):
        return lax.broadcast_in_dim(stack[:, 0], (TURNS, TURNS), (1,))

    def fn(w, x):
        end, made = gradients(w, x)
        return end, jnp.sum(made * across(w)), jnp.sum(made * across(made))

    found = Rewritten(fn, *values((TURNS, TURNS), (TURNS,))).check()
    assert [e.primitive.name for e in found.whole_readers()] == ["broadcast_in_dim"]
    assert found.readers_of_made() == ["mul"]


def test_gradients_with_a_function_of_the_parameters():
    """Weight decay in the loss; norms of parameters are taken by the first loop that has their slices."""

    def loss(w, b, x):
        y, _ = lax.scan(lambda x, each: (jnp.tanh(x @ each[0] + each[1][None]), None), x, (w, b))
        decay = sum(jnp.sum(p**2) for p in (w, b))
        return jnp.sum(y**2) + 0.1 * decay, jnp.sqrt(jnp.sum(w**2, (1, 2)))

    def fn(w, b, x):
        (value, norms), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(w, b, x)
        return value, norms, grads, [jnp.sum(g**2) for g in grads], jnp.max(jnp.abs(w))

    args = values((TURNS, 3, 3), (TURNS, 3), (2, 3))
    found = Rewritten(fn, *args, num=2).check()
    assert found.whole_readers() == []
    assert found.readers_of_made() == []
    forward, backward = found.loops
    assert all(takes_slices(forward, v) for v in found.leaves)
    # The backward loop needs the biases for their decay alone.
    assert all(takes_slices(backward, v) for v in found.leaves)


def test_a_loop_does_not_wait_for_itself():
    """What a loop needs of a whole stack is made before it, and what follows from that stays out of it."""

    def needs(w, x):
        return gradients(w / jnp.max(jnp.abs(w)), x)

    found = Rewritten(needs, *values((TURNS, 5), (5,))).check(sunk_exact=False)
    assert [e.primitive.name for e in found.whole_readers()] == ["reduce_max"]

    def scaled(w, x):  # Its own largest parameter is there only when the loop ends.
        end, made = gradients(w, x)
        return end, jnp.sum(made * jnp.max(w)), made / jnp.sqrt(jnp.sum(w**2, 1))[:, None].sum()

    found = Rewritten(scaled, *values((TURNS, 5), (5,))).check()
    assert found.whole_readers() == []
    assert set(found.readers_of_made()) == {"mul", "div"}

    def by_turn(w, x):  # Norms of each turn that come back as scales of the same loop.
        norms = jnp.sqrt(jnp.sum(w**2, 1))
        scaled = w * jnp.cumsum(norms)[:, None]
        x, made = lax.scan(lambda x, w: (jnp.sin(x) + w[0], w[1] - w[0]), x, (w, scaled))
        return norms, jnp.sum(made**2)

    found = Rewritten(by_turn, *values((TURNS, 5), (5,))).check(sunk_exact=False)
    assert [e.primitive.name for e in found.whole_readers()] == ["sqrt"]


def test_an_element_that_others_wait_for():
    """A program waits for one element of a stack: that one alone leaves the loop for it."""

    def fn(w, x):
        _, made = gradients(w, x)
        token = lax.squeeze(lax.slice(made, (1, 0, 2), (2, 1, 3)), (0, 1, 2))
        return lax.optimization_barrier((x, token))

    found = Rewritten(fn, *values((TURNS, 5, 6), (5, 6))).check()
    made = _growing_loop.stacks_made(found.loops[0])
    assert [v.aval.shape for v in made] == [(TURNS, 1, 1)]
    assert found.readers_of_made() == []


@pytest.mark.slow(but=[7, 9])
@pytest.mark.parametrize("seed", range(30))
def test_drawn_chains(seed):
    """Drawn equations before and after two loops, which read what was drawn before them."""
    rng = np.random.default_rng(seed)
    maps: list[Callable[[jax.Array], jax.Array]] = [
        jnp.sin, lambda x: x.astype(jnp.float32).astype(x.dtype), lambda x: x[:, ::-1],
        lambda x: x.transpose(0, 2, 1).reshape(x.shape), lambda x: jnp.cumsum(x, 1),
        lambda x: jnp.roll(x, 1, 0), lambda x: x + jnp.arange(6.0)[None, None], lambda x: x[::-1],
        lambda x: x / (1 + jnp.sum(x**2, (1, 2), keepdims=True)), lambda x: x.ravel().reshape(x.shape),
    ]  # fmt: skip
    sums: list[Callable[[jax.Array], jax.Array]] = [
        jnp.sum, jnp.max, lambda x: jnp.sum(x, (0, 1)).max(), lambda x: jnp.vdot(x, x) / x.size,
        lambda x: jnp.all(x < 2).astype(x.dtype), lambda x: jnp.sum(x, (1, 2)).mean(),
        lambda x: jnp.sum(x[1:]),
    ]  # fmt: skip

    def fn(w, v, x):
        stacks, scalars, outs = [w, v], [jnp.float64(0.3)], []

        def draw(num):
            for _ in range(num):
                one, two = (stacks[rng.integers(len(stacks))] for _ in range(2))
                scale = scalars[rng.integers(len(scalars))]
                kind = rng.integers(4)
                if kind == 0:
                    scalars.append(jnp.tanh(sums[rng.integers(len(sums))](one)))
                elif kind == 1:
                    stacks.append(jnp.sin(one * scale + two))
                else:
                    stacks.append(jnp.sin(maps[rng.integers(len(maps))](one)))

        for reverse in (False, True):
            draw(4)
            chosen = [stacks[i] for i in rng.integers(len(stacks), size=2)]
            scale = scalars[rng.integers(len(scalars))]

            def turn(x, each, scale=scale):
                return jnp.sin(x + each[0]) * scale, (jnp.cos(x) * each[1], each[0] * each[1])

            x, made = lax.scan(turn, x, chosen, reverse=reverse)
            stacks.extend(made)
            draw(6)
            outs.append(stacks[rng.integers(len(stacks))])
        return x, outs, scalars

    Rewritten(fn, *values((TURNS, 5, 6), (TURNS, 5, 6), (5, 6)), num=2).check(sunk_exact=False)
