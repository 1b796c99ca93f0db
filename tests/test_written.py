"""Steps with collectives of their own, what they train, and what they move."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jzero
import small
import zoo

pytestmark = pytest.mark.usefixtures("float64")

AXIS = "batch"
TX = optax.adamw(1e-2)
MESHES: dict[str, dict[str, int]] = {
    "1": {"data": 1}, "4": {"data": 4}, "2x4": {"node": 2, "local": 4},
}  # fmt: skip


def mlp(params, x):
    def layer(h, w):
        return jnp.tanh(h @ w), h.mean()

    h, means = lax.scan(layer, x, params["layers"])
    return h @ params["out"] + params["bias"][None], means


def plain(params, x):
    y, means = mlp(params, x)
    return jnp.mean(y**2) + means.sum()


def synchronised(params, x):
    """Statistics of the whole batch, through which gradients flow."""
    y, _ = mlp(params, x)
    mean = lax.pmean(y.mean(0, keepdims=True), AXIS)
    variance = lax.pmean(((y - mean) ** 2).mean(0, keepdims=True), AXIS)
    return jnp.mean(((y - mean) * lax.rsqrt(variance + 1e-3) - x[:, :6]) ** 2)


def contrastive(params, x):
    y, _ = mlp(params, x)
    everyone = lax.all_gather(y, AXIS, tiled=True)
    labels = lax.axis_index(AXIS) * len(x) + jnp.arange(len(x))
    logits = y @ everyone.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def ring(params, x):
    y, _ = mlp(params, x)
    num = lax.axis_size(AXIS)
    perm = [(i, (i + 1) % num) for i in range(num)]

    def turn(carry, _):
        other, total = carry
        other = lax.ppermute(other, AXIS, perm)
        return (other, total + (y * other).mean()), None

    (_, total), _ = lax.scan(turn, (y, jnp.zeros(())), None, length=3)
    return total + plain(params, x)


def exchanged(params, x):
    y, _ = mlp(params, x)
    num = lax.axis_size(AXIS)
    parts = jnp.broadcast_to(y.mean(0, keepdims=True), (num, 6)) * jnp.arange(1.0, num + 1)[:, None]
    others = lax.all_to_all(parts, AXIS, 0, 0)
    scattered = lax.psum_scatter(parts, AXIS, tiled=True)
    return jnp.mean(others**2) + jnp.mean(scattered**2) + plain(params, x)


def branches(params, x):
    """What a device decides for itself, on what it has of the state."""
    y, _ = mlp(params, x)
    y = lax.cond(y[0, 0] > 0, lambda y: y @ params["square"], lambda y: y + params["bias"][None], y)
    return jnp.mean(y**2)


def loops(params, x):
    y, _ = mlp(params, x)
    limit = lax.stop_gradient(jnp.abs(y).sum())

    def turn(carry):
        i, total = carry
        return i + 1, total + lax.stop_gradient(params["bias"] * params["square"][0]).sum()

    i, total = lax.while_loop(lambda c: c[0] < limit, turn, (0.0, 0.0))
    return jnp.mean(y**2) * (1 + 0.01 * i) + total


def noisy(params, x):
    key = jax.random.fold_in(jax.random.key(3), lax.axis_index(AXIS))
    return plain(params, x * jax.random.bernoulli(key, 0.5, x.shape))


def remat(params, x):
    return jax.checkpoint(synchronised)(params, x)


def alike(params, x):
    """Also sums of what does not differ."""
    count = lax.psum(jnp.sum(params["bias"] ** 2), AXIS) + lax.psum(2, AXIS)
    return plain(params, x) * count


def looks_up(params, x):
    tokens = (jnp.abs(x[:, :2]) * 100).astype(int) % 512
    rows = params["table"][tokens]
    return plain(params, x + rows.mean(1)) + jnp.mean(rows**2)


LOSSES = [
    plain, synchronised, contrastive, ring, exchanged, branches, loops, noisy, remat, alike,
    looks_up,
]  # fmt: skip


def step_of(loss, clips=False):
    def step(state, x):
        params, opt = state
        value, grads = jax.value_and_grad(loss)(params, x)
        grads = lax.pmean(grads, AXIS)
        if clips:
            norm = optax.tree.norm(grads)
            grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.1 / norm), grads)
        updates, opt = TX.update(grads, opt, params)
        metrics = {
            "loss": lax.pmean(value, AXIS),
            "most": lax.pmax(x.max(), AXIS),
            "least": lax.pmin(x.min(), AXIS),
        }
        return (optax.apply_updates(params, updates), opt), metrics

    return step


def state_of():
    rng = np.random.default_rng(0)
    shapes = {"layers": (3, 8, 8), "out": (8, 6), "bias": (6,), "square": (6, 6), "table": (512, 8)}
    params = {k: jnp.asarray(rng.normal(size=s) / 3) for k, s in shapes.items()}
    return params, TX.init(params)


def batches():
    rng = np.random.default_rng(1)
    return [jnp.asarray(rng.normal(size=(16, 8))) for _ in range(3)]


def trained(step, axes, **options):
    run = small.shard_train_step(step, mesh=small.mesh(**axes), axis_name=AXIS, **options)
    state, seen = run.shard(state_of(), batches()[0]), []
    for x in batches():
        state, metrics = run(state, x)
        seen.append(metrics)
    return run, state, (run.unshard(state), seen)


def same(actual, expected):
    for (path, x), y in zip(
        jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(x, y, 1e-9, 1e-9, err_msg=jax.tree_util.keystr(path))


def reference(step, num):
    run = jax.jit(zoo.on_shards(step, num, AXIS))
    state, seen = state_of(), []
    for x in batches():
        state, metrics = run(state, x)
        seen.append(metrics)
    return state, seen


@pytest.mark.slow(but=["4-loops", "4-alike", "4-looks_up"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("mesh", ["4", "2x4"])
def test_it_trains_what_its_devices_do(loss, mesh):
    axes = MESHES[mesh]
    run, _, found = trained(step_of(loss), axes, stage=3)
    same(found, reference(step_of(loss), int(np.prod([*axes.values()]))))


@pytest.mark.slow(but=["1-3"])
@pytest.mark.parametrize(("mesh", "stage"), [("1", 3), ("4", 1), ("2x4", 2)])
def test_in_each_stage(mesh, stage):
    axes = MESHES[mesh]
    step = step_of(synchronised, clips=True)
    run, _, found = trained(step, axes, stage=stage)
    same(found, reference(step, int(np.prod([*axes.values()]))))


def over(names):
    """Sums over one axis of two, and over both."""

    def step(state, x):
        params, opt = state
        value, grads = jax.value_and_grad(plain)(params, x)
        near = lax.pmean(x.mean(0), names[1])
        far = lax.pmean(lax.pmean(value, names[1]), names[0]) + lax.pmean((near**2).sum(), names[0])
        grads = lax.pmean(lax.pmean(grads, names[1]), names[0])
        updates, opt = TX.update(grads, opt, params)
        index = lax.psum(lax.axis_index(names) * 1.0, names)
        return (optax.apply_updates(params, updates), opt), {"far": far, "index": index}

    return step


@pytest.mark.slow
def test_sums_over_one_axis_of_two():
    names = ("node", "local")
    step = over(names)
    mesh = small.mesh(**MESHES["2x4"])
    run = small.shard_train_step(step, mesh=mesh, stage=3)
    state = run.shard(state_of(), batches()[0])

    def both(state, x):
        inner = jax.vmap(step, (None, 0), axis_name="local")
        outs = jax.vmap(inner, (None, 0), axis_name="node")(state, x.reshape(2, 4, 2, 8))
        return jax.tree.map(lambda y: y[0, 0], outs)

    expected: Any = state_of()
    for x in batches():
        state, found = run(state, x)
        expected, wanted = jax.jit(both)(expected, x)
        same(found, wanted)
    same(run.unshard(state), expected)


@pytest.mark.slow
def test_groups_of_devices():
    def step(w, x):
        mean = lax.pmean(x.mean(0, keepdims=True), AXIS, axis_index_groups=[[0, 1], [2, 3]])
        grads = lax.pmean(jax.grad(lambda w: (((x - mean) @ w) ** 2).mean())(w), AXIS)
        return w - 0.1 * grads, lax.pmean((mean**2).sum(), AXIS)

    w, x = jnp.ones((8, 8)) / 8, batches()[0]
    mesh = small.mesh(**MESHES["4"])
    run = small.shard_train_step(step, mesh=mesh, axes=jzero.Axes(axis_name=AXIS))
    found = run(run.shard(jnp.copy(w), x), x)
    means = x.reshape(2, 8, 8).mean(1)
    parts = (x.reshape(2, 8, 8) - means[:, None]).reshape(16, 8)
    grads = jax.grad(lambda w: ((parts @ w) ** 2).mean())(w)
    same((run.unshard(found[0]), found[1]), (w - 0.1 * grads, (means**2).sum(1).mean()))


@pytest.mark.slow
def test_every_device_prints(capfd):
    def step(w, x):
        jax.debug.print("of {}", lax.axis_index(AXIS))
        grads = lax.pmean(jax.grad(lambda w: ((x @ w) ** 2).mean())(w), AXIS)
        return w - 0.1 * grads

    run = small.shard_train_step(
        step, mesh=small.mesh(**MESHES["4"]), axes=jzero.Axes(axis_name=AXIS)
    )
    w = run(run.shard(jnp.ones((8, 8)), batches()[0]), batches()[0])
    jax.block_until_ready(w)
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split("\n")) == ["", *(f"of {i}" for i in range(4))]


@pytest.mark.slow(but=["1-False", "4-True"])
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("num", [1, 4])
def test_rows_of_all_microbatches_and_their_gradients(num, tiled):
    """A contrastive loss: each gathers all others' rows, and gets its part of what they make of its own."""

    def loss(params, x):
        h = jnp.tanh(x @ params["w"])
        rows = lax.all_gather(h, AXIS, tiled=tiled).reshape(-1, h.shape[1])
        first = lax.axis_index(AXIS) * len(h)
        return jnp.mean(jax.nn.logsumexp(h @ rows.T, axis=1) - (h @ rows[first]))

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        grads = lax.pmean(grads, AXIS)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), lax.pmean(value, AXIS)

    params, x = {"w": jnp.eye(8) + 0.1}, batches()[0]
    run = small.shard_train_step(
        step, mesh=small.mesh(data=num), axes=jzero.Axes(axis_name=AXIS), microbatches=2
    )
    found = run(run.shard(jax.tree.map(jnp.copy, params), x), x)
    each = x.reshape(2 * num, -1, 8)
    expected = jax.jit(jax.vmap(step, (None, 0), axis_name=AXIS))(params, each)
    same((run.unshard(found[0]), found[1]), jax.tree.map(lambda y: y[0], expected))
