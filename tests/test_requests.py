"""A sharding constraint of the step's own over data axes requests a layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jzero
import small
import zoo
from small import grouped

ROWS, WIDTH = 16, 32


def loss_fn(w, x):
    return jnp.mean(jnp.tanh(x @ w["up"]) @ w["down"])


def new_state():
    keys = jax.random.split(jax.random.key(0), 3)
    w = {
        "up": jax.random.normal(keys[0], (WIDTH, 64)),
        "down": jax.random.normal(keys[1], (64, WIDTH)),
    }
    return w, keys[2]


def updated(w, x):
    loss, grads = jax.value_and_grad(loss_fn)(w, x)
    return jax.tree.map(lambda p, g: p - g, w, grads), loss


def own_rows(spec):
    """A step that draws its batch itself, and says how it lies."""

    def step(state, scale):
        w, key = state
        key, now = jax.random.split(key)
        x = scale * jnp.sin(jnp.arange(ROWS * WIDTH).reshape(ROWS, WIDTH) * jax.random.normal(now))
        w, loss = updated(w, x if spec is None else jax.lax.with_sharding_constraint(x, spec))
        return (w, key), loss

    return step


def trains_as_on_one_device(step, new_state, batches, **options):
    train_step = jzero.shard_train_step(step, **grouped(min_shard_bytes=0, **options))
    mesh = options["mesh"]
    plain, state, expected = jax.jit(step), new_state(), new_state()
    for batch in batches:
        state, metrics = train_step(state, batch)
        with jax.set_mesh(mesh):  # Constraints need one.
            expected, wanted = plain(expected, batch)
        zoo.assert_trees_close(zoo.to_host(metrics), zoo.to_host(wanted), zoo.FP32, "metrics")
    whole = zoo.to_host(train_step.unshard(state))
    zoo.assert_trees_close(whole, zoo.to_host(expected), zoo.FP32, "state")
    return train_step


def flops(step, spec):
    mesh = small.auto_mesh(data=8)
    train_step = jzero.shard_train_step(step(spec), mesh=mesh, axes=jzero.Axes(min_shard_bytes=0))
    return train_step.lower(new_state(), 1.0).compile().cost_analysis()["flops"]


@pytest.mark.slow
def test_rows_that_the_step_makes_are_shared_out():
    mesh = small.auto_mesh(data=8)
    batches = [np.float32(1.0), np.float32(2.0)]
    trains_as_on_one_device(own_rows(P("data")), new_state, batches, mesh=mesh)
    assert flops(own_rows, P("data")) < flops(own_rows, None) / 4


def constraining(*specs, of=lambda x: x):
    """A step that says how its batch lies, and what each turn of a loop carries."""

    def step(state, x):
        w, key = state

        def loss_fn(w):
            h = jax.lax.with_sharding_constraint(of(x), specs[0])
            h = jnp.tanh(h @ w["up"]) @ w["down"]

            def turn(h, _):
                return jax.lax.with_sharding_constraint(jnp.sin(h), specs[-1]), jnp.sum(h) / h.size

            h, firsts = jax.lax.scan(turn, h, None, length=3)
            return jnp.mean(h) + firsts.sum()

        loss, grads = jax.value_and_grad(loss_fn)(w)
        return (jax.tree.map(lambda p, g: p - g, w, grads), key), loss

    return step


def batches(rows=ROWS):
    return [
        np.sin(np.arange(rows * WIDTH, dtype=np.float32) * k).reshape(rows, WIDTH) for k in (1, 2)
    ]


SPECS = {
    "rows": (P("a"), P("a")),
    "columns": (P(None, "a"), P("a")),
    "columns in the loop": (P("a"), P(None, "a")),
    "both": (P("a", "b"), P("b", "a")),
    "one dim": (P(("a", "b")), P(("b", "a"))),
    "nothing": (P(), P(None, None)),
    "unconstrained": (P(P.UNCONSTRAINED, "a"), P("b", P.UNCONSTRAINED)),
}


@pytest.mark.slow(but=["columns-1", "one dim-1"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", SPECS)
def test_trains_the_same(name, accumulate):
    mesh = small.auto_mesh(a=2, b=4)
    options = {"mesh": mesh, "axis_names": ("a", "b"), "accumulate": accumulate}
    trains_as_on_one_device(constraining(*SPECS[name]), new_state, batches(), **options)


@pytest.mark.slow(but=["one dim", "unconstrained"])
@pytest.mark.parametrize("name", SPECS)
def test_trains_the_same_beside_an_axis_of_xla(name):
    mesh = small.auto_mesh(a=4, b=2)
    trains_as_on_one_device(
        constraining(*SPECS[name]), new_state, batches(), mesh=mesh, axis_names="a"
    )


def test_what_devices_do_not_divide_is_not_asked_for():
    mesh = small.auto_mesh(a=8)
    step = constraining(P("a"), P(None, "a"), of=lambda x: x[:12])
    trains_as_on_one_device(step, new_state, batches(), mesh=mesh)


@pytest.mark.slow
def test_what_a_request_moves_is_listed():
    mesh = small.auto_mesh(a=8)
    step = constraining(P(None, "a"), P(None, "a"))
    train_step = jzero.shard_train_step(step, mesh=mesh, axes=jzero.Axes(min_shard_bytes=0))
    text = str(train_step.describe(new_state(), batches()[0]))
    assert "the step asks for it" in text
    assert "test_requests.py" in text


@pytest.mark.slow
def test_gradients_lie_as_the_stage_says():
    mesh = small.auto_mesh(a=8)

    def step(state, x, spec):
        w, key = state
        loss, grads = jax.value_and_grad(loss_fn)(w, x)
        if spec is not None:
            grads = jax.tree.map(lambda g: jax.lax.with_sharding_constraint(g, spec), grads)
        return (jax.tree.map(lambda p, g: p - g, w, grads), key), loss

    plain = jzero.shard_train_step(
        lambda s, x: step(s, x, None), mesh=mesh, axes=jzero.Axes(min_shard_bytes=0)
    )
    asking = trains_as_on_one_device(
        lambda s, x: step(s, x, P(None, "a")), new_state, batches(), mesh=mesh
    )
    given = new_state(), batches()[0]
    assert asking.describe(*given).traffic == plain.describe(*given).traffic


PLACES = {
    "constraint": lambda x, place: jax.lax.with_sharding_constraint(x, place),
    "put": jax.device_put,
    "put on a device": lambda x, place: jax.device_put(x, *place.device_set),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", PLACES)
def test_one_device_is_no_place_in_a_sharded_step(name, accumulate):
    """`jax.jit` on one device takes it, and it says nothing of the mesh."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: (PLACES[name](x @ w, place) ** 2).mean())(w)
        return w - grad, loss

    train_step = jzero.shard_train_step(
        step, axes=jzero.Axes(min_shard_bytes=0), microbatches=accumulate
    )
    w, x = jnp.eye(8), np.sin(np.arange(128, dtype=np.float32)).reshape(16, 8)
    found, expected = train_step(w, x), jax.jit(step)(jnp.eye(8), x)
    zoo.assert_trees_close(zoo.to_host(found), zoo.to_host(expected), zoo.FP32, "step")
    assert not train_step.describe(jnp.eye(8), x).movements


@pytest.mark.slow
def test_a_program_first_written_under_the_mesh_of_the_caller():
    """What passes write is traced once for all meshes: the first one had left its mesh in it."""
    mesh = small.auto_mesh(data=8)
    # Of a shape that no other test has, so that it is written here first.
    state, x = {"w": jnp.eye(24), "s": jnp.ones(24)}, jnp.ones((48, 24))

    def step(state, x):
        def loss_fn(state):
            return jnp.mean((x @ state["w"]) ** 2) * (1 + state["s"][0])

        loss, grads = jax.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    def trained():
        train_step = jzero.shard_train_step(
            step, microbatches=2, mesh=mesh, axes=jzero.Axes(min_shard_bytes=0)
        )
        new, loss = train_step(train_step.shard(state), x)
        return zoo.to_host(train_step.unshard(new)), zoo.to_host(loss)

    with jax.set_mesh(mesh):
        under = trained()
    expected = zoo.to_host(jax.jit(step)(state, x))
    for found in (under, trained()):
        zoo.assert_trees_close(found, expected, zoo.FP32, "new state and loss")
