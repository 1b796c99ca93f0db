"""Parameters in pinned memory: the same training, and at most so many bytes of them on a device."""

import collections
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
from jzero.offload.execute import _stream
from jzero.segments import _programs
from jzero.sharding.analysis import _residuals, _traffic
from jzero.sharding.cut import _layer_parts

WIDTH, ROWS, STEPS = 16, 16, 3
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
PLAIN = optax.sgd(0.1)
UPDATES = {
    "on the host": jzero.HostCPU(),
    "in buckets": jzero.PinnedHost(device_bytes=2**14),
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
        metrics = {"loss": loss, "norm": optax.tree.norm(grads)}
        return {"params": params, "opt_state": opt_state}, metrics

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
    train_step = small.shard_train_step(
        make_step(scan, tx, dtype),
        mesh=small.mesh(**axes),
        offload_params=jzero.PinnedHost(device_bytes=device_bytes),
        **options,
    )
    return train_step, train_step.init(lambda: new_state(scan, layers, tx))


def check(scan, clipped=True, **options):
    train_step, state = sharded(scan, CLIPPED if clipped else PLAIN, **options)
    for i, expected in enumerate(one_device(scan, clipped)):
        state, metrics = train_step(state, batch(i))
        zoo.assert_trees_close(zoo.to_host((state, metrics)), expected, zoo.FP32, f"step {i}")
    return train_step, state


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.CORE)
def test_the_zoo_with_the_smallest_window(name):
    check_with_the_smallest_window(name)


def check_with_the_smallest_window(name, **options):
    """What the largest part needs is all that is ever there: each step in as many parts as can be."""

    def train(device_bytes):
        policy = jzero.PinnedHost(device_bytes=device_bytes)
        shard = functools.partial(small.shard_train_step, offload_params=policy, **options)
        parity.check(name, {"data": 4}, shard, options)

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


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, False], ids=("scanned", "unrolled"))
def test_an_optimizer_without_state(scan):
    check(scan, clipped=False)


@pytest.mark.slow(but=[1])
@pytest.mark.parametrize(
    "options",
    [
        {"axes": {"node": 2, "local": 4}, "param_axes": "local", "optimizer_axes": "local"},
        {"full": "head"},
        {"offload": jzero.PinnedHost(device_bytes=3000)},
    ],
    ids=str,
)
@pytest.mark.parametrize("update", ["on the host", "on the devices"])
def test_with_other_options(options, update):
    check(True, **{"offload": UPDATES[update]} | options)


@pytest.mark.slow(but=["scanned-1"])
@pytest.mark.parametrize("num", [1, 4])
@pytest.mark.parametrize("scan", [True, False], ids=("scanned", "unrolled"))
def test_microbatches_run_in_parts_where_they_have_no_room(scan, num):
    """Their loop is one part if there is room for what it reads; else its iterations run in parts."""
    found = []
    for device_bytes in (2**13, 2**20):
        train_step, state = check(scan, axes={"data": num}, accumulate=2, device_bytes=device_bytes)
        call = train_step._programs.bind((state, batch(0)), {})
        layered = train_step._programs.of(call).step.layered
        found.append(len([*_layer_parts.outer_loops(layered.parts)]))
        fetched = train_step.describe(state, batch(0)).to_dict()["transfers"][0]
        layers, head = 4 * (2 * 2 * WIDTH * WIDTH + WIDTH), WIDTH * WIDTH
        # In parts, once for each pass of each microbatch; the head's passes are one part. And for the update.
        times = (2 * 2 + 1, 2 + 1) if found[-1] else (1 + 1, 1 + 1)
        # Parts of unrolled layers have some parameters in common.
        expected = (times[0] * layers + times[1] * head) // num
        assert fetched["elements"] == expected if scan else fetched["elements"] >= expected
    assert found == [1, 0]


@pytest.mark.parametrize(("num", "nested"), [(1, 1), (4, 0)])
def test_a_while_that_devices_may_leave_one_after_the_other(num, nested):
    """In a step with collectives of its own: on several devices it stays one part."""

    def step(state, x):
        def iteration(carry):
            x, t = carry
            for w in state["frozen"]:
                x = jnp.tanh(x @ w)
            return x, t + 1

        x, _ = jax.lax.while_loop(lambda carry: carry[1] < 3, iteration, (x, 0))
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
        loss, grad = jax.lax.pmean((loss, grad), "batch")
        return state | {"w": state["w"] - 0.1 * grad}, loss

    keys = jax.random.split(jax.random.key(0), 4)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / 4 for key in keys]

    def train(device_bytes):
        policy = jzero.PinnedHost(device_bytes=device_bytes)
        train_step = small.shard_train_step(
            step, mesh=small.mesh(data=num), axis_name="batch", offload_params=policy
        )
        state = {"w": jnp.copy(weights[0]), "frozen": [*map(jnp.copy, weights[1:])]}
        call = train_step._programs.bind((state, batch(0)), {})
        parts = train_step._programs.of(call).step.layered.parts
        return train_step(state, batch(0)), len([*_layer_parts.outer_loops(parts)])

    if nested:
        (_, loss), found = train(2**11)
        assert found == 1
    else:
        with pytest.raises(jzero.OptionError, match="one part is fetched while another runs"):
            train(2**11)
        (_, loss), found = train(2**14)
        assert found == 0
    x = batch(0)
    for w in weights[1:] * 3:
        x = jnp.tanh(x @ w)
    np.testing.assert_allclose(loss, jnp.mean((x @ weights[0]) ** 2), rtol=1e-5)


@pytest.mark.parametrize("of_layers", [True, False])
def test_programs_that_differ_in_a_callback_alone(of_layers):
    """Equal layers, or updates, share a program; the text of a jaxpr does not tell callbacks apart."""
    scales = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]

    def times(scale, x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: np.float32(scale) * np.asarray(x), shape, x)

    def loss_fn(weights, x):
        for w, scale in zip(weights, scales, strict=True):
            x = jnp.tanh(x @ w)
            x = x + times(scale, jax.lax.stop_gradient(x)) if of_layers else x
        return jnp.mean(x**2)

    def step(state, x):
        loss, grads = jax.value_and_grad(loss_fn)(state["w"], x)
        moments = [0.9 * m + g for m, g in zip(state["m"], grads, strict=True)]
        updates = moments if of_layers else map(times, scales, moments)
        weights = [w - 0.1 * u for w, u in zip(state["w"], updates, strict=True)]
        return {"w": weights, "m": moments}, loss

    keys = jax.random.split(jax.random.key(0), len(scales))
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / 4 for key in keys]
    state = {"w": weights, "m": [*map(jnp.zeros_like, weights)]}
    policy = jzero.PinnedHost(device_bytes=2**11 if of_layers else 2**10)
    memory = jzero.Memory(params=policy) if of_layers else jzero.Memory(optimizer=policy)
    train_step = small.shard_train_step(step, mesh=small.mesh(data=4), memory=memory)
    found = train_step(train_step.init(lambda: state), batch(0))
    expected = zoo.to_host(jax.jit(step)(state, batch(0)))
    zoo.assert_trees_close(zoo.to_host(found), expected, zoo.FP32, "step 0")


def peak_bytes(monkeypatch, train_step, state, *batches, of=lambda x: True):
    """The most bytes of arrays on the devices between two programs of a second step, above those before."""
    found, stream = [0], _stream.stream

    def live():
        arrays = jax.live_arrays()
        return sum(x.nbytes for x in arrays if x.sharding.memory_kind == "device" and of(x))

    def watched(visits, *limits):
        def looked_at(visit):
            if visit is None:
                return None

            def update(arrays):
                waits = visit.update(arrays)
                jax.block_until_ready(waits)
                found[0] = max(found[0], live() - before)
                return waits

            return visit._replace(update=update)

        stream(map(looked_at, visits), *limits)

    state, _ = train_step(state, *batches[0])
    before = live()
    with monkeypatch.context() as patched:
        patched.setattr(_stream, "stream", watched)
        train_step(state, *batches[1])
    return found[0]


# Of one iteration: shards of 8 devices, and whole on each of them.
SHARDS = 4 * (2 * 2 * WIDTH * WIDTH + WIDTH)
WHOLE = 8 * SHARDS


@pytest.mark.slow(but=[3])
@pytest.mark.parametrize("more", [{}, {"accumulate": 2, "layer_major": True}], ids=str)
@pytest.mark.parametrize(
    "device_bytes", [9000, 2**14], ids=["gathers in iterations", "gathers ahead"]
)
def test_depth_costs_nothing_with_activations_on_the_host(device_bytes, more, monkeypatch):
    """This iteration and the next two have their inputs on the devices; all others are on the host."""
    monkeypatch.setattr(_residuals, "LEAST_BYTES", 0)
    there = [0]

    def peak(layers):
        options = dict(layers=layers, device_bytes=device_bytes, offload=jzero.HostCPU())
        train_step, state = sharded(
            True, CLIPPED, offload_activations=jzero.PinnedHost(), **options, **more
        )
        found = peak_bytes(monkeypatch, train_step, state, (batch(0),), (batch(1),))
        there.append(sum(r.nbytes for r in train_step.plan(state, batch(0)).activations))
        return found

    few, many = peak(4), peak(12)
    assert many <= few, (few, many)
    inputs = ROWS // 8 * WIDTH * 4 // more.get("accumulate", 1)
    assert there[1:] == [5 * inputs, 13 * inputs]  # of the head, too


def test_what_waited_on_the_host_is_freed(monkeypatch):
    monkeypatch.setattr(_residuals, "LEAST_BYTES", 0)

    def pinned():
        arrays = jax.live_arrays()
        return sum(x.nbytes for x in arrays if x.sharding.memory_kind == "pinned_host")

    train_step, state = sharded(True, CLIPPED, offload_activations=jzero.PinnedHost())
    state, _ = train_step(state, batch(0))
    before = pinned()
    state, _ = train_step(state, batch(1))
    assert pinned() == before


# -- gathers --------------------------------------------------------------------------------------------


def loops_of(train_step, state, *batches):
    call = train_step._programs.bind((state, *batches), {})
    parts = train_step._programs.of(call).step.layered.parts
    return [part for part in parts if isinstance(part, _layer_parts.ScannedLayers)]


def two_iterations():
    """Bytes on each device of two iterations: fetched, and gathered."""
    train_step, state = sharded(True, CLIPPED)
    loop, _ = loops_of(train_step, state, batch(0))
    assert loop.nbytes == (SHARDS + WHOLE) // 8
    return 2 * loop.nbytes


@pytest.mark.slow
def test_iterations_gather_ahead_where_two_have_room():
    """Else an iteration gathers its own: the smallest window is what one iteration needs."""
    room = two_iterations()
    for device_bytes, num in [(room, 3), (room - 1, 0), (room // 2, 0)]:
        train_step, state = sharded(True, CLIPPED, device_bytes=device_bytes)
        found = [len(loop.body.gathered) for loop in loops_of(train_step, state, batch(0))]
        assert found == [num, num]


@pytest.mark.slow
def test_parameters_on_the_devices_stay_within_device_bytes(monkeypatch):
    """Shards, and what the devices have of them whole: of two iterations, and no more."""
    room = two_iterations()
    train_step, state = sharded(
        True, CLIPPED, device_bytes=room, layers=12, offload=jzero.HostCPU()
    )
    of_layers = {(WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH), (WIDTH,), (1, WIDTH)}
    mine = lambda x: x.shape in of_layers or x.shape[1:] in of_layers  # noqa: E731
    found = peak_bytes(monkeypatch, train_step, state, (batch(0),), (batch(1),), of=mine)
    assert WHOLE < found <= 8 * room


@pytest.mark.slow
@pytest.mark.parametrize("tile_bytes", [None, 1024])
def test_leaves_that_are_read_as_shards_stay_for_their_iteration(tile_bytes):
    """An iteration reads them when those of the next one are there: they count in its bytes."""

    def step(params, x):
        def iteration(carry, w):
            x, decay = carry
            return (jnp.tanh(x @ w["up"]) @ w["down"], decay + jnp.sum(w["up"] ** 2) / 100), None

        def loss_fn(params):
            (y, decay), _ = jax.lax.scan(
                jax.checkpoint(iteration, prevent_cse=False), (x, 0.0), params["layers"]
            )
            return jnp.mean((y @ params["head"]) ** 2) + decay

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

    params = expected = new_state(True, 4, PLAIN)["params"]
    window = jzero.PinnedHost(device_bytes=2**14)
    train_step = small.shard_train_step(step, offload_params=window, tile_bytes=tile_bytes)
    params = train_step.shard(params)
    for loop in loops_of(train_step, params, batch(0)):
        kept = [loop.body.slices[i].aval.size * 4 for i in loop.body.used_sharded]
        if tile_bytes is None:
            assert loop.body.gathered
            assert sum(kept) == loop.body.sharded_bytes > 0
        else:  # An iteration gathers its tiles itself.
            assert not loop.body.gathered
            assert kept
    for i in range(STEPS):
        expected, expected_loss = jax.jit(step)(expected, batch(i))
        params, loss = train_step(params, batch(i))
        found = zoo.to_host((train_step.unshard(params), loss))
        zoo.assert_trees_close(found, zoo.to_host((expected, expected_loss)), zoo.FP32, f"step {i}")


def gathers_started(train_step, state, *batches):
    """How often the programs that a step starts gather so many elements; the step cannot run after it."""
    call = train_step._programs.bind((state, *batches), {})
    program = train_step._programs.of(call)
    traced = program.step.dispatched(*_programs.stored_inputs(call, program))
    found: collections.Counter[int] = collections.Counter()
    for each in _traffic.collectives(traced):
        if each.op == "all-gather":
            found[each.elements] += each.times
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "in their iterations"])
def test_each_pass_gathers_each_leaf_once(ahead):
    room = two_iterations()
    train_step, state = sharded(True, CLIPPED, device_bytes=room if ahead else room - 1)
    expected = {2 * WIDTH * WIDTH: 2 * 2 * 4, WIDTH: 2 * 4, WIDTH * WIDTH: 2}
    assert gathers_started(train_step, state, batch(0)) == expected


@pytest.mark.slow
def test_casts_in_the_layers_hand_no_parameters_to_the_backward_pass():
    """A cast of a layer's slice is a residual of the forward loop, all layers' parameters in it."""
    train_step, state = sharded(True, CLIPPED, dtype=jnp.bfloat16)
    forward, *_ = loops_of(train_step, state, batch(0))
    results = zip(forward.results[1], forward.ys, strict=True)
    assert [y.aval.shape[1:] for y, kind in results if kind != "unread"] == [(ROWS // 8, WIDTH)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"offload_params": jzero.HostCPU()}, "in pinned memory, or in files"),
        ({"offload_params": 2**20}, "Memory: params=1048576. It is a policy"),
        ({"stage": 2}, "parameters are replicated"),
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


def test_other_axes_for_parameters_are_refused():
    mesh = small.auto_mesh(node=2, local=4)
    options = {"offload_params": jzero.PinnedHost(), "param_axes": "local"}
    train_step = small.shard_train_step(make_step(True, CLIPPED), mesh=mesh, **options)
    with pytest.raises(jzero.OptionError, match="Use the same axes for"):
        train_step(new_state(True, 4, CLIPPED), batch(0))
