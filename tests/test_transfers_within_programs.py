"""Slices that iterations of a loop fetch within their programs, for the next one or the one after it."""

import numpy as np
import pytest

import jzero
import small
import test_offload_params as params
import zoo
from jzero._memory_kinds import PINNED
from jzero.offload import _layer_programs
from jzero.offload._layer_schedule import ITERATION
from jzero.offload.execute._executor import Executable, Execution, Section
from jzero.offload.schedule import _folds
from jzero.offload.schedule._ops import Fetch, Loop, Run, Send, Slice, Value, flat
from jzero.offload.schedule._schedule import Schedule

ITERATIONS = 4


def value(name, what="parameter"):
    return Value(what, name, ITERATIONS, 4 * ITERATIONS)


class Layers:
    """A loop whose iterations add a slice of `w` to a carry, and a list of what programs did.

    If it `stores`, each iteration also makes a slice of `g`, which is 1 more than its slice of `w`.
    """

    def __init__(self, ahead, reverse=False, kept=False, stores=False):
        self.w, self.g, self.carry, self.did = (
            value("w"),
            value("g", "gradient"),
            value("c", "carry"),
            [],
        )
        self.ahead, self.reverse = ahead, reverse
        taken = [Slice(self.w, self.ahead - 1)]
        taken += [Slice(self.w)] if kept and ahead == 2 else []
        gives = (self.carry, *([Slice(self.g)] if stores else []))
        transfers = (self.fetch(ahead), *([self.send()] if stores else []))
        self.iteration = Run(
            "iteration", (self.carry, *taken), gives, self._iteration, transfers=transfers
        )
        self.first = tuple(self.fetch(i + 1) for i in range(ahead))
        last = (self.send(),) if stores else ()
        self.loop = Loop(
            (self.iteration,), ITERATIONS, "", first=self.first, last=last, reverse=reverse
        )

    def fetch(self, ahead, nbytes=4):
        return Fetch((Slice(self.w, ahead),), PINNED, (), self._fetched, nbytes)

    def send(self):
        return Send((Slice(self.g, -1),), PINNED, (), self._sent)

    def _fetched(self, stacks, place):
        self.did.append(("fetch", place))
        return [stacks[0][place]]

    def _sent(self, stacks, new, place):
        self.did.append(("store", place, float(*new)))
        stack = stacks[0] if stacks else np.zeros(ITERATIONS)
        return [self._stored(stack, new[0], place)], []

    def _stored(self, stack, new, place):
        stack = stack.copy()
        stack[place] = new
        return stack

    def _iteration(self, arrays, place):
        step, num = -1 if self.reverse else 1, len(self.iteration.transfers)
        own, (hosted, slices, renewed) = (
            arrays[: -2 * num + 1],
            [*arrays[-2 * num + 1 :], [], []][:3],
        )
        carry, *mine = own
        self.did.append(("iteration", place, [float(x) for x in mine], bool(hosted)))
        made = [carry + sum(mine), *([10 * place + 1] if num > 1 else [])]
        made += [x[place + step * self.ahead] for x in hosted]
        if slices:
            stack = renewed[0] if renewed else np.zeros(ITERATIONS)
            made.append(self._stored(stack, slices[0], place - step))
        return made, []

    def run(self, device_bytes):
        program = Executable((self.loop,), (self.carry,), (self.g,) if self.loop.last else ())
        stack = 10.0 * np.arange(ITERATIONS)
        run = Execution(program, {self.carry: np.zeros(())}, {self.w: stack})
        run.run(Section(program.ops, device_bytes))
        return run


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "backward"])
def test_each_iteration_takes_its_slice_and_fetches_the_next_ones(reverse):
    layers = Layers(1, reverse)
    run = layers.run(8)
    order = [*range(ITERATIONS)][:: -1 if reverse else 1]
    iterations = [("iteration", place, [10.0 * place], place != order[-1]) for place in order]
    assert layers.did == [("fetch", order[0]), *iterations]
    assert run.here[layers.carry] == 60


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "backward"])
def test_iterations_that_take_what_the_next_one_reads_fetch_for_the_one_after_it(reverse):
    layers = Layers(2, reverse, kept=True)
    layers.run(8)
    order = [*range(ITERATIONS)][:: -1 if reverse else 1]
    iterations = [
        ("iteration", place, [10.0 * x for x in (*order[i + 1 : i + 2], place)], i + 2 < ITERATIONS)
        for i, place in enumerate(order)
    ]
    assert layers.did == [("fetch", order[0]), ("fetch", order[1]), *iterations]


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("ahead", [1, 2])
def test_each_iteration_stores_what_the_one_before_it_has_made(ahead, reverse):
    layers = Layers(ahead, reverse, stores=True)
    run = layers.run(12)
    last = 0 if reverse else ITERATIONS - 1
    assert [x for x in layers.did if x[0] == "store"] == [("store", last, 10 * last + 1)]
    assert layers.did[-1][0] == "store"
    assert list(run.there) == [layers.g]
    assert [*run.there[layers.g]] == [1, 11, 21, 31]
    assert {*run.here} == {layers.carry}


@pytest.mark.parametrize("num", [2, 3])
@pytest.mark.parametrize("ahead", [1, 2])
def test_copies_begin_when_there_is_room_for_them(ahead, num):
    """From when its copy begins until the iteration is over that it is for, a slice is on the device."""
    layers, over, most = Layers(ahead), [], []

    class Waited:
        def block_until_ready(self):
            over.append(self)
            return self

    own = layers._iteration

    def call(arrays, place):
        made, _ = own(arrays, place)
        begun = sum(did[0] == "fetch" or did[-1] for did in layers.did)
        most.append(begun - len(over))
        return made, [Waited()]

    object.__setattr__(layers.iteration, "call", call)
    layers.run(num * 4)
    # Of iterations that take the slice of the next one, what that became of this iteration's has its room.
    assert max(most) == num + ahead - 1


def test_bytes_and_lines_are_those_of_a_fetch_by_itself():
    layers = Layers(2)
    apart = Loop((layers.fetch(0), Run("iteration")), ITERATIONS, "")
    found = [[*_folds.transfers(Schedule((loop,)))] for loop in (layers.loop, apart)]
    assert found[0] == found[1]
    assert str(Schedule((layers.loop,))).splitlines() == [
        "operation  what                            each device  link",
        "loop       4 iterations",
        "  run      iteration",
        "    fetch  1 x parameter, a slice of each          4 B  pinned_host -> device",
    ]


def riding(train_step, state):
    schedule = train_step.describe(state, params.batch(0)).schedule
    runs = [op for op, _ in flat(schedule.ops) if isinstance(op, Run) and op.program == ITERATION]
    return [
        [ref.ahead for op in run.transfers for ref in op.refs[:1] if isinstance(ref, Slice)]
        for run in runs
    ]


@pytest.mark.slow(but=["8"])
@pytest.mark.parametrize("num", [1, 8])
def test_iterations_fetch_where_two_have_room(num):
    """For the iteration after the next one where they gather for that; one device gathers nothing."""
    axes = {"data": num}
    train_step, state = params.sharded(True, params.CLIPPED, axes=axes)
    room = 2 * params.loops_of(train_step, state, params.batch(0))[0].nbytes
    ahead = 1 if num == 1 else 2
    for device_bytes, expected in [(room, [[ahead], [ahead, -1]]), (room - 1, [[], []])]:
        train_step, state = params.check(True, axes=axes, device_bytes=device_bytes)
        assert riding(train_step, state) == expected


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_loops_of_few_iterations(layers):
    train_step, state = params.sharded(True, params.CLIPPED, layers=layers)
    for i, expected in enumerate(params.one_device(True, True, layers)):
        state, metrics = train_step(state, params.batch(i))
        found = zoo.to_host((state, metrics))
        zoo.assert_trees_close(found, expected, zoo.FP32, f"step {i}")


def test_a_gpu_gets_options_and_a_trace_does_not(monkeypatch):
    """JAX refuses options of a program within a trace; XLA for CPUs takes those for GPUs."""
    assert not _layer_programs.options_of(_layer_programs.ITERATION, small.mesh(data=8))
    monkeypatch.setattr(_layer_programs, "platform_of", lambda mesh: "gpu")
    assert _layer_programs.options_of(_layer_programs.ITERATION, None)
    assert not _layer_programs.options_of("iteration", None)
    train_step, state = params.check(True, offload=jzero.HostCPU())
    found = params.gathers_started(train_step, state, params.batch(0))
    assert found
