"""Activations that wait on the host for the backward pass: the same training, and types say where."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import jzero
import samples
import small
import zoo
from jzero.sharding.analysis import _residuals
from jzero.sharding.plan import _host_memory
from jzero.tracing import _jaxpr

LAYERS, WIDTH, ROWS, STEPS = 4, 16, 16, 4
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
BY_NAME = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=["kept"], names_which_can_be_offloaded=["moved"],
    offload_src="device", offload_dst="pinned_host",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """The models' values are small, so all that may wait on the host does, and little is on its way."""
    monkeypatch.setattr(_residuals, "LEAST_BYTES", 0)
    monkeypatch.setattr(_residuals, "ON_THEIR_WAY", 4 * 2 * WIDTH)


def new_state():
    keys = jax.random.split(jax.random.key(0), 3)
    layers = {
        "up": jax.random.normal(keys[0], (LAYERS, WIDTH, 2 * WIDTH)) / 4,
        "down": jax.random.normal(keys[1], (LAYERS, 2 * WIDTH, WIDTH)) / 6,
    }
    params = {"layers": layers, "head": jax.random.normal(keys[2], (WIDTH, WIDTH)) / 4}
    return {"params": params, "opt_state": TX.init(params)}


def block(x, w, key):
    x = checkpoint_name(x, "moved")
    hidden = checkpoint_name(jnp.tanh(x @ w["up"]), "kept")
    hidden = hidden * jax.random.bernoulli(key, 0.8, hidden.shape)
    return x + hidden @ w["down"]


def make_step(scan, recompute="nothing"):
    """A residual MLP with dropout; `recompute` is what of a layer the backward pass computes again."""
    layer = {
        "nothing": block,
        "blocks": jax.checkpoint(block, prevent_cse=not scan),
        "by name": jax.checkpoint(block, prevent_cse=not scan, policy=BY_NAME),
        "apart, by name": jax.checkpoint(block, policy=BY_NAME),
    }[recompute]

    def loss_fn(params, x, key):
        keys = jax.random.split(key, LAYERS)
        if scan:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, *w), None), x, (params["layers"], keys))
        else:
            layers = params["layers"]
            for up, down, key in zip(layers["up"], layers["down"], keys, strict=True):
                x = layer(x, {"up": up, "down": down}, key)
        return jnp.mean((x @ params["head"]) ** 2)

    def step(state, x, key):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], x, key)
        updates, opt_state = TX.update(grads, state["opt_state"], state["params"])
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
        }, loss

    return step


def batches():
    return [
        (jax.random.normal(jax.random.key(i), (ROWS, WIDTH)), jax.random.key(100 + i))
        for i in range(STEPS)
    ]


@functools.cache
def one_device(scan, recompute):
    """The state after the last step, and the losses."""
    state, losses = new_state(), []
    step = jax.jit(make_step(scan, recompute))
    for batch in batches():
        state, loss = step(state, *batch)
        losses.append(loss)
    return jax.device_get((state, losses))


ON_HOST: dict[str, Any] = {"offload_activations": jzero.PinnedHost()}
BOTH: dict[str, Any] = {"offload_params": jzero.PinnedHost(device_bytes=2**14), **ON_HOST}


def sharded(scan, recompute="blocks", **options):
    step = make_step(scan, recompute)
    return small.shard_train_step(step, in_specs={"key": jax.P()}, **options)


def assert_trains_as_one_device(scan, recompute, axes=None, **options):
    """On a mesh every leaf and loss is one device's."""
    mesh = small.mesh(**axes or {"data": 8})
    train_step = sharded(scan, recompute, mesh=mesh, **options)
    state, losses = train_step.shard(new_state(), *batches()[0]), []
    for batch in batches():
        state, loss = train_step(state, *batch)
        losses.append(loss)
    state = train_step.unshard(state)
    expected = one_device(scan, recompute)
    zoo.assert_trees_close(jax.device_get((state, losses)), expected, zoo.FP32, "")
    return train_step


@pytest.mark.parametrize(("scan", "recompute"), [(True, "nothing"), (False, "blocks")])
def test_one_device_moves_what_each_of_two_does(scan, recompute):
    """Though nothing differs between devices there."""
    plans = []
    for num in (1, 2):
        train_step = assert_trains_as_one_device(scan, recompute, {"data": num}, **ON_HOST)
        state, batch = new_state(), batches()[0]
        plans.append(train_step.describe(state, *batch).plan.activations)
    one, two = plans
    assert one
    assert [x._replace(shape=(), nbytes=0) for x in one] == [
        x._replace(shape=(), nbytes=0) for x in two
    ]


def test_microbatches_move_what_one_batch_does():
    one, two = (
        sharded(True, accumulate=k, **ON_HOST).plan(new_state(), *batches()[0]).activations
        for k in (1, 2)
    )
    assert one
    assert [(x.iterations, x.times) for x in two] == [(x.iterations, x.times) for x in one]


@pytest.mark.parametrize("limit", [0, 2**30], ids=["one on its way", "all on their way"])
def test_values_wait_for_those_before(monkeypatch, limit):
    """What an unrolled forward pass goes on with waits for copies to the host, if they are many bytes."""
    monkeypatch.setattr(_residuals, "ON_THEIR_WAY", limit)
    train_step = sharded(False, **ON_HOST)
    jaxpr = train_step.program(new_state(), *batches()[0], after="activations").jaxpr
    barriers = [e for e in jaxpr.eqns if e.primitive.name == "optimization_barrier"]
    on_host = [[_jaxpr.is_on_host(x.aval) for x in e.invars] for e in barriers]
    assert any(any(rest) and not first for first, *rest in on_host) == (not limit)


@pytest.mark.slow
def test_a_stack_that_is_read_whole():
    """Both passes read it otherwise than slice by slice: it leaves as a value, when its loop is over."""

    def step(params, x):
        def loss_fn(params):
            def iteration(h, w):
                h = jnp.tanh(h @ w)
                return h, h

            _, stack = jax.lax.scan(iteration, x, params["layers"])
            return jnp.mean(jnp.tanh(stack @ params["head"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

    keys = jax.random.split(jax.random.key(0))
    params = {"layers": jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / 4,
              "head": jax.random.normal(keys[1], (WIDTH, WIDTH)) / 4}  # fmt: skip
    x, _ = batches()[0]
    expected = jax.device_get(jax.jit(step)(params, x))
    for options in (BOTH, ON_HOST):
        train_step = small.shard_train_step(step, **options)
        stack, *_ = train_step.plan(params, x).activations
        assert (stack.shape, stack.iterations) == ((LAYERS, ROWS // 8, WIDTH), 1)
        params_there, loss = train_step(train_step.shard(params), x)
        found = train_step.unshard(params_there), loss
        zoo.assert_trees_close(jax.device_get(found), expected, zoo.FP32, "")


# -- beside parameters on the host -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scan", "recompute"),
    [pytest.param(True, "by name", marks=pytest.mark.slow), (False, "apart, by name")],
)
def test_policies_of_the_step_beside_parameters(scan, recompute):
    for options in (BOTH, {"offload_params": BOTH["offload_params"]}):
        train_step = assert_trains_as_one_device(scan, recompute, **options)
        assert layered(train_step)._cut.waiting


@pytest.mark.slow
def test_coming_defaults_keep_what_waits():
    """JAX's own names of values become other equations."""
    with samples.switched_on("jax_remat3"):
        train_step = sharded(True, "blocks", **BOTH)
        assert layered(train_step)._cut.waiting


def layered(train_step):
    call = train_step._programs.bind((new_state(), *batches()[0]), {})
    return train_step._programs.of(call).step.layered


# -- a step's own policies -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scan", "options"),
    [(False, {"offload": jzero.PinnedHost()}), (True, {"offload": jzero.HostCPU()}),
     pytest.param(True, ON_HOST | {"accumulate": 2}, marks=pytest.mark.slow)],
)  # fmt: skip
def test_policies_of_the_step(scan, options):
    train_step = assert_trains_as_one_device(scan, "by name", **options)
    assert "<host>" in str(train_step.program(new_state(), *batches()[0], after="activations"))
    # No rows are gathered for it.
    assert not train_step.describe(new_state(), *batches()[0]).movements


# -- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (jzero.HostCPU(), "reads and writes pinned memory of their host, and no other"),
        (jzero.PinnedHost(device_bytes=3), "Its fields are about optimizer state"),
    ],
)
def test_policies_that_cannot_be(policy, text):
    with pytest.raises(jzero.OptionError, match=text):
        sharded(True, offload_activations=policy)


@pytest.mark.parametrize(
    ("recompute", "options", "error", "text"),
    [
        ("blocks", ON_HOST, jzero.OptionError,
         "Memory(activations=PinnedHost()) on GPUs with JAX "),
        ("by name", {}, jzero.StepError, "a loop makes float32[4, 16, 16] at "),
        ("blocks", BOTH | {"accumulate": 2}, jzero.OptionError, "on GPUs with JAX"),
    ],
    ids=["the option", "a policy of the step", "in microbatches"],
)  # fmt: skip
def test_gpus_of_which_xla_is_wrong(monkeypatch, recompute, options, error, text):
    """It trains wrong there without a word (XLA), so that it is refused."""
    monkeypatch.setattr(_host_memory, "RIGHT_SINCE", (99, 0))
    monkeypatch.setattr(_host_memory, "platform_of", lambda mesh: "gpu")
    train_step = sharded(True, recompute, **options)
    with pytest.raises(error, match=re.escape(text)) as caught:
        train_step.plan(new_state(), *batches()[0])
    assert "Use JAX 0.11.1 or newer" in str(caught.value)
    # Without stacks on the host nothing is refused; layers that are programs of their own have none.
    sharded(True).plan(new_state(), *batches()[0])
    assert sharded(True, "blocks", **BOTH).plan(new_state(), *batches()[0]).activations


def test_the_platform_of_a_mesh():
    assert _host_memory.platform_of(small.mesh(data=8)) == "cpu"
    assert _host_memory.platform_of(jax.sharding.AbstractMesh((8,), ("data",))) == "cpu"
