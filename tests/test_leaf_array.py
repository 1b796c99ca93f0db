"""Leaves that are padded, or on the host, are plain arrays of their true shape to all that takes arrays."""

import copy
import tempfile
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
import small
from jzero.sharding.plan import _quantized_leaves

FOLDER = tempfile.TemporaryDirectory()
UNEVEN, EVEN = (13, 3), (16, 3)  # On 8 devices the first is padded.
KINDS: dict[str, Any] = {
    "padded": (jzero.NoOffload(), UNEVEN),
    "host": (jzero.HostCPU(), EVEN),
    "host, padded": (jzero.HostCPU(), UNEVEN),
    "files, padded": (jzero.NVMe(FOLDER.name, host_bytes=2**16), UNEVEN),
    "codes, padded": (jzero.NoOffload(), UNEVEN),
}


def step_fn(state, batch):
    grads = jax.grad(lambda w: jnp.mean(batch @ w))(state["w"])
    m = 0.9 * state["m"] + grads
    return {"w": state["w"] - 0.1 * m, "m": m}


def new_leaf(kind: str) -> Any:
    offload, shape = KINDS[kind]
    in_codes = kind.startswith("codes")
    mesh = small.mesh(data=8)
    train_step = small.shard_train_step(step_fn, mesh=mesh, memory=offload)
    state = {"w": jnp.ones(shape), "m": jax.random.normal(jax.random.key(0), shape)}
    leaf = train_step.shard(state, jnp.ones((8, shape[0])))["m"]
    if in_codes:
        with mock.patch.object(_quantized_leaves, "LEAST", 1):
            blocks = jzero.Blocks("int8", size=16)
            step: Any = jzero.shard_eval_step(lambda w, x: x @ w, weight_dtype=blocks, mesh=mesh)
            leaf = step.shard(leaf, jnp.ones((8, shape[0])))
        assert leaf.codes.padding
        return leaf
    assert isinstance(leaf, jzero.LeafArray)
    return leaf


@pytest.fixture(scope="module", params=KINDS)
def leaf(request):
    return new_leaf(request.param)


def three_devices() -> NamedSharding:
    mesh = small.auto_mesh(a=3)
    return NamedSharding(mesh, P(None, "a"))


def model_of(x: Any) -> nnx.Linear:
    graph, _ = nnx.split(nnx.Linear(*x.shape, use_bias=False, rngs=nnx.Rngs(0)))
    return nnx.merge(graph, nnx.State({"kernel": nnx.Param(x)}))


def donated(x: Any) -> Any:
    with warnings.catch_warnings():  # A CPU's own arrays can say that nothing reuses them.
        warnings.filterwarnings("ignore", "Some donated buffers")
        return jax.jit(lambda x: 2 * x, donate_argnums=0)(x)


USES: dict[str, Callable[[Any], Any]] = {
    "jit": jax.jit(lambda x: 2 * x),
    "jit, returned as it is": jax.jit(lambda x: x),

    "jit, with shardings": lambda x: jax.jit(lambda x: x.sum(0), in_shardings=x.sharding)(x),
    "compiled": lambda x: jax.jit(lambda x: 2 * x).lower(x).compile()(x),
    "closed over by jit": lambda x: jax.jit(lambda y: jnp.sum(x) * lax.add(x, x) + y)(1.0),
    "a row of it in jit": lambda x: jax.jit(lambda i: x[i])(2),
    "closed over by scan": lambda x: lax.scan(lambda c, _: (c + x, None), 0 * x, None, 3)[0],
    "grad": jax.grad(lambda x: jnp.sum(x**3)),

    "jvp": lambda x: jax.jvp(jnp.sin, (x,), (x,)),

    "checkpoint": jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(x).sum())(x)),
    "eval_shape": lambda x: jnp.zeros(jax.eval_shape(lambda x: x.T, x).shape),
    "typeof": lambda x: jnp.zeros(jax.typeof(x).shape, x.aval.dtype),
    "vmap": jax.vmap(lambda row: row.sum()),

    "scan": lambda x: lax.scan(lambda c, row: (c + row.sum(), 2 * row), 0.0, x),

    "cond": lambda x: lax.cond(True, lambda x: x, lambda x: 2 * x, x),
    "shard_map": lambda x: jax.jit(
        jax.shard_map(lambda x: 2 * x, mesh=x.sharding.mesh, in_specs=P(), out_specs=P())
    )(x),

    "an optimizer's init and update": lambda x: optax.adam(0.1).update(x, optax.adam(0.1).init(x)),
    "tree.map": lambda x: jax.tree.map(lambda x, y: x + y, [x], [x]),
    "device_put": jax.device_put,

    "device_put in shards": lambda x: jax.device_put(x, three_devices()),
    "device_get": jax.device_get,
    "donated": donated,
    "operators": lambda x: [x + 1, 2 * x, -x, abs(x), 1 / x, x**2, x < 0, x == x, x != 0, x % 2, x @ x.T],
    "operators, on the right": lambda x: [np.float32(2) - x, np.ones(x.shape) - x, jnp.ones((2, len(x))) @ x],

    "methods": lambda x: [x.sum(), x.mean(0), x.max(), x.astype(jnp.bfloat16), x.reshape(-1), x.copy()],
    "properties": lambda x: [x.T, x.mT, x.real, x.itemsize, x.nbytes, x.size, x.ndim, len(x)],
    "at": lambda x: x.at[0].set(1.0),
    "rows": lambda x: [x[1:, 0], x[-1], *x, *reversed(x)],
    "numbers": lambda x: [float(x[0, 0]), x[0, 0].item(), x.tolist(), bool(x[0, 0] > 0)],
    "jnp": lambda x: [jnp.sum(x), jnp.stack([x, x]), jnp.where(x > 0, x, 0), jnp.asarray([x]), jnp.array(x)],
    "lax": lambda x: [lax.add(x, x), lax.dot(x, jnp.ones((3, 2))), lax.slice(x, (0, 0), (2, 2))],
    "NumPy": lambda x: [np.sum(x), np.stack([x, x]), np.asarray(x, np.float64)],
    "a callback": lambda x: jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
    "to_bytes": lambda x: flax.serialization.from_bytes([x], flax.serialization.to_bytes([x])),
    "to_state_dict": lambda x: flax.serialization.to_state_dict([x]),
    "from_state_dict": lambda x: flax.serialization.from_state_dict([x], {"0": np.asarray(x)}),
    "nnx.merge": lambda x: model_of(x)(jnp.ones((2, len(x)))),
    "nnx.jit": lambda x: nnx.jit(lambda model: 2 * model.kernel)(model_of(x)),

    "copies": lambda x: [copy.copy(x), copy.deepcopy(x)],
}  # fmt: skip


def assert_same(actual: Any, expected: Any) -> None:
    """Every leaf bit for bit, and a plain array where a plain array gives one."""
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert isinstance(x, jax.Array | np.ndarray) == isinstance(y, jax.Array | np.ndarray)
        assert np.shape(x) == np.shape(y)
        assert getattr(x, "dtype", type(x)) == getattr(y, "dtype", type(y))
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow(but=85)
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_used_as_an_array(leaf, use):
    before = np.array(leaf)
    expected = use(jnp.asarray(leaf))
    for _ in range(2):  # A second call finds what JAX has kept of the first.
        assert_same(use(leaf), expected)
    np.testing.assert_array_equal(leaf, before)
    assert not leaf.is_deleted()


@pytest.mark.parametrize("kind", ["padded", "host, padded"])
def test_used_on_explicit_axes(kind):
    with jax.set_mesh(small.mesh(data=8)):
        leaf = new_leaf(kind)
        for name in ("jit", "closed over by jit", "grad", "scan", "operators", "device_put"):
            assert_same(USES[name](leaf), USES[name](jnp.asarray(leaf)))


def test_a_plain_array_comes_of_it(leaf):
    places = {"in host memory", "in files"}
    assert leaf.where == next((place for place in places if place in repr(leaf)), "on devices")
    assert (leaf.codes is None) == (leaf.error is None)
    assert ("padded to" in repr(leaf)) == (leaf.storage.shape != leaf.shape and leaf.codes is None)
    assert isinstance(leaf, jax.Array)
    for plain in (jax.device_put(leaf), jax.device_put(leaf, leaf.sharding), jnp.asarray(leaf)):
        assert type(plain) is type(jnp.ones(()))
    padded = leaf.shape == UNEVEN
    assert leaf.sharding.shard_shape(leaf.shape) == (leaf.shape if padded else (2, 3))
    assert jnp.asarray(leaf).sharding == leaf.sharding
    assert (leaf.committed, leaf.is_fully_addressable) == (True, True)
    assert leaf.is_fully_replicated == padded
    assert (leaf.devices(), leaf.device) == (set(jax.devices()), leaf.sharding)
    assert f"{leaf}".startswith(f"{type(leaf).__name__}(shape={leaf.shape}, dtype=float32")


@pytest.mark.parametrize("new", [ocp.PyTreeCheckpointer, ocp.StandardCheckpointer])
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_orbax_saves_and_restores_it(leaf, new, tmp_path):
    tree = {"leaf": leaf, "plain": jnp.ones(3)}
    with new() as checkpointer:
        checkpointer.save(tmp_path / "saved", tree)
        getattr(checkpointer, "wait_until_finished", lambda: None)()
        found = [checkpointer.restore(tmp_path / "saved")]
        if new is ocp.PyTreeCheckpointer:
            how = ocp.checkpoint_utils.construct_restore_args(tree)
            found += [checkpointer.restore(tmp_path / "saved", item=tree, restore_args=how)]
        else:
            found += [checkpointer.restore(tmp_path / "saved", tree)]
    for restored in found:
        assert_same(restored["leaf"], np.asarray(leaf))


@pytest.mark.parametrize("name", ["PaddedArray", "CodedArray", "HostArray", "NVMeArray"])
def test_classes_of_old_say_where_they_went(name):
    assert name not in dir(jzero)
    assert not hasattr(jzero, name)
    text = rf"jzero.{name} is gone. One class has all .* isinstance\(x, jzero.LeafArray\), and ask x.where"
    with pytest.raises(AttributeError, match=text):
        getattr(jzero, name)
    with pytest.raises(AttributeError, match=rf"^module 'jzero' has no attribute '{name[:-2]}'$"):
        getattr(jzero, name[:-2])
