"""`jzero.groups` is a vmap over groups of rows; on devices that divide the groups nothing of it moves."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
import small
from jzero.testing import assert_collectives

ROWS = 32
COLLECTIVES = r"all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def by_hand(fn, n, x, axis=0):
    """A Python loop over the groups."""
    return [fn(part) for part in np.split(x, n, axis)]


# -- what it means -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4, 32])
def test_results_come_back_in_the_order_of_the_rows(n):
    x = normal(ROWS, 3)
    rows, means = jzero.groups(lambda x: (x - x.mean(0)[None], x.mean(0)), n, out_axes=(0, None))(x)
    np.testing.assert_allclose(
        rows, np.concatenate(by_hand(lambda x: x - x.mean(0), n, x)), atol=1e-6
    )
    np.testing.assert_allclose(means, np.stack(by_hand(lambda x: x.mean(0), n, x)), atol=1e-6)


@pytest.mark.slow
def test_rows_along_other_dims_and_shared_arguments():
    x, w, b = normal(3, ROWS), normal(3, 5), normal(ROWS, 1)

    def fn(arrays, weights, *, bias):
        y = arrays["x"].T @ weights + jnp.broadcast_to(bias, (8, 5))
        return {"y": y.T, "last": y[-1]}

    grouped = jzero.groups(fn, 4, in_axes=(1, None), out_axes={"y": -1, "last": None})
    found = grouped({"x": x}, w, bias=b)
    np.testing.assert_allclose(found["y"], (x.T @ w + b).T, atol=1e-6)
    np.testing.assert_allclose(found["last"], (x.T @ w + b)[7::8], atol=1e-6)


# -- wrong uses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "n", "options", "args"), [
    ("jzero.groups: n=0. There is at least one group", 0, {}, ()),
    ("n=3 does not divide 32 rows. All groups have the same number of rows", 3, {}, [normal(ROWS)]),
    ("args[0] float32[32] has 32 rows\n  - args[1]['y'] float32[8] has 8 rows", 4, {},
     [normal(ROWS), {"y": normal(8)}]),
    ("no argument has rows. All arguments with rows have the same", 4, {"in_axes": None}, [normal(ROWS)]),
    ("no argument has rows", 4, {}, []),
    ("args[0] float32[] has no dim 0. Rows are along a dim. Name that dim in in_axes", 4, {},
     [np.float32(1)]),
    ("args[1] float32[32] has no dim 1", 4, {"in_axes": (0, 1)}, [normal(ROWS), normal(ROWS)]),
    ("output float32[] has no dim 0. Rows are along a dim. Name that dim in out_axes, or None", 4, {},
     [normal(ROWS)]),
])  # fmt: skip
def test_refusals(text, n, options, args):
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        jzero.groups(lambda *args: jnp.sum(args[0]), n, **options)(*args)
    assert isinstance(caught.value, jzero.JzeroError)


@pytest.mark.parametrize(("text", "fn"), [
    ("output float32[3] has not the 8 rows of its group along dim 0. A group returns as many rows as are "
     "passed to it. Name their dim in out_axes, or None", lambda x: x[:3]),
    ("output['y'] float32[16] has not the 8 rows", lambda x: {"y": jnp.repeat(x, 2)}),
    ("2 results fail:\n  - output[1] is a str\n  - output[2] is a function\nResults are arrays.",
     lambda x: (x, "a", normal)),
])  # fmt: skip
def test_refused_results(text, fn):
    with pytest.raises(jzero.BatchError, match=re.escape(text)):
        jzero.groups(fn, 4)(normal(ROWS))


@pytest.mark.parametrize("n", ["2", 2.0, True, np.True_, jnp.ones(2)], ids=str)
def test_what_is_no_number_of_groups(n):
    text = re.escape(
        f"jzero.groups: n={n!r}. There is at least one group. Pass a Python int n >= 1."
    )
    with pytest.raises(jzero.OptionError, match=text):
        jzero.groups(jnp.sin, n)


def test_a_traced_number_of_groups():
    with pytest.raises(jzero.OptionError, match="Pass a Python int n >= 1"):
        jax.jit(lambda n, x: jzero.groups(jnp.sin, n)(x))(2, normal(ROWS))


PREFIX = "It is one dim, or a prefix of the tree of"
WRAPPERS: dict[str, Callable[..., Callable[..., Any]]] = {
    "groups": functools.partial(jzero.groups, n=4),
    "per_example": jzero.per_example,
}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize(("text", "options"), [
    ("fn=3 is no function. It is called. Pass a function.", {"fn": 3}),
    ("in_axes='0'. It is the dim of the rows or None, for all or for each of them. Pass an int, None, or a "
     "tuple with one for each argument.", {"in_axes": "0"}),
    ("in_axes=True. It is the dim", {"in_axes": True}),
    ("in_axes=(0, '1'). It is the dim", {"in_axes": (0, "1")}),
    ("out_axes={'y': 1.5}. It is the dim of the rows or None, for all or for each of them. Pass an int, "
     "None, or a tree of these like that of the results.", {"out_axes": {"y": 1.5}}),
])  # fmt: skip
def test_refused_when_made(name, text, options):
    with pytest.raises(jzero.OptionError, match=re.escape(f"jzero.{name}: {text}")):
        WRAPPERS[name](**{"fn": jnp.sin, **options})


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize(("text", "options", "args", "kwargs"), [
    (f"in_axes=(0, 0) does not fit PyTreeDef((*,)). {PREFIX} arguments. Name one for each, or for each part.",
     {"in_axes": (0, 0)}, [1], {}),
    ("in_axes=({'a': 0},) does not fit PyTreeDef(({'a': *, 'w': *},))",
     {"in_axes": ({"a": 0},)}, [{"a": 1, "w": 2}], {}),
    (f"out_axes=(0, 0) does not fit PyTreeDef(*). {PREFIX} results",
     {"out_axes": (0, 0)}, [normal(ROWS)], {}),
    ("args[1] is a str. A value with rows is an array. Name that dim in in_axes, or None",
     {}, [normal(ROWS), "f4"], {}),
    ("args[0]['a'] is an ndarray. A value with rows", {}, [{"a": np.array(["b"])}], {}),
    ("kwargs['train'] bool[] has no dim 0. Rows are along a dim. Keyword arguments have their rows in dim 0: "
     "pass it by position to name its axis, or bind it with functools.partial.",
     {}, [normal(ROWS)], {"train": True}),

    ("or None where it has none. Keyword arguments have their rows in dim 0: pass it by position",
     {}, [normal(ROWS)], {"b": normal(8)}),
])  # fmt: skip
def test_refused_when_called(name, text, options, args, kwargs):
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        WRAPPERS[name](lambda x, *_, **__: x, **options)(*args, **kwargs)
    assert isinstance(caught.value, jzero.JzeroError)


# -- on devices ------------------------------------------------------------------------------------------


def norm(x):
    """Of a group: its rows, normalised, sorted and added up along the group."""
    x = (x - x.mean(0)[None]) * jax.lax.rsqrt(x.var(0) + 0.1)[None]
    return jnp.sort(x, axis=0) + jnp.cumsum(x, axis=0)


def forward_and_backward(n, state, x):
    def loss(x):
        return jnp.sum(jnp.sin(jzero.groups(norm, n)(x)), axis=1)

    return state, {"loss": loss(x), "grad": jax.grad(lambda x: loss(x).sum())(x)}


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "accumulate", "n"), [(8, 1, 16), (4, 2, 8)])
def test_nothing_moves(devices, accumulate, n):
    fn = functools.partial(forward_and_backward, n)
    step = small.shard_train_step(fn, mesh=small.mesh(data=devices), microbatches=accumulate)
    state, x = jnp.ones(8), normal(ROWS, 3)
    assert_collectives(step, state, x, {})
    assert not re.search(COLLECTIVES, step.lower(state, x).compile().as_text())
    _, expected = jax.jit(fn)(state, x)
    _, found = step(step.shard(state), x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


def test_too_few_groups_gather_and_say_so():
    fn = functools.partial(forward_and_backward, 4)
    step = small.shard_train_step(fn)
    state, x = jnp.ones(8), normal(ROWS, 3)
    text = " ".join(str(step.describe(state, x)).split())
    assert "jzero.groups is local if its n is a multiple of 8" in text
    assert "test_groups.py" in text
    _, expected = jax.jit(fn)(state, x)
    _, found = step(step.shard(state), x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)
