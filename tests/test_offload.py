"""Optimizer state in the hosts' memory: the same training, in buckets that fit on the devices."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
import optimizers
import small
import test_optimizers
from jzero._quantities import readable_bytes
from jzero.offload.execute import _stream
from optimizers import ENTRIES

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:optax")

# Their state is a few scalars, if anything.
NOTHING_TO_OFFLOAD = {
    "sgd", "sign_sgd", "fromage", "noisy_sgd", "polyak_sgd", "polyak_sgd(large)",
    "keep_params_nonnegative", "reduce_on_plateau", "scale_by_backtracking_linesearch",
}  # fmt: skip


WITH_STATE = [name for name in ENTRIES if name not in NOTHING_TO_OFFLOAD]


def least_room(step_fn, arguments, least: int, **options) -> jzero.PinnedHost:
    """The smallest bound that is not refused, from `least` on; the refusal names it."""
    policy = jzero.PinnedHost(device_bytes=least)
    try:
        small.shard_train_step(step_fn, offload=policy, **options).plan(*arguments)
    except jzero.OptionError as error:
        found = re.search(r"Use PinnedHost\(device_bytes=(\d+)\)", str(error))
        if not found:
            raise
        policy = jzero.PinnedHost(device_bytes=int(found.group(1)))
    return policy


def kinds(tree: Any) -> set[str]:
    at_rest: list[Any] = [getattr(leaf, "storage", leaf) for leaf in jax.tree.leaves(tree)]
    return {leaf.sharding.memory_kind for leaf in at_rest if leaf.ndim}


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_STATE)
@pytest.mark.usefixtures("optax_promotions")
def test_optimizers_train_as_on_one_device(name: str):
    entry, mesh = ENTRIES[name], small.mesh(data=8)
    step_fn, batches = optimizers.make_step(entry), optimizers.make_batches(entry.poisoned)
    state: Any = optimizers.make_state(entry)
    policy = least_room(step_fn, (state, batches[0]), 600, mesh=mesh)
    train_step = small.shard_train_step(step_fn, mesh=mesh, memory=policy)
    state = train_step.shard(state, batches[0])
    expected = test_optimizers.one_device(name)
    for i, (batch, wanted) in enumerate(zip(batches, expected, strict=True)):
        state, metrics = train_step(state, batch)
        test_optimizers.assert_same((state, metrics), wanted, f"{name}, step {i}")
    if not entry.lookahead:  # Its slow parameters are read by the update alone.
        assert kinds(state["params"]) == {"device"}
    assert "pinned_host" in kinds(state["opt"])


@pytest.mark.parametrize("policy", [jzero.PinnedHost(), jzero.HostCPU(ratio=0.5)], ids=str)
@pytest.mark.parametrize("shape", [(), (64, 64)], ids=["a scalar", "a moment"])
def test_nothing_to_update_is_said(policy: Any, shape: tuple[int, ...]):
    """A scalar, or a moment that no step renews."""

    def step_fn(state, x):
        w, m = state
        return w - gradient(w, x), m

    train_step = small.shard_train_step(step_fn, memory=policy)
    with pytest.raises(jzero.OptionError, match="has no optimizer state that is worth it"):
        train_step.plan((jnp.ones((64, 64)), jnp.ones(shape)), BATCH)


def gradient(w, x):
    return jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


def momentum(state, x):
    w, m = state
    m = 0.9 * m + gradient(w, x)
    return w - 0.1 * m, m


def assert_same(found: Any, expected: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-5)


# -- one step, looked at ---------------------------------------------------------------------------

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
SHAPES = ((64, 48), (48, 51), (51,), (51, 16))
BATCH = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)


def new_state(tx=TX, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    params = [jax.random.normal(key, s, dtype) * 0.1 for key, s in zip(keys, SHAPES, strict=True)]
    return params, tx.init(params)


def make_step(tx=TX, norm=False):
    def step_fn(state, x):
        params, opt_state = state

        def loss_fn(params):
            a, b, c, d = params
            y = jnp.tanh(jnp.tanh(x.astype(a.dtype) @ a) @ b + c[None]) @ d
            return jnp.mean(y.astype(jnp.float32) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        metrics = {"loss": loss} | ({"moved": optax.global_norm(updates)} if norm else {})
        return (optax.apply_updates(params, updates), opt_state), metrics

    return step_fn


def on(num: int, device_bytes: int, tx=TX, norm=False, **options):
    return small.shard_train_step(
        make_step(tx, norm=norm),
        mesh=small.mesh(data=num),
        offload=jzero.PinnedHost(device_bytes),
        **options,
    )


def parts_of(train_step, *arguments):
    step = train_step._programs.of(train_step._programs.bind(arguments, {})).step
    return step.grad, step.buckets


def types(variables) -> list[str]:
    return sorted(f"{v.aval.dtype}{list(v.aval.shape)}" for v in variables)


@pytest.mark.parametrize(("num", "device_bytes"), [(1, 3000), (8, 1230), (8, 2**20)])
def test_buckets_are_bounded_and_renew_every_leaf_once(num, device_bytes):
    train_step = on(num, device_bytes)
    plan = train_step.plan(new_state(), BATCH)
    offloaded = {leaf.path: leaf.nbytes_per_device for leaf in plan.leaves if leaf.tier != "device"}
    assert sorted(path for bucket in plan.buckets for path in bucket.leaves) == sorted(offloaded)
    for bucket in plan.buckets:
        assert bucket.nbytes == sum(offloaded[path] for path in bucket.leaves)
        assert bucket.nbytes_at_once <= device_bytes // 3
        assert bucket.nbytes_at_once * bucket.parts >= bucket.nbytes
    assert any(bucket.parts > 1 for bucket in plan.buckets) == (device_bytes < 2**20)


def test_plan_report_and_fingerprint():
    state = new_state()
    train_step, plain = on(8, 1230), small.shard_train_step(make_step())
    report, without = train_step.describe(state, BATCH), plain.describe(state, BATCH)
    plan = report.plan
    moved = sum(x.nbytes_per_device for x in plan.leaves if x.tier == "pinned_host")
    rows = {row.role: row for row in report.memory}
    before = {row.role: row for row in without.memory}
    assert rows["optimizer state"].on_host == moved
    assert rows["optimizer state"].per_device == before["optimizer state"].per_device - moved == 4
    assert rows["parameter"] == before["parameter"]
    assert plan.nbytes_at_rest(tier="pinned_host") == moved
    assert plan.nbytes_at_rest() == without.plan.nbytes_at_rest() - moved
    others = without.plan, on(8, 2**20).plan(state, BATCH)
    assert plan.fingerprint not in [other.fingerprint for other in others]
    for text in (
        f"8 of 13 leaves are stored in pinned_host memory, {readable_bytes(moved)} for each",
        "1 of 9 leaves of optimizer state stay on the devices: 4 B on each device",
        "4 B  state[1][1][0].count int32[]",
    ):
        assert text in str(report)
    assert "on its host" not in str(without)
    # The same collectives as without, but for the loss of overlap.
    for op in ("all-gather", "reduce-scatter"):
        assert report.elements(op) == without.elements(op)


def test_what_reads_the_batch_stays():
    """A moment that the forward-backward program reads: the loss is weighed by it."""

    def step_fn(state, x):
        w, seen, mean = state
        grads = gradient(w, x)
        near = jax.lax.cond(
            seen.sum() > 0, lambda: jax.lax.stop_gradient(x @ seen).mean(), lambda: 0.0
        )
        seen = seen + near * grads
        return (w - 0.1 * seen, seen, 0.9 * mean + grads), near

    w = jnp.ones((64, 8))
    train_step = small.shard_train_step(step_fn, memory=jzero.PinnedHost())
    tiers = [leaf.tier for leaf in train_step.plan((w, w, w), BATCH).leaves]
    assert tiers == ["device", "device", "pinned_host"]


@pytest.mark.slow
def test_state_is_placed_and_consumed():
    train_step = on(8, 1230)
    state = train_step.init(new_state)
    assert kinds(state) == {"pinned_host"}  # Before a batch was seen, roles are unknown.
    train_step.plan(state, BATCH)
    params, opt_state = state = train_step.init(new_state)
    assert (kinds(params), kinds(opt_state)) == ({"device"}, {"pinned_host"})
    assert isinstance(params[2], jzero.LeafArray)
    again = train_step.shard(new_state(), BATCH)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
        assert getattr(x, "storage", x).sharding == getattr(y, "storage", y).sharding
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-6)  # compiled or not
    shardings = jax.tree.leaves(train_step.state_shardings(state))
    assert {s.memory_kind for s in shardings} == {"device", "pinned_host"}
    new, _ = train_step(state, BATCH)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state) if leaf.ndim)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(train_step.unshard(new))} == {
        "device"
    }
    with pytest.raises(jzero.StateError, match="already donated"):
        train_step(state, BATCH)


@pytest.mark.slow
def test_a_step_that_fails_while_it_runs():
    """In the second of four buckets: its state is consumed, which is said, and the next training runs."""
    fails = False

    def check(x):
        if fails:
            raise ValueError("planted")
        return x

    def step_fn(state, x):
        params, means = state
        grads = jax.grad(lambda p: sum((jnp.mean((x @ w) ** 2) for w in p), 0.0))(params)
        means = [0.9 * m + g for m, g in zip(means, grads, strict=True)]
        means[1] = jax.pure_callback(check, jax.ShapeDtypeStruct((64, 64), jnp.float32), means[1])
        return [w - 0.1 * m for w, m in zip(params, means, strict=True)], means

    w = [jnp.ones((64, 64))] * 4
    train_step = small.shard_train_step(step_fn, memory=jzero.PinnedHost(3 * 64 * 64 * 4 // 8))
    first = train_step((w, w), BATCH)
    fails = True
    with pytest.raises(jax.errors.JaxRuntimeError, match="planted"):
        train_step(first, BATCH)
    with pytest.raises(jzero.StateError, match="leaves were already donated"):
        train_step(first, BATCH)
    fails = False
    state = train_step(train_step((w, w), BATCH), BATCH)
    assert_same(state, jax.jit(step_fn)(jax.jit(step_fn)((w, w), BATCH), BATCH))


@pytest.mark.slow
def test_buckets_that_only_give_scalars():
    """The first level reads history and renews nothing; what it finds scales every update."""

    def step_fn(state, x):
        params, olds = state
        grads = jax.grad(lambda p: sum((jnp.mean((x @ w) ** 2) for w in p), 0.0))(params)
        scale = 1 / (1 + sum((jnp.sum(old**2) for old in olds), 0.0))
        params = [w - scale * (g + old) for w, g, old in zip(params, grads, olds, strict=True)]
        return params, [0.5 * old + scale * w for old, w in zip(olds, params, strict=True)]

    def new():
        return [jnp.ones((64, 8)), jnp.ones((64, 12))], [jnp.ones((64, 8)), jnp.ones((64, 12))]

    train_step = small.shard_train_step(step_fn, memory=jzero.PinnedHost(3 * 64 * 12 * 4 // 8))
    state, expected = new(), new()
    buckets = parts_of(train_step, state, BATCH)[1]
    assert [(bool(bucket.gives), bool(bucket.outs)) for bucket in buckets] == [
        (True, False), (True, False), (True, False), (False, True), (False, True)
    ]  # fmt: skip
    for _ in range(3):
        state, expected = train_step(state, BATCH), jax.jit(step_fn)(expected, BATCH)
    assert_same(state, expected)


@pytest.mark.parametrize(("rate", "num"), [((0.1,) * 6, 2), ((0.2, 0.1, 0.1, 0.1, 0.1, 0.1), 3)])
def test_equal_buckets_share_a_program(rate, num):
    """Six layers of one shape and a wider one, each by itself; one with a rate of its own."""
    shapes = [(64, 64)] * 5 + [(64, 65)]

    def step_fn(state, x):
        params, means = state
        grads = jax.grad(lambda p: sum((jnp.mean((x @ w) ** 2) for w in p), 0.0))(params)
        means = [0.9 * m + g for m, g in zip(means, grads, strict=True)]
        return [w - r * m for w, r, m in zip(params, rate, means, strict=True)], means

    w = [jnp.ones(shape) for shape in shapes]
    rows = 64 * 64 * 4 // 8
    train_step = small.shard_train_step(step_fn, memory=jzero.PinnedHost(3 * (rows + 64)))
    state = train_step((w, w), BATCH)
    step = train_step._programs.of(train_step._programs.bind((state, BATCH), {})).step
    assert len(step.buckets) == 6
    assert step.compiled.num == num


@pytest.mark.slow
def test_equal_buckets_that_consume_other_leaves_share_no_program():
    """The last level reads the second layer's old parameters: that layer's bucket may not consume them."""

    def step_fn(state, x):
        params, means = state
        grads = jax.grad(lambda p: sum((jnp.mean((x @ w) ** 2) for w in p), 0.0))(params)
        triples = zip(means, params, grads, strict=True)
        means = [0.9 * m + 0.01 * w + g for m, w, g in triples]
        new = [w - 0.1 * m for m, w in zip(means, params, strict=True)]
        return (new, means), jnp.sum(params[1] * sum(jnp.sum(m**2) for m in means))

    def w():
        return [jnp.ones((64, 64)), jnp.ones((64, 64))]

    train_step = small.shard_train_step(step_fn, memory=jzero.PinnedHost(3 * 64 * 64 * 4 // 8))
    assert_same(train_step((w(), w()), BATCH), jax.jit(step_fn)((w(), w()), BATCH))


def test_slices_of_layers_whose_rows_are_padded():
    """31 rows on two devices: of each layer the second device holds 15, and a row of padding."""

    def step_fn(state, x):
        w, mean = state
        grads = jax.grad(lambda w: sum(jnp.mean((x[:, :31] @ layer) ** 2) for layer in w))(w)
        mean = 0.9 * mean + grads
        return w - 0.1 * mean, mean

    w, mesh = jnp.ones((3, 31, 5)), small.mesh(data=2)
    policy = least_room(step_fn, ((w, w), BATCH), 384, mesh=mesh)
    train_step = small.shard_train_step(step_fn, offload=policy, mesh=mesh)
    (bucket,) = train_step.plan((w, w), BATCH).buckets
    assert bucket.parts > 3
    found = train_step.unshard(train_step((w, w), BATCH))
    assert_same(found, jax.jit(step_fn)((w, w), BATCH))


def test_an_output_beside_the_state_is_not_made_in_slices():
    def step_fn(state, x):
        w, mean = momentum(state, x)
        return (w, mean), {"mean": mean}

    w, batch = jnp.ones((64, 64)), jnp.asarray(BATCH)
    train_step = small.shard_train_step(step_fn, memory=jzero.PinnedHost(1536))
    with pytest.raises(jzero.OptionError, match="the step returns something else of their update"):
        train_step((w, w), batch)
    policy = least_room(step_fn, ((w, w), batch), 1536)
    train_step = small.shard_train_step(step_fn, memory=policy)
    assert_same(train_step((w, w), batch), jax.jit(step_fn)((w, w), batch))
    assert not batch.is_deleted()


@pytest.mark.parametrize("device_bytes", [64 * 64 * 4 // 4, 2**20])
def test_old_leaves_are_freed_when_moved_or_overwritten(device_bytes):
    def step_fn(state, x):
        w, last, a, b, same = state
        g = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * (g + a), g, b, 0.5 * a + g, same

    def new():
        return tuple(jnp.full((64, 64), 1.0 + i) for i in range(5))

    policy = least_room(step_fn, (new(), BATCH), device_bytes)
    train_step = small.shard_train_step(step_fn, memory=policy)
    state, expected = train_step.shard(new(), BATCH), new()
    for _ in range(3):
        old, state = state, train_step(state, BATCH)
        expected = jax.jit(step_fn)(expected, BATCH)
        assert [x.is_deleted() for x in old] == [True, True, True, True, False]
        assert kinds(state[1:4]) == {"pinned_host"}
    assert_same(state, expected)


def test_bounds_of_numpy_are_ints():
    bound: Any = np.int64(2**20)
    policy = jzero.PinnedHost(bound)
    assert type(policy.device_bytes) is int
    assert policy == jzero.PinnedHost(2**20)


# -- the stream ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "room"), [((4, 4, 4, 4, 4), 12), ((4, 4, 4), 4), ((1, 9, 2, 9, 3), 9), ((3,) * 9, 7)]
)
def test_stream_keeps_within_its_room(sizes, room):
    """Whenever something starts, what came from the host and is not back there is counted."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    host = sharding.with_memory_kind("pinned_host")
    mine = jnp.dtype("complex64")  # which nothing else here has
    leaves = [jax.device_put(np.full(n, n, mine), host) for n in sizes]
    new: list[Any] = [None] * len(sizes)
    events: list[tuple[str, int]] = []

    def check_room() -> None:
        """What was fetched, and is not yet on the host again."""
        fetched = [j for kind, j in events if kind == "fetch"]
        there = [j for j in fetched if new[j] is None or not new[j].is_ready()]
        assert sum(sizes[j] for j in there) <= room
        alive = [x for x in jax.live_arrays() if x.dtype == mine]
        assert sum(x.size for x in alive if x.sharding.memory_kind == "device") <= room

    def visit(i: int) -> _stream.StreamSlot:
        def fetch():
            events.append(("fetch", i))
            arrays = [jax.device_put(leaves[i], sharding)]
            check_room()
            return arrays

        def update(arrays):
            events.append(("update", i))
            check_room()
            new[i] = jax.device_put(jax.jit(lambda x: x + 1, donate_argnums=0)(arrays.pop()), host)
            return [new[i]]

        def over():
            assert new[i].is_ready()
            ended.append(i)

        return _stream.StreamSlot(sizes[i], fetch, update, over)

    ended: list[int] = []
    _stream.stream(map(visit, range(len(sizes))), room)
    assert ended == [*range(len(sizes))]
    for x, n in zip(new, sizes, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.full(n, n + 1, mine))
    # Copies start before the update before, if there is room for both.
    for i in range(len(sizes) - 1):
        ahead = events.index(("fetch", i + 1)) < events.index(("update", i))
        assert ahead == (sizes[i] + sizes[i + 1] <= room)


@pytest.mark.parametrize("under_way", [None, 0, 1])
def test_stream_waits_for_what_is_under_way(under_way, monkeypatch):
    """Before a visit fetches, all but the one before and so many more are over, whatever room there is."""
    over: set[int] = set()
    waited: list[int] = []
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: over.update(jax.tree.leaves(tree)))

    def visit(i: int) -> _stream.StreamSlot:
        def fetch():
            waited.append(len(over))

        def update(_: Any) -> Any:
            return [i]

        return _stream.StreamSlot(1, fetch, update)

    _stream.stream(map(visit, range(8)), 2**20, under_way)
    late = 8 if under_way is None else under_way + 1
    assert waited == [max(i - late, 0) for i in range(8)]
    assert over == set(range(8))
