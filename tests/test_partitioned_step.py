"""Steps that the partitioner runs, and what can be asked of them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
import partition_steps
import partitioned
import small
from jzero.segments import _partitioned
from jzero.segments._partitioned import Partitioned
from jzero.sharding.analysis import _traffic
from jzero.sharding.passes._inputs_first import COTANGENT
from jzero.tracing import _jaxpr

pytestmark = pytest.mark.usefixtures("float64")

TX = optax.adam(1e-2)


def loss_of(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["a"]) @ params["b"]) ** 2)


def step_fn(state, batch):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"loss": loss, "sums": batch.sum(1)}


def state_of(dim=10, features=16):
    rng = np.random.default_rng(0)
    shapes = {"a": (features, dim), "b": (dim, 16)}
    params = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
    return params, TX.init(params)


def batches(rows=16, features=16):
    rng = np.random.default_rng(1)
    return [jnp.asarray(rng.normal(size=(rows, features))) for _ in range(3)]


def assert_close(actual, expected):
    for (path, x), y in zip(
        jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), path
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12, err_msg=jax.tree_util.keystr(path))


def equation_of(train_step, *args):
    """The one equation of a step on whole arrays, and its program."""
    program = train_step._programs.of(train_step._programs.bind(args, {}))
    found = program.step.found
    assert isinstance(found, Partitioned)
    leaves = [*jax.tree.leaves(args[0])], [*jax.tree.leaves(args[1])]
    (eqn,) = jax.make_jaxpr(program.step.run)(*leaves).eqns
    return eqn, found.program


def test_its_program_is_one_equation_that_is_not_traced_again():
    train_step = small.shard_train_step(step_fn)
    eqn, program = equation_of(train_step, state_of(16), batches()[0])
    assert eqn.primitive.name == "shard_map"
    assert len(eqn.params["jaxpr"].eqns) == len(program.jaxpr.eqns)
    pairs = zip(eqn.params["jaxpr"].eqns, program.jaxpr.eqns, strict=True)
    assert all(a is b for a, b in pairs)


# -- passes --------------------------------------------------------------------------------------------


def primitives(jaxpr):
    """Names of its equations, and of those inside, in their order."""
    found = []
    for eqn in jaxpr.eqns:
        found.append(eqn.primitive.name)
        for inner in _jaxpr.inner_jaxprs(eqn):
            found += primitives(_jaxpr.open_jaxpr(inner)[0])
    return found


MODELS = {
    "scanned": partition_steps.gpt,
    "unrolled, tied": lambda: partition_steps.gpt(scan=False, tied=True),
    "over time": partition_steps.lstm,
}


@pytest.mark.slow
def test_a_matrix_that_every_device_updates():
    """What needs it whole has no owner, since no other update is like it."""

    def step(w, batch):
        return w - jnp.linalg.qr(w)[0] - jax.grad(lambda w: jnp.tanh(batch @ w).mean())(w)

    w, batch = state_of(16)[0]["a"], batches()[0]
    train_step = small.shard_train_step(step)
    found = train_step(w, batch)
    assert [each.why != "" for each in train_step.plan(w, batch).owned] == [True]
    assert_close(train_step.unshard(found), jax.jit(step)(w, batch))


def leaves_of(jaxpr):
    """Of each kind of collective, the leaves that it serves; nothing but for scalars."""
    found = set()
    for each in _traffic.collectives(jaxpr):
        if each.elements > 1 or each.leaf:
            found.add((each.op, each.leaf))
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:optax.global_norm:DeprecationWarning")
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", MODELS)
def test_collectives_name_the_leaves_that_they_serve_behind_every_pass(name, stage):
    with jax.numpy_rank_promotion("allow"):
        ahead = {"prefetch_bytes": 2**25} if stage == 3 else {}
        init, step, batch = MODELS[name]()
        train_step, state = small.shard_train_step(step, stage=stage, **ahead), init()
        paths = {
            leaf.path for leaf in train_step.plan(state, batch).leaves if leaf.role == "parameter"
        }
        ops = {"all-reduce"} if stage == 0 else {"all-gather", "reduce-scatter"}
        for after in _partitioned.PASSES:
            found = leaves_of(train_step.program(state, batch, after=after).jaxpr)
            assert {leaf for _, leaf in found} == paths, after
            expected = {(op, path) for op in ops for path in paths if "embed" not in path}
            assert found >= expected, after  # Columns of a table are looked up where they are.


def test_prefetch_obeys_the_step_s_own_bytes():
    def starts(nbytes):
        train_step = small.shard_train_step(step_fn, comm=jzero.Comm(prefetch_bytes=nbytes))
        return primitives(train_step.program(state_of(16), batches()[0], after="prefetch").jaxpr)

    none, all_ahead = starts(0), starts(2**28)
    assert none.index("dot_general") < len(none) - none[::-1].index("all_gather") - 1
    assert [x for x in none if x == "all_gather"] == [x for x in all_ahead if x == "all_gather"]
    assert all_ahead.index("dot_general") > none.index("dot_general")


def test_large_gradients_come_behind_those_of_their_inputs():
    """Of matrices that are larger than what may be gathered ahead."""
    train_step = small.shard_train_step(step_fn, comm=jzero.Comm(prefetch_bytes=2**10))
    ask = functools.partial(train_step.program, state_of(16), batches()[0])
    assert ask(after="inputs_first").jaxpr is not ask(after="partition").jaxpr
    names = [
        eqn.params["name"]
        for eqn in ask(after="inputs_first").jaxpr.eqns
        if eqn.primitive.name == "name"
    ]
    assert COTANGENT in names


@pytest.mark.slow
def test_of_a_step_with_offload_the_gradients_are_printed():
    train_step = small.shard_train_step(step_fn, mesh=small.mesh(data=8), memory=jzero.PinnedHost())
    program = train_step.program(state_of(16), batches()[0], after="order")
    lines = str(program).splitlines()
    assert lines[0].startswith("# step_fn, gradients, after order, of one device")
    assert any("reduce_scatter" in line for line in lines)
    assert any(re.search(r"state\S+ +\[.*@data.*\]  for the update", line) for line in lines)


PRINTS = """
import conftest, hashlib, jax, test_partitioned_step as t
mesh = jax.sharding.AbstractMesh((2, 4), ("node", "local"))
step = t.small.shard_train_step(t.step_fn, mesh=mesh, param_axes="local")
text = str(step.program(t.state_of(13, 10), t.batches(13, 10)[0], after="partition"))
print(len(text), hashlib.sha256(text.encode()).hexdigest())
"""


@pytest.mark.slow
def test_processes_write_the_same_program():
    found = partitioned.printed_by_processes(PRINTS)
    assert int(found.split()[0]) > 1000


def test_places_along_two_axes_are_those_of_the_mesh():
    """Of rows that are counted, sliced and looked up over both."""

    def step(w, batch):
        place = jnp.arange(len(batch), dtype=batch.dtype)
        loss, grad = jax.value_and_grad(lambda w: ((batch @ w).sum(1) * place).mean())(w)
        return w - 0.01 * grad, (
            loss,
            jnp.argmax(batch[:, 0]),
            batch[3:7],
            batch[::-1] * place[:, None],
        )

    w, batch = jnp.ones((16, 4)), batches()[0]
    new, found = small.shard_train_step(step, mesh=small.mesh(node=2, local=4))(w, batch)
    expected, wanted = jax.jit(step)(w, batch)
    assert_close(found, wanted)
    assert_close(new, expected)


def test_keys_differ_between_the_devices_of_all_axes():
    def step(w, batch, key):
        noise = jax.random.uniform(jzero.fold_device_index(key), batch.shape[:1])
        grad = jax.lax.pmean(jax.grad(lambda w: jnp.mean(batch @ w))(w), ("node", "local"))
        return w - 0.1 * grad, noise

    train_step = jzero.shard_train_step(step, mesh=small.mesh(node=2, local=4))
    _, noise = train_step(jnp.ones((16, 4)), batches()[0], jax.random.key(0))
    assert len(np.unique(noise)) == 16
