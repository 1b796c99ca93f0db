# SPDX-License-Identifier: Apache-2.0
"""Loops along the batch: scans, maps and whiles whose carries add, swap, scale, select and read each other.

What an iteration makes of its carries decides whether devices may run the iterations of their own rows only.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._setting import Setting
from .check import BUNDLE, Result, compare
from .programs import NUM_STEPS, Program

DIM, TIMES = 3, 2
MESHES = {(2,): 4, (4,): 3, (2, 2): 1, (3,): 1}
# A carry's next value, of its own last one, of another carry's last one, of another's next one if that is
# there already, and of terms of the row.
NEXT: dict[str, int] = {
    "2 * {own} + {term}": 2, "0.9 * {own} + {term}": 3, "{own} / 2": 1, "1 * {own} + {term}": 1,
    "{term} - {own}": 3, "-{own}": 1, "-(-{own} - {term})": 1,
    "jnp.where({term} > 0.1, {own} + {term}, {own})": 3, "jnp.where({own} > 0.1, {own} - {term}, {term})": 2,
    "{own} + jnp.where({term} > 0.1, {term}, 0)": 3, "jnp.maximum({own}, {term})": 2,
    "{own} + bounded({other})": 2, "{own} + bounded({own})": 2, "{own} + {term} * bounded({other})": 2,
    "lax.cond(first({term}) > 0.1, lambda c, t: c + t, lambda c, t: c, {own}, {term})": 2,
    "lax.cond(flag > 0, lambda c, t: c + t, lambda c, t: c - t, {own}, {term})": 2,
    "lax.fori_loop(0, 2, lambda _, c: c + {term}, {own})": 2,
    "lax.scan(lambda c, t: (c + t, None), {own}, jnp.stack([{term}, {term}]))[0]": 2,
    "{own} + lax.scan(lambda c, t: (c + t, c), {term}, jnp.stack([{term}, {term}]))[0]": 2,
    "lax.optimization_barrier({own}) + {term}": 1, "lax.optimization_barrier({own} + {term})": 1,
    "there_and_back({own}) + {term}": 2, "{own}.at[()].add({term})": 1,
    "jnp.stack([{own}, {term}]).sum(0)": 1, "{own} + fit(count, {own})": 2,
    "fit({own} + {term}, {other}) * 0 + {own}": 1, "lax.reduce_precision({own}, 11, 52) + {term}": 1,
}  # fmt: skip
# Those of which devices can sum up the terms of their rows, or could if the carry were another one.
ADDITIVE = {
    "{own} + {term}": 24, "{term} + {own}": 6, "{own} - {term}": 6, "{own}": 6,
    "({own} + {term}) - {term}": 4, "{own} + ({term} + {term})": 3, "{own} + 1": 3, "{own} + 0": 1,
    "{own} + {other}": 5, "{own} - {other}": 3, "{other}": 3, "{other} + {term}": 4, "{own} + {next}": 4,
    "{next} + {term}": 2, "{next}": 1, "{own} + ({other} - {other})": 1, "{own} + {own}": 2,
    "{own} + ({own} - {own})": 1,
    "{term}": 1, "{other} + ({own} + {term})": 2, "{own} + ({other} + {term})": 2,
    "copied({own}) + {term}": 2, "lax.stop_gradient({own}) + {term}": 2, "plus({own}, {term})": 2,
    "plus({own}, {other})": 1, "jax.checkpoint(lambda c, t: c + t)({own}, {term})": 2,
    "jax.checkpoint(lambda a, b, t: (b, a + t))({own}, {other}, {term})[0]": 2,
    "jax.checkpoint(lambda a, b, t: (a - t, b))({own}, {other}, {term})[0]": 2,
    "jax.jit(lambda a, b, t: a + t)({own}, {other}, {term})": 2,
    "jnp.reshape({own}, {own}.shape) + {term}": 1,
}  # fmt: skip
TERMS = {
    "r": 10, "r * r": 3, "-r": 2, "0.5 * jnp.sin(r)": 3, "jnp.sum(r)": 3, "jnp.max(r)": 1, "r[0]": 2,
    "jax.grad(lambda v: jnp.sum((r * v) ** 2))(p['v'])": 3, "p['v']": 2, "mean": 2, "w['k']": 1,
    "0.25": 2, "0.0": 1, "jnp.outer(r, p['v'])": 2, "place": 2, "jnp.where(r > 0, r, 0)": 2,
    "lax.fori_loop(0, 2, lambda _, a: a * p['v'], r)": 1, "table[place]": 1,
}  # fmt: skip
# What an iteration hands out beside its carries: something of them, or not.
HANDED = {
    "{own}": 3, "{next}": 3, "({term}, {own})": 2, "{own} + {term}": 2, "{own} - {own}": 1,
    "bounded({own})": 1,
}  # fmt: skip
APART = {"None": 4, "{term}": 5, "0.5": 2, "jnp.sum(p['v'])": 2, "count": 1}
# How often all of an iteration is additive, and all carries are of one shape: adding one to another then
# reads it by nothing but the addition.
ALL_ADDITIVE, ONE_SHAPE, SOME_INTEGERS = 0.7, 0.8, 0.2
SHAPES = {"()": 5, "(DIM,)": 6, "(DIM, DIM)": 1}
STARTS = {"jnp.zeros({shape})": 4, "jnp.full({shape}, 0.3)": 2, "fit(p['v'], jnp.zeros({shape}))": 2,
          "fit(x[0], jnp.zeros({shape}))": 1, "fit(mean, jnp.zeros({shape}))": 1}  # fmt: skip
ROWS_OF = {"row": 2, "jnp.tanh(row @ p['m'])": 5, "row * p['v']": 3}
LOOPS = {
    "rows": 14, "reversed": 2, "unrolled": 2, "backwards": 1, "merged": 4, "doubled": 2, "chunks": 2,
    "time": 4, "map": 3, "fori": 2, "while": 2,
}  # fmt: skip
XS = {
    "merged": "t['s'].reshape(-1, DIM)", "doubled": "jnp.concatenate([x, 0.5 * x])", "time": "t['s']",
    "backwards": "x[::-1]", "chunks": "x.reshape(-1, 2, DIM) if x.shape[0] % 2 == 0 else x[:, None]",
}  # fmt: skip
AROUND = {
    "run(p)": 12, "jax.jit(run)(p)": 1, "jax.checkpoint(run)(p)": 2,
    "jax.vmap(lambda a: run({**p, 'v': a * p['v']}))(jnp.array([1.0, 0.5]))": 2,
    "lax.cond(flag > 0, run, lambda p: jax.tree.map(lambda a: 2 * a, run(p)), p)": 1,
}  # fmt: skip
PASSES = {"forward": 4, "backward": 6, "tangent": 1}


def choose(rng: np.random.Generator, options: Any) -> Any:
    """One of a collection; a dict's values are weights."""
    names = list(options)
    weights = np.array([options[name] if isinstance(options, dict) else 1 for name in names])
    return names[rng.choice(len(names), p=weights / weights.sum())]


def setting_of(seed: int) -> Setting:
    """How the seed's bundle is sharded."""
    rng = np.random.default_rng([seed // BUNDLE, 3])
    axes, stage, accumulate = choose(rng, MESHES), choose(rng, (0, 3)), choose(rng, (1, 2))
    rows = int(np.prod(axes)) * accumulate * choose(rng, (1, 2, 3))
    if rng.random() < 0.2:
        rows = choose(rng, (5, 7, 10, 13))
    return Setting(stage, axes, accumulate=accumulate, rows=rows)


def check(seeds: Sequence[int], setting: Setting | None = None) -> list[Result]:
    """The results of seeds of one bundle, checked side by side."""
    setting = setting or setting_of(seeds[0])
    return compare([draw(seed, setting.rows) for seed in seeds], setting)


def draw(seed: int, rows: int) -> Program:
    """A random loop over so many rows in a step that uses what it makes; the same seed gives the same one."""
    d = _Loop(np.random.default_rng([seed, rows, 3]))
    source = d.source()
    namespace: dict[str, Any] = {
        "jax": jax, "jnp": jnp, "lax": lax, "DIM": DIM, "fit": fit, "plus": plus, "bounded": bounded,
        "first": first, "copied": copied, "there_and_back": there_and_back,
    }  # fmt: skip
    exec(compile(source, f"<loop {seed}>", "exec"), namespace)

    def batch(i: int) -> tuple[Any, Any, Any]:
        rng = np.random.default_rng([seed, i, 4])
        b, t = rng.normal(size=(rows, DIM)), rng.normal(size=(TIMES, rows, DIM))
        return {"x": b}, {"s": t}, {"k": rng.normal(size=DIM), "flag": np.int32(i)}

    def state() -> Any:
        rng = np.random.default_rng([seed, 5])
        return {"p": {"m": rng.normal(size=(DIM, DIM)), "v": 0.5 + 0.1 * rng.normal(size=DIM)}}

    batches = [batch(i) for i in range(NUM_STEPS)]
    return Program(
        seed, source, frozenset(d.features), "float64", jax.jit(namespace["step"]), state, batches
    )


class _Loop:
    """Draws one loop."""

    def __init__(self, rng: np.random.Generator):
        self._rng = rng
        self._num = int(rng.integers(1, 5))
        mixed = rng.random() < SOME_INTEGERS
        self._integers = {i for i in range(self._num) if mixed and rng.random() < 0.4}
        self._shape = choose(rng, SHAPES) if rng.random() < ONE_SHAPE else None
        self._additive = rng.random() < ALL_ADDITIVE
        self.features = set[str]()

    def source(self) -> str:
        """The step."""
        loop, around, passed = (self._choose(o) for o in (LOOPS, AROUND, PASSES))
        if loop == "while" and passed == "backward":
            passed = "tangent"
        nexts, handed_out = ADDITIVE, APART
        if not self._additive:
            nexts, handed_out = NEXT | ADDITIVE, HANDED | APART
        names = [f"c{i}" for i in range(self._num)]
        carry = f"({', '.join(names)},)"
        lines = [f"r = {self._choose(ROWS_OF)}"]
        if loop == "chunks":
            lines.append("r = jnp.sum(r, 0)")
        if loop == "time":
            lines.append("r = jnp.mean(r, 0)")
        order = self._rng.permutation(self._num)
        made: list[int] = []
        for i in order if loop != "map" else ():
            lines.append(f"n{i} = fit({self._filled(nexts, i, made)}, c{i})")
            made.append(i)
        handed = self._filled(handed_out, int(order[0]), made if loop != "map" else [])
        news = f"({', '.join(f'n{i}' for i in range(self._num))},)" if made else carry
        lines.append(f"return {news}, {handed}")
        turn = "\n            ".join(lines)
        starts = ", ".join(self._start(i) for i in range(self._num))
        text = f"""
def step(s, b, t, w):
    x, flag, table, mean = b['x'], w['flag'], jnp.arange(64.0), jnp.mean(b['x'], 0)
    def run(p):
        def turn(carry, xs):
            {carry}, (row, place, count) = carry, xs
            {turn}
        xs = {XS.get(loop, "x")}
        places = jnp.arange(xs.shape[0])
        init = ({starts},)
        {_LOOP_TEXTS.get(loop, _SCAN).format(how=_HOW.get(loop, ""))}
    def loss(p):
        carry, ys = {around}
        total = sum(0.1 * jnp.sum(c) + jnp.sum(bounded(c)) for c in carry)
        total = total + sum(jnp.sum(y * y) for y in jax.tree.leaves(ys)) / 16
        return total + jnp.mean((x @ p['m']) ** 2), (carry, ys)
    {_PASS_TEXTS[passed]}
    new = jax.tree.map(lambda p, g: p - 0.1 * g / (1 + jnp.max(jnp.abs(g))), s['p'], g)
    return {{'p': new}}, (l, aux)
"""
        return text.lstrip("\n")

    def _choose(self, options: dict[str, int]) -> str:
        found: str = choose(self._rng, options)
        self.features.add(found)
        return found

    def _filled(self, options: dict[str, int], own: int, made: Sequence[int]) -> str:
        template = self._choose(options)
        others = [i for i in range(self._num) if i != own] or [own]
        text = template
        for _ in range(template.count("{other}")):
            text = text.replace("{other}", f"fit(c{choose(self._rng, others)}, c{own})", 1)
        for _ in range(template.count("{next}")):
            next = f"n{choose(self._rng, made)}" if made else f"c{choose(self._rng, others)}"
            text = text.replace("{next}", f"fit({next}, c{own})", 1)
        for _ in range(template.count("{term}")):
            text = text.replace("{term}", f"fit({self._choose(TERMS)}, c{own})", 1)
        return text.replace("{own}", f"c{own}")

    def _start(self, i: int) -> str:
        shape = self._shape or choose(self._rng, SHAPES)
        start = self._choose(STARTS).format(shape=shape)
        if i in self._integers:
            self.features.add("integers")
            return f"fit({start}, jnp.zeros({shape}, jnp.int32))"
        return start


_SCAN = """return lax.scan(turn, init, (xs, places, jnp.zeros(xs.shape[0], jnp.int32)){how})"""
_HOW = {"reversed": ", reverse=True", "unrolled": ", unroll=2"}
_ONE = "lambda i, c: turn(c, (xs[i], i, i))[0]"
_LOOP_TEXTS = {
    "map": "return init, lax.map(lambda each: turn(init, (*each, each[1]))[1], (xs, places))",
    "fori": f"return lax.fori_loop(0, xs.shape[0], {_ONE}, init), None",
    "while": f"""one = {_ONE}
        going, one_more = lambda ic: ic[0] < xs.shape[0], lambda ic: (ic[0] + 1, one(*ic))
        return lax.while_loop(going, one_more, (0, init))[1], None""",
}
_PASS_TEXTS = {
    "forward": "(l, aux), g = loss(s['p']), s['p']",
    "backward": "(l, aux), g = jax.value_and_grad(loss, has_aux=True)(s['p'])",
    "tangent": """l, g, aux = jax.jvp(loss, (s['p'],), (s['p'],), has_aux=True)
    g = jax.tree.map(lambda p: p * g, s['p'])""",
}


def fit(x: Any, like: Any) -> jax.Array:
    """`x` in the shape and dtype of another."""
    x = jnp.asarray(x)
    while x.ndim > like.ndim:
        x = jnp.sum(x, 0)
    if x.dtype != like.dtype:
        integers = jnp.issubdtype(like.dtype, jnp.integer) and not jnp.issubdtype(
            x.dtype, jnp.integer
        )
        x = (x > 0.1234).astype(like.dtype) if integers else x.astype(like.dtype)
    return x if x.shape == like.shape else jnp.broadcast_to(x, like.shape)


def bounded(x: jax.Array) -> jax.Array:
    return jnp.tanh(0.3 * x)


def first(x: jax.Array) -> jax.Array:
    return x.ravel()[0]


def copied(x: jax.Array) -> jax.Array:
    return jnp.array(x, copy=True)


def there_and_back(x: jax.Array) -> jax.Array:
    """Through another dtype that has all its values."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(jnp.float64).astype(x.dtype)
    return lax.real(lax.complex(x, jnp.zeros_like(x)))


@jax.custom_jvp
def plus(a: jax.Array, b: jax.Array) -> jax.Array:
    return a + b


@plus.defjvp
def _plus_jvp(primals: Any, tangents: Any) -> Any:
    return plus(*primals), tangents[0] + tangents[1]
