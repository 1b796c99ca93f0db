"""A step that moves values between memories is a list of operations, from which what it takes follows."""

import collections
import math

import jax
import jax.numpy as jnp
import optax
import pytest

import jzero
import small
import test_dispatches
import test_offload_params as params
from jzero._memory_kinds import NVME, PINNED, HostNeed
from jzero.offload.schedule import _folds
from jzero.offload.schedule._ops import (
    HANDED_ON,
    Commit,
    Fetch,
    Loop,
    Run,
    Send,
    Slice,
    Update,
    Value,
    Wait,
    flat,
)  # fmt: skip
from jzero.offload.schedule._schedule import Schedule
from jzero.preflight._dispatches import TO_HOST
from jzero.sharding.analysis import _residuals

LAYERS = test_dispatches.LAYERS
UP, DOWN = jzero.PinnedHost(device_bytes=10_000), jzero.HostCPU()


def floats(num, what=HANDED_ON):
    return Value(what, "float32", num, 4 * num)


def schedule_of(scan=True, tx=params.CLIPPED, **options):
    train_step = small.shard_train_step(params.make_step(scan, tx), **options)
    mesh = small.auto_mesh(data=8).abstract_mesh
    state = jax.eval_shape(lambda: params.new_state(scan, LAYERS, tx))
    return train_step.on_mesh(mesh).describe(state, test_dispatches.BATCH).schedule


def done(schedule, kind):
    """Each operation of a kind, how often it is done in a step, and the loops around it."""
    return [
        (op, math.prod(loop.length or 1 for loop in around), around)
        for op, around in flat(schedule.ops)
        if isinstance(op, kind)
    ]


@pytest.mark.slow(but=["optimizer state, updated in buckets-scanned"])
@pytest.mark.parametrize("scan", [True, False], ids=("scanned", "unrolled"))
@pytest.mark.parametrize("name", test_dispatches.OFFLOAD)
def test_its_programs_and_copies_are_those_that_a_step_starts(scan, name):
    """As the trace of what it dispatches says, which nobody made from the list."""
    found = test_dispatches.dispatches(scan, name)
    schedule = schedule_of(scan, **test_dispatches.OFFLOAD[name])
    started = collections.Counter(step.program.name for step in found.steps if step.program)
    runs = collections.Counter[str]()
    for op, num, _ in done(schedule, Run):
        runs[op.program] += num
    iterations = started["iteration"] + started["iteration_beside_copies"]
    assert runs["an iteration of the loop over layers"] == iterations
    assert runs["a stretch of layers"] == started["stretch"]
    # A program takes the slices of an iteration out of stacks: one by itself, or that of an iteration before
    # it.
    visits = {around[-1]: num for op, num, around in done(schedule, Fetch) if op.by}
    inside = {x for op, *_ in done(schedule, Run) for x in op.transfers}
    apart = sum(num for op, num, _ in done(schedule, Fetch) if op.by and op not in inside)
    first = [op for loop in visits for op in loop.first if isinstance(op, Fetch)]
    assert started["fetch"] == apart + len(first)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["to host", "to device"])
def test_bytes_of_iterations_are_those_of_their_copies(way):
    """Of optimizer state that visits the devices whole, where each copy is one of JAX's."""
    train_step = small.shard_train_step(
        params.make_step(True, params.CLIPPED), memory=jzero.PinnedHost()
    )
    state = jax.eval_shape(lambda: params.new_state(True, LAYERS, params.CLIPPED))
    copies = [
        x for step in test_dispatches.started_by(train_step, state).steps for x in step.copies
    ]
    copied = sum(x.nbytes for x in copies if (x.stream == TO_HOST) == (way == "to host"))
    found = _folds.transfers(schedule_of(offload=jzero.PinnedHost()))
    assert sum(x.nbytes for x in found if x.direction == way) == copied > 0


@pytest.mark.slow
def test_updates_stand_where_their_gradients_are():
    """In the backward loop, also under a clip or behind a factor of all gradients."""

    def scaled(grads, state, params=None):
        scale = jnp.minimum(1.0, 1.0 / optax.tree.norm(grads))
        return jax.tree.map(lambda g: scale * g, grads), state

    def places(tx):
        ops = schedule_of(tx=tx, offload_params=UP, offload=DOWN).ops
        loops = [op for op in ops if isinstance(op, Loop)]
        return [[type(op) for op in loop.body] for loop in loops], [type(op) for op in ops]

    (forward, backward), whole = places(optax.sgd(0.1, momentum=0.9))
    assert Update not in forward
    assert Send not in forward
    assert backward.index(Run) < backward.index(Send) < backward.index(Update)
    (_, backward), _ = places(params.CLIPPED)
    assert Update in backward
    always = optax.GradientTransformation(lambda params: optax.EmptyState(), scaled)
    (_, backward), _ = places(optax.chain(always, optax.sgd(0.1, momentum=0.9)))
    assert Update in backward
    assert whole.count(Loop) == 2


def test_activations_wait(monkeypatch):
    """Once for each microbatch, and of one at a time."""
    monkeypatch.setattr(_residuals, "LEAST_BYTES", 0)
    schedule = schedule_of(offload_activations=jzero.PinnedHost(), accumulate=2)
    waits = [op for op, *_ in done(schedule, Wait)]
    assert waits
    assert all((op.times, op.copies) == (2, 1) for op in waits)
    ways = collections.Counter(x.direction for x in _folds.transfers(schedule))
    assert ways == {"to host": len(waits), "to device": len(waits)}


def crossed(*ops):
    return [
        (x.direction, x.elements, x.loop and x.loop.num) for x in _folds.transfers(Schedule(ops))
    ]


def test_bytes_over_each_link():
    w, g, m = floats(8), floats(8, "gradient"), floats(16, "optimizer state")
    assert crossed(Fetch((w,), PINNED), Send((g,), PINNED)) == [
        ("to device", 8, None), ("to host", 8, None),
    ]  # fmt: skip
    assert crossed(Fetch((w,), NVME)) == [("from disk", 8, None), ("to device", 8, None)]
    # What waits in files is read from there; what is updated there is read and written.
    assert crossed(Send((g,), NVME), Update(NVME, (m,), (g,)), Commit(NVME)) == [
        ("to host", 8, None), ("to disk", 8, None),
        ("from disk", 16, None), ("to disk", 16, None), ("from disk", 8, None),
    ]  # fmt: skip
    assert crossed(Update("host", (m,), (g,))) == []
    assert crossed(Wait(w, 3)) == [("to host", 24, None), ("to device", 24, None)]


def test_bytes_in_loops():
    """A slice of each iteration is a part of the whole; what each iteration fetches whole crosses again."""
    w = floats(8)

    def layers(*body):
        return Loop(body, 4, "model.py:1")

    def tokens(*body, num=5):
        return Loop(body, num, "generate.py:1")

    assert crossed(layers(Fetch((Slice(w),), PINNED))) == [("to device", 8, None)]
    assert crossed(tokens(Fetch((w,), PINNED))) == [("to device", 40, 5)]
    assert crossed(tokens(layers(Fetch((Slice(w),), PINNED)))) == [("to device", 40, 5)]
    assert crossed(tokens(tokens(Fetch((w,), PINNED), num=2))) == [("to device", 80, 10)]
    ((way, num, iterations),) = crossed(tokens(tokens(Fetch((w,), PINNED)), num=None))
    assert (way, num, iterations) == ("to device", 8, None)


def test_memory_of_the_host():
    g, new, a = floats(8, "gradient"), floats(4), floats(2, "activation")
    ring = HostNeed("tiles", "host", 100)
    ops = (
        Wait(a, times=6, copies=3), Send((g,), PINNED, copies=2), Send((g,), NVME),
        Send((new,), PINNED, copies=0),
        Update("host", (), (g,), (new,), copies=2),
    )  # fmt: skip
    found = {need.what: need.nbytes for need in _folds.host_needs(Schedule(ops, (ring,)))}
    assert found == {
        "gradients and parameters on their way": 2 * 32 + 2 * 16, "activations": 3 * 8, "tiles": 100,
    }  # fmt: skip


def test_what_parts_hand_on():
    """The most at a time: from where it is made to its last reader."""
    a, b, c = floats(1), floats(10), floats(100)
    parts = (
        Run("first", (), (a, b)), Loop((), 3, "", (a,), (c,)), Run("second", (b,), ()), Run("last", (c,)),
    )  # fmt: skip
    assert _folds.handed_bytes(Schedule(parts)) == 4 * 111
    assert _folds.handed_bytes(Schedule((*parts[:2], parts[3]))) == 4 * 101
    assert _folds.handed_bytes(Schedule((Run("all", (), (a,)),))) == 0


def test_it_prints_as_a_table():
    def step(w, m, x):
        m = 0.9 * m + jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
        return w - 0.1 * m, m

    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    train_step = small.shard_train_step(step, state=(0, 1), mesh=mesh, memory=jzero.PinnedHost())
    matrix, x = jnp.ones((64, 64)), jnp.ones((16, 64))
    schedule = train_step.describe(matrix, matrix, x).schedule
    print(schedule)
    assert str(schedule).splitlines() == [
        "operation  what                    each device  link",
        "run        gradients",
        "fetch      1 x optimizer state         2.0 KiB  pinned_host -> device",
        "run        a bucket of the update",
        "send       1 x optimizer state         2.0 KiB  device -> pinned_host",
    ]
    assert repr(schedule) == "<Schedule: 4 operations; print it>"
    rows = train_step.describe(matrix, matrix, x).to_dict()["schedule"]
    assert rows[1] == {
        "operation": "fetch", "what": "1 x optimizer state", "nbytes": 2048, "link": "pinned_host -> device",
        "depth": 0,
    }  # fmt: skip


def test_a_line_has_neighbours_of_one_kind_and_a_loop_one_iteration():
    w, g, m = floats(1024, "parameter"), floats(1024, "gradient"), floats(2048, "optimizer state")
    fetch = Fetch((Slice(w),), PINNED)
    body = fetch, fetch, Run("a layer"), Send((Slice(g),), NVME)
    ops = (
        Wait(g, 2), Fetch((w,), NVME), Fetch((g,), PINNED), Fetch((w,), NVME), Loop(body, 4, "model.py:7"),
        Loop((Run("a token"),), None, ""), Update(NVME, (m, m, w), (g,)), Commit(NVME),
    )  # fmt: skip
    assert str(Schedule(ops)).splitlines() == [
        "operation  what                                each device  link",
        "wait       1 x gradient                            4.0 KiB  on the host, between the passes",
        "fetch      2 x parameter                           8.0 KiB  nvme -> device",
        "fetch      1 x gradient                            4.0 KiB  pinned_host -> device",
        "loop       4 iterations at model.py:7",
        "  fetch    2 x parameter, a slice of each          2.0 KiB  pinned_host -> device",
        "  run      a layer",
        "  send     1 x gradient, a slice of each           1.0 KiB  device -> nvme",
        "loop       a while loop",
        "  run      a token",
        "update     2 x optimizer state, 1 x parameter     20.0 KiB  on the host, in nvme",
        "commit     what was written",
    ]
