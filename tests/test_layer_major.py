"""All microbatches pass a layer before the next one comes: the same training, and each layer twice a step."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jzero
import small
import test_offload_params as model
import zoo
from jzero.sharding.analysis import _residuals
from jzero.sharding.cut import _layer_parts
from jzero.sharding.passes import _order

SCAN = pytest.mark.parametrize("scan", [True, False], ids=("scanned", "unrolled"))


PLAIN_ADAM = optax.adamw(1e-2, eps=1e-3)
ACTIVATIONS = {"offload_activations": jzero.PinnedHost()}
LAYER_MAJOR = {"accumulate": 2, "layer_major": True}


@pytest.mark.slow(but=[2, 7])
@pytest.mark.parametrize(
    "options",
    [
        LAYER_MAJOR,
        ACTIVATIONS | {"accumulate": 2, "device_bytes": 2**17},  # in one program
        ACTIVATIONS | LAYER_MAJOR | {"device_bytes": 2**15},  # gathered ahead
    ],
    ids=str,
)
@pytest.mark.parametrize("tx", [model.CLIPPED, PLAIN_ADAM], ids=["updated late", "updated early"])
@SCAN
def test_everything_at_once(scan, tx, options, monkeypatch):
    """On the hosts: parameters, what waits for the backward pass, optimizer state, and its update."""
    monkeypatch.setattr(_residuals, "LEAST_BYTES", 0)
    mesh = small.mesh(data=4)
    policy = jzero.PinnedHost(device_bytes=options.get("device_bytes", 2**14))
    train_step = small.shard_train_step(
        model.make_step(scan, tx),
        mesh=mesh,
        offload=jzero.HostCPU(),
        offload_params=policy,
        **{name: x for name, x in options.items() if name != "device_bytes"},
    )
    state = train_step.init(lambda: model.new_state(scan, 4, tx))
    expected, step = model.new_state(scan, 4, tx), jax.jit(model.make_step(scan, tx))
    for i in range(3):
        expected, loss = step(expected, model.batch(i))
        state, metrics = train_step(state, model.batch(i))
        zoo.assert_trees_close(
            zoo.to_host((state, metrics)), jax.device_get((expected, loss)), zoo.FP32, f"step {i}"
        )
    text = str(train_step.describe(state, model.batch(0)))
    assert ("saved on the host" in text) == ("offload_activations" in options)


def test_activations_of_microbatches_that_run_one_after_the_other(monkeypatch):
    """What waits on the host leaves and comes back within one program, and that has to have room."""
    monkeypatch.setattr(_residuals, "LEAST_BYTES", 0)
    with pytest.raises(jzero.OptionError, match="What one part of the step reads of parameters"):
        model.check(True, device_bytes=2**12, **ACTIVATIONS | {"accumulate": 2})


# Steps that cannot be run in microbatches, layer by layer or not (test_options.py).
CANNOT = {"inner_steps"}


@pytest.mark.slow(but=["mixed_bf16"])
@pytest.mark.parametrize("name", [name for name in zoo.CORE if name not in CANNOT])
def test_the_zoo_with_the_smallest_window(name):
    model.check_with_the_smallest_window(name, accumulate=2, layer_major=True)


ADAM = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3))


def divided_by_a_count(params, x):
    errors = jnp.square(hidden(params, x) @ params["head"])
    mask = jnp.abs(x[:, :1]) > 0.3
    return jnp.sum(jnp.where(mask, errors, 0)) / jnp.sum(mask)


def tied(params, x):
    return jnp.mean((hidden(params, x @ params["head"]) @ params["head"].T) ** 2)


def hidden(params, x):
    @jax.checkpoint
    def layer(x, w):
        return x + jnp.tanh((x * w["scale"][None]) @ w["up"]) @ w["down"], None

    if isinstance(params["layers"], dict):
        return jax.lax.scan(layer, x, params["layers"])[0]
    for w in params["layers"]:
        x, _ = layer(x, w)
    return x


def step_of(loss_fn):
    def step(state, x):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], x)
        updates, opt_state = ADAM.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, loss

    return step


def shard(loss_fn, num=4, device_bytes=2**14, **options):
    return small.shard_train_step(
        step_of(loss_fn),
        mesh=small.mesh(data=num),
        offload_params=jzero.PinnedHost(device_bytes=device_bytes),
        **options,
    )


# -- what moves ------------------------------------------------------------------------------------


def moved(report):
    """Elements fetched, gathered and reduced in a step, scalars aside, and how often."""
    fetched, ops = sum(x.elements for x in report.transfers if x.direction == "to device"), {}
    for op in ("all-gather", "reduce-scatter", "all-reduce"):
        found = [c for c in report.traffic if c.op == op and c.elements > 1]
        ops[op] = sum(c.total_elements for c in found), sum(c.times for c in found)
    return fetched, ops


LAYERS = 4
LAYERS_SIZE = LAYERS * (2 * 2 * model.WIDTH**2 + model.WIDTH)
HEAD_SIZE = model.WIDTH**2


def test_large_gradients_leave_as_layers_end():
    """Reductions that keep the wire busy are not put in an order that waits for the loop's end."""
    width = 4 * model.WIDTH

    def loss_fn(params, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w["up"]) @ w["down"], None))
        return jnp.mean(jnp.square(jax.lax.scan(layer, x, params["layers"])[0]))

    train_step = small.shard_train_step(
        step_of(loss_fn),
        mesh=small.mesh(data=2),
        memory=jzero.Memory(optimizer=jzero.HostCPU(), params=jzero.PinnedHost(device_bytes=2**30)),
        microbatches=jzero.Microbatches(2, order="layer"),
    )
    rows = 2 * _order.SMALLEST_GROUP // (LAYERS * width * 4)
    layers = {"up": (LAYERS, width, rows), "down": (LAYERS, rows, width)}
    params = {"layers": {name: jax.ShapeDtypeStruct(x, jnp.float32) for name, x in layers.items()}}
    state = {"params": params, "opt_state": jax.eval_shape(ADAM.init, params)}
    call = train_step._programs.bind((state, jnp.ones((4, width))), {})
    _, backward = (
        part for part in train_step._programs.of(call).step.layered.parts
        if isinstance(part, _layer_parts.ScannedLayers)
    )  # fmt: skip
    assert sorted(v.aval.shape for v in backward.made(_layer_parts.SENT)) == [
        (LAYERS, width, rows // 2), (LAYERS, rows // 2, width)
    ]  # fmt: skip


@pytest.mark.slow(but=["scanned-tied-2"])
@pytest.mark.parametrize(("loss_fn", "passes"), [(tied, 2), (divided_by_a_count, 3)])
@SCAN
def test_traffic_does_not_grow_with_microbatches(scan, loss_fn, passes):
    """A loss that is divided by a count has two loops over microbatches, one with a forward pass only."""

    def report(**options):
        train_step = shard(loss_fn, offload=jzero.HostCPU(), **options)
        return moved(train_step.describe(model.new_state(scan, 4, ADAM), model.batch(0)))

    whole = report()
    for k in (2, 4):
        found = report(accumulate=k, layer_major=True)
        assert passes > 2 or found == whole
        fetched, ops = found
        # Where a stretch ends within a layer, the next one may need the same matrix.
        size = passes * (LAYERS_SIZE + HEAD_SIZE)
        assert 0.9 * size <= fetched * 4 <= 1.2 * size
        assert size <= ops["all-gather"][0] <= 1.2 * size
        assert ops["reduce-scatter"][0] == LAYERS_SIZE + HEAD_SIZE
        assert ops["all-reduce"] == (0, 0)


def test_describe_says_what_layers_hand_on():
    """Of each layer its input, for all microbatches: the device's rows; and what comes out of the last.

    Sums over microbatches begin in the loop over layers, and are reduced there: one is whole at a time.
    """
    train_step, state = model.sharded(True, model.CLIPPED, accumulate=2, layer_major=True)
    report = train_step.describe(state, model.batch(0))
    assert report.accumulator_bytes == 4 * LAYERS_SIZE // 4
    rows = model.ROWS // 8 * model.WIDTH * 4
    assert 4 * rows <= report.handed_bytes <= 7 * rows
    found = report.to_dict()["microbatches"]
    assert (found["order"], found["handed_bytes"]) == ("layer", report.handed_bytes)
    assert found["reduce"] == "once"
    text = " ".join(str(report).split())
    assert "all microbatches pass a layer, whose parameters are fetched once per pass" in text
    assert f"values passed between layers take up to {report.handed_bytes} B on each device" in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"accumulate": 1}, "Microbatches: order='layer' and num=1. It is about several"),
        (
            {"offload_params": jzero.NoOffload()},
            "Microbatches(order='layer') without Memory(params=)",
        ),
        (
            {"reduce": "each"},
            "Microbatches: order='layer' and reduce='each'. A layer's gradient is",
        ),
    ],
    ids=str,
)
def test_refused_by_name(options, text):
    given = {"accumulate": 2, "layer_major": True, "offload_params": jzero.PinnedHost()} | options
    with pytest.raises(jzero.OptionError, match=re.escape(text)):
        small.shard_train_step(step_of(tied), **given)


def test_prints_of_microbatches_are_refused():
    """Of a step that is written with collectives, each device prints, and so does each microbatch."""

    def step(state, x):
        def loss_fn(params):
            y = hidden(params, x)
            jax.debug.print("{}", y[0, 0])
            return jnp.mean((y @ params["head"]) ** 2)

        grads = jax.lax.pmean(jax.grad(loss_fn)(state["params"]), "batch")
        return {"params": jax.tree.map(lambda p, g: p - g, state["params"], grads)}

    mesh = small.mesh(data=2)
    policy = jzero.PinnedHost(device_bytes=2**14)
    train_step = small.shard_train_step(
        step,
        mesh=mesh,
        axes=jzero.Axes(axis_name="batch"),
        memory=jzero.Memory(params=policy),
        microbatches=jzero.Microbatches(2, order="layer"),
    )
    with pytest.raises(
        jzero.OptionError, match="order='layer'.*, and a debug_(print|callback).*Drop order, or"
    ):
        train_step({"params": model.new_state(True, 4, ADAM)["params"]}, model.batch(0))
