"""What jzero takes for granted on a GPU, the most doubtful first: each check in a process of its own.

python experiments/offload/one_gpu/checks.py pinned    # prints a line of JSON; run.py runs them all

`tests/gpu/test_checks.py` runs those that measure nothing as tests.
"""

import dataclasses
import functools
import json
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from jzero.offload.memory import _addresses, _pinned_leaf
from jzero.offload.memory._pinned_leaf import pinned_zeros, view
from jzero.offload.nvme._direct import DirectFile

ON_GPU = jax.devices()[0].platform == "gpu"
MIB = 2**20 if ON_GPU else 2**14  # Sizes for which a GPU needs time; elsewhere the code is tried.
TX = jzero.master_weights(optax.adamw(1e-2))


def places() -> tuple[NamedSharding, NamedSharding]:
    """On the first device, and in pinned memory."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    pinned = NamedSharding(mesh, P(), memory_kind="pinned_host")
    return pinned.with_memory_kind("device"), pinned


def scratch() -> Any:
    """A folder on the disk that is measured."""
    return tempfile.TemporaryDirectory(dir=os.environ.get("DISK"))


def extremes(x: Any) -> tuple[float, float]:
    return float(x.min()), float(x.max())


# -- the machine, and its pinned memory ----------------------------------------------------------------------


def machine() -> str:
    """Pinned memory, and a CPU beside the GPU, which `JAX_PLATFORMS=cuda` alone would take away."""
    kinds = sorted(memory.kind for memory in jax.devices()[0].addressable_memories())
    assert "pinned_host" in kinds, kinds
    assert jax.local_devices(backend="cpu"), "HostCPU computes there what is not elementwise"
    return f"{kinds}, locked memory at most {resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]}"


def pinned() -> str:
    """The host writes pinned arrays through their address; the next copy to the device has what it wrote."""
    device, there = places()
    x = pinned_zeros((64, MIB), jnp.bfloat16, there)
    (written,) = [view(shard.data) for shard in x.addressable_shards]
    for value in range(1, 9):
        written[...] = value
        copy = jax.block_until_ready(jax.device_put(x, device))
        assert copy.sharding.memory_kind == "device"
        assert extremes(copy) == (value, value), "the device has something older"
    same = np.asarray(x).ctypes.data == written.ctypes.data
    return f"np.asarray of a pinned array is {'the memory itself' if same else 'a copy'}"


def renewed() -> None:
    """A donated pinned array keeps its address, and its donation waits for copies that still read it."""
    device, there = places()
    x = pinned_zeros((256, MIB), jnp.float32, there)
    for value in range(1, 6):
        shard = x.addressable_shards[0].data
        before = shard.unsafe_buffer_pointer()
        view(shard)[...] = value
        copies = [jax.device_put(x, device) for _ in range(3)]  # 3 GiB on their way
        del shard
        x = _pinned_leaf.renewed([x], [0], [])[0]
        _pinned_leaf.LeafMemory.of(x, list(device.device_set)).buffers[0][...] = -1  # as kernels do
        after = x.addressable_shards[0].data.unsafe_buffer_pointer()
        assert before == after, "another address: the update would be lost"
        for copy in copies:
            assert extremes(copy) == (value, value), "a copy read what was written later"
            copy.delete()


def slices() -> None:
    """Programs read and write slices of pinned stacks in place, at the right places."""
    device, there = places()
    num, dim = 8, 2048 if ON_GPU else 64
    fetch = jax.jit(fetched, out_shardings=device)
    store = jax.jit(
        lambda x, y, i: lax.dynamic_update_index_in_dim(x, jax.device_put(y, there), i, 0),
        donate_argnums=0, out_shardings=there,
    )  # fmt: skip
    stack = jax.device_put(jnp.zeros((num, dim, dim)), there)
    before = stack.addressable_shards[0].data.unsafe_buffer_pointer()
    index = [jax.device_put(jnp.int32(i), device) for i in range(num)]
    for i in range(num):
        stack = store(stack, jax.device_put(jnp.full((dim, dim), i + 1.0), device), index[i])
    got = [fetch(stack, i) for i in index]
    assert {x.sharding.memory_kind for x in got} == {"device"}
    assert stack.sharding.memory_kind == "pinned_host"
    assert [extremes(x) for x in got] == [(i + 1.0, i + 1.0) for i in range(num)]
    after = stack.addressable_shards[0].data.unsafe_buffer_pointer()
    assert before == after, "a second stack was made"


def fetched(stack: jax.Array, i: jax.Array) -> jax.Array:
    return jax.device_put(lax.dynamic_index_in_dim(stack, i, 0, False), places()[0])


def reads() -> None:
    """What went to pinned memory is there, by its address, when block_until_ready returns."""
    device, there = places()
    send = jax.jit(lambda x: jax.device_put(jnp.sin(x) * 0 + x + 1, there), out_shardings=there)
    x = jax.device_put(jnp.zeros((128, MIB)), device)
    for step in range(1, 7):
        sent = jax.block_until_ready([send(x), jax.device_put(x + 1, there)])
        for found in sent:
            data = found.addressable_data(0)
            (here,) = _addresses.on_host([data])
            assert here is data, "it is read through a copy"
            assert extremes(view(data)) == (step, step), "read before it was written"
        x = x + 1


def reversed_scan() -> str:
    """A backward scan reads each residual on the host where it was written (openxla/xla 46231, 46308)."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device",
        offload_dst="pinned_host",
    )  # fmt: skip

    def loss(w: jax.Array, x: jax.Array, policy: Any) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> jax.Array:
            return x + jnp.tanh(checkpoint_name(x, "h") @ w)

        block = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        return jnp.mean(lax.scan(lambda x, w: (block(x, w), None), x, w)[0] ** 2)

    w = jax.random.normal(jax.random.key(0), (6, 256, 256)) / 16
    x = jax.random.normal(jax.random.key(1), (1024, 256))
    with jax.default_matmul_precision("highest"):
        gradient = jax.jit(jax.grad(loss), static_argnums=2)
        worst = difference(gradient(w, x, policy), gradient(w, x, None))
    assert worst < 1e-4, f"gradients are wrong by {worst:.1e}"
    return f"JAX {jax.__version__} is right here: off by {worst:.0e}"


def direct() -> str:
    """O_DIRECT to and from pinned memory."""
    nbytes = 2**23
    with scratch() as folder:
        file = DirectFile(Path(folder) / "x", create=True)
        out = view(pinned_zeros((2 * nbytes,), jnp.uint8, places()[1]).addressable_data(0))
        start = -out.ctypes.data % max(file.memory_alignment, 1)
        part = out[start : start + nbytes]
        part[...] = np.arange(nbytes, dtype=np.uint8)
        want = part.copy()
        file.resize(nbytes)
        file.write(part, 0, "x")
        file.sync()
        part[...] = 0
        file.read(part, 0, "x")
        assert (part == want).all()
        return f"direct={file.direct} {file.why_not} alignment={file.memory_alignment}, memory's {start}"


# -- training, against jax.jit -------------------------------------------------------------------------------


def init() -> Any:
    """Parameters in bfloat16 with float32 masters, of a small residual network."""
    keys = jax.random.split(jax.random.key(0), 4)
    w = jax.vmap(lambda key: jax.random.normal(key, (256, 256)) / 16)(keys).astype(jnp.bfloat16)
    params = {"blocks": w, "head": w[0] * 0.5}
    return params, TX.init(params)


def step_fn(state: Any, x: jax.Array) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        block = jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w), prevent_cse=False)
        y = lax.scan(lambda x, w: (block(x, w), None), x, params["blocks"])[0] @ params["head"]
        return jnp.mean(y.astype(jnp.float32) ** 2)

    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


# A layer's input has 1 MiB, the least that `Memory(activations=...)` takes.
BATCHES = [np.random.default_rng(i).normal(size=(2048, 256)).astype(jnp.bfloat16) for i in range(4)]
ROOM = 4 * 256 * 256 * 2  # bytes of the blocks
LAYERS = jzero.Memory(params=jzero.PinnedHost(2 * ROOM), optimizer=jzero.HostCPU())
MEMORY: dict[str, Any] = {
    "host": jzero.HostCPU(),
    "layers": LAYERS,
    "turns": jzero.PinnedHost(2**18),
    "pinned": jzero.PinnedHost(),
    "activations": dataclasses.replace(LAYERS, activations=jzero.PinnedHost()),
    "half": jzero.HostCPU(ratio=0.5),
    "late": jzero.HostCPU(delayed_update=True, delay_after=4),
}


def started(memory: Any) -> tuple[Any, Any]:
    """A sharded step, and the state that it begins with."""
    train_step = jzero.shard_train_step(step_fn, memory=memory)
    train_step.plan(jax.eval_shape(init), BATCHES[0])
    return train_step, train_step.init(init)


def difference(found: Any, wanted: Any) -> float:
    """The largest of all leaves, in the norm, relative."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    arrays = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    return max(float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1)) for a, b in arrays)


def trains(memory: Any = None) -> str:
    """Losses, and every leaf after some steps, are those of `jax.jit`."""
    with jax.default_matmul_precision("highest"):
        whole, jitted, want = jax.jit(init)(), jax.jit(step_fn, donate_argnums=0), []
        for x in BATCHES:
            whole, loss = jitted(whole, x)
            want.append(float(loss))
        train_step, state = started(memory)
        got = []
        for x in BATCHES:
            state, loss = train_step(state, x)
            got.append(float(loss))
        state = train_step.unshard(train_step.flush(state))
    np.testing.assert_allclose(got, want, rtol=2e-2, err_msg="the losses are not jax.jit's")
    np.testing.assert_allclose(got[0], want[0], rtol=1e-3)
    worst = difference(state, whole)
    assert worst < 2e-2, f"a leaf is {worst:.1e} from jax.jit's"
    return f"losses {got[0]:.5f} .. {got[-1]:.5f}, leaves within {worst:.0e} of jit's"


def trains_nvme() -> str:
    with scratch() as folder:
        return trains(jzero.NVMe(folder))


# -- a step behind whatever reads the state ------------------------------------------------------------------


def goes_on_behind(reader: Callable[[Any, Any], Any]) -> None:
    """Steps donate leaves in pinned memory that somebody has read.

    XLA for CPUs copies what somebody still refers to; for GPUs it raises, since `np.asarray` of a pinned
    array is a view of it, which the array keeps.
    """
    for name in ("layers", "turns"):
        train_step, state = started(MEMORY[name])
        state, _ = train_step(state, BATCHES[0])
        try:
            held = reader(train_step, state)
            state, loss = train_step(state, BATCHES[1])
            float(loss)
            del held
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__} {error}") from error


def saved() -> None:
    """A checkpoint is saved, and the next step runs; what is restored is what was saved."""

    def save(train_step: Any, state: Any) -> None:
        want = jax.tree.map(np.array, train_step.unshard(state))
        with scratch() as folder, jzero.Checkpointer(folder, train_step) as checkpointer:
            checkpointer.save(1, state)
            checkpointer.wait()
            found = checkpointer.restore(jax.eval_shape(lambda: want))
            found = jax.tree.map(np.array, train_step.unshard(found))
            jax.tree.map(np.testing.assert_array_equal, found, want)

    goes_on_behind(save)


def looked_at() -> None:
    """Somebody has leaves as NumPy arrays, and the next step runs."""
    goes_on_behind(lambda _, state: [np.asarray(x) for x in jax.tree.leaves(state)])


# -- figures -------------------------------------------------------------------------------------------------


def overlap() -> str:
    """Whether a fetch hides behind products: a copy should, a program of its own runs on their stream."""
    device, there = places()
    dim, num, times = (8192, 4, 24) if ON_GPU else (256, 4, 2)
    ones = jnp.ones((dim, dim), jnp.bfloat16)
    stack = jax.device_put(jnp.ones((num, dim, dim), jnp.bfloat16), there)
    parts = [jax.device_put(ones, there) for _ in range(num)]
    x, i = jax.device_put((ones, jnp.int32(1)), device)
    fetch = jax.jit(fetched, out_shardings=device)

    def products(x: jax.Array) -> jax.Array:
        y = x
        for _ in range(times):
            y = (y @ x) * 1e-4
        return y

    work = jax.jit(products)
    # The slice that the next iteration needs, fetched by the program of this one.
    both = jax.jit(lambda x, s, i: (products(x), fetched(s, i)), out_shardings=(device, device))

    def milliseconds(*runs: Callable[[], Any]) -> float:
        found = []
        for _ in range(4):
            start = time.perf_counter()
            jax.block_until_ready([run() for run in runs])
            found.append(time.perf_counter() - start)
        return 1000 * min(found[1:])

    runs: dict[str, Callable[[], Any]] = {
        "products": lambda: work(x),
        "copies": lambda: [jax.device_put(part, device) for part in parts],
        "programs": lambda: [fetch(stack, i) for _ in range(num)],
        "sends": lambda: [jax.device_put(x, there) for _ in range(num)],
        "one slice": lambda: fetch(stack, i),
        "one slice in the program of products": lambda: both(x, stack, i),
    }
    times_of = {name: milliseconds(run) for name, run in runs.items()}
    for name in ("copies, products", "programs, products", "products, copies", "copies, sends"):
        times_of[name] = milliseconds(*(runs[part] for part in name.split(", ")))
    alone = times_of["products"] + 0.5 * times_of["programs"]
    verdict = "hide" if times_of["programs, products"] < alone else "DO NOT hide"
    gb = num * dim * dim * 2 / 1e6
    rates = (f"{name} {gb / times_of[name]:.0f}" for name in ("copies", "programs", "sends"))
    told = ", ".join(f"{name} {ms:.1f}" for name, ms in times_of.items())
    return f"fetch programs {verdict} behind products; ms: {told}; GB/s: {', '.join(rates)}"


def peak() -> str:
    """The device's peak by the allocator's count beside preflight's, for layers on the host."""
    dim, layers = (4096, 12) if ON_GPU else (128, 4)

    def init() -> Any:
        w = jnp.full((layers, dim, dim), 0.01, jnp.bfloat16)
        return w, TX.init(w)

    def step_fn(state: Any, x: jax.Array) -> Any:
        def loss_fn(w: jax.Array) -> jax.Array:
            block = jax.checkpoint(lambda x, w: jnp.tanh(x @ w), prevent_cse=False)
            y = lax.scan(lambda x, w: (block(x, w), None), x, w)[0]
            return jnp.mean(y.astype(jnp.float32) ** 2)

        w, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(w)
        updates, opt_state = TX.update(grads, opt_state, w)
        return (optax.apply_updates(w, updates), opt_state), loss

    x, window = jnp.ones((512, dim), jnp.bfloat16), jzero.PinnedHost(4 * 2 * dim**2)
    memory = jzero.Memory(params=window, optimizer=jzero.HostCPU())
    train_step = jzero.shard_train_step(step_fn, memory=memory)
    train_step.plan(jax.eval_shape(init), x)
    state = train_step.init(init)
    for _ in range(3):
        state, loss = train_step(state, x)
    jax.block_until_ready(loss)
    stats = jax.devices()[0].memory_stats() or {}
    told = ", ".join(f"{name} {(stats.get(name) or 0) / 2**20:.0f} MiB"
                     for name in ("peak_bytes_in_use", "bytes_in_use"))  # fmt: skip
    try:
        found = jzero.preflight(train_step, jax.eval_shape(init), x, target="h100", topology="1x1")
        return f"{told}, preflight {found.peak_bytes / 2**20:.0f} MiB (of a step, not of init)"
    except Exception as error:  # No compiler, or another version: the rest is told all the same.
        return f"{told}, preflight: {type(error).__name__} {str(error)[:120]}"


def pool() -> str:
    """How much more than was asked for the pool of pinned memory takes of the machine."""
    from jzero.offload.memory import _available

    device, there = places()
    gib = 10 if ON_GPU else 1
    x = jax.device_put(jnp.zeros(2**28, jnp.uint8), device)
    jax.block_until_ready(jax.device_put(x, there)).delete()
    before, start = _available.available() or 0, time.perf_counter()
    held = jax.block_until_ready([jax.device_put(x, there) for _ in range(4 * gib)])
    seconds, gone = time.perf_counter() - start, before - (_available.available() or 0)
    return f"{len(held) / 4:.0f} GiB asked for, {gone / 2**30:.1f} GiB gone, {seconds:.1f} s"


# In the order of doubt.
CHECKS: dict[str, Callable[[], str | None]] = {
    "machine": machine, "saved": saved, "looked_at": looked_at, "pinned": pinned, "renewed": renewed,
    "slices": slices, "reads": reads, "trains": trains,
    **{f"trains_{name}": functools.partial(trains, MEMORY[name]) for name in ("host", "layers")},
    "reversed_scan": reversed_scan,
    **{f"trains_{name}": functools.partial(trains, MEMORY[name]) for name in MEMORY},
    "direct": direct, "trains_nvme": trains_nvme,
}  # fmt: skip
FIGURES: dict[str, Callable[[], str | None]] = {"overlap": overlap, "peak": peak, "pool": pool}


def main() -> None:
    try:
        told = {"status": "ok", "told": (CHECKS | FIGURES)[sys.argv[1]]() or ""}
    except ImportError as error:
        told = {"status": "left out", "told": str(error)[:300]}
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split())[:600]
        told = {"status": "FAIL", "told": f"{type(error).__name__}: {text}"}
    print(json.dumps(told), flush=True)
    os._exit(0)  # Whatever may hang at the end of the process has nothing to say.


if __name__ == "__main__":
    main()
