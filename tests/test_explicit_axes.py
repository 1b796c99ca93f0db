"""Meshes as `jax.make_mesh` makes them, of Explicit axes: taken as Auto, given or by `jax.set_mesh`."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
import small
import zoo

TX = optax.adam(1e-2)
MESHES = {"data": ((8,), ("data",)), "data and model": ((4, 2), ("data", "model"))}
AUTO_SPECS = {"up": P(None, "model"), "down": P("model", None)}


def init():
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "up": jax.random.normal(keys[0], (8, 32)),
        "down": jax.random.normal(keys[1], (32, 8)),
    }
    return {"params": params, "opt": TX.init(params), "key": jax.random.key(1)}


def step_of(constrain):
    def forward(params, x):
        return constrain(jnp.tanh(x @ params["up"])) @ params["down"]

    def step(state, x):
        def loss_fn(params):
            y = forward(params, x) + 0.1 * jax.random.normal(state["key"], x.shape)
            return jnp.mean(y**2), y

        (loss, y), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = TX.update(grads, state["opt"], state["params"])
        new = {"params": optax.apply_updates(state["params"], updates), "opt": opt}
        return new | {"key": jax.random.fold_in(state["key"], 1)}, (loss, y)

    return step


plain_step = step_of(lambda h: h)
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


def explicit(name):
    mesh = jax.make_mesh(*MESHES[name])
    assert set(mesh.axis_types) == {AxisType.Explicit}
    return mesh


def sharded(mesh, given, **options):
    has_model = len(mesh.axis_names) > 1
    constrain = (
        (lambda h: jax.lax.with_sharding_constraint(h, P(None, "model")))
        if has_model
        else lambda h: h
    )
    if has_model:
        options |= dict(auto_specs=AUTO_SPECS, axis_names="data")
    options |= dict(mesh=None if given == "set_mesh" else mesh)
    return small.shard_train_step(step_of(constrain), **options)


def around(mesh, given):
    return contextlib.nullcontext() if given == "argument" else jax.set_mesh(mesh)


def expected_after(num_steps):
    state = init()
    for _ in range(num_steps):
        state, outs = jax.jit(plain_step)(state, X)
    return state, outs


def host(tree):
    def leaf(x):
        return np.asarray(
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        )

    return jax.tree.map(leaf, tree)


def close(actual, expected):
    zoo.assert_trees_close(host(actual), host(expected), zoo.FP32, "explicit axes")


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


CASES = [
    ("data", "both", {"stage": 1}),
    ("data and model", "argument", {"accumulate": 2}),
    ("data and model", "set_mesh", {"offload": jzero.PinnedHost()}),
    ("data", "set_mesh", {"offload": jzero.HostCPU()}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "given", "options"), CASES, ids=str)
def test_trains_as_on_one_device(name, given, options):
    mesh = explicit(name)
    train_step = sharded(mesh, given, **options)
    with around(mesh, given):
        state = train_step.init(init)
        for _ in range(3):
            state, outs = train_step(state, X)
        close(train_step.unshard(state), expected_after(3)[0])
    close(outs, expected_after(3)[1])


@pytest.mark.parametrize("given", [pytest.param("argument", marks=pytest.mark.slow), "set_mesh"])
def test_inputs_of_explicit_axes(given):
    """They are views of arrays on Auto axes: nothing is copied, and a state in its place is consumed."""
    mesh = explicit("data and model")
    with around(mesh, given):
        train_step = sharded(mesh, given, stage=3)
        theirs = jax.tree.map(
            lambda s: NamedSharding(mesh, s.spec),
            train_step.state_shardings(jax.eval_shape(init), X),
        )
        state = jax.device_put(init(), theirs)
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        first = state["params"]["up"]
        state, _ = train_step(state, x)
        assert first.is_deleted() == (given == "set_mesh")
        state, outs = train_step(state, x)
        close(outs, expected_after(2)[1])


def test_an_array_that_is_there_twice():
    """It is one view, so that a step which donates the one does not read the other."""

    def step(w, x):
        return w + 1, x * 2

    with jax.set_mesh(explicit("data")):
        train_step = small.shard_train_step(step, stage=0, in_specs={"x": P()})
        w, _ = train_step(jnp.ones((16, 8)), X)
        close(train_step(w, w), (jnp.full((16, 8), 3.0), jnp.full((16, 8), 4.0)))


def test_under_an_outer_jit():
    mesh = explicit("data and model")
    with jax.set_mesh(mesh):
        train_step = sharded(mesh, "set_mesh", stage=3)
        state = train_step.init(init)
        state, outs = jax.jit(train_step)(state, X)
        assert set(outs[1].sharding.mesh.axis_types) == {AxisType.Explicit}
        close([state, outs], expected_after(1))
        eval_step = jzero.shard_eval_step(
            lambda s, x: jnp.tanh(x @ s["params"]["up"]), like=train_step
        )
        close(jax.jit(eval_step)(state, X), jnp.tanh(X @ host(state)["params"]["up"]))


LAYOUTS = {
    "reshard": lambda h, mesh: jax.sharding.reshard(h, P("data", "model")),
    "reshard, a sharding": lambda h, mesh: jax.sharding.reshard(h, NamedSharding(mesh, P("data"))),
    "einsum": lambda h, mesh: jnp.einsum("bi,ij->bj", h, jnp.ones((32, 32)), out_sharding=P("data", "model")),
    "gather": lambda h, mesh: h.at[jnp.arange(16)].get(out_sharding=P("data")),
    "zeros": lambda h, mesh: h + jnp.zeros(h.shape, out_sharding=NamedSharding(mesh, P("data"))),
    "constraint": lambda h, mesh: jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P("data"))),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_a_step_s_own(layout):
    mesh = explicit("data and model")
    step = step_of(lambda h: LAYOUTS[layout](h, mesh))
    with around(mesh, "set_mesh"), pytest.raises(jzero.StepError) as raised:
        small.shard_train_step(step, mesh=mesh, axes="data").plan(init(), X)
    text = f"{raised.value}"
    assert "a layout over Explicit mesh axes at " in text
    assert "test_explicit_axes.py:" in text
    assert "Write jax.lax.with_sharding_constraint(x, jax.P(...))" in text


@pytest.mark.parametrize("put", ["state", "batch", "both"])
def test_arrays_of_explicit_axes_under_an_outer_jit(put):
    """Without a mesh that is current the values of the trace say over which they lie."""
    mesh = explicit("data")
    expected = jax.jit(plain_step)(init(), X)
    state, x = init(), jnp.asarray(X)
    if put != "batch":
        state = jax.device_put(state, NamedSharding(mesh, P()))
    if put != "state":
        x = jax.device_put(x, NamedSharding(mesh, P("data")))
    found = jax.jit(sharded(mesh, "argument", stage=3))(state, x)
    zoo.assert_trees_close(zoo.to_host(found), zoo.to_host(expected), zoo.FP32, put)


def test_weak_types_last():
    """A leaf that is a Python number to JAX is one under `jax.set_mesh` of Explicit axes too."""
    with jax.set_mesh(explicit("data")):
        train_step = small.shard_train_step(lambda s, x: {"w": s["w"] + x.mean(), "n": s["n"] * 2})
        state = train_step.shard({"w": jnp.ones(8), "n": jnp.asarray(1.5)}, X)
        weak = jax.jit(lambda: 1.5)()
        state = train_step({**state, "n": weak}, X)
        assert state["n"].weak_type
        assert train_step(state, X)["n"].weak_type
