"""Loops over microbatches taken apart: the values stay, and each layer comes once for all microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jzero
from jzero.ir._loops import MICROBATCHES
from jzero.sharding.cut import _interchange, _layer_parts, _layers
from jzero.tracing import _jaxpr, _rewrite

K, LAYERS, ROWS, WIDTH = 3, 4, 2, 5


def values(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape) / 3, jnp.float32) for shape in shapes]


def over_microbatches(body, init, xs, reverse=False):
    with jax.named_scope(MICROBATCHES):
        return lax.scan(body, init, xs, reverse=reverse)


class Interchanged:
    """A function's jaxpr, of which the first `num` arguments are leaves; before and after."""

    def __init__(self, fn, *args, num=1, most=2**20):
        closed = jax.make_jaxpr(fn)(*args)
        flat, self.consts = _rewrite.flatten_calls(*_jaxpr.open_jaxpr(closed))
        names = {"debug_info": closed.jaxpr.debug_info.with_unknown_names()}
        self.args, self.most = args, most
        self.old = _jaxpr.replaced(_jaxpr.open_jaxpr(closed)[0], **flat._asdict(), **names)
        self.leaves = {var: 4 * var.aval.size for var in self.old.invars[:num]}
        self.batch = self.old.invars[-1:]
        self.new = _interchange.layer_major(self.old, self.leaves, self.batch, 2 * most)

    def run(self, jaxpr):
        return jax.jit(lambda *args: _jaxpr.evaluate(jaxpr, self.consts, *args))(*self.args)

    def check(self):
        """All values are what they were; inputs and outputs are the same."""
        assert self.new.invars == self.old.invars
        assert [id(v) for v in self.new.outvars] == [id(v) for v in self.old.outvars]
        for x, y in zip(self.run(self.new), self.run(self.old), strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        return self

    @property
    def parts(self):
        return _layers.cut(self.new, self.leaves, self.batch, (), 2 * self.most, nests=())

    @property
    def loops(self):
        return [part for part in self.parts if isinstance(part, _layer_parts.ScannedLayers)]


def forward(stack, x, reverse=False):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w) + x, x), x, stack, reverse=reverse)


def backward(stack, kept, ct, reverse=True):
    def turn(ct, own):
        w, x = own
        return ct @ w.T, x.T @ ct

    return lax.scan(turn, ct, (stack, kept), reverse=reverse)


def train(stack, head, x, reverse=False):
    """Gradients summed over the microbatches, as the loop of a step sums them."""

    def microbatch(totals, own):
        index, x = own
        y, kept = forward(stack, x, reverse)
        loss = jnp.sum((y @ head) ** 2)
        ct, grads = backward(stack, kept, (y @ head) @ head.T, not reverse)
        sums = [totals[0] + grads, totals[1] + y.T @ (y @ head), totals[2] + loss]
        return [*sums, jnp.sum(x)], (ct, loss * index)

    init = [jnp.zeros_like(stack), jnp.zeros_like(head), jnp.float32(0), jnp.float32(0)]
    return over_microbatches(microbatch, init, (jnp.arange(K), x))


SHAPES = (LAYERS, WIDTH, WIDTH), (WIDTH, WIDTH), (K, ROWS, WIDTH)


@pytest.mark.slow(but=["together-False"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("most", [1, 2**20], ids=("each apart", "together"))
def test_a_step_with_a_forward_and_a_backward_loop(most, reverse):
    found = Interchanged(
        lambda stack, head, x: train(stack, head, x, reverse), *values(*SHAPES), num=2, most=most
    ).check()
    forward, backward = found.loops
    assert forward.parts.length == backward.parts.length == LAYERS
    assert forward.xs == ("leaf",)
    assert sorted(backward.xs) == ["leaf", "slices"], "sums of gradients begin in the loop"
    assert {y.aval.shape for y in forward.results[1]} == {(LAYERS, K, ROWS, WIDTH)}
    assert {y.aval.shape for y in backward.results[1]} == {(LAYERS, WIDTH, WIDTH)}


def summed(fn):
    """A loop over microbatches that sums up what `fn` makes of one, and hands that out, too."""

    def run(stack, head, x):
        def microbatch(total, own):
            y = fn(stack, head, *own)
            return jax.tree.map(jnp.add, total, y), y

        first = jax.tree.map(jnp.zeros_like, jax.eval_shape(fn, stack, head, jnp.int32(0), x[0]))
        return over_microbatches(microbatch, first, (jnp.arange(K), x))

    return run


def deep(stack, x):
    return forward(stack, x)[0]


def time_loop(stack, head, i, x):
    def layer(x, w):
        return lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x), lax.while_loop(
            lambda x: jnp.sum(x) > 1, lambda x: x / 2, x
        )

    return lax.scan(layer, x, stack)


def counted(stack, head, i, x):
    def layer(carry, w):
        n, x = carry
        return (n + 1, jnp.tanh(x @ w) * n), (n, 2.5, jnp.sum(w))

    return lax.scan(layer, (jnp.float32(1), x), stack)


def noise(stack, head, i, x):
    def layer(x, own):
        w, key = own
        return x @ w * jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, x.shape), None

    return lax.scan(layer, x, (stack, jax.random.split(jax.random.key(0), LAYERS)))[0]


def shared_alone(stack, head, i, x):
    return lax.scan(lambda y, w: (y @ w, y), head, stack), jnp.sum(head), 3.0


CASES = {
    "a loop over layers": lambda stack, head, i, x: deep(stack, x) @ head,
    "no loop": lambda stack, head, i, x: x @ head @ stack[1] + i,
    "two loops": lambda stack, head, i, x: deep(stack, deep(stack * 2, x) @ head),
    "one layer": lambda stack, head, i, x: deep(stack[:1], x) @ head,
    "a cast of all layers": lambda stack, head, i, x: deep(
        stack.astype(jnp.bfloat16), x.astype(jnp.bfloat16)),
    "loops in layers": time_loop,
    "a counter, numbers and sums of slices": counted,
    "bits": noise,
    "what all microbatches share": shared_alone,
    "layers that read all of a leaf": lambda stack, head, i, x: lax.scan(
        lambda x, w: (x @ w @ head, jnp.sum(head)), x, stack),
    "layers that read a value of the microbatch": lambda stack, head, i, x: lax.scan(
        lambda y, w: (jnp.tanh(y @ w) + x * i, jnp.sum(y)), x, stack),
    "stacks of a microbatch": lambda stack, head, i, x: lax.scan(
        lambda y, own: (y @ own[0] + own[1], y), x, (stack, jnp.stack([x * j for j in range(LAYERS)]))),
    "a stack of a loop, read whole": lambda stack, head, i, x: jnp.sum(forward(stack, x)[1] @ head, 0),
    "a stack of a loop, sorted by layers": lambda stack, head, i, x: forward(
        stack, jnp.sum(jnp.sort(forward(stack, x)[1], 0) @ head, 0)),
    "a broadcast of a number of the microbatch": lambda stack, head, i, x: (
        deep(stack, x + jnp.full(x.shape, i)) @ head + jnp.full(x.shape, i)),
    "gradients of a table": lambda stack, head, i, x: jax.grad(
        lambda stack, head: jnp.sum(deep(stack, x @ head) @ head.T), (0, 1))(stack, head),
    "a checkpoint around layers": lambda stack, head, i, x: jax.grad(
        lambda stack: jnp.sum(lax.scan(
            jax.checkpoint(lambda x, w: (jnp.tanh(x @ w) @ head, None)), x, stack)[0]))(stack),
}  # fmt: skip


@pytest.mark.slow(but=["bits-each apart", "stacks of a microbatch-each apart"])
@pytest.mark.parametrize("most", [1, 2**20], ids=("each apart", "together"))
@pytest.mark.parametrize("name", CASES)
def test_values_stay(name, most):
    Interchanged(summed(CASES[name]), *values(*SHAPES), num=2, most=most).check()


def test_a_loop_that_goes_backwards():
    def run(stack, head, x):
        def microbatch(total, x):
            y = deep(stack, x) @ head
            return (total[0] + y, y, jnp.float32(1)), y * 2

        init = (x[0], x[1], jnp.float32(0))
        return over_microbatches(microbatch, init, x, reverse=True)

    Interchanged(run, *values(*SHAPES), num=2).check()


def test_sums_are_taken_in_the_order_of_the_microbatches():
    """In float32 the terms below sum up to 0 in their order, and to 1 in others."""
    stack, head, x = (jnp.ones(shape) for shape in SHAPES)
    x = x * jnp.float32([1e8, 1, -1e8])[:, None, None]

    def microbatch(total, x):
        _, inputs = lax.scan(lambda x, w: (x, x * w[0, 0]), x, stack)
        return total + inputs, None

    def run(stack, head, x):
        return over_microbatches(microbatch, jnp.zeros((LAYERS, ROWS, WIDTH)), x)[0]

    found = Interchanged(run, stack, head, x)
    (total,) = found.check().run(found.new)
    np.testing.assert_array_equal(total, 0)


def test_each_use_of_a_weight_adds_to_the_sum_where_it_is_made():
    """With a cast of the sum, too: none of the terms waits for all microbatches."""

    def run(stack, head, x):
        def microbatch(total, x):
            first, last = x.T @ x, deep(stack, x @ head)
            low = (first.astype(jnp.bfloat16) + (last.T @ x).astype(jnp.bfloat16)).astype(
                jnp.float32
            )
            return (total[0] + low, total[1] + (first + last.T @ last)), None

        zeros = jnp.zeros((WIDTH, WIDTH))
        return over_microbatches(microbatch, (zeros, zeros), x)[0]

    found = Interchanged(run, *values(*SHAPES), num=2, most=1)
    for x, y in zip(found.run(found.new), found.run(found.old), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-2, atol=2e-2)
    handed = {v.aval.shape for part in found.parts for v in part.reads}
    assert (WIDTH, WIDTH) in handed
    assert (K, WIDTH, WIDTH) not in handed


def test_what_microbatches_only_hand_on():
    """The last one's value, one that nobody changes, and one that all share; and what nobody reads."""

    def run(stack, head, x):
        def microbatch(carry, x):
            kept, _, _, _ = carry
            y, stacks = forward(stack, x + kept)
            return (kept, jnp.sum(y), jnp.sum(head), stacks), (kept, 2.0, y)

        zero = jnp.float32(0)
        init = (jnp.float32(0.5), zero, zero, jnp.zeros((LAYERS, ROWS, WIDTH)))
        (_, *lasts), (kept, two, _) = over_microbatches(microbatch, init, x)
        return lasts, kept, two

    Interchanged(run, *values(*SHAPES), num=2).check()


def test_casts_before_the_loop_are_done_where_layers_are_read():
    def run(stack, head, x):
        low, scale = stack.astype(jnp.bfloat16), jnp.sum(head)
        low = low * scale.astype(jnp.bfloat16)

        def microbatch(total, x):
            return total + deep(low, x.astype(jnp.bfloat16)), jnp.sum(low)

        return over_microbatches(microbatch, jnp.zeros(x.shape[1:], jnp.bfloat16), x)

    found = Interchanged(run, *values(*SHAPES)).check()
    assert [loop.xs for loop in found.loops] == [("leaf",)]


def waits_for_the_end(stack, head, x):
    return over_microbatches(lambda y, x: (deep(stack, y + x) @ head, None), x[0], x)


def is_handed_on(stack, head, x):
    def microbatch(carry, x):
        a, b = carry
        return (deep(stack, x), a), b

    return over_microbatches(microbatch, (x[0], x[0]), x)


def is_summed_up_through_all_layers(stack, head, x):
    def microbatch(total, x):
        def layer(carry, w):
            total, x = carry
            return (total * jnp.sum(w), x @ w), None

        return lax.scan(layer, (total, x), stack)[0]

    return over_microbatches(microbatch, jnp.float32(1), x)


def prints(stack, head, x):
    def microbatch(total, x):
        y = deep(stack, x)
        jax.debug.print("{}", y[0, 0])
        return total + y, None

    return over_microbatches(microbatch, x[0], x)


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (waits_for_the_end, r"float32\[2,5\] at .*waits_for_the_end.* made in the layer"),
        (is_handed_on, r"2 values fail.*made in the layer"),
        (is_summed_up_through_all_layers, r"float32\[\] at .* made in the layer"),
        (prints, r"a debug_(print|callback) at .* for each microbatch"),
    ],
)
def test_refused_by_name(fn, text):
    with pytest.raises(jzero.OptionError, match=f"(?s){text}"):
        Interchanged(fn, *values(*SHAPES), num=2)
