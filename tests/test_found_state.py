"""Steps for which nothing is said: their state is found where it is taken and returned."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import jzero
import small
import zoo
from jzero.testing import assert_collectives
from small import grouped

TX: Any = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
X = jax.random.normal(jax.random.key(1), (32, 16))
Y = jnp.tanh(X[:, :6])


def init():
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "w": jax.random.normal(keys[0], (16, 40)),
        "v": jax.random.normal(keys[1], (40, 6)),
        "b": jnp.zeros(6),
    }
    return params, TX.init(params)


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"][None] - y) ** 2)


def update(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def loss_first(state, x, y):
    params, opt_state = state
    params, opt_state, loss = update(params, opt_state, x, y)
    return loss, (params, opt_state)


def numbered(i, state, batch):
    """As `jax.example_libraries.optimizers` has it."""
    return loss_first(state, *batch)[1]


def key_first(key, params, opt_state, x, y):
    key, noise = jax.random.split(key)
    params, opt_state, loss = update(params, opt_state, x + jax.random.normal(noise, x.shape), y)
    return key, params, opt_state, loss


def without_batch(key, params, opt_state):
    """As in optax's nanolm."""
    key, at = jax.random.split(key)
    rows = jax.random.randint(at, (16,), 0, 32)
    params, opt_state, loss = update(params, opt_state, X[rows], Y[rows])
    return params, key, opt_state, loss


def batch_first(batch, state):
    return loss_first(state, batch["x"], batch["y"])[::-1]


def averaged(params, average, opt_state, x, y):
    params, opt_state, loss = update(params, opt_state, x, y)
    average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)
    return loss, params, average, opt_state


def with_gradients(params, opt_state, x, y):
    grads = jax.grad(loss_fn)(params, x, y)
    return (*update(params, opt_state, x, y)[:2], grads)


def with_target(params, target, opt_state, x, y):
    """As in DQN: what is like the parameters does not come back."""
    return update(jax.tree.map(lambda p, t: p + 0.01 * t, params, target), opt_state, x, y)


def by_name(x, y, *, params, opt_state, scale=1.0):
    params, opt_state, loss = update(params, opt_state, x * scale, y)
    return {"loss": loss, "new": {"opt": opt_state, "params": params}}


def bare(x, w):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return loss, w - 0.1 * grad


def momentum(params, moments, x, y):
    grads = jax.grad(loss_fn)(params, x, y)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments


P, O = init()  # noqa: E741
KEY = jax.random.key(3)
ONE = np.float32(1)
# Of each: the step, its arguments, those that are the state, and where each is among the results.
FOUND: dict[str, Any] = {
    "loss first": (loss_first, ((P, O), X, Y), {"state": lambda outs: outs[1]}),
    "a number first": (numbered, (ONE, (P, O), (X, Y)), {"state": lambda outs: outs}),
    "a key first": (
        key_first, (KEY, P, O, X, Y), {"params": lambda o: o[1], "opt_state": lambda o: o[2]}
    ),
    "batch first": (batch_first, ({"x": X, "y": Y}, (P, O)), {"state": lambda outs: outs[0]}),
    "two": (update, (P, O, X, Y), {"params": lambda o: o[0], "opt_state": lambda o: o[1]}),
    "average": (
        averaged, (P, P, O, X, Y),
        {"params": lambda o: o[1], "average": lambda o: o[2], "opt_state": lambda o: o[3]},
    ),
    "gradients": (
        with_gradients, (P, O, X, Y), {"params": lambda o: o[0], "opt_state": lambda o: o[1]}
    ),
    "a bare array": (bare, (X, P["w"]), {"w": lambda outs: outs[1]}),
    "moments": (momentum, (P, P, X, Y), {"params": lambda o: o[0], "moments": lambda o: o[1]}),
}  # fmt: skip


def sharded(step_fn, devices=8, **options):
    mesh = small.mesh(data=devices)
    chosen: dict[str, Any] = {"min_shard_bytes": 0, "mesh": mesh}
    return jzero.shard_train_step(step_fn, **grouped(**chosen | options))


def copies(tree):
    """Its arrays, in buffers that a step may consume."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, tree)


def bits(tree):
    def data(x):
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if is_key else x

    return zoo.to_host(jax.tree.map(data, tree))


def close(actual, expected, where=""):
    zoo.assert_trees_close(bits(actual), bits(expected), zoo.FP32, where)


@functools.cache
def reference(name):
    """What one device returns in each of three steps."""
    step_fn, args, state = FOUND[name]
    found = []
    for _ in range(3):
        outs = jax.jit(step_fn)(*args)
        found.append(outs)
        args = following(name, args, outs)
    return found


def following(name, args, outs):
    """The arguments of the next step: what is state, and a key, is what this one returned."""
    step_fn, _, state = FOUND[name]
    named = dict(zip(parameters(step_fn), args, strict=True))
    named |= {name: where(outs) for name, where in state.items()}
    return tuple((named | {"key": outs[0]} if "key" in named else named).values())


def parameters(step_fn):
    return list(jzero.shard_train_step(step_fn)._programs.signature.parameters.parameters)


@pytest.mark.slow(but=["moments"])
@pytest.mark.parametrize("name", FOUND)
def test_trains_as_one_device(name):
    step_fn, args, state = FOUND[name]
    train_step, args = sharded(step_fn), copies(args)
    for i, want in enumerate(reference(name)):
        given = args
        outs = train_step(*args)
        close(outs, want, f"{name}, step {i}")
        args = following(name, args, outs)
    roots = {leaf.path.split("[")[0] for leaf in train_step.plan(*args).leaves}
    assert roots == (set(state) if len(state) > 1 else {"state"})
    # It is donated, and nothing else is.
    for argument, value in zip(parameters(step_fn), given, strict=True):
        arrays = [x for x in jax.tree.leaves(value) if isinstance(x, jax.Array)]
        assert all(x.is_deleted() == (argument in state) for x in arrays), argument


def test_an_optimizer_without_arrays_is_state_and_another_form_of_it_is_a_tree():
    tx = optax.sgd(optax.linear_schedule(0.1, 0.0, 10))

    def plain(params, opt_state, x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, Y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return loss, optax.apply_updates(params, updates), opt_state

    train_step = sharded(plain)
    state = train_step.shard((P, tx.init(P)), X)
    want = jax.jit(plain)(P, tx.init(P), X)
    close(train_step(*state, X), want)
    assert train_step._programs.signature.state_names == ("params", "opt_state")
    as_dict = train_step.init(lambda: {"params": init()[0], "opt_state": tx.init(P)})
    close(train_step(as_dict["params"], as_dict["opt_state"], X), want)
    with pytest.raises(
        jzero.StateError, match=r"the state is a dict\. .*Pass \(params, opt_state\)"
    ):
        train_step.shard(as_dict, X)


def test_by_name():
    train_step = sharded(by_name)
    params, opt_state = init()
    want = jax.jit(by_name)(X, Y, params=params, opt_state=opt_state)
    close(train_step(X, Y, params=params, opt_state=opt_state), want)
    params, opt_state = init()
    close(train_step(X, scale=ONE, opt_state=opt_state, y=Y, params=params), want)
    assert train_step._programs.signature.state_names == ("params", "opt_state")
    # In the order of the parameters, found, or about to be.
    for step in (train_step, sharded(by_name, state_argnames=("opt_state", "params"))):
        close(step.shard(init(), X, y=Y), init())
        placed = step.init(init)
        assert step.state_shardings(init(), X, Y) == jax.tree.map(lambda x: x.sharding, placed)
        close(step(X, Y, params=placed[0], opt_state=placed[1]), want)


def test_what_the_step_raises_itself_is_raised_where_a_state_is_placed():
    def failing(batch, state):
        params, opt_state = state
        update(params, opt_state, batch["x"], batch["y"])
        raise KeyError("of the step's own")

    for place in ("shard", "state_shardings"):
        with pytest.raises(KeyError, match="of the step's own") as caught:
            getattr(sharded(failing), place)(init(), {"x": X, "y": Y})
        notes = "".join(caught.value.__notes__)
        assert "with state for the state, as nobody has said" in notes
        assert "with batch it raises TypeError" in notes


def test_collectives_of_a_step_whose_state_is_found():
    w = jnp.ones((16, 8))
    for step_fn, batch in ((bare, X), (lambda w, x: bare(x, w), X)):
        expected = {"reduce-scatter": 16 * 8, "all-gather": 16 * 8, "all-reduce": 1}
        assert_collectives(sharded(step_fn, stage=1), w, batch, expected)


def autoencoder(params, x):
    def loss(params):
        reconstruction = jnp.tanh(x @ params["w"]) @ params["w"].T
        return jnp.mean((reconstruction - x) ** 2), reconstruction

    grads, reconstruction = jax.grad(loss, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), reconstruction


def recurrent(params, opt_state, h, x):
    """What comes back beside a clear state has rows, and is computed of the argument like it."""
    return *update(params, opt_state, x, Y)[:2], jnp.tanh(x @ params["w"] + h)


def target_network(state, x, rewards, done):
    """As in CleanRL's DQN."""
    values = jnp.tanh(x @ state[0]["w"]).mean(-1)
    loss, state = loss_first(state, x, Y * (rewards * (1 - done))[:, None])
    return loss, values, state


def reconstructs(params, opt_state, x):
    params, opt_state, loss = update(params, opt_state, x, Y)
    return loss, params, opt_state, x @ params["w"] @ params["w"].T


H = jnp.zeros((32, 40))
BESIDE_BATCH: dict[str, Any] = {
    "hidden": (recurrent, (P, O, H, X)),
    "values": (target_network, ((P, O), X, Y[:, 0], jnp.zeros(32))),
    "autoencoder": (reconstructs, (P, O, X)),
}


@pytest.mark.slow(but=["autoencoder"])
@pytest.mark.parametrize("name", BESIDE_BATCH)
def test_rows_beside_a_clear_state_are_batch(name):
    step_fn, args = BESIDE_BATCH[name]
    train_step, given = sharded(step_fn), copies(args)
    close(train_step(*given), jax.jit(step_fn)(*args), name)
    names = ("state",) if name == "values" else ("params", "opt_state")
    assert train_step._programs.signature.state_names == names
    assert not any(x.is_deleted() for x in jax.tree.leaves(given[len(names) :]))
    close(sharded(step_fn, accumulate=2)(*copies(args)), jax.jit(step_fn)(*args), name)


def forgets(params, opt_state, mean, x):
    """What comes back like the mean, of another number of rows than the batch, is not computed of it."""
    return *update(params, opt_state, x - mean[None], Y)[:2], x.mean(0)


def like_a_bias(params, opt_state, x, weights):
    """What comes back like the weights has their rows, and the shape of a moment."""
    found = jnp.tanh(x @ params["w"]) @ params["v"]
    return *update(params, opt_state, x * weights[:, None], Y[:6]), found.mean(1)


def test_a_key_alone_is_no_batch():
    """Of the old style too, which has a dim: a step that has its data elsewhere takes no rows."""
    report = sharded(without_batch).describe(jax.random.PRNGKey(0), *init())
    assert report.movements == ()
    assert "arguments: key replicated" in str(report)


def test_nothing_in_a_state_and_in_a_batch_is_no_leaf():
    """A solver's state with `aux=None` beside parameters, and an absent field of a batch."""

    def solve(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch["xy"])
        velocity = jax.tree.map(lambda v, g: 0.9 * v - 0.1 * g, state["velocity"], grads)
        state = {"aux": None, "velocity": velocity, "value": loss}
        return jax.tree.map(jnp.add, params, velocity), state

    params, _ = init()
    state = {"aux": None, "velocity": jax.tree.map(jnp.zeros_like, params), "value": 0.0}
    batch = {"images": None, "xy": (X, Y)}
    want = jax.jit(solve)(params, state, batch)
    for options in ({}, {"in_specs": {"batch": jax.P("data")}}, {"in_specs": {"batch": jax.P()}}):
        outs = sharded(solve, **options)(*copies((params, state)), batch)
        close(outs, want, f"{options}")


def test_what_no_result_is_computed_of_is_no_state():
    for step_fn, args in ((forgets, (X[0], X)), (like_a_bias, (X[:6], Y[:6, 0]))):
        for accumulate in (1, 2):
            train_step = sharded(
                step_fn, devices=2 if step_fn is forgets else 3, accumulate=accumulate
            )
            close(train_step(*init(), *args), jax.jit(step_fn)(*init(), *args))
            assert train_step._programs.signature.state_names == ("params", "opt_state")
    # It is, if it is computed of it.
    with pytest.raises(
        jzero.StepError, match=r"a\[3\] comes back, float32\[6\], and may be a batch"
    ):
        sharded(lambda *a: (*like_a_bias(*a)[:3], 0.9 * a[3]))(*init(), X[:6], Y[:6, 0])


def taught(teacher, params, opt_state, x, y):
    """A frozen teacher leads, and the parameters that come back first are like it."""
    return update(params, opt_state, x, y + 0.1 * jnp.tanh(x @ teacher["w"]) @ teacher["v"])


def reconstruction_first(x, state):
    def of_params(params):
        out = jnp.tanh(x @ params["w"]) @ params["w"].T
        return jnp.mean((out - x) ** 2), out

    params, opt_state = state
    (loss, out), grads = jax.value_and_grad(of_params, has_aux=True)(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return out, loss, (optax.apply_updates(params, updates), opt_state)


def batch_back(batch, state):
    loss, state = loss_first(state, batch["x"], batch["y"])
    return batch, state, loss


def weighed(params, opt_state, batch):
    """A batch that comes back, augmented, with something in it that is for all rows."""
    x = batch["x"] * batch["scale"][None]
    return *update(params, opt_state, x, batch["y"]), {**batch, "x": batch["x"] + 1e-3}


MISLEADING: dict[str, Any] = {
    "teacher": (taught, (init()[0], *init(), X, Y), ("params", "opt_state")),
    "reconstruction": (reconstruction_first, (X, init()), ("state",)),
    "batch": (batch_back, ({"x": X, "y": Y}, init()), ("state",)),
}


@pytest.mark.slow(but=["teacher", "reconstruction"])
@pytest.mark.parametrize("name", MISLEADING)
def test_what_comes_back_and_is_not_trained_is_no_state(name):
    step_fn, args, names = MISLEADING[name]
    train_step, given = sharded(step_fn), copies(args)
    close(train_step(*given), jax.jit(step_fn)(*args), name)
    assert train_step._programs.signature.state_names == names
    assert not any(x.is_deleted() for x in jax.tree.leaves(given[0]))
    assert sharded(step_fn).plan(*args).leaves == train_step.plan(*args).leaves


def test_a_batch_of_unlike_leading_dims_that_comes_back_is_asked_about():
    batch = {"x": X, "y": Y, "scale": jnp.ones(16)}
    with pytest.raises(
        jzero.StepError,
        match=r"(?s)batch comes back, .* may be a batch.*=\(0, 1\), or state=\(0, 1, 2\)",
    ):
        sharded(weighed)(*init(), batch)
    train_step = sharded(weighed, state_argnums=(0, 1))
    close(train_step(*init(), batch), jax.jit(weighed)(*init(), batch))


def with_mean(params, opt_state, mean, x):
    """The weak candidate has another number of rows than the batch."""
    new = 0.9 * mean + 0.1 * x.mean(0)
    return *update(params, opt_state, x - new[None], Y)[:2], new


def test_what_is_ambiguous_is_refused_with_all_that_comes_back():
    args = P, O, jnp.zeros(16), X
    lines = (
        r"(?s)3 arguments fail:.*"
        r"- params comes back, a dict of 3 leaves \(\['b'\] float32\[6\], .*\n.*"
        r"- opt_state comes back, a tuple of 7 leaves \(.*int32\[\], .*\)\n.*"
        r"- mean comes back, float32\[16\], and may be a batch\n"
        r"The state is passed and returned.* "
        r"Say what is state: state=\(0, 1\), or state=\(0, 1, 2\)\."
    )
    with pytest.raises(jzero.StepError, match=lines):
        sharded(with_mean)(*args)
    assert not any(x.is_deleted() for x in jax.tree.leaves(args))
    want = jax.jit(with_mean)(*args)
    for argnums in ((0, 1), (0, 1, 2)):
        close(sharded(with_mean, state_argnums=argnums)(*copies(args)), want)

    def of_one_array(w, opt_state, x):
        """As many rows as the batch, and the shape of its moments."""
        params, opt_state, loss = update({"w": w, "v": P["v"], "b": P["b"]}, opt_state, x, Y[:16])
        return loss, params["w"], opt_state

    with pytest.raises(jzero.StepError, match=r"(?s)w comes back, .*=\(0, 1\)"):
        sharded(of_one_array)(P["w"], O, X[:16])
    # Nothing is sure, and which of two like arguments came back cannot be told.
    with pytest.raises(jzero.StepError, match=r"state=0, or .*=1, or .*=\(0, 1\)\."):
        sharded(lambda x, w: (w, jnp.tanh(x)))(X, P["w"])
    either = r"(?s)a\[1\] comes back, .*, or an argument like it does.*=\(0, 2\), or .*\(1, 2\)\."
    with pytest.raises(jzero.StepError, match=either):
        sharded(lambda *a: with_target(*a)[::-1])(P, P, O, X, Y)


def test_gradients_are_not_taken_for_the_new_state():
    """Their trees are those of the parameters, which would be donated."""
    gradients = jax.value_and_grad(loss_fn)

    def of_layers(x, params):
        @jax.checkpoint
        def layer(h, w):
            return jnp.tanh(h @ w), None

        return jax.value_and_grad(lambda p: jax.lax.scan(layer, x, p["w"])[0].mean())(params)

    def updates(params, opt_state, x, y):
        loss, grads = gradients(params, x, y)
        return loss, *optax.adam(1e-2).update(grads, opt_state, params)

    def with_statistics(params, stats, x, y):
        """Beside gradients comes what is kept, and no optimizer state."""
        stats = {"mean": 0.9 * stats["mean"] + 0.1 * x.mean(0), "num": jnp.ones(3)}
        return *gradients(params, x, y), stats

    for step_fn, args, argnums in (
        (gradients, (P, X, Y), "0"),
        (of_layers, (X, {"w": jnp.ones((3, 16, 16))}), "1"),
        (updates, (P, optax.adam(1e-2).init(P), X, Y), r"\(0, 1\)"),
        (with_statistics, (P, {"mean": X[0], "num": jnp.ones(3)}, X, Y), r"\(0, 1\)"),
    ):
        refused = (
            rf"what comes back like params is computed without adding to it, as gradients are\. "
            rf".* returns the new parameters\. Pass the whole step; or state={argnums} if"
        )
        for ask in (sharded(step_fn), sharded(step_fn).describe):
            with pytest.raises(jzero.StepError, match=refused):
                ask(*args)
        assert not any(x.is_deleted() for x in jax.tree.leaves(args))
    # Where a user says so, and where it comes first, it is the state.
    close(sharded(gradients, state_argnums=0)(copies(P), X, Y), gradients(P, X, Y))
    alone = jax.grad(loss_fn)
    close(sharded(alone)(copies(P), X, Y), alone(P, X, Y))


def test_what_a_step_computes_of_its_state_by_other_ways_is_added_to():
    """No refusal: by a vector of all of them, in a loop, in a branch, and of what is forgotten or turned."""
    grad = jax.grad(loss_fn)

    def of_vector(x, params):
        flat, unravel = ravel_pytree(params)
        grads, _ = ravel_pytree(grad(params, x, Y))
        return x.mean(), unravel(flat - 0.1 * grads)

    def stepped(params, x):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grad(params, x, Y))

    def in_loop(x, params):
        return x.mean(), jax.lax.scan(lambda p, _: (stepped(p, x), None), params, None, 3)[0]

    def in_branch(x, params):
        new = jax.lax.cond(x.mean() > -9, lambda p: stepped(p, x), lambda p: p, params)
        return x.mean(), new

    for step_fn in (of_vector, in_loop, in_branch):
        close(sharded(step_fn)(X, copies(P)), jax.jit(step_fn)(X, P), step_fn.__name__)

    def spectral(params, opt_state, u, x, y):
        params, opt_state, loss = update(params, opt_state, x, y)
        turned = params["w"].T @ (params["w"] @ u["w"])
        return loss, params, opt_state, {"w": turned / jnp.linalg.norm(turned), "n": X[0] * 2}

    args = P, O, {"w": jnp.ones(40), "n": X[0]}, X, Y
    close(sharded(spectral)(*copies(args)), jax.jit(spectral)(*args))


def test_what_was_read_once_is_not_read_otherwise():
    """Beside 32 rows the moments, of 4 and 5, are whole, and may be a batch; beside 4 they would be split."""

    def small(params, moments, x):
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"] @ p["v"]) ** 2))(params)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments

    few = {"w": jnp.ones((4, 5)), "v": jnp.ones((5, 3))}
    train_step = sharded(small)
    close(train_step(copies(few), few, X[:, :4]), jax.jit(small)(few, few, X[:, :4]))
    with pytest.raises(jzero.StepError, match=r"(?s)moments comes back, .*=0, or state=\(0, 1\)\."):
        train_step(few, few, X[:4, :4])


@pytest.mark.slow
def test_in_specs_say_that_an_argument_is_no_state():
    def stated(params, opt_state, table, x, y):
        *state, loss = update(params, opt_state, x + table["t"][None], y)
        return *state, {"t": table["t"] + loss}

    table = {"t": jnp.zeros(16)}
    train_step = sharded(stated, in_specs={"table": jax.P()})
    close(train_step(*init(), table, X, Y), jax.jit(stated)(*init(), table, X, Y))
    assert train_step._programs.signature.state_names == ("params", "opt_state")


def test_a_step_with_collectives_of_its_own():
    def written(key, params, opt_state, x, y):
        loss, grads = jax.lax.pmean(jax.value_and_grad(loss_fn)(params, x, y), "data")
        updates, opt_state = TX.update(grads, opt_state, params)
        return loss, optax.apply_updates(params, updates), opt_state

    def reference_step(key, *args):
        *state, loss = update(*args)
        return loss, *state

    train_step = sharded(written, axis_name="data")
    close(train_step(KEY, *init(), X, Y), jax.jit(reference_step)(KEY, *init(), X, Y))
    assert train_step._programs.signature.state_names == ("params", "opt_state")


class Trainer:
    scale = 1.0

    @jzero.shard_train_step(static_argnums=0, axes=jzero.Axes(min_shard_bytes=0))
    def step(self, state, x, y):
        loss, state = loss_first(state, x * self.scale, y)
        return state, loss

    @jzero.shard_train_step(static_argnums=0, axes=jzero.Axes(min_shard_bytes=0))
    def found(self, x, y, *, state):
        return loss_first(state, x * self.scale, y)

    @jzero.shard_train_step(axes=jzero.Axes(min_shard_bytes=0))
    def opaque(self, state, x, y):
        return state

    @classmethod
    @jzero.shard_train_step(static_argnums=0, axes=jzero.Axes(min_shard_bytes=0))
    def of_class(cls, state, x, y):
        return loss_first(state, x * cls.scale, y)

    @staticmethod
    @jzero.shard_train_step(axes=jzero.Axes(min_shard_bytes=0))
    def free(state, x, y):
        return loss_first(state, x, y)


class Other(Trainer):
    scale = 0.5


@functools.partial(jax.tree_util.register_dataclass, data_fields=["scale"], meta_fields=[])
@dataclasses.dataclass
class Scaled:
    """A pytree without state."""

    scale: Any

    @jzero.shard_train_step(axes=jzero.Axes(min_shard_bytes=0))
    def step(self, state, x, y):
        return loss_first(state, x * self.scale, y)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["params", "opt_state"], meta_fields=[]
)
@dataclasses.dataclass
class Model:
    """A pytree that is the state."""

    params: Any
    opt_state: Any

    @jzero.shard_train_step(axes=jzero.Axes(min_shard_bytes=0))
    def step(self, x, y):
        params, opt_state, loss = update(self.params, self.opt_state, x, y)
        return Model(params, opt_state), loss


def test_methods_bind():
    loss, state = reference("loss first")[0]
    for trainer, x in ((Trainer(), X), (Other(), 2 * X)):
        assert isinstance(trainer.step, jzero.ShardedStep)
        close(trainer.step(init(), x, Y), (state, loss))
        close(trainer.found(x, Y, state=init()), (loss, state))
        close(trainer.of_class(init(), x, Y), (loss, state))
    close(Trainer().free(init(), X, Y), (loss, state))
    assert Trainer.step is Trainer.step
    close(Trainer.step(Trainer(), init(), X, Y), (state, loss))
    scaled = Scaled(ONE)
    close(scaled.step.shard(init(), X, Y), init())
    close(scaled.step(init(), X, Y), (loss, state))
    model, found = Model(*init()).step(X, Y)
    close(((model.params, model.opt_state), found), (state, loss))
    close(model.step(X, Y)[1], reference("loss first")[1][0])
    # Not where it is an attribute of an instance.
    own: Any = Trainer()
    own.step = sharded(loss_first)
    close(own.step(init(), X, Y), (loss, state))


def test_an_opaque_self_is_refused_by_name():
    with pytest.raises(
        jzero.OptionError, match=r"self is a Trainer.*argument 0.*Say static_argnums=0;"
    ):
        Trainer().opaque(init(), X, Y)


def predict(batch, state):
    return jnp.tanh(batch @ state[0]["w"])


def of_params(batch, params):
    return predict(batch, (params,))


@pytest.mark.parametrize("place", ["init", "on_mesh"])
def test_an_evaluation_before_the_first_step(place):
    """It reads what was placed."""
    train_step = sharded(batch_first)
    if place == "on_mesh":
        train_step.plan({"x": X, "y": Y}, init())
        train_step = train_step.on_mesh(small.mesh(data=4))
    state = train_step.init(init) if place == "init" else train_step.shard(init())
    for fn, read in ((predict, state), (of_params, state[0])):
        evaluate = jzero.shard_eval_step(fn, like=train_step)
        close(evaluate(X, read), fn(X, read))
        assert len(evaluate._programs.signature.state_names) == 1
        assert evaluate._programs.signature.found


class Evaluator:
    @jzero.shard_eval_step(static_argnums=0)
    def predict(self, params, batch):
        return of_params(batch, params)


def test_evaluations():
    train_step = sharded(batch_first)
    state, _ = train_step({"x": X, "y": Y}, init())
    want = predict(X, state)
    evaluate = jzero.shard_eval_step(predict, like=train_step)
    close(evaluate(X, state), want)
    assert len(evaluate.plan(X, state).unread) == len(jax.tree.leaves(state)) - 1
    of_two = sharded(update)
    params, opt_state, _ = of_two(*init(), X, Y)
    evaluate = jzero.shard_eval_step(of_params, like=of_two)
    close(evaluate(X[:13], params), want[:13])
    assert [leaf.path for leaf in evaluate.plan(X, params).leaves][0] == "state['b']"
    # The tuple is what takes a state of several arguments.
    assert jzero.shard_eval_step(predict, like=of_two).plan(X, (params, opt_state)).unread
    close(jzero.shard_eval_step(lambda p, x: of_params(x, p), like=of_two)(params, X), want)
    close(Evaluator().predict(params, X), want)
