"""jzero.testing: right steps pass, wrong ones fail, and the message says where and by how much."""

import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

import jzero.testing
import small
from jzero._compare import differences, to_host, ulps_apart
from jzero.testing import Tolerance, assert_collectives, assert_same_training
from small import grouped

TX = optax.adamw(1e-2)
BATCHES = [jax.random.normal(jax.random.key(i), (16, 8)) for i in range(3)]


def init():
    params = {"b": jnp.zeros(4), "w": jnp.ones((8, 4)) / 8}
    return {"params": params, "opt_state": TX.init(params)}


def make_step(loss_fn, reduced=lambda tree: tree):
    def step(state, x):
        loss, grads = reduced(jax.value_and_grad(loss_fn)(state["params"], x))
        updates, opt_state = TX.update(grads, state["opt_state"], state["params"])
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
        }, {"loss": loss}

    return step


def mean_loss(params, x):
    return jnp.mean(jnp.square(x @ params["w"] + params["b"][None] - 1))


def scaled_loss(params, x):
    return mean_loss(params, x / jnp.max(jnp.abs(x)))


def mean_over_devices(tree):
    return jax.lax.pmean(tree, "data")


# It averages its gradients, and scales by the largest number of its own rows.
WRONG = make_step(scaled_loss, mean_over_devices)
IN_DEVICES: Any = {"axis_name": "data", "reference": make_step(scaled_loss)}


def fails(text, fn, *args, error: Any = jzero.MismatchError, **kwargs):
    with pytest.raises(error) as caught:
        fn(*args, **kwargs)
    assert isinstance(caught.value, jzero.JzeroError)
    for part in [text] if isinstance(text, str) else text:
        assert part in str(caught.value)
    return str(caught.value)


# -- the same training -----------------------------------------------------------------------------


def test_the_state_is_really_sharded():
    """And not left full because a test's model is small."""
    with pytest.raises(jzero.OptionError, match="min_shard_bytes=-1"):
        assert_same_training(
            make_step(mean_loss), init, BATCHES, axes=jzero.Axes(min_shard_bytes=-1)
        )


@pytest.mark.slow
def test_a_wrong_step_is_found_with_index_values_and_ulps():
    text = fails(
        ["assert_same_training, batches[0]: ", " leaves fail:",
         "  - state['opt_state'][0].mu['w'] float32[8,4]: ",
         "elements differ, most at [", " instead of ", " ULPs apart",
         "At stage 1 a step must train on several devices as on one. ", "still local?"],
        assert_same_training, WRONG, init, BATCHES, stage=1, **IN_DEVICES,
    )  # fmt: skip
    assert "output[1]['loss'] float32[]: 1 of 1 elements differ: " in text


def test_the_first_leaves_of_many_are_shown():
    def step(state, x, reduced=lambda x: x):
        return jax.tree.map(lambda w: w + reduced(jnp.max(x)), state)

    def wrong(state, x):
        return step(state, x, mean_over_devices)

    axes = jzero.Axes(axis_name="data")
    text = fails("batches[0]: 11 leaves fail:\n", assert_same_training, wrong,
                 lambda: [jnp.ones(8)] * 11, BATCHES, axes=axes, reference=step)  # fmt: skip
    assert text.count("\n  - state[") == 8
    assert "\n  - and 3 more\nAt stage 3" in text


@pytest.mark.slow
def test_the_first_step_that_differs_is_named():
    def step(w, batch, reduced=lambda x: x):
        x, bad = batch
        new = w - 0.1 * reduced(jnp.mean(x)) + jnp.where(bad[0], reduced(jnp.max(x)), 0.0)
        return new, reduced(jnp.mean(x))

    def wrong(w, batch):
        new, mean = step(w, batch, mean_over_devices)
        return mean_over_devices(new), mean

    batches = [((x, jnp.full(16, i == 1)),) for i, x in enumerate(BATCHES)]
    message = fails("batches[1]: state float32[8]: 8 of 8 elements differ, most at [",
                    assert_same_training, wrong, lambda: jnp.ones(8), batches,
                    axes=jzero.Axes(axis_name="data"), reference=step)  # fmt: skip
    assert "output" not in message


def test_the_reference_is_compared_with():
    def step(w, x, scale):
        return w - 0.1 * scale * jax.grad(lambda w: jnp.mean(x @ w))(w)

    def reference(w, x, scale):
        return w - 0.1 * jax.grad(lambda w: jnp.mean(x @ w))(w)

    start = (lambda: jnp.ones((8, 4)),)
    assert_same_training(step, *start, [(x, 1.0) for x in BATCHES], reference=reference)
    batches = [(x, 2.0) for x in BATCHES]
    fails("state float32[8,4]", assert_same_training, step, *start, batches, reference=reference)


def test_written_steps_need_a_reference():
    def step(w, x):
        return w - jax.lax.pmean(jax.grad(lambda w: jnp.mean(x @ w))(w), "batch")

    def whole(w, x):
        return w - jax.grad(lambda w: jnp.mean(x @ w))(w)

    state = (lambda: jnp.ones((8, 4)), BATCHES)
    fails("axis_name='batch') without reference", assert_same_training, step, *state,
          axes=jzero.Axes(axis_name="batch"), error=jzero.OptionError)  # fmt: skip
    assert_same_training(step, *state, axes=jzero.Axes(axis_name="batch"), reference=whole)


def test_codes_on_the_wire_need_a_tolerance():
    def step(w, x, rate=0.1):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w["large"]) ** 2))(w)
        return jax.tree.map(lambda w, g: w - rate * g, w, grads), {"loss": loss}

    def faster(w, x):
        return step(w, x, 0.11)

    def start(size):
        w = jax.random.normal(jax.random.key(size), (size, size)) / size**0.5
        return {"large": w, "other": jnp.ones(size)}

    codes: Any = {"comm": jzero.Comm(reduce_dtype=jnp.int8), "stage": 1}
    batches = [jax.random.normal(jax.random.key(i), (16, 128)) for i in range(2)]
    large = step, lambda: start(128), batches
    text = fails(
        ["assert_same_training: state['large'] is sent quantized. Quantized values train near to one device",
         "Drop gather_dtype and reduce_dtype to check every leaf", "docs/guide/precision.md"],
        assert_same_training, *large, **codes, error=jzero.OptionError,
    )  # fmt: skip
    assert "other" not in text
    assert_same_training(*large, tolerance=Tolerance(0, 1e-4), **codes)
    fails("state['large']", assert_same_training, *large, **codes, tolerance=Tolerance(0, 1e-4),
          reference=faster)  # fmt: skip
    # Small leaves travel as they are, and are compared so.
    small = [x[:, :8] for x in batches]
    assert_same_training(step, lambda: start(8), small, **codes)


def test_nothing_to_compare():
    step = make_step(mean_loss)
    fails("batches is empty. Each batch is one step.", assert_same_training, step, init, [],
          error=jzero.OptionError)  # fmt: skip
    fails(["the mesh has 1 device", "device_count=8"], assert_same_training, step, init,
          BATCHES, mesh=small.mesh(data=1), error=jzero.MeshError)  # fmt: skip


@pytest.mark.slow
def test_a_plain_script_can_do_it():
    """With the environment that the module's docstring asks for, and nothing else of ours."""
    code = """
import jax, jax.numpy as jnp
from jzero.testing import assert_same_training
step = lambda w, x: w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
assert_same_training(step, lambda: jnp.ones((8, 4)), [jnp.ones((16, 8))])
"""
    lines = (jzero.testing.__doc__ or "").split("::")[1].split("\n\n")[1]
    settings = dict(re.findall(r'(\w+)=("[^"]*"|\S+)', lines))
    environment = {name: " ".join(value.strip('"').split()) for name, value in settings.items()}
    assert set(environment) == {"JAX_PLATFORMS", "XLA_FLAGS", "PJRT_NPROC"}
    environment["PYTHONPATH"] = ":".join(filter(None, sys.path))
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


# -- how leaves are compared -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "a", "b", "ulps"),
    [
        (np.float32, 1.0, 1.0 + 2**-23, 1),
        (np.float32, -1.0, -1.0 - 2**-23, 1),
        (np.float32, 0.0, -0.0, 0),
        (np.float32, -1e-45, 1e-45, 2),  # the subnormals beside zero
        (np.float64, 1.0, 2.0, 2**52),
        (jnp.bfloat16, 1.0, 2.0, 2**7),
        (np.float16, 1.0, np.inf, 2**10 * 16),
        (np.float32, 1.0, np.nan, None),
        (np.int32, 1, 2, None),
    ],
)
def test_ulps(dtype, a, b, ulps):
    a, b = (np.asarray(x, dtype)[()] for x in (a, b))
    assert ulps_apart(a, b) == ulps_apart(b, a) == ulps


def found(a, b, **kwargs):
    return list(differences(to_host(a), to_host(b), "x", **kwargs))


def test_what_differs_is_described():
    one = np.ones((2, 3), np.float32)
    other = one.copy()
    other[1, 2], other[0, 0] = 1.5, 1.1
    text = "x['a'] float32[2,3]: 2 of 6 elements differ, most at [1, 2]: 1.5 instead of 1.0, 4,194,304 ULPs"
    assert found({"a": other}, {"a": one}) == [f"{text} apart"]
    assert found(one + 1e-6, one) == []
    assert found(one, one.astype(np.float64)) == ["x float64[2,3]: it is float32[2,3]"]
    assert found(np.array([1, 2]), np.array([1, 3])) == [
        "x int64[2]: 1 of 2 elements differ, most at [1]: 2 instead of 3"
    ]
    assert found({"a": one, "new": one}, {"a": one, "old": one}) == [
        "x['old'] is missing",
        "x['new'] is new",
    ]


def test_what_is_not_finite():
    nan, inf = np.array([np.nan], np.float32), np.array([np.inf], np.float32)
    assert found(nan, nan) == found(inf, inf) == []
    assert found(inf, inf, tolerance=Tolerance(0, 0)) == []
    assert "nan instead of inf" in found(nan, inf)[0]
    assert (
        "most at [0]: inf instead of 1.0"
        in found(inf, np.ones(1, np.float32), tolerance=Tolerance(9, 9))[0]
    )
    assert "-inf instead of inf" in found(-inf, inf)[0]


def test_keys_are_compared():
    a, b = jax.random.split(jax.random.key(0))
    assert found(a, a) == []
    assert "2 of 2 elements differ" in found(a, b)[0]


# -- traffic ---------------------------------------------------------------------------------------

NODES = AbstractMesh((2, 4), ("node", "local"))
W, X = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32)


def linear_step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.square(jnp.tanh(x @ w) @ w)))(w)
    return w - 0.1 * grad, {"loss": loss}


def sharded(**options):
    return jzero.shard_train_step(
        linear_step, **grouped(**{"min_shard_bytes": 0, "mesh": NODES, **options})
    )


RIGHT = {
    ("all-gather", "float32", "local"): (2 * 64, 2),
    ("all-gather", None, "node"): 16,
    ("reduce-scatter", "float32"): 64 + 16,
    "all-reduce": 1,
}


def test_what_else_moves_is_named_by_kind_and_leaf():
    expected = {
        **RIGHT,
        "reduce-scatter": 80,
        ("all-gather", None, "node"): (16, 2),
        "all-to-all": 5,
    }
    expected.pop(("reduce-scatter", "float32"))
    expected.pop("all-reduce")
    text = fails("assert_collectives: 3 kinds fail:", assert_collectives,
                 sharded(param_axes="local"), W, X, expected)  # fmt: skip
    assert text.splitlines()[1:] == [
        "  - all-gather over node: 16 elements in 1, expected 16 elements in 2 (state 16)",
        "  - all-to-all: 0 elements in 0, expected 5 elements",
        "  - all-reduce float32 over node,local: 1 elements in 1, expected 0 elements (no leaf's 1)",
        "Elements are of whole values, times how often a step moves them. Correct expected, or read "
        "print(train_step.describe(...)).",
    ]


def test_a_step_that_gathers_more_than_it_should():
    """The contract breaks when an option changes behind its back."""
    contract = {"all-gather": 64, "reduce-scatter": 64, "all-reduce": 1}
    assert_collectives(sharded(gather="keep"), W, X, contract)
    fails(
        "all-gather: 128 elements in 2, expected 64", assert_collectives, sharded(), W, X, contract
    )


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ({3: 1}, "expected has the kind 3. A kind is an op, or (op, dtype, axes)."),
        ({("all-gather", "float32", "data", "x"): 1}, "expected has the kind ('all-gather',"),
        ({("all-gather", jnp.float32): 1}, "expected has the kind ('all-gather', <class"),
        ({"all-gather": 2.5}, "expected['all-gather'] is 2.5. It is elements, or (elements, times)."),
        ({"all-gather": (1, 2, 3)}, "expected['all-gather'] is (1, 2, 3)"),
        ({"all-gather": 1, ("all-gather", "float32"): 1},
         "all-gather and all-gather float32 both mean all-gather float32 over node,local."),
    ],
    ids=str,
)  # fmt: skip
def test_expectations_of_another_form(expected, text):
    fails(text, assert_collectives, sharded(), W, X, expected, error=jzero.OptionError)


def test_a_step_that_was_not_sharded():
    fails("train_step is a function", assert_collectives, linear_step, W, X, {},
          error=jzero.OptionError)  # fmt: skip
