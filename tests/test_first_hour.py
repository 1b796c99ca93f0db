# SPDX-License-Identifier: Apache-2.0
"""What somebody tries in the first hour: each mistake is named, with what to write instead."""

import collections
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jzero
from small import grouped

W = jnp.ones((64, 8))
X = np.ones((16, 64), np.float32)
shard_train_step: Any = jzero.shard_train_step
shard_eval_step: Any = jzero.shard_eval_step


def step(state, batch):
    x = batch["x"] if isinstance(batch, dict) else batch
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state)
    return state - 0.1 * grad, loss


class Tensor:
    """Of another package: it has a shape, a dtype of its own, and becomes an array where NumPy asks."""

    dtype: Any = "torch.float32"
    shape = X.shape

    def __array__(self, dtype=None, copy=None):
        return X


class Loader:
    def __iter__(self):
        yield X


@dataclasses.dataclass
class Fields:
    """No pytree."""

    x: Any


def of(package, **attributes):
    return type("Tensor", (Tensor,), {"__module__": package, **attributes})()


@pytest.mark.parametrize(("leaf", "edit"), [
    (of("torch"), r"batch\['x'\] is a Tensor.*np.asarray\(tensor\) or tensor.numpy\(\).*collate_fn"),
    (of("tensorflow.python.ops"), r"tfds.as_numpy\(dataset\)"),
    (of("pandas.core.series", dtype=np.dtype("float32")), r"frame.to_numpy\(\)"),
    (of("PIL.Image"), r"np.asarray\(image\)"),
    ("hello", r"batch\['x'\] is a str: 'hello'.*Leave text out.*token ids.*static_argnames"),
    (np.array(["hello"]), r"batch\['x'\] is an ndarray: array\(\['hello'\].*Leave text out"),
    (np.array([1, 2.5], object), r"is an ndarray.*array.astype\(np.float32\)"),
    (np.array([[1], [1, 2]], object), r"is an ndarray.*pad them to one length"),
    (np.zeros(3, [("a", "f4")]), r"\{name: array\[name\] for name in array.dtype.names\}"),
    (np.array(["2026-01-01"], "datetime64[D]"), r"array.astype\(np.float32\)"),
    (Loader(), r"next\(iterator\), or write for batch in loader"),
    (range(3), r"Pass NumPy arrays: np.asarray\(x\)"),
    ({1, 2}, r"np.asarray\(sorted\(x\)\)"),
    (collections.UserDict(x=X), r"is a UserDict.*dict\(batch\)"),
    (Fields(X), r"is a Fields.*register_dataclass.*vars\(x\)"),
    (Fields("a configuration"), r"is a Fields.*static_argnames"),
    (jnp.tanh, r"static_argnames"),
])  # fmt: skip
def test_a_leaf_that_is_no_array(leaf, edit):
    with pytest.raises(jzero.BatchError, match=f"(?s)Every leaf must be an array.*{edit}|{edit}"):
        shard_train_step(step)(W, {"x": leaf})


def test_each_kind_of_leaf_has_its_edit_once():
    with pytest.raises(jzero.BatchError) as caught:
        shard_train_step(step)(W, {"x": of("torch"), "y": of("torch"), "text": ["a"] * 20})
    assert "22 leaves fail" in str(caught.value)
    assert str(caught.value).count("tensor.numpy()") == 1
    assert "and 14 more" in str(caught.value)


@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
def test_a_loader_in_the_place_of_a_batch():
    with pytest.raises((jzero.BatchError, TypeError), match=r"next\(iterator\)|iterable type"):
        shard_train_step(step)(W, iter([X]))


@pytest.mark.parametrize("made", [shard_train_step(step), shard_eval_step(lambda w, x: x @ w)])
def test_shapes_where_a_step_runs(made):
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    with pytest.raises(
        jzero.BatchError, match="is a ShapeDtypeStruct.*shapes are for plan.*Pass arrays"
    ):
        made(W, shape)
    with pytest.raises(jzero.StateError, match="state is a ShapeDtypeStruct"):
        made(jax.ShapeDtypeStruct(W.shape, W.dtype), X)
    made(W, X)
    with pytest.raises(jzero.BatchError, match="is a ShapeDtypeStruct"):
        made(W, shape)


def test_a_list_of_numbers_is_named_where_the_step_fails():
    with pytest.raises(TypeError, match="unsupported operand") as caught:
        shard_train_step(step)(W, {"x": X.tolist(), "lr": 0.1})
    assert "batch['x'] (1024 numbers) is a Python list" in "".join(caught.value.__notes__)


# -- calls -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("args", "kwargs", "found"), [
    ((W,), {}, "missing a required argument: 'batch'"),
    ((), {}, "missing a required argument: 'state'"),
    ((W, X, 1), {}, "too many positional arguments"),
    ((W,), {"bacth": X}, "there is no parameter 'bacth'"),
])  # fmt: skip
@pytest.mark.parametrize("ask", ["__call__", "describe"])
def test_a_call_that_does_not_fit(args, kwargs, found, ask):
    text = rf"a call does not fit step\(state, batch\): .*{found}.*Call it with \(state, batch\)"
    with pytest.raises(jzero.StepError, match=text):
        getattr(shard_train_step(step), ask)(*args, **kwargs)


def test_a_call_of_an_evaluation_that_does_not_fit():
    def predict(w, x, *, scale: float, bias=0.0, **rest):
        return x @ w * scale

    text = (
        r"shard_eval_step: .*predict\(w, x, \*, scale, bias=0.0, \*\*rest\).*\(w, x, scale=scale\)"
    )
    with pytest.raises(jzero.StepError, match=text):
        shard_eval_step(predict)(W, X)


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [shard_train_step, functools.partial(shard_train_step, step)])
@pytest.mark.parametrize(("options", "edit"), [
    ({"donate_argnums": 0}, "no option donate_argnums=. A train step donates its state"),
    ({"in_shardings": None}, r"Drop it: arguments are sharded along dim 0.*in_specs=\{"),
    ({"out_shardings": None}, "Drop it: the state is returned as it is stored"),
    ({"zero_stage": 3}, "no option zero_stage=. Write stage="),
    ({"devices": 8}, r"Write mesh=jax.make_mesh\(\(len\(devices\),\)"),

    ({"gradient_accumulation_steps": 2}, "Write microbatches="),
    ({"static_argnum": 2}, r"Did you mean static_argnums=\?"),
    ({"accumulate": 2}, "no option accumulate=. Write microbatches=2."),
    ({"accumulate": 2, "reduce": "once", "layer_major": True},
     r"Write microbatches=jzero.Microbatches\(2, reduce='once', order='layer'\)."),
    ({"offload": jzero.HostCPU(ratio=0.5), "axis_names": "data", "stage": 2},
     r"Write memory=jzero.HostCPU\(ratio=0.5\), axes='data'."),
    ({"offload_params": jzero.PinnedHost(8), "reduce_dtype": jnp.bfloat16, "full": "bias"},
     r"Write memory=jzero.Memory\(params=jzero.PinnedHost\(device_bytes=8\)\), "
     r"comm=jzero.Comm\(reduce_dtype=jnp.bfloat16\), axes=jzero.Axes\(replicate='bias'\)."),
    ({"state_argnums": (0, 2), "zero_stage": 3},
     r"Write state=\(0, 2\). For zero_stage=: Write stage=."),
    ({"keep_unused": True}, "jzero compiles the step itself: drop it"),
    ({"xyzzy": 1}, r"Drop it: help\(jzero.shard_train_step\) lists the options"),
    ({"zero_stage": 3, "axis": "x"},
     "no option zero_stage=, axis=. For zero_stage=: Write stage=. For axis=: Write axes="),
])  # fmt: skip
def test_an_option_that_is_not_there(make, options, edit):
    with pytest.raises(jzero.OptionError, match=f"shard_train_step: there is .*{edit}"):
        make(**options)


def test_an_option_that_an_evaluation_has_not():
    with pytest.raises(
        jzero.OptionError, match="shard_eval_step: there is no option zero_stage=. Drop"
    ):
        shard_eval_step(step, zero_stage=3)


def test_options_by_position():
    text = (
        r"2 arguments by position, the second a int.*Write shard_train_step\(step_fn, stage=...\)"
    )
    with pytest.raises(jzero.OptionError, match=text):
        shard_train_step(step, 3)


@pytest.mark.parametrize("make", [shard_train_step, shard_eval_step])
def test_a_decorator_that_is_called_like_a_step(make):
    with pytest.raises(
        jzero.OptionError, match="called without .*, and its result with 2 arguments"
    ):
        make(mesh=None)(W, X)
    assert callable(make()(step))


# -- functions that are compiled already -----------------------------------------------------------


def with_count(state, batch, num: int):
    for _ in range(num):
        state, loss = step(state, batch)
    return state, loss


@pytest.mark.slow
@pytest.mark.parametrize("jitted", [
    jax.jit(with_count, static_argnums=2),
    jax.jit(with_count, static_argnums=(-1,), donate_argnums=0),
    functools.partial(jax.jit, static_argnames=("num",))(with_count),
    nnx.jit(with_count, static_argnames="num"),
])  # fmt: skip
def test_what_is_static_is_taken_over(jitted):
    expected, _ = with_count(W, X, 2)
    for options in ({}, {"static_argnames": "num"}):
        train_step = shard_train_step(jitted, **grouped(**options))
        np.testing.assert_allclose(train_step(W, X, 2)[0], expected, rtol=1e-5)
        np.testing.assert_allclose(train_step(W, batch=X, num=2)[0], expected, rtol=1e-5)


@pytest.mark.parametrize("fn", [
    with_count,
    lambda state, batch, num: jax.jit(with_count, static_argnums=2)(state, batch, num),
])  # fmt: skip
def test_what_cannot_be_read_is_named(fn):
    with pytest.raises((TypeError, ValueError)) as caught:
        shard_train_step(fn)(W, X, 2)
    assert "static_argnames=('num',)" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(("fn", "value"), [
    (lambda w, x, num: (w + x.reshape(num, -1).mean(), 1.0), 4),
    (lambda w, x, num: (w + jnp.zeros(num).sum(), 1.0), 4),
    (lambda w, x, num: (w, 1.0) if num else (w, 2.0), True),
])  # fmt: skip
def test_a_value_that_the_step_needs_is_named(fn, value):
    with pytest.raises(TypeError) as caught:
        shard_train_step(fn)(W, X, value)
    assert "num came as a number or bool" in "".join(caught.value.__notes__)
    shard_train_step(fn, static_argnames="num")(W, X, value)


def test_a_number_beside_what_the_step_needs_is_not_named():
    with pytest.raises(TypeError, match="value of the argument w") as caught:
        shard_train_step(lambda w, x, num: (w, 1.0) if w.sum() > 0 else (w, num))(W, X, 3)
    assert "jzero" not in "".join(caught.value.__notes__)


def test_a_number_that_no_array_holds_is_named():
    train_step = shard_train_step(lambda w, x, num: (w * num, 1.0))
    train_step(W, X, 2)
    with pytest.raises(jzero.BatchError, match=r"num is 1099511627776\. It fits no array"):
        train_step(W, X, 2**40)


# -- what a notebook shows -------------------------------------------------------------------------


def test_repr():
    train_step = shard_train_step(step, stage=2)
    assert repr(train_step) == "<ShardedStep of step: stage 2, mesh of the first call>"
    train_step(W, X)
    assert repr(train_step) == "<ShardedStep of step: stage 2, mesh ('data': 8)>"
    mesh = jax.make_mesh((2, 4), ("node", "local"))
    assert repr(train_step.on_mesh(mesh)).endswith("stage 2, mesh ('node': 2, 'local': 4)>")
    of_partial = repr(shard_train_step(functools.partial(step)))
    assert of_partial == "<ShardedStep of step: stage 3, mesh of the first call>"
    eval_step = shard_eval_step(lambda w, x: x @ w, mesh=mesh)
    assert repr(eval_step) == "<ShardedStep of <lambda>: mesh ('node': 2, 'local': 4)>"


def test_html_says_what_the_text_says():
    state = {"w": W, "<b>": jnp.ones(7)}

    def of_both(state, x):
        new, loss = step(state["w"], x)
        return {"w": new, "<b>": state["<b>"] + loss}, jnp.sort(x["x"][:, 0] * loss)

    report = shard_train_step(of_both).describe(state, {"x": X})
    html = report._repr_html_()
    assert html.count("<table>") == 2
    assert "<b>" not in html
    assert "state[&#x27;&lt;b&gt;&#x27;]" in html
    cells = re.sub(r"<[^>]*>", " ", html).replace("&#x27;", "'").replace("&lt;", "<")
    cells = cells.replace("&gt;", ">").replace("&amp;", "&")
    assert cells.split() == str(report).split()


@pytest.mark.parametrize("specs", [(None, jax.P("data")), 0, "data", {"batch": "data"}], ids=str)
def test_in_specs_is_a_dict_of_specs(specs):
    with pytest.raises(
        jzero.OptionError, match=r"in_specs.*Write in_specs=\{'batch': jax.P\('data'\)\}"
    ):
        shard_train_step(step, in_specs=specs)


def test_init_and_shard_are_told_apart():
    made, key = shard_train_step(step), jax.random.key(0)
    for wrong, what in ((W, "an ArrayImpl"), ((W, W), "a tuple"), (key, "a PRNGKeyArray")):
        with pytest.raises(
            jzero.StateError, match=rf"init_fn is {what}.*train_step.shard\(state\)"
        ):
            made.init(wrong)
    with pytest.raises(jzero.MeshError, match="mesh is a list"):
        repr(shard_train_step(step, mesh=jax.devices()))


def two_states(actor, critic, batch):
    return step(actor["w"], batch)[0], critic


@pytest.mark.parametrize(("options", "text"), [
    ({}, r"arguments of two_states\(actor, critic, batch\).*shard\(\(params, opt_state\)\)"),
    ({"state_argnums": (0, 1)}, r"shard: the state is a dict.*Pass \(actor, critic\)"),
])  # fmt: skip
def test_a_state_in_two_arguments_is_placed_as_their_tuple(options, text):
    with pytest.raises(jzero.StateError, match=text):
        shard_train_step(two_states, **grouped(**options)).shard({"w": W}, {"w": W})


class Variable:
    """As Keras has it: an array to eager operations, and none to JAX's transformations."""

    shape, dtype, value = W.shape, "float32", W

    def __jax_array__(self):
        return W


@pytest.mark.parametrize("use", [
    lambda made: made(Variable(), X), lambda made: made.describe(Variable(), X),
    lambda made: made.shard(Variable()),
], ids=["call", "describe", "shard"])  # fmt: skip
def test_a_variable_is_no_array(use):
    with pytest.raises(jzero.StateError, match=r"state is a Variable.*lambda x: x.value"):
        use(shard_train_step(step))


def test_a_report_is_short_where_it_is_shown_in_a_list():
    mesh = jax.make_mesh((1,), ("data",))
    report = shard_train_step(step, stage=3, mesh=mesh).describe(W, X)
    assert repr([report]) == "[<Report: stage 3 over 1 device; print it>]"
    assert str(report).startswith("jzero: stage 3 over 1 device (data")
