"""Updates that begin before the norm is known: the same bits as if they had waited, whatever a clip does."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
import zoo
from jzero.offload._assumptions import Assumption, History
from jzero.offload._host_updates import HostUpdates
from jzero.offload._memory_run import MemoryRun
from jzero.offload.execute._executor import Execution
from jzero.offload.kernels import _machine
from jzero.offload.kernels._host_update import HostUpdate
from test_early_updates import check_lost, early, failing_at, log, sharded, updates_of  # noqa: F401
from test_offload_params import batch, new_state

LAYERS = 4
LIMIT = 1.0
ADAM = optax.adamw(1e-3, weight_decay=0.1)


def clipped(tx):
    return optax.chain(optax.clip_by_global_norm(LIMIT), tx)


def skips_bad_steps(tx):
    """A step whose gradients are not finite leaves the state as it is."""

    def update(grads, state, params):
        updates, new = tx.update(grads, state, params)
        norm = optax.tree.norm(grads)
        good = jnp.isfinite(norm)

        def keep(new, old):
            return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)

        return keep(updates, jax.tree.map(jnp.zeros_like, updates)), keep(new, state)

    return optax.GradientTransformationExtraArgs(tx.init, lambda g, s, p=None, **_: update(g, s, p))


def multiplied(tx):
    def update(grads, state, params=None):
        scale = jnp.minimum(1.0, LIMIT / optax.tree.norm(grads))
        return tx.update(jax.tree.map(lambda g: g * scale, grads), state, params)

    return optax.GradientTransformation(tx.init, update)


CLIPPED = {
    "adamw": clipped(ADAM),
    "lion": clipped(optax.lion(optax.cosine_decay_schedule(1e-2, 10))),
    "masters": jzero.master_weights(clipped(ADAM)),
    "skips": skips_bad_steps(ADAM),
    "clips and skips": skips_bad_steps(clipped(ADAM)),
}
OPTIMIZERS = {**CLIPPED, "multiplied": multiplied(ADAM)}
# Of each step: small gradients, ones that are clipped, none at all, ones that are not finite.
SMALL, LARGE, ZERO, BAD = 0.02, 50.0, 0.0, math.inf
PATTERNS = {
    "random": [SMALL, SMALL, LARGE, LARGE, SMALL, SMALL, SMALL, LARGE, SMALL],
    "not finite": [SMALL, SMALL, BAD, SMALL, SMALL],
    # By a norm of zero, which nobody chooses, no kernel divides as by others.
    "no gradients": [SMALL, SMALL, ZERO, ZERO, SMALL, SMALL],
}


class Seen:
    """Of each step: how many updates have begun when the backward pass ends, and how many are undone."""

    def __init__(self, monkeypatch):
        self.steps: list[list[int]] = []
        start, finish, restore = HostUpdate.start, MemoryRun.finish, MemoryRun._restore
        begun = 0

        def counted(*args):
            nonlocal begun
            begun += 1
            return start(*args)

        def finished(run, reads):
            nonlocal begun
            self.steps.append([begun, 0])
            finish(run, reads)
            begun = 0

        def restored(*args):
            self.steps[-1][1] += 1
            restore(*args)

        monkeypatch.setattr(HostUpdate, "start", counted)
        monkeypatch.setattr(MemoryRun, "finish", finished)
        monkeypatch.setattr(MemoryRun, "_restore", restored)

    @property
    def begun(self):
        return [begun for begun, _ in self.steps]

    @property
    def undone(self):
        return [undone for _, undone in self.steps]


@pytest.fixture
def seen(monkeypatch):
    return Seen(monkeypatch)


@functools.cache
def step_of(scan, name, num, share, in_bfloat16, options):
    """One for all tests that ask for it: to trace and compile it is most of their time."""
    train_step, _ = sharded(scan, OPTIMIZERS[name], {"data": num}, **dict(options))
    return train_step, early(train_step, new(train_step, scan, name, in_bfloat16))


@pytest.fixture(autouse=True, scope="module")
def _forget_steps():
    yield
    step_of.cache_clear()


def new(train_step, scan, name, in_bfloat16=False):
    def init():
        params = new_state(scan, LAYERS, OPTIMIZERS[name])["params"]
        if in_bfloat16:
            params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        return {"params": params, "opt_state": OPTIMIZERS[name].init(params)}

    return train_step.init(init)


def trained(name, scales, share=1.0, *, scan=True, num=2, in_bfloat16=False, **options):
    """The state and the metrics of every step, and the plan of its updates.

    `share` of the old values may be kept, to undo updates: with 0 all updates wait.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostUpdates, "old_share", share)
        given = tuple(options.items())
        train_step, plan = step_of(scan, name, num, share, in_bfloat16, given)
        state, found = new(train_step, scan, name, in_bfloat16), []
        # It has seen no other state.
        program_of(train_step, state).updates.history = History()
        for i, scale in enumerate(scales):
            state, metrics = train_step(state, batch(i) * scale)
            found.append(zoo.to_host((state, metrics)))
    return found, plan


def assert_same_bits(found, expected, where=""):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.tobytes() == b.tobytes(), where


def check_same_bits(seen, name, scales, **options):
    """As with updates that wait for all that they read; and some do not wait, and are undone."""
    expected, plan = trained(name, scales, 0, **options)
    assert not plan.buckets
    assert not seen.steps
    found, plan = trained(name, scales, **options)
    assert all(bucket.assumption for bucket in plan.buckets)
    for i, pair in enumerate(zip(found, expected, strict=True)):
        assert_same_bits(*pair, f"step {i}")
    begin, undone = expected_to_begin(name, scales)
    assert [num > 0 for num in seen.begun] == begin
    assert seen.undone == [num * bad for num, bad in zip(seen.begun, undone, strict=True)]


def expected_to_begin(name, scales):
    """In which steps updates begin early, and in which they are undone."""
    if name == "skips":  # Of a norm they read nothing but whether it is finite: it decides all.
        decided = [math.isfinite(scale) for scale in scales]
        begin = [False] + [True] * (len(scales) - 1)
    else:
        decided = [scale == SMALL for scale in scales]
        begin, bad = [False, *decided[:-1]], scales.index(BAD) if BAD in scales else len(scales)
        if "skips" not in name:  # From then on the norm is not finite: the same in each step.
            decided[bad:] = [False] * (len(scales) - bad)
            begin[bad + 1 :] = [i > bad + 1 for i in range(bad + 1, len(scales))]
    changes = [a != b for a, b in itertools.pairwise(decided)]
    return begin, [False, *(a and b for a, b in zip(begin[1:], changes, strict=True))]


@pytest.mark.slow(
    but=["not finite-clips and skips", "no gradients-adamw", "random-masters", "random-skips"]
)
@pytest.mark.parametrize("name", CLIPPED)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_same_bits(name, pattern, seen):
    check_same_bits(seen, name, PATTERNS[pattern])


@pytest.mark.slow(but=[0, 2, 5])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("clips and skips", {"scan": False, "num": 4}),
        ("adamw", {"num": 1}),
        ("masters", {"num": 4, "in_bfloat16": True}),
        ("adamw", {"accumulate": 2}),
        ("adamw", {"accumulate": 2, "layer_major": True}),
        ("masters", {"scan": False, "accumulate": 2, "layer_major": True, "in_bfloat16": True}),
    ],
    ids=str,
)
def test_other_models_have_the_same_bits(name, options, seen):
    check_same_bits(seen, name, PATTERNS["random"], **options)


@pytest.mark.slow(but=["masters"])
@pytest.mark.parametrize("name", ["adamw", "masters"])
def test_xla_has_the_same_bits(name, seen, monkeypatch):
    """Where llvmlite is not installed, it compiles the updates."""
    monkeypatch.setattr(_machine, "llvm", lambda: None)
    step_of.cache_clear()
    check_same_bits(seen, name, [SMALL, SMALL, LARGE, SMALL, SMALL, ZERO, SMALL])
    step_of.cache_clear()


def test_they_begin_while_earlier_layers_run(log, monkeypatch):  # noqa: F811
    """As they do without a clip: the last layers' slices before the first layers run backward."""
    monkeypatch.setattr(HostUpdates, "old_share", 1.0)
    train_step, state = sharded(True, OPTIMIZERS["adamw"], {"data": 4})
    for i in range(2):
        log.clear()
        state, _ = train_step(state, batch(i) * SMALL)
    parts = [event for event in log if isinstance(event, tuple)]
    backward = parts[-2][0]
    head, *_ = updates_of(log, "'head'")
    slices = updates_of(log, "'up'")
    assert head < log.index((backward, LAYERS - 2))
    assert slices[0] < log.index((backward, 0))


def test_old_values_have_a_bound(seen):
    """What has no room waits; a report says how much there is."""
    expected, _ = trained("adamw", PATTERNS["random"], HostUpdates.old_share)
    some = seen.begun
    assert HostUpdates.old_share == 0.25
    seen.steps.clear()
    found, _ = trained("adamw", PATTERNS["random"])
    assert [x < y for x, y in zip(some, seen.begun, strict=True)] == [y > 0 for y in seen.begun]
    assert max(some) > 0
    assert_same_bits(found, expected)


def test_a_report_says_so(monkeypatch):
    tx = OPTIMIZERS["adamw"]
    train_step, state = sharded(True, tx, {"data": 2})
    step = program_of(train_step, state)
    (need,) = [need for need in step.schedule().buffers if "undone" in need.what]
    renewed = sum(step.leaves[i].nbytes_per_device for i in step.host.leaves)
    assert need.nbytes == renewed // 4
    text = " ".join(str(train_step.describe(state, batch(0))).split())
    assert "in 4 slices, if the last step did not clip" in text
    assert f"old values: {need.nbytes / 1024:.1f} KiB for each device at most" in text
    monkeypatch.setattr(HostUpdates, "old_share", 0)
    train_step, state = sharded(True, tx, {"data": 2})
    assert not program_of(train_step, state).schedule().buffers
    text = " ".join(str(train_step.describe(state, batch(0))).split())
    assert "undone" not in text
    assert "after the backward pass (they read a number that comes at its end" in text


def program_of(train_step, state):
    call = train_step._programs.bind((state, batch(0)), {})
    return train_step._programs.of(call).step


def test_a_factor_is_assumed_when_it_has_been_the_same_twice(seen):
    """A clip by `min(1, most / norm)` decides nothing: it multiplies, by 1 where it does not clip."""
    scales = [SMALL, SMALL, SMALL, LARGE, LARGE, SMALL, SMALL, SMALL]
    expected, _ = trained("multiplied", scales, 0)
    found, _ = trained("multiplied", scales)
    assert_same_bits(found, expected)
    assert [i for i, num in enumerate(seen.begun) if num] == [2, 3, 7]
    assert [i for i, num in enumerate(seen.undone) if num] == [3]


@pytest.mark.parametrize(
    ("last", "now", "holds"), [(0.0, -0.0, False), (1.0, 1.0, True), (math.nan, math.nan, True)]
)
def test_a_factor_is_the_same_in_every_bit(last, now, holds):
    """A product with a zero of the other sign has other bits, though the zeros are equal."""
    (var,) = jax.make_jaxpr(lambda x: x)(0.0).jaxpr.invars
    assumption = Assumption((var,), (), (frozenset([var]),))
    numbers = [{var: [np.array(x, np.float32)]} for x in (last, now)]
    assert assumption.holds(*numbers) == holds


# -- what a failure leaves -------------------------------------------------------------------------


def failing_call(number, call, error):
    """Raises in the call of this number, from 0, and does nothing of it."""
    calls = itertools.count()

    def failing(*args):
        if next(calls) == number:
            raise error("planted")
        return call(*args)

    return failing


FAULTS = {
    "an update that begins": ("start", 2, 3),
    "the first of what is put back": ("restore", 0, 12),
    "in the middle of what is put back": ("restore", 2, 12),
    "an update that begins again": ("start", 5, 12),
    "the last that begins again": ("start", 9, 12),
}


@pytest.mark.slow(but=[*(f"{fault}-KeyboardInterrupt" for fault in FAULTS)])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_leaves_no_half_new_state(fault, error, monkeypatch):
    """By name; and the next state that is trained has the bits of one that nothing has happened to."""
    where, number, lost = FAULTS[fault]
    scales = [SMALL, SMALL, LARGE]
    expected, _ = trained("adamw", scales)
    train_step, _ = step_of(True, "adamw", 2, 1.0, False, ())
    monkeypatch.setattr(HostUpdates, "old_share", 1.0)
    state = new(train_step, True, "adamw")
    for i, scale in enumerate(scales[:2]):
        state, _ = train_step(state, batch(i) * scale)
    before = [np.asarray(x).copy() for x in jax.tree.leaves(state)]
    with monkeypatch.context() as patch:
        of, name = (MemoryRun, "_restore") if where == "restore" else (HostUpdate, "start")
        patch.setattr(of, name, failing_call(number, getattr(of, name), error))
        with pytest.raises(error, match="planted"):
            train_step(state, batch(2) * LARGE)
    assert check_lost(train_step, state, before) >= lost
    assert_same_bits(trained("adamw", scales)[0], expected)


def test_a_layer_that_fails_after_updates_have_begun(monkeypatch):
    train_step, state = sharded(True, OPTIMIZERS["adamw"], {"data": 4})
    for i in range(2):
        state, _ = train_step(state, batch(i) * SMALL)
    before = [np.asarray(x).copy() for x in jax.tree.leaves(state)]
    with monkeypatch.context() as patch:
        patch.setattr(Execution, "_run", failing_at(0, RuntimeError))
        with pytest.raises(RuntimeError, match="planted"):
            train_step(state, batch(2) * SMALL)
    assert check_lost(train_step, state, before) >= 3


def test_states_take_buckets(monkeypatch):
    """What the last step decided may be another state's: then it is undone, and nothing else."""
    scales = SMALL, LARGE
    alone = [trained("adamw", [scale] * 4)[0][-1][0] for scale in scales]
    train_step, _ = step_of(True, "adamw", 2, 1.0, False, ())
    monkeypatch.setattr(HostUpdates, "old_share", 1.0)
    states = [new(train_step, True, "adamw") for _ in scales]
    for i, k in itertools.product(range(4), range(2)):
        states[k], _ = train_step(states[k], batch(i) * scales[k])
    assert_same_bits(zoo.to_host(states), alone)
