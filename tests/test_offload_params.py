"""Parameters in pinned memory: the same training, and at most so many bytes of them on a device."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
import parity
import small
import zoo
from jzero.offload import _layered, _pinned

WIDTH, ROWS, STEPS = 16, 16, 3
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
PLAIN = optax.sgd(0.1)
UPDATES = {
    "on the host": jzero.HostCPU(),
    "in turns": jzero.PinnedHost(device_bytes=2**14),
    "on the devices": jzero.NoOffload(),
}


def new_state(scan, layers, tx):
    keys = jax.random.split(jax.random.key(0), 3)
    stacks = {
        "up": jax.random.normal(keys[0], (layers, WIDTH, 2 * WIDTH)) / 4,
        "down": jax.random.normal(keys[1], (layers, 2 * WIDTH, WIDTH)) / 6,
        "scale": jnp.ones((layers, WIDTH)),
    }
    blocks: Any = stacks
    if not scan:
        blocks = [{name: x[i] for name, x in stacks.items()} for i in range(layers)]
    params = {"layers": blocks, "head": jax.random.normal(keys[2], (WIDTH, WIDTH)) / 4}
    return {"params": params, "opt_state": tx.init(params)}


def make_step(scan, tx, dtype=None):
    """A residual MLP; in `dtype`, cast layer by layer."""

    @functools.partial(jax.checkpoint, prevent_cse=not scan)
    def block(x, w):
        if dtype is not None:
            w = jax.tree.map(lambda w: w.astype(dtype), w)
        y = x.astype(w["up"].dtype) * w["scale"][None]
        return x + (jnp.tanh(y @ w["up"]) @ w["down"]).astype(x.dtype)

    def loss_fn(params, x):
        if scan:
            x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, params["layers"])
        else:
            for w in params["layers"]:
                x = block(x, w)
        return jnp.mean((x @ params["head"]) ** 2)

    def step(state, x):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], x)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {
            "loss": loss,
            "norm": optax.tree.norm(grads),
        }

    return step


def batch(i):
    return jax.random.normal(jax.random.key(i), (ROWS, WIDTH))


@functools.cache
def one_device(scan, clipped, layers=4):
    """States and metrics of `jax.jit` after each step, on the host."""
    tx = CLIPPED if clipped else PLAIN
    state, step, found = new_state(scan, layers, tx), jax.jit(make_step(scan, tx)), []
    for i in range(STEPS):
        state, metrics = step(state, batch(i))
        found.append(jax.device_get((state, metrics)))
    return found


def sharded(scan, tx, axes=None, layers=4, device_bytes=2**14, dtype=None, **options):
    axes = {"data": 8} if axes is None else axes
    num = parity.num_devices(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[:num])
    train_step = small.shard_train_step(
        make_step(scan, tx, dtype), mesh=mesh,
        offload_params=jzero.PinnedHost(device_bytes=device_bytes), **options,
    )  # fmt: skip
    return train_step, train_step.init(lambda: new_state(scan, layers, tx))


def check(scan, clipped=True, **options):
    train_step, state = sharded(scan, CLIPPED if clipped else PLAIN, **options)
    for i, expected in enumerate(one_device(scan, clipped)):
        state, metrics = train_step(state, batch(i))
        zoo.assert_trees_close(zoo.to_host((state, metrics)), expected, zoo.FP32, f"step {i}")
    return train_step, state


@pytest.mark.parametrize("num", [1, 2, 4, 8])
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("scan", [True, False], ids=("scanned", "unrolled"))
def test_it_trains_what_one_device_trains(scan, update, num):
    _, state = check(scan, axes={"data": num}, offload=UPDATES[update])
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state["params"]) if x.nbytes >= 1024}
    assert kinds == {"pinned_host"}


BY_DEFAULT = {
    "transformer_scan_remat", "tied_embeddings", "moe_top_k", "lora", "microbatch_scan", "cond_on_batch",
    "pmap_style", "sam", "ctc", "batch_norm", "per_example_outputs",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow)
        for name in zoo.NAMES
    ],
)
def test_the_zoo_with_the_smallest_window(name):
    """What the largest part needs is all that is ever there: each step in as many parts as can be."""

    def train(device_bytes):
        shard = functools.partial(
            small.shard_train_step, offload_params=jzero.PinnedHost(device_bytes=device_bytes)
        )
        parity.check(name, {"data": 4}, shard)

    device_bytes = 1
    while True:
        try:
            train(device_bytes)
        except jzero.OptionError as refused:
            (needed,) = map(int, re.findall(r"device_bytes=(\d+)\) or more", str(refused)))
            assert needed > device_bytes
            device_bytes = needed
        else:
            break
    assert device_bytes > 1


@pytest.mark.parametrize("scan", [True, False], ids=("scanned", "unrolled"))
def test_an_optimizer_without_state(scan):
    check(scan, clipped=False)


@pytest.mark.parametrize(
    "options",
    [
        {"axes": {"node": 2, "local": 4}},
        {"axes": {"node": 2, "local": 4}, "param_axes": "local", "optimizer_axes": "local"},
        {"accumulate": 2, "device_bytes": 2**20},
        {"min_shard_bytes": 0},
        {"full": "head"},
        {"offload": jzero.PinnedHost(device_bytes=3000)},
    ],
    ids=str,
)
@pytest.mark.parametrize("update", ["on the host", "on the devices"])
def test_with_other_options(options, update):
    check(True, **{"offload": UPDATES[update]} | options)


@pytest.mark.parametrize("scan", [True, False], ids=("scanned", "unrolled"))
def test_depth_costs_activations_only(scan, monkeypatch):
    """Between any two programs the devices hold a part's parameters, and the layers' inputs."""

    def peak(layers):
        found = [0]

        def watched(visits, device_bytes):
            def looked_at(visit):
                def update(arrays):
                    waits = visit.update(arrays)
                    jax.block_until_ready(waits)
                    live = [x for x in jax.live_arrays() if x.sharding.memory_kind == "device"]
                    found[0] = max(found[0], sum(x.nbytes for x in live) - before)
                    return waits

                return visit._replace(update=update)

            _pinned.stream(map(looked_at, visits), device_bytes)

        train_step, state = sharded(
            scan, CLIPPED, layers=layers, device_bytes=9000, offload=jzero.HostCPU()
        )
        state, _ = train_step(state, batch(0))
        before = sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == "device")
        with monkeypatch.context() as patched:
            patched.setattr(_layered, "stream", watched)
            train_step(state, batch(1))
        return found[0]

    few, many = peak(4), peak(12)
    inputs = ROWS * WIDTH * 4
    assert (many - few) / 8 <= 1.5 * inputs, (few, many)
    weights = 2 * 2 * WIDTH * WIDTH * 4
    assert 1.5 * inputs < weights, "the bound says nothing of a layer's parameters"


def test_casts_in_the_layers_hand_no_parameters_to_the_backward_pass():
    """A cast of a layer's slice is a residual of the forward loop, all layers' parameters in it."""
    train_step, state = sharded(True, CLIPPED, dtype=jnp.bfloat16)
    call = train_step._programs.bind((state, batch(0)), {})
    (forward, *_) = [
        part for part in train_step._programs.of(call).step._layered.parts
        if isinstance(part, _layered._layers.LayerLoop)
    ]  # fmt: skip
    kept = [
        y.aval.shape[1:]
        for y, kind in zip(forward.results[1], forward.ys, strict=True)
        if kind != "unread"
    ]
    assert kept == [(ROWS // 8, WIDTH)]


def test_describe_counts_what_crosses():
    train_step, state = sharded(True, CLIPPED, offload=jzero.HostCPU())
    report = train_step.describe(state, batch(0))
    layers = 4 * (2 * 2 * WIDTH * WIDTH + WIDTH) // 8
    head = WIDTH * WIDTH // 8
    moved = {
        direction: sum(
            x.elements for x in report.crossings if x.direction == direction and x.elements > 1
        )
        for direction in ("to device", "to host")
    }
    # The head's backward pass follows its forward pass, in one part.
    assert moved == {"to device": 2 * layers + head, "to host": layers + head}
    text = " ".join(str(report).split())
    assert "4 of 8 leaves rest in pinned_host memory" in text
    assert "of parameters" in text


def test_evaluation_reads_parameters_where_they_rest():
    train_step, state = check(True)
    eval_step = jzero.shard_eval_step(
        lambda state, x: jnp.mean(x @ state["params"]["head"]), like=train_step
    )
    expected = jnp.mean(batch(0) @ one_device(True, True)[-1][0]["params"]["head"])
    np.testing.assert_allclose(eval_step(state, batch(0)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"offload_params": jzero.HostCPU()}, "Parameters rest on the devices, or in pinned memory"),
        ({"offload_params": 2**20}, "Parameters rest on the devices, or in pinned memory"),
        ({"stage": 2}, "parameters rest whole on every device"),
        ({"prefetch_bytes": 0}, "at most device_bytes are on a device, fetched and gathered"),
        ({"gather": "keep"}, "fetched and gathered for each pass"),
        ({"offload": jzero.HostCPU(ratio=0.5)}, "The host updates all parameters in their place"),
        ({"offload": jzero.HostCPU(delayed_update=True)}, "The host updates all parameters in their place"),
        ({"offload_params": jzero.PinnedHost(device_bytes=1000)}, "one part is fetched while another runs"),
        ({"min_shard_bytes": 2**20}, "no parameter is worth it"),
    ],
    ids=str,
)  # fmt: skip
def test_refused_by_name(options, text):
    given = {"offload_params": jzero.PinnedHost(device_bytes=2**14)} | options

    def train():
        train_step = small.shard_train_step(make_step(True, CLIPPED), **given)
        train_step(new_state(True, 4, CLIPPED), batch(0))

    with pytest.raises(jzero.OptionError, match=text):
        train()


@pytest.mark.parametrize(
    ("axes", "options", "text"),
    [
        ({"node": 2, "local": 4}, {"param_axes": "local"}, "Use the same axes for"),
        ({"data": 4, "model": 2}, {"axis_names": "data"}, "Shards over data axes are fetched"),
    ],
)  # fmt: skip
def test_meshes_that_are_refused(axes, options, text):
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)
    train_step = small.shard_train_step(
        make_step(True, CLIPPED), mesh=mesh, offload_params=jzero.PinnedHost(), **options
    )
    with pytest.raises(jzero.OptionError, match=text):
        train_step(new_state(True, 4, CLIPPED), batch(0))
