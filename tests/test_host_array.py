"""Leaves that rest in the host's memory: made there, placed, read, moved away again, and refused in time."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jzero
import small
from jzero.offload.memory import _available, _placing

HOST, NONE, PINNED = jzero.HostCPU(), jzero.NoOffload(), jzero.PinnedHost(2**16)
TX = optax.adam(1e-2, mu_dtype=jnp.bfloat16)


def step_fn(state, x):
    grads = jax.grad(lambda p: jnp.mean((x @ p["even"] @ p["odd"]) ** 2))(state["params"])
    updates, opt_state = TX.update(grads, state["opt_state"], state["params"])
    return state | {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}


def new_state() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "even": jax.random.normal(keys[0], (16, 64)),
        "odd": jax.random.normal(keys[1], (64 - 11, 7)).repeat(2, 1),  # padded but for one device
        "bf16": jax.random.normal(keys[2], (40, 24), jnp.bfloat16),
        "counts": jnp.arange(48, dtype=jnp.int32),
        "short": jnp.arange(3.0),  # on 8 devices full
    }
    return {"params": params, "opt_state": TX.init(params), "key": jax.random.key(7)}


SETTINGS: dict[str, Any] = {
    "1": dict(shape=(1,)),
    "2": dict(shape=(2,)),
    "5": dict(shape=(5,)),
    "8": dict(shape=(8,)),
    "stage 0": dict(shape=(8,), stage=0),
    "hybrid": dict(shape=(2, 4), param_axes="local", optimizer_axes="local"),
    "params within nodes": dict(shape=(2, 4), param_axes="local"),
    "tensor axis": dict(shape=(4, 2), axis_names="node", auto_specs={"even": P(None, "local")}),
}  # fmt: skip
REPLICAS_SHARE = {"stage 0": 1, "hybrid": 4}  # so many buffers


def on(name: str, offload: Any = HOST) -> Any:
    options = dict(SETTINGS[name])
    shape = options.pop("shape")
    mesh = jax.make_mesh(
        shape, ("node", "local")[: len(shape)], devices=jax.devices()[: int(np.prod(shape))],
        axis_types=(jax.sharding.AxisType.Auto,) * len(shape),
    )  # fmt: skip
    return small.shard_train_step(step_fn, mesh=mesh, offload=offload, **options)


def plain(x: Any) -> np.ndarray:
    return np.asarray(
        jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    )


def assert_same(actual: Any, expected: Any) -> None:
    """Bit for bit, every leaf."""

    def check(x: Any, y: Any) -> None:
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(plain(x), plain(y))

    jax.tree.map(check, actual, expected)


def host_leaves(state: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(state) if getattr(x, "where", "") == "in host memory"]


def overwrite(state: Any) -> None:
    for leaf in host_leaves(state):
        for buffer in leaf.storage.buffers:
            buffer[...] = 1


def renewed(leaf: jzero.LeafArray, pending: Any) -> jzero.LeafArray:
    return jzero.LeafArray(leaf.storage.renewed(pending, 1), leaf.shape)


@pytest.fixture(scope="module")
def expected() -> Any:
    return jax.jit(new_state)()


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_born_on_the_host(name, expected):
    train_step = on(name)
    state = train_step.init(new_state)
    assert_same(state, expected)
    devices = tuple(train_step.mesh.devices.flat)[: REPLICAS_SHARE.get(name)]
    on_devices = [x for x in jax.tree.leaves(state) if getattr(x, "where", "") != "in host memory"]
    assert [x.ndim for x in on_devices] == [0, 0]  # the key, and Adam's count
    starts = set()
    for leaf in host_leaves(state):
        part = leaf.storage.sharding.shard_shape(leaf.storage.shape)
        where = leaf.storage.sharding.addressable_devices_indices_map(leaf.storage.shape)
        whole = np.zeros(leaf.storage.shape, leaf.dtype)
        whole[tuple(map(slice, leaf.shape))] = leaf
        assert leaf.storage.placement.devices == devices
        for device, buffer in zip(
            leaf.storage.placement.devices, leaf.storage.buffers, strict=True
        ):
            assert (buffer.shape, buffer.dtype) == (part, leaf.dtype)
            assert buffer.flags.c_contiguous
            assert buffer.flags.writeable
            assert buffer.ctypes.data % 64 == 0
            np.testing.assert_array_equal(buffer, whole[where[device]])  # the padding is zero
            starts.add(buffer.ctypes.data)
    assert len(starts) == sum(len(leaf.storage.buffers) for leaf in host_leaves(state))
    whole = train_step.unshard(state)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(whole))
    assert {x.sharding.memory_kind for x in jax.tree.leaves(whole)} == {"device"}
    overwrite(state)
    assert_same(whole, expected)


@pytest.mark.slow
def test_born_in_groups(expected, monkeypatch):
    monkeypatch.setattr(_placing, "_BORN_TOGETHER", 1000)
    assert_same(on("8").init(new_state), expected)


def as_numpy(state: Any) -> Any:
    leaves, tree = jax.tree.flatten(state)
    return jax.tree.unflatten(tree, [x if x.ndim == 0 else np.asarray(x) for x in leaves])


SOURCES: dict[str, Any] = {
    "NumPy": as_numpy,
    "NumPy, in other order": lambda state: jax.tree.map(
        lambda x: np.asfortranarray(x) if x.ndim else x, as_numpy(state)
    ),
    "JAX": lambda state: jax.tree.map(jnp.copy, state),
    "one device": lambda state: jax.device_put(state, jax.devices()[3]),
    **{f"sharded on {name}": lambda state, name=name: on(name, NONE).shard(state) for name in SETTINGS},
    **{f"pinned on {name}": lambda state, name=name: on(name, PINNED).shard(state) for name in ("5", "8")},
    **{f"host on {name}": lambda state, name=name: on(name).shard(state) for name in SETTINGS},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1", "8", "hybrid", "tensor axis"])
@pytest.mark.parametrize("source", SOURCES)
def test_placed_from_anywhere(source, name, expected):
    given = SOURCES[source](expected)
    placed = on(name).shard(given)
    born = host_leaves(on(name).init(new_state))
    assert [leaf.storage.placement for leaf in host_leaves(placed)] == [
        leaf.storage.placement for leaf in born
    ]
    assert_same(placed, expected)
    if source != f"host on {name}":  # Else they are the same leaves.
        overwrite(placed)
        assert_same(given, expected)  # No buffer is the user's.


@pytest.mark.slow
def test_what_rests_there_is_not_copied():
    train_step = on("8")
    state = train_step.init(new_state)
    again = jax.tree.leaves(train_step.shard(state))
    pairs = zip(jax.tree.leaves(state), again, strict=True)
    assert all(getattr(x, "storage", x) is getattr(y, "storage", y) for x, y in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("offload", [NONE, PINNED], ids=str)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("source", ["1", "8", "hybrid"])
def test_moved_to_the_devices(source, name, offload, expected):
    given = on(source).init(new_state)
    moved = on(name, offload).shard(given)
    as_expected = on(name, offload).shard(expected)
    assert not host_leaves(moved)
    for x, y in zip(jax.tree.leaves(moved), jax.tree.leaves(as_expected), strict=True):
        x, y = (getattr(leaf, "storage", leaf) for leaf in (x, y))
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)  # of the same memory, too
        np.testing.assert_array_equal(plain(x), plain(y))
    overwrite(given)
    assert_same(moved, expected)  # No JAX array is made of the buffers.


@pytest.mark.slow
def test_shardings_are_those_on_the_way():
    train_step = on("8")
    shardings = train_step.state_shardings(new_state())
    assert shardings["params"]["even"].memory_kind == "pinned_host"
    assert shardings["params"]["odd"].spec == P()  # It is padded.
    placed = jax.device_put(new_state(), shardings)
    assert_same(train_step.shard(placed), new_state())


def test_reads_as_its_true_shape():
    state = on("8").init(new_state)
    leaf = state["params"]["odd"]
    value = np.asarray(leaf)
    said = "LeafArray(shape=(53, 14), dtype=float32, in host memory, padded to (56, 14))"
    assert repr(leaf) == said
    assert (leaf.shape, leaf.storage.shape, leaf.ndim, leaf.size) == ((53, 14), (56, 14), 2, 742)
    assert (leaf.dtype, leaf.nbytes, leaf.storage.pending) == (np.float32, 2968, None)
    assert leaf.storage.sharding.spec == P("node")
    assert leaf.sharding.spec == P()  # of its true shape
    with pytest.raises(ValueError, match="truth value"):
        bool(leaf)
    assert jax.block_until_ready(state)["params"]["odd"] is leaf
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(leaf)), value)
    leaf.storage.buffers[0][...] = 0  # as the next step may
    np.testing.assert_array_equal(value, on("8").init(new_state)["params"]["odd"])


READS: list[Callable[[Any], Any]] = [
    np.asarray, jnp.asarray, list, lambda x: x[0], lambda x: x == 0, lambda x: x.storage.buffers,
    pickle.dumps, copy.deepcopy, lambda x: x.storage.renewed(None, 1), lambda x: x.storage.parts(),
]  # fmt: skip


def test_taken_by_a_step():
    train_step = on("8")
    state = train_step.init(new_state)
    before = {path: leaf.storage.buffers for path, leaf in state["params"].items()}
    hosted = [id(x) for x in host_leaves(state)]
    taken = jax.tree.map(lambda x: renewed(x, None) if id(x) in hosted else x, state)
    for path, leaf in state["params"].items():
        assert leaf.is_deleted()
        assert not taken["params"][path].is_deleted()
        assert taken["params"][path].storage.buffers is before[path]
    gone = state["params"]["odd"]
    assert (gone.shape, gone.dtype) == ((53, 14), np.float32)  # enough to restore another
    for read in READS:
        with pytest.raises(
            jzero.StateError, match=r"LeafArray\(.* was already donated. A step consumes"
        ):
            read(gone)
    for use in (train_step.shard, train_step.unshard, on("8", NONE).shard):
        with pytest.raises(jzero.StateError, match=r"already donated: .*\.mu\['bf16'\]"):
            use(state)


def test_a_delayed_update_comes_first():
    train_step = on("8")
    state = train_step.init(new_state)
    pending = object()
    for name in ("odd", "even"):
        state["params"][name] = renewed(state["params"][name], pending)
    taken = state["params"]["odd"]
    assert taken.storage.pending is pending
    for read in (np.asarray, jnp.asarray, lambda x: x[0], pickle.dumps):
        with pytest.raises(
            jzero.StateError, match=r"waits for the last step's update.* train_step.flush"
        ):
            read(taken)
    text = r"2 leaves fail:(?s:.*)\['even'\] still waits for(?s:.*)Call state = train_step.flush\("
    with pytest.raises(jzero.StateError, match="unshard: " + text):
        train_step.unshard(state)
    for other in (on("8", NONE), on("2")):
        with pytest.raises(jzero.StateError, match="shard: " + text):
            other.shard(state)
    same = train_step.shard(state)["params"]["odd"]  # Nothing reads it.
    assert same.storage is taken.storage


# -- enough memory -------------------------------------------------------------------------------

V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
MACHINE = {"proc/meminfo": "MemTotal:  900 kB\nMemAvailable:  100 kB\nHugePages_Total:  0\n"}
OTHER_GROUPS = "9:name=systemd:/\n3:cpuset:/\n"


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, None),
        (MACHINE, 102400),
        (MACHINE | {"proc/self/cgroup": OTHER_GROUPS}, 102400),
        ({"proc/self/cgroup": "0::/a\n", f"{V2}/a/memory.max": "900", f"{V2}/a/memory.current": "500"}, 400),
        (  # A cache of files makes room; a group around it leaves less.
            MACHINE | {
                "proc/self/cgroup": OTHER_GROUPS + "0::/a/b\n",
                f"{V2}/a/b/memory.max": "5000\n", f"{V2}/a/b/memory.current": "4000\n",
                f"{V2}/a/b/memory.stat": "anon 3000\ninactive_file 500\nactive_file 200\nslab 7\n",
                f"{V2}/a/memory.max": "90000\n", f"{V2}/a/memory.current": "89999\n",
            }, 1,
        ),
        (
            MACHINE | {
                "proc/self/cgroup": "0::/a/b\n",
                f"{V2}/a/b/memory.max": "5000\n", f"{V2}/a/b/memory.current": "4000\n",
                f"{V2}/a/b/memory.stat": "anon 3000\ninactive_file 500\nactive_file 200\nslab 7\n",
                f"{V2}/a/memory.max": "max\n", f"{V2}/a/memory.current": "89999\n",
            }, 1700,
        ),
        (
            MACHINE | {
                "proc/self/cgroup": OTHER_GROUPS + "4:memory:/a\n",
                f"{V1}/a/memory.limit_in_bytes": "5000\n", f"{V1}/a/memory.usage_in_bytes": "4000\n",
                f"{V1}/a/memory.stat": "inactive_file 9\ntotal_inactive_file 500\ntotal_active_file 200\n",
                f"{V1}/memory.limit_in_bytes": "9223372036854771712\n", f"{V1}/memory.usage_in_bytes": "1\n",
            }, 1700,
        ),
        (  # A container: the path is that of the machine around it.
            MACHINE | {
                "proc/self/cgroup": "4:cpu,memory:/docker/0123\n",
                f"{V1}/memory.limit_in_bytes": "5000\n", f"{V1}/memory.usage_in_bytes": "4000\n",
            }, 1000,
        ),
    ],
)  # fmt: skip
def test_memory_that_is_left(files, found, tmp_path, monkeypatch):
    write(tmp_path, files)
    monkeypatch.setattr(_available, "ROOT", tmp_path)
    assert _available.available() == found


def test_memory_of_this_machine_is_found():
    found = _available.available()
    assert found is None or 2**20 < found < 2**60


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
