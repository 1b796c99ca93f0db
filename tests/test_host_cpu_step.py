"""Steps with optimizer state on the host, looked at: what crosses, staleness, failures, refusals."""

import concurrent.futures
import re
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jzero
import optimizers
import small
import zoo
from interrupting import failing
from jzero.offload import _bandwidth, _host_engine, _host_updates, _memory_updates
from jzero.offload._backends import OnHostCPU
from jzero.offload._memory_run import MemoryRun
from jzero.offload.memory import _available, _pinned_leaf
from jzero.sharding.plan._stored_layout import REPLICATED
from test_offload import BATCH, gradient, make_step, momentum, new_state
from waiting import wait_until

pytest.importorskip("llvmlite")

ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def on(num: int, tx=ADAMW, policy: Any = None, step_fn=None, **options):
    return small.shard_train_step(
        step_fn or make_step(tx),
        mesh=small.mesh(data=num),
        offload=policy or jzero.HostCPU(),
        **options,
    )


DELAYED = jzero.HostCPU(delayed_update=True, delay_after=0)
LINEAR = np.linspace(-1, 1, 64 * 24, dtype=np.float32).reshape(64, 24)


def batches(num: int) -> list[np.ndarray]:
    return [np.roll(BATCH, i, 0) * (1 + i / 3) for i in range(num)]


def assert_same(found: Any, expected: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-5, atol=1e-6)


def hosted(tree: Any) -> list[jzero.LeafArray]:
    return [
        leaf for leaf in jax.tree.leaves(tree) if getattr(leaf, "where", "") == "in host memory"
    ]


# -- state on the host -----------------------------------------------------------------------------


@pytest.mark.slow
def test_state_is_updated_in_its_place_and_consumed():
    train_step = on(8)
    state = train_step.init(new_state)
    first, _ = train_step(state, BATCH)
    at = [x.ctypes.data for leaf in hosted(first) for x in leaf.storage.buffers]
    second, _ = train_step(first, BATCH)
    assert at == [x.ctypes.data for leaf in hosted(second) for x in leaf.storage.buffers]
    assert len(hosted(second)) == 8
    with pytest.raises(jzero.StateError, match="were already donated"):
        train_step(first, BATCH)
    assert all(x.is_deleted() for x in jax.tree.leaves(first) if getattr(x, "ndim", 0))
    assert [leaf.storage.num_steps for leaf in hosted(second)] == [2] * 8


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("policy", [jzero.HostCPU(), DELAYED], ids=str)
def test_a_dropped_state_is_freed(policy, stage):
    """Or the next one might not find room."""
    mine = jnp.dtype("float16")  # which nothing else here has
    tx = jzero.master_weights(optax.adam(1e-2))
    train_step = on(2, tx, policy, stage=stage)
    state = train_step.init(new_state, tx, mine)
    for _ in range(3):
        first = state
        state, _ = train_step(state, BATCH)
    assert {leaf.storage.pending for leaf in hosted(first)} == {None}
    buffers = [weakref.ref(x.base) for leaf in hosted(state) for x in leaf.storage.buffers]
    assert all(ref() is not None for ref in buffers)
    del state, first
    if not policy.delayed_update:
        held = [x for x in jax.live_arrays() if x.dtype == mine]
        assert {x.sharding.memory_kind for x in held} <= {"pinned_host"}
    # A thread that came late knows of them.
    wait_until(lambda: all(ref() is None for ref in buffers), "they are freed", 60)


@pytest.mark.slow
def test_memory_of_outputs_lives_as_long_as_a_thread_may_write_it():
    x = jax.device_put(np.ones((3, 5), np.float32), jax.devices()[0])
    view, alive = _pinned_leaf.view(x), weakref.ref(x)
    del x
    view[:] = 2
    assert alive() is not None
    del view
    assert alive() is None


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "stage"), [(jzero.HostCPU(), 3), (jzero.PinnedHost(10_000), 1)])
def test_frozen_leaves_are_not_copied(policy, stage):
    """A base model beside what is trained of it: twice would be once too much."""

    def step_fn(state, x):
        base, w, m = state
        m = 0.9 * m + jax.grad(lambda w: jnp.mean((x @ (base + w)) ** 2))(w)
        return base, w - 0.1 * m, m

    train_step = on(4, policy=policy, step_fn=step_fn, stage=stage)
    expected = jnp.ones((64, 40)), jnp.zeros((64, 40)), jnp.zeros((64, 40))
    state = train_step.shard(expected, BATCH)
    for _ in range(2):
        base = state[0]
        state, expected = train_step(state, BATCH), jax.jit(step_fn)(expected, BATCH)
        assert state[0] is base
    assert_same(state, expected)


@pytest.mark.slow
@pytest.mark.parametrize("delayed", [False, True])
def test_trainings_in_threads(delayed):
    """One step, a state for each thread: a search for hyperparameters."""
    policy = jzero.HostCPU(delayed_update=True, delay_after=1) if delayed else jzero.HostCPU()
    # One device: threads may start collectives in different orders.
    train_step = on(1, policy=policy)

    def train(_: int) -> Any:
        state: Any = new_state()
        for batch in batches(12):
            state, _ = train_step(state, batch)
        return train_step.flush(state)

    expected = train(0)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for found in pool.map(train, range(6)):
            assert_same(found, expected)


@pytest.mark.parametrize("policy", [
    jzero.HostCPU(), DELAYED, jzero.HostCPU(ratio=0.5)
], ids=str)  # fmt: skip
def test_a_handler_that_trains_before_the_first_byte_is_written(policy, monkeypatch):
    """What is prepared, and the memory of what is sent, were the handler's step's then."""
    expected, found = (on(2, policy=policy) for _ in range(2))
    wanted, state = expected.init(new_state, ADAMW), found.init(new_state, ADAMW)
    take, told = MemoryRun.take, list[str]()

    def handled(run: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(MemoryRun, "take", take)
            try:
                other, _ = found(found.init(new_state, ADAMW), BATCH)
                found(other, BATCH)  # A delayed step begins to update with the second.
            except jzero.StateError as error:
                told.append(str(error))
        return take(run)

    for batch in batches(3):
        wanted, _ = expected(wanted, batch)
        with monkeypatch.context() as patch:
            patch.setattr(MemoryRun, "take", handled)
            state, _ = found(state, batch)
    assert told
    says = "in the middle of its own update.*one state at a time. Set a flag there"
    assert all(re.search(says, text) for text in told)
    small.assert_same(found.flush(state), expected.flush(wanted))


@pytest.mark.slow
def test_a_step_copies_nothing_that_a_guard_forbids():
    """Between host and devices: under `jax.transfer_guard`, in slices."""
    train_step = on(4, policy=jzero.PinnedHost(2_000))
    state = train_step.shard(new_state(), BATCH)
    sharding = jax.tree.leaves(state[0])[0].sharding
    batch = jax.device_put(BATCH, jax.NamedSharding(sharding.mesh, jax.P(sharding.mesh.axis_names)))
    with jax.transfer_guard("disallow"):
        state, _ = train_step(state, batch)
    assert_same(state, jax.jit(make_step())(new_state(), BATCH)[0])


@pytest.mark.slow
def test_a_guard_lets_pass_what_the_hosts_xla_reads():
    """A scalar beside a function that kernels do not know."""

    def step_fn(state, x):
        w, m, scale = state
        m = 0.9 * m + jax.lax.bessel_i1e(gradient(w, x) * scale)
        return w - 0.1 * m, m, scale * 0.5

    w, x = jnp.ones((64, 8)), jnp.linspace(0, 1, 8 * 64).reshape(8, 64)
    expected = jax.jit(step_fn)((w, w, jnp.float32(2)), x)
    train_step = on(4, step_fn=step_fn)
    state = train_step.shard((w, w, jnp.float32(2)), x)
    rows = jax.device_put(x, jax.NamedSharding(state[0].sharding.mesh, P("data")))
    with jax.transfer_guard("disallow"):
        state = train_step(state, rows)
    assert_same(state, expected)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("policy", [jzero.HostCPU(), jzero.PinnedHost(700)])
def test_masters_of_the_steps_own(policy, stage):
    """Of parameters that are too small to be sharded, and that nothing ties to them but a cast."""

    def step_fn(state, x):
        w, master, m = state
        m = 0.9 * m + gradient(w.astype(jnp.float32), x)
        master = master - 0.1 * m
        return master.astype(w.dtype), master, m

    def new():
        master = jnp.linspace(-1, 1, 64 * 6).reshape(64, 6)
        return master.astype(jnp.bfloat16), master, jnp.zeros_like(master)

    train_step = on(4, step_fn=step_fn, policy=policy, stage=stage, min_shard_bytes=1024)
    plan = train_step.plan(new(), BATCH)
    assert [leaf.layout == REPLICATED for leaf in plan.leaves] == [True, False, False]
    if isinstance(policy, jzero.PinnedHost):
        assert [bucket.parts for bucket in plan.buckets] == [4]
    state = train_step(new(), BATCH)
    assert_same(state[1:], jax.jit(step_fn)(new(), BATCH)[1:])
    for _ in range(2):
        w, master, _ = state
        np.testing.assert_array_equal(w, np.asarray(master).astype(w.dtype))
        assert w.sharding.is_fully_replicated
        state = train_step(state, BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_padding_stays_zero(stage):
    """Of an update that would make it one."""

    def step_fn(state, x):
        w, m = state
        m = 0.9 * m + gradient(w, x[:, :51]) + 1.0
        return w - 0.1 * m, m

    w = jnp.ones((51, 9))
    train_step = on(8, step_fn=step_fn, stage=stage)
    state: Any = (w, w)
    expected = state
    for _ in range(3):
        state, expected = train_step(state, BATCH), jax.jit(step_fn)(expected, BATCH)
    assert_same(state, expected)
    w, m = state
    assert m.storage.shape != m.shape
    for device, buffer in zip(m.storage.placement.devices, m.storage.buffers, strict=True):
        index = m.storage.sharding.devices_indices_map(m.storage.shape)[device]
        beyond = np.zeros(m.storage.shape, bool)
        beyond[tuple(slice(n) for n in m.shape)] = True
        assert not buffer[~beyond[index]].any()
    if isinstance(w, jzero.LeafArray):
        padded = np.array(w.storage)
        padded[tuple(slice(n) for n in w.shape)] = 0
        assert not padded.any()


# -- delayed updates -------------------------------------------------------------------------------


class PlainLoop:
    """The same delay in plain JAX: gradients are applied when those of the next step are there."""

    def __init__(self, tx, dtype=jnp.float32):
        self.params, self.opt_state = new_state(tx, dtype)
        self.pending: Any = None
        self._grads = jax.jit(jax.grad(lambda p, x: self._loss(p, x)))

        @jax.jit
        def apply(params, opt_state, grads):
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        self._apply = apply

    @staticmethod
    def _loss(params, x):
        a, b, c, d = params
        y = jnp.tanh(jnp.tanh(x.astype(a.dtype) @ a) @ b + c[None]) @ d
        return jnp.mean(y.astype(jnp.float32) ** 2)

    def step(self, x: Any, delays: bool) -> None:
        grads = self._grads(self.params, x)
        if not delays:
            self.pending = grads
            grads = None
        self.flush()
        self.pending = grads

    def flush(self) -> None:
        if self.pending is not None:
            self.params, self.opt_state = self._apply(self.params, self.opt_state, self.pending)
            self.pending = None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num", "after", "options"),
    [
        (1, 0, dict(stage=3)), (4, 2, dict(stage=1)), (8, 1, dict(stage=3, accumulate=2, reduce="once")),
    ],
)  # fmt: skip
def test_delayed_by_exactly_one_step(num, after, options):
    policy = jzero.HostCPU(delayed_update=True, delay_after=after)
    train_step, loop = on(num, policy=policy, **options), PlainLoop(ADAMW)
    state: Any = train_step.shard(new_state(ADAMW), BATCH)
    for i, batch in enumerate(batches(7)):
        state, _ = train_step(state, batch)
        loop.step(batch, delays=i >= after)
        assert_same(state[0], loop.params)
        if i == 4:
            state = train_step.flush(state)
            loop.flush()
            assert_same(state, (loop.params, loop.opt_state))
    assert all(leaf.storage.pending is not None for leaf in hosted(state))
    loop.flush()
    state = train_step.flush(state)
    assert_same(state, (loop.params, loop.opt_state))
    assert train_step.flush(state) is state


@pytest.mark.slow
def test_delayed_states_in_turn(monkeypatch):
    """And no memory is written from which the devices may still copy: what an array is made of that was
    deleted since, too."""
    wait, waited = jax.block_until_ready, []

    def block_until_ready(tree):
        waited.extend(jax.tree.leaves(tree))
        return wait(tree)

    class Watched(_host_engine.HostEngine):
        def run(self):
            params = [getattr(x, "storage", x) for x in states[which][0]]
            assert {id(x) for x in params} <= {id(x) for x in waited}
            return super().run()

    monkeypatch.setattr(_memory_updates, "HostEngine", Watched)
    monkeypatch.setattr(jax, "block_until_ready", block_until_ready)
    train_step = on(2, policy=DELAYED)
    loops = [PlainLoop(ADAMW), PlainLoop(ADAMW)]
    states: list[Any] = [train_step.init(new_state, ADAMW), train_step.init(new_state, ADAMW)]
    for which, batch in zip([0, 0, 1, 0, 1, 1, 0], batches(7), strict=True):
        states[which], _ = train_step(states[which], batch)
        loops[which].step(batch, delays=True)
        assert_same(states[which][0], loops[which].params)


@pytest.mark.slow
def test_a_loss_scale_waits_with_its_gradients():
    """A leaf that rests on the devices, and has another value when they are divided by it."""

    def grads(w, scale, x):
        return jax.grad(lambda w: scale * jnp.mean((x @ w) ** 2))(w)

    def renewed(w, m, g, scale):
        m = 0.9 * m + g / scale
        return w - 0.1 * m, m

    def step_fn(state, x):
        w, m, scale = state
        return *renewed(w, m, grads(w, scale, x), scale), scale * 4

    train_step = on(4, policy=DELAYED, step_fn=step_fn)
    w, m, scale = jnp.linspace(-1, 1, 64 * 8).reshape(64, 8), jnp.zeros((64, 8)), jnp.ones(())
    state: Any = (w, m, scale)
    pending: Any = None
    for batch in batches(4):
        state = train_step(state, batch)
        late, pending = pending, (grads(w, scale, batch), scale)
        w, m = renewed(w, m, *late) if late else (w, m)
        scale *= 4
        assert_same((state[0], state[2]), (w, scale))
    assert_same(train_step.flush(state)[:2], renewed(w, m, *pending))


@pytest.mark.parametrize("kind", [jzero.HostCPU, jzero.NVMe])
def test_an_update_that_reads_no_gradient(kind, tmp_path):
    """Nothing goes down to the hosts."""

    def step_fn(state, x):
        w, m = state
        loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return (w - 0.1 * g, 0.9 * m), loss

    policy = kind(str(tmp_path)) if kind is jzero.NVMe else kind()
    train_step = on(4, policy=policy, step_fn=step_fn)
    state = expected = LINEAR, LINEAR / 2
    for _ in range(2):
        state, loss = train_step(state, BATCH)
        expected, wanted = jax.jit(step_fn)(expected, BATCH)
        assert_same((state, loss), (expected, wanted))


@pytest.mark.slow
def test_an_argument_that_the_update_reads():
    """Not through the batch: a learning rate, which waits with its gradients, too."""

    def step_fn(state, x, learning_rate):
        w, m = state
        m = 0.9 * m + gradient(w, x)
        return w - learning_rate * m, m

    delayed = DELAYED
    train_step, late_step = on(4, step_fn=step_fn), on(4, step_fn=step_fn, policy=delayed)
    w = jnp.linspace(-1, 1, 64 * 8).reshape(64, 8)
    state = expected = w, 0 * w
    for i, batch in enumerate(batches(3)):
        rate = jnp.float32(0.1 * (i + 1))
        late = late_step.flush(late_step(expected, batch, rate))
        state, expected = train_step(state, batch, rate), jax.jit(step_fn)(expected, batch, rate)
        assert_same(state, expected)
        assert_same(late, expected)


def test_a_state_that_waits_cannot_be_read_or_saved(tmp_path):
    train_step = on(2, policy=DELAYED)
    state, _ = train_step(new_state(ADAMW), BATCH)
    with jzero.Checkpointer(tmp_path, train_step, save_interval_steps=2) as checkpointer:
        assert checkpointer.is_due(1)  # the first one
        with pytest.raises(jzero.StateError, match=r"state = train_step\.flush\(state\) first"):
            checkpointer.save(1, state)
        with pytest.raises(jzero.StateError, match=r"flush\(state\) first"):
            np.asarray(hosted(state)[0])
        state = train_step.flush(state)
        checkpointer.save(1, state)
        assert [checkpointer.is_due(step) for step in (1, 2, 3)] == [False, True, False]
        assert checkpointer.is_due(3, force=True)
        state, _ = train_step(state, BATCH)
        state = train_step.flush(state)
        other = checkpointer.restore(jax.eval_shape(lambda: new_state(ADAMW)))
    other, _ = train_step(other, BATCH)
    assert_same(state, train_step.flush(other))


def test_a_step_that_is_not_delayed_takes_a_state_that_waits():
    """Other options, the same state: what is pending is applied before gradients are computed."""
    delayed = on(2, policy=DELAYED)
    train_step, plain = on(2), jax.jit(make_step(ADAMW))
    state, _ = delayed(new_state(ADAMW), BATCH)
    state, _ = train_step(state, BATCH)
    expected = plain(plain(new_state(ADAMW), BATCH)[0], BATCH)[0]
    assert_same(state, expected)


@pytest.mark.slow
def test_a_delayed_step_takes_a_state_that_waits_for_another_one():
    """One that renews on the devices what the other does on the host: neither update is lost."""

    def average(state, x):
        w, m = state
        w = w - 0.01 * gradient(w, x)
        return w, 0.9 * m + 0.1 * w

    one, other = (on(2, step_fn=step_fn, policy=DELAYED) for step_fn in (momentum, average))
    state = other.flush(other(one((LINEAR, LINEAR / 2), BATCH), BATCH))
    assert_same(state, average(momentum((LINEAR, LINEAR / 2), BATCH), BATCH))


@pytest.mark.slow
def test_a_last_batch_of_another_shape():
    """Gradients of one program are applied while another one computes."""
    train_step, loop = on(4, policy=DELAYED), PlainLoop(ADAMW)
    state: Any = new_state(ADAMW)
    for num in (16, 8, 8, 16):
        state, _ = train_step(state, BATCH[:num])
        loop.step(BATCH[:num], delays=True)
        assert_same(state[0], loop.params)
    loop.flush()
    assert_same(train_step.flush(state), (loop.params, loop.opt_state))


def test_memory_for_what_is_on_its_way(monkeypatch, tmp_path):
    """There was enough for the state, and is too little for gradients: said before anything is lost."""
    train_step = on(2)
    state = train_step.shard(new_state(ADAMW), BATCH)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemAvailable: 1 kB\n")
    with monkeypatch.context() as patch:
        patch.setattr(_available, "ROOT", tmp_path)
        says = r"needs \d+ bytes \([\d.]+ KiB\) of the host's memory \(\d+ pinned for gradients and"
        with pytest.raises(jzero.OptionError, match=says):
            train_step(state, BATCH)
    train_step(state, BATCH)


def other_steps():
    """Pairs of steps that do not do the same, of one text."""
    scale = np.linspace(1, 2, 64 * 24, dtype=np.float32).reshape(64, 24)

    def scaled(by):
        def step_fn(state, x):
            w, a, b = state
            a = 0.9 * a + by * gradient(w, x)
            return w - 0.1 * a, a, b

        return step_fn

    def pulled(swap):
        def step_fn(state, x):
            w, a, b = state
            by, to = (b, a) if swap else (a, b)
            return w - gradient(w, x) - by * (w - to), a, b

        return step_fn

    yield pytest.param(scaled(scale), scaled(scale + 1), id="constants")
    yield pytest.param(pulled(False), pulled(True), id="leaves")


@pytest.mark.parametrize(("one", "other"), list(other_steps()))
def test_steps_that_differ_share_no_engine(one, other):
    kept = []
    for step_fn in (one, other):
        kept.append(on(4, step_fn=step_fn))
        state = LINEAR, LINEAR / 2, LINEAR / 4
        assert_same(kept[-1](state, BATCH), jax.jit(step_fn)(state, BATCH))


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_sent_is_there_before_its_memory_is_written(stage):
    """Parameters of a state in use, also those that a program has yet to gather from what was sent."""
    train_step = on(4, stage=stage)
    params, _ = train_step(new_state(ADAMW), BATCH)[0]
    (program,) = train_step._programs.built.values()
    waits = {id(ref()) for ref in program.step.updates._engine._sets[-1].sent}
    assert waits == {id(getattr(x, "storage", x)) for x in params}


def test_leaves_of_different_steps():
    train_step = on(2, policy=DELAYED)
    (params, opt_state), _ = train_step(new_state(ADAMW), BATCH)
    (_, other), _ = train_step(new_state(ADAMW), BATCH)
    adam = opt_state[1][0]
    mixed = opt_state[0], (adam._replace(mu=other[1][0].mu), *opt_state[1][1:])
    with pytest.raises(jzero.StateError, match="come from different steps"):
        train_step((params, mixed), BATCH)
    plain = on(2, policy=jzero.NoOffload())
    with pytest.raises(jzero.StateError, match="Call flush of the train_step that returned the st"):
        plain.flush((params, opt_state))
    train_step((params, opt_state), BATCH)


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_host_that_fails_leaves_the_state():
    """The update asks Python, which raises in the third step; the training goes on after it."""
    fails = False

    def check(x):
        if fails:
            raise ValueError("planted")
        return x

    def step_fn(state, x):
        w, m, count = state
        g = gradient(w, x)
        m = 0.9 * m + g
        seen = jax.pure_callback(check, jax.ShapeDtypeStruct((64, 64), jnp.float32), m + 1)
        return w - 0.1 * seen, m, count + jnp.sum(g)

    def new():
        return jnp.ones((64, 64)), jnp.zeros((64, 64)), jnp.zeros(())

    step = on(1, step_fn=step_fn)
    state = step(step(new(), BATCH), BATCH)
    before = [np.array(x) for x in state]
    fails = True
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="planted"):
        step(state, BATCH)
    fails = False
    for x, y in zip(state, before, strict=True):
        np.testing.assert_array_equal(np.asarray(x), y)
    step(state, BATCH)


@pytest.mark.slow
def test_what_brings_parameters_to_rest_is_compiled_before():
    """At stage 1 they come as shards; who has no memory to compile that keeps the state."""
    train_step = on(4, stage=1)
    state = train_step.init(new_state, ADAMW)
    planted = MemoryError("planted")
    with (
        failing(_host_updates._conversions, "leaving", error=planted),
        pytest.raises(MemoryError, match="planted"),
    ):
        train_step(state, BATCH)
    expected, _ = jax.jit(make_step(ADAMW))(new_state(ADAMW), BATCH)
    assert_same(train_step(state, BATCH)[0], expected)


# -- settings that cannot be obeyed ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(ratio=0), r"ratio=0\. .*above 0, up to 1"),
        (dict(ratio=float("nan")), "ratio=nan"),
        (dict(ratio="half"), "ratio='half'"),
        (dict(ratio=True), "ratio=True"),
        (dict(delayed_update=1), "delayed_update=1"),
        (dict(delay_after=3), "delay_after=3 without delayed_update"),
        (dict(delayed_update=True, delay_after=-1), "delay_after=-1"),
        (dict(delayed_update=True, delay_after=2.5), r"delay_after=2\.5"),
        (dict(threads=0), "threads=0"),
        (dict(threads="all"), "threads='all'"),
    ],
)
def test_policies_that_are_none(options, says):
    with pytest.raises(jzero.OptionError, match=says):
        jzero.HostCPU(**options)


def test_numbers_of_numpy():
    policy = jzero.HostCPU(True, np.int64(3), np.float32(0.5), np.int32(2))  # type: ignore[arg-type]
    assert policy == jzero.HostCPU(True, 3, 0.5, 2)
    assert OnHostCPU(jzero.Memory(optimizer=policy)).delay_after == 3
    delayed = jzero.Memory(optimizer=jzero.HostCPU(delayed_update=True))
    assert OnHostCPU(delayed).delay_after == 40


def test_a_metric_that_needs_other_devices_is_found():
    def step_fn(state, x):
        w, m = momentum(state, x)
        return (w, m), {"norm": jnp.sum(m**2)}

    w = jnp.ones((64, 8))
    with pytest.raises(jzero.OptionError) as error:
        on(2, step_fn=step_fn).plan((w, w), BATCH)
    where = (
        r"reduce_sum \(.*test_host_cpu_step\.py:\d+.*step_fn.*\) does not treat every element alike"
    )
    assert re.search(where, str(error.value))
    assert "Drop what asks for it (a norm of the updates, as a metric)" in str(error.value)


@pytest.mark.usefixtures("optax_promotions")
def test_delays_that_cannot_be():
    policy = jzero.HostCPU(delayed_update=True)

    entry = optimizers.ENTRIES["sophia"]  # Its estimate of the Hessian reads moments.
    state, (batch, *_) = optimizers.make_state(entry), optimizers.make_batches()
    step_fn = optimizers.make_step(entry)
    with pytest.raises(
        jzero.OptionError, match=r"is read with the batch(.|\n)*Drop delayed_update"
    ):
        on(1, step_fn=step_fn, policy=policy).plan(state, batch)

    w = jnp.ones((64, 8))

    def hands_out(state, x):
        w, m = momentum(state, x)
        return (w, m), {"m": m}

    with pytest.raises(jzero.OptionError, match="output 0 beside the state follows from optimizer"):
        on(1, step_fn=hands_out, policy=policy).plan((w, w), BATCH)
    (_, m), metrics = on(1, step_fn=hands_out)((w, w), BATCH)
    np.testing.assert_array_equal(np.asarray(m), np.asarray(metrics["m"]))


# -- a share of the state --------------------------------------------------------------------------


def share(plan) -> float:
    leaves = [leaf for leaf in plan.leaves if leaf.role == "optimizer state" and leaf.shape]
    return sum(x.nbytes for x in leaves if x.tier == "host") / sum(x.nbytes for x in leaves)


def test_a_share_that_is_too_small():
    with pytest.raises(jzero.OptionError) as error:
        on(4, policy=jzero.HostCPU(ratio=0.001)).plan(new_state(ADAMW), BATCH)
    assert "are the fewest leaves that are updated together: 0.008 of all bytes" in str(error.value)
    found = re.search(r"Use ratio=([\d.]+) or more", str(error.value))
    assert found
    plan = on(4, policy=jzero.HostCPU(ratio=float(found.group(1)))).plan(new_state(ADAMW), BATCH)
    assert 0 < share(plan) < 0.01


@pytest.mark.slow
def test_what_meets_in_scalars_rests_together():
    """The norm of all updates scales each of them."""
    tx = optax.chain(optax.adam(1e-2), optax.clip_by_global_norm(1.0))
    says = r"1\.000 of all bytes.* Use ratio=1\.000 or more"
    with pytest.raises(jzero.OptionError, match=says):
        on(1, tx, jzero.HostCPU(ratio=0.09)).plan(new_state(tx), BATCH)
    train_step, state, expected = on(1, tx), new_state(tx), new_state(tx)
    for batch in batches(3):
        state, _ = train_step(state, batch)
        expected, _ = jax.jit(make_step(tx))(expected, batch)
    assert_same(state, expected)


def test_the_share_that_ends_together():
    bandwidths = _bandwidth.Bandwidths(host=1e9, device=3e9, link=1e12)
    assert _bandwidth.share(bandwidths, 12e9, 2e9) == pytest.approx(0.25)
    slow = bandwidths._replace(link=1e8)
    on_host, on_device = 2e9 / 1e8, 12e9 / 3e9
    assert _bandwidth.share(slow, 12e9, 2e9) == pytest.approx(on_device / (on_host + on_device))


def test_a_measured_share_is_at_least_the_smallest(monkeypatch):
    """The device is so much faster that the host should have nothing."""
    asked: list[Any] = []

    def measured(*args: Any) -> Any:
        asked.append(args)
        return _bandwidth.Bandwidths(host=1.0, device=1e12, link=1.0)

    monkeypatch.setattr(_bandwidth, "measure", measured)
    plan = on(2, policy=jzero.HostCPU(ratio="auto", threads=3)).plan(new_state(ADAMW), BATCH)
    assert 0 < share(plan) < 0.01
    assert asked == [(jax.devices()[0], 2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(("num", "tx", "ratio"), [(8, ADAMW, "auto"), (1, optax.lamb(1e-2), 1.0)])
def test_under_a_mesh_of_the_context(num, tx, ratio):
    """What XLA does for the host, and what is measured, happens on other devices."""
    _bandwidth.measure.cache_clear()
    expected, plain = new_state(tx), jax.jit(make_step(tx))
    mesh = jax.make_mesh((num,), ("data",), devices=jax.devices()[-num:])
    with jax.set_mesh(mesh):
        policy = jzero.HostCPU(ratio=ratio)
        train_step = small.shard_train_step(make_step(tx), memory=policy)
        state = train_step.init(new_state, tx)
        for _ in range(2):
            state, _ = train_step(state, BATCH)
    for _ in range(2):
        expected, _ = plain(expected, BATCH)
    assert_same(state, expected)


def test_no_share_is_measured_without_devices():
    mesh = jax.sharding.AbstractMesh((512,), ("data",))
    policy = jzero.HostCPU(ratio="auto")
    train_step = small.shard_train_step(make_step(), mesh=mesh, memory=policy)
    batch = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    with pytest.raises(jzero.OptionError, match=r"ratio='auto'.*the mesh has no devices"):
        train_step.plan(jax.eval_shape(new_state), batch)


# -- reports ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_report_names_what_is_left_to_xla():
    tx = optax.lamb(1e-2)
    report = on(1, tx).describe(new_state(tx), BATCH)
    text = " ".join(str(report).split())
    assert re.search(r"by a kernel, after XLA \(.*float32\[64,48\]\): state\[0\]\[0\]", text)


@pytest.mark.slow
def test_numbers_of_several_updates_that_rest_on_the_devices():
    """Subgraphs of one bucket share a number: the norm of updates that the host has no part in."""
    tx = optax.adam(1e-2, eps=1e-3)

    def step(state, x):
        params, opt_state = state
        loss_fn = lambda p: jnp.mean(jnp.square(jnp.tanh(x @ p["a"]) @ p["b"] @ p["c"]))  # noqa: E731
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        norm = optax.tree.norm({name: updates[name] for name in ("a", "b")})
        return (optax.apply_updates(params, updates), opt_state), (loss, norm)

    def new_state():
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = {"a": (8, 16), "b": (16, 8), "c": (8, 4)}
        pairs = zip(keys, shapes.items(), strict=True)
        params = {name: jax.random.normal(key, shape) / 4 for key, (name, shape) in pairs}
        return params, tx.init(params)

    train_step = small.shard_train_step(
        step, mesh=small.mesh(data=4), memory=jzero.HostCPU(ratio=0.2)
    )
    state, expected = train_step.init(new_state), new_state()
    for i in range(3):
        x = jax.random.normal(jax.random.key(i), (8, 8))
        state, outs = train_step(state, x)
        expected, wanted = jax.jit(step)(expected, x)
        found = zoo.to_host((train_step.unshard(state), outs))
        zoo.assert_trees_close(found, jax.device_get((expected, wanted)), zoo.FP32, f"step {i}")
        state = train_step.shard(state)
