"""State in several arguments, as scripts with `donate_argnums=(0, 1)` have it: trained, kept, named."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
import small
import zoo
from jzero.testing import assert_collectives, assert_same_training
from small import grouped

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
X = jax.random.normal(jax.random.key(1), (32, 16))
Y = jnp.tanh(X[:, :6])


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"][None] - y) ** 2)


def step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, {"loss": loss}


def init():
    # 8 devices divide no dim of `v`, which is large enough to be padded, and none of `b`, which is not.
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "w": jax.random.normal(keys[0], (16, 30)),
        "v": jax.random.normal(keys[1], (30, 6)),
        "b": jnp.zeros(6),
    }
    return params, TX.init(params)


def sharded(step_fn=step, devices=8, **options):
    mesh = small.mesh(data=devices)
    chosen: dict[str, Any] = {"state_argnums": (0, 1), "min_shard_bytes": 0, "mesh": mesh}
    return jzero.shard_train_step(step_fn, **grouped(**chosen | options))


def close(actual, expected, where):
    zoo.assert_trees_close(zoo.to_host(actual), zoo.to_host(expected), zoo.FP32, where)


@functools.cache
def expected():
    """(params, opt_state, metrics) after each of three steps, on one device."""
    state, found = init(), []
    for _ in range(3):
        params, opt_state, metrics = jax.jit(step)(*state, X, Y)
        state = params, opt_state
        found.append(zoo.to_host((params, opt_state, metrics)))
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 3, accumulate, 2 devices": {"accumulate": 4, "devices": 2},
    "pinned host": {"offload": jzero.PinnedHost(device_bytes=2**10)},
    "host": {"offload": jzero.HostCPU(), "accumulate": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_trains_as_one_device(name):
    train_step = sharded(**SETTINGS[name])
    params, opt_state = train_step.shard(init(), X, Y)
    for i, reference in enumerate(expected()):
        consumed = jax.tree.leaves((params, opt_state))
        params, opt_state, metrics = train_step(params, opt_state, X, Y)
        close((params, opt_state, metrics), reference, f"step {i}")
        assert all(leaf.is_deleted() for leaf in consumed if isinstance(leaf, jax.Array))
        assert not X.is_deleted()


def test_what_takes_a_state_takes_the_tuple():
    train_step = sharded()
    state = train_step.init(init)
    close(state, init(), "init")
    state = train_step.shard(state, X, y=Y)
    shardings = train_step.state_shardings(state)
    assert jax.tree.map(lambda s: None, shardings) == jax.tree.map(lambda x: None, state)
    assert shardings[0]["w"].spec == jax.P("data")
    close(train_step.unshard(state), init(), "unshard")
    close(train_step.unshard(state)[0], train_step.unshard(state[0]), "a part of it")
    assert train_step.flush(state) is state
    assert "params['w']" in [leaf.path for leaf in train_step.plan(*state, X, Y).leaves]
    text = str(train_step.describe(*state, X, Y))
    assert "4 B  opt_state[1][0].count int32[]" in text
    assert "output[2]['loss'] replicated" in text
    assert train_step.lower(*state, X, Y).out_info is not None
    with pytest.raises(jzero.StateError, match=r"the state is a dict.*\(params, opt_state\)"):
        train_step.shard({"params": state[0], "opt_state": state[1]})
    with pytest.raises(jzero.StateError, match="the state is a tuple of 3"):
        train_step.state_shardings((*state, X))
    train_step(*state, X, Y)
    with pytest.raises(jzero.StateError, match=r"donated: params\['b'\], params\['v'\]"):
        train_step.unshard(state)


@pytest.mark.slow
def test_checkpoint_of_the_tuple(tmp_path):
    train_step = sharded()
    *state, _ = train_step(*train_step.init(init), X, Y)
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        checkpointer.save(1, tuple(state))
    other = sharded(stage=1, devices=4, offload=jzero.HostCPU())
    with jzero.Checkpointer(tmp_path, other) as checkpointer:
        step_number, restored = checkpointer.latest_step(), checkpointer.restore(init())
    assert step_number == 1
    assert isinstance(restored, tuple)
    close(restored, expected()[0][:2], "restored")
    close(other(*restored, X, Y), expected()[1], "and trained")


@pytest.mark.slow
def test_parameters_and_their_average_are_alike():
    def averaging(params, average, opt_state, x, y):
        params, opt_state, metrics = step(params, opt_state, x, y)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)
        return metrics, params, average, opt_state

    train_step = sharded(averaging, state_argnums=(0, 1, 2))
    (params, opt_state), (average, _) = init(), init()
    want = jax.jit(averaging)(params, average, opt_state, X, Y)
    close(train_step(params, average, opt_state, X, Y), want, "average")

    def stateless(params, average, x):
        return averaging(params, average, TX.init(params), x, Y)[1:3]

    # What plainly is an average needs no word.
    found = sharded(stateless, state_argnums=None)
    want = jax.jit(stateless)(init()[0], init()[0], X)
    close(found(init()[0], init()[0], X), want, "found")
    assert "average['w']" in [leaf.path for leaf in found.plan(init()[0], init()[0], X).leaves]


def test_the_assertions_take_it():
    def steps(params, opt_state, x, y):
        return step(params, opt_state, x, y)[::-1]

    batches = [(X, Y), (X[::-1], Y[::-1])]
    assert_same_training(steps, init, batches, state=(0, 1))

    def sgd(w, momentum, x):
        momentum = 0.9 * momentum + jax.grad(lambda w: jnp.mean(x @ w))(w)
        return w - momentum, momentum

    w = jnp.ones((16, 8))
    assert_collectives(
        sharded(sgd, stage=1), (w, w), X, {"reduce-scatter": 16 * 8, "all-gather": 16 * 8}
    )


REFUSED: dict[str, Any] = {
    "missing": (
        lambda *args: step(*args)[::2], {},
        r"args\[1\] \(a tree of 7 leaves\) is not among the 2 results of step_fn.*leave out of",
    ),
    "cast": (
        lambda *args: (jax.tree.map(lambda p: p.astype(jnp.bfloat16), args[0]), args[1]), {},
        r"(?s)args\[0\]\['w'\] float32\[16,30\] became bfloat16.*Cast it back",
    ),
    "unclear": (
        lambda *args: [*step(*args)[::-1], args[0]], {},
        r"args\[0\] could come back as output\[2\] or output\[3\]. .*\(args\[0\], args\[1\], ...\)",
    ),
    "static": (step, {"static_argnums": 1}, "the state 'opt_state' is declared static"),
    "specs": (step, {"in_specs": {1: jax.P()}}, "in_specs names the state 'opt_state'"),
    "none": (step, {"state_argnums": ()}, r"state=\(\) names no argument"),
    "unknown": (step, {"state_argnames": "moments"}, "state names 'moments'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    step_fn, options, text = REFUSED[name]
    state = init()
    with pytest.raises(jzero.JzeroError, match=text):
        sharded(step_fn, **options)(*state, X, Y)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.slow
def test_optimizer_state_of_a_step_with_collectives_is_not_split():
    def written(params, opt_state, x, y):
        loss, grads = jax.lax.pmean(jax.value_and_grad(loss_fn)(params, x, y), "data")
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss}

    pad = {"w": jnp.zeros((16, 32)), "v": jnp.zeros((32, 8)), "b": jnp.zeros(8)}
    y = jnp.zeros((32, 8))
    padded = sharded(written, state_argnums=None, axis_name="data")
    close(
        padded(pad, TX.init(pad), X, y), jax.jit(step)(pad, TX.init(pad), X, y), "its rows divide"
    )
    assert "opt_state[1][0].mu['w']" in [
        leaf.path for leaf in padded.plan(pad, TX.init(pad), X, y).leaves
    ]
    for argnums in (None, (0, 1)):
        written_step = sharded(written, state_argnums=argnums, axis_name="data")
        close(written_step(*init(), X, Y), expected()[0], str(argnums))


def momentum(w, m, x):
    m = 0.9 * m + jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * m, m


def recurrent(w, h, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(h @ w + x) ** 2))(w)
    return w - 0.1 * grad, jnp.tanh(h @ w + x), loss


def autoencoder(w, x, y):
    grad = jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
    return w - 0.1 * grad, x @ w, y


def noisy(w, key, x):
    new_key, key = jax.random.split(key)
    noise = jax.random.normal(key, x.shape)
    return w - 0.1 * jax.grad(lambda w: jnp.mean(((x + noise) @ w) ** 2))(w), new_key


SQUARE = np.linspace(-1, 1, 256, dtype=np.float32).reshape(16, 16)
LEGAL = {
    "hidden state": (recurrent, SQUARE),
    "hidden state of 12 rows": (recurrent, SQUARE[:12, :12]),
    "reconstruction": (autoencoder, SQUARE),
    "key": (noisy, jax.random.key(0)),
    "old key": (noisy, jax.random.PRNGKey(0)),
    "counter": (lambda w, n, x: (w - 0.1 * (n + 1) * x.mean(), n + 1), np.float32(0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEGAL)
def test_arguments_that_come_back_and_are_no_state(name):
    """Their shapes are those of the state, by chance; the default is to take them as they are."""
    step_fn, other = LEGAL[name]
    w = other if isinstance(other, np.ndarray) and other.ndim else SQUARE
    train_step = sharded(step_fn, state_argnums=None)
    actual = train_step(jnp.asarray(w), other, w[::-1])
    want = jax.jit(step_fn)(jnp.asarray(w), other, w[::-1])
    close(jax.tree.map(bits, actual), jax.tree.map(bits, want), name)


def bits(x):
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def test_moments_of_ones_own_are_refused_and_may_be_insisted_on():
    text = r"(?s)m comes back, float32.* may be a batch.*state=0, or state=\(0, 1\)\."
    with pytest.raises(jzero.StepError, match=text):
        sharded(momentum, state_argnums=None)(SQUARE, SQUARE, X)
    with pytest.raises(jzero.StepError, match=text):
        sharded(momentum, state_argnums=None)(SQUARE[:12, :12], SQUARE[:12, :12], X[:12, :12])
    insisted = sharded(momentum, state_argnums=0)(jnp.asarray(SQUARE), SQUARE, X)
    close(insisted, jax.jit(momentum)(SQUARE, SQUARE, X), "insisted")
