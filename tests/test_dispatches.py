"""What a step of several programs starts, read from its trace: programs, places, and what is alive when."""

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jzero
import small
import test_offload_params as params
from jzero.offload.execute import _stream
from jzero.preflight import _dispatches, _examined
from jzero.preflight._dispatches import ProgramMemory
from jzero.segments import _programs

BATCH = jax.ShapeDtypeStruct((params.ROWS, params.WIDTH), jnp.float32)
LAYERS = 6
OFFLOAD: dict[str, dict[str, Any]] = {
    "parameters, updated on the host": {
        "offload_params": jzero.PinnedHost(device_bytes=10_000), "offload": jzero.HostCPU(),
    },
    "parameters, updated on the devices": {
        "offload_params": jzero.PinnedHost(device_bytes=10_000), "offload": jzero.NoOffload(),
    },
    "parameters, updated in slices": {
        "offload_params": jzero.PinnedHost(device_bytes=10_000),
        "offload": jzero.PinnedHost(device_bytes=800),
    },
    "optimizer state, updated in buckets": {"offload": jzero.PinnedHost(device_bytes=3000)},
    "optimizer state, updated on the host": {"offload": jzero.HostCPU()},
}  # fmt: skip


def dispatches(scan, name, num=8, layers=LAYERS):
    train_step = small.shard_train_step(params.make_step(scan, params.CLIPPED), **OFFLOAD[name])
    state = jax.eval_shape(lambda: params.new_state(scan, layers, params.CLIPPED))
    return started_by(train_step, state, num)


def started_by(train_step, state, num=8):
    """What a step starts, on an abstract mesh."""
    train_step = train_step.on_mesh(small.auto_mesh(data=num).abstract_mesh)
    call = train_step._programs.bind((state, BATCH), {})
    program = train_step._programs.of(call)
    state, arrays = _programs.stored_inputs(call, program)
    traced = program.step.dispatched(state, arrays)
    return _dispatches.read_dispatches(traced, [*state, *arrays])


def without_temporaries(found):
    """Memory of programs that need none but for arguments and results that outlive them."""
    nothing = ProgramMemory(0, 0, 0)
    return dict.fromkeys(found.programs, (nothing, nothing))


@pytest.mark.slow(but=["parameters, updated in slices"])
@pytest.mark.parametrize("name", OFFLOAD)
def test_every_program_that_a_step_starts_compiles(name):
    found = dispatches(True, name)
    assert sum(found.programs.values()) == sum(step.program is not None for step in found.steps)
    for part in found.programs:
        here, _ = ProgramMemory.of(part.lower(small.auto_mesh(data=8)).compile())
        args = [_dispatches.held_bytes(part.args, kind) for kind in ("device", "pinned_host")]
        # On CPUs both are one memory; XLA leaves out what a program does not read, an int32 or two.
        assert 0 <= sum(args) - here.arguments <= 64


def test_the_programs_of_a_scanned_step():
    found = dispatches(True, "parameters, updated on the host")
    counts = collections.Counter[str]()
    for part, times in found.programs.items():
        counts[part.name] += times
    # A forward and a backward loop: the head and its derivative stand between them, the norm behind.
    # Iterations fetch for the iteration after the next one, of which the last two have none. Gradients go to
    # the host slice by slice, since updates begin with them, as if the step did not clip.
    assert counts == {
        "fetch": 4, "enter": 2, "gather": 2, "iteration_beside_copies": 2 * (LAYERS - 2), "iteration": 4,
        "stretch": 2,
    }  # fmt: skip
    kinds = {
        part.name: {x.sharding.memory_kind for x in part.args if len(x.shape) > 1}
        for part in found.programs
    }
    assert kinds["iteration"] == {"device"}
    assert kinds["iteration_beside_copies"] == {"device", "pinned_host"}
    assert kinds["fetch"] == {"pinned_host"}


@functools.cache
def measured(scan, name):
    """The most bytes of arrays on the devices, and in pinned memory, between any two programs of a step."""
    most, stream = {"device": 0, "pinned_host": 0}, _stream.stream

    def look():
        for kind in most:
            live = [x for x in jax.live_arrays() if x.sharding.memory_kind == kind]
            most[kind] = max(most[kind], sum(x.nbytes for x in live) - before[kind])

    def watched(visits, *limits):
        def looked_at(visit):
            def update(arrays):
                look()
                waits = visit.update(arrays)
                jax.block_until_ready(waits)
                look()
                return waits

            return visit._replace(update=update)

        stream(map(looked_at, visits), *limits)

    train_step = small.shard_train_step(
        params.make_step(scan, params.CLIPPED),
        mesh=small.auto_mesh(data=1),
        **OFFLOAD[name],
    )
    state = train_step.init(lambda: params.new_state(scan, LAYERS, params.CLIPPED))
    batch = params.batch(0)
    state, _ = train_step(state, batch)
    batch = params.batch(1)
    mine = {id(x) for x in [*jax.tree.leaves(state), batch] if isinstance(x, jax.Array)}
    others = [x for x in jax.live_arrays() if id(x) not in mine]
    before = {
        kind: sum(x.nbytes for x in others if x.sharding.memory_kind == kind) for kind in most
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_stream, "stream", watched)
        train_step(state, batch)
    return most


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, False], ids=("scanned", "unrolled"))
def test_what_is_alive_is_what_a_run_has_alive(scan):
    """To a layer's input or two: a run is looked at between iterations, and not at each copy."""
    name = "parameters, updated on the host"
    found = dispatches(scan, name, num=1)
    moments = _dispatches.moments(found, without_temporaries(found))
    told = max(moment.nbytes for moment in moments)
    most = measured(scan, name)
    inputs = params.ROWS * params.WIDTH * 4
    assert abs(told - most["device"]) <= 2 * inputs, (told, most)


def test_depth_costs_the_layers_inputs():
    """Bytes alive between programs, by the trace alone: what a layer hands to the backward pass."""

    def told(layers):
        found = dispatches(True, "parameters, updated on the host", layers=layers)
        return max(m.nbytes for m in _dispatches.moments(found, without_temporaries(found)))

    inputs = params.ROWS // 8 * params.WIDTH * 4
    place = 4  # of an iteration in its stacks, an int32
    assert told(12) - told(6) == 6 * (inputs + place)


PROGRAM = """
%copies (p: f32[4,8], i: s32[]) -> f32[1,8] {{
  %p = f32[4,8]{{1,0:S(5)}} parameter(0)
  %i = s32[] parameter(1)
  ROOT %slice = f32[1,8]{{1,0}} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={{1,8}}
}}

ENTRY %main (x: f32[4,8], j: s32[]) -> f32[1,8] {{
  %x = f32[4,8]{{1,0:S(5)}} parameter(0)
  %j = s32[] parameter(1)
  %start = ((f32[4,8]{{1,0:S(5)}}, s32[]), f32[1,8]{{1,0}}, u32[]) fusion-start(%x, %j), calls=%copies
  %done = f32[1,8]{{1,0}} fusion-done(%start)
  {line}
}}
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("ROOT %sum = f32[1,8]{1,0} add(%done, %done)", ()),
        ("ROOT %sum = f32[4,8]{1,0} add(%x, %x)", ("add",)),
        ("ROOT %new = f32[4,8]{1,0:S(5)} negate(%done)", ("negate",)),
        ('ROOT %new = f32[4,8]{1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"', ()),
        ('ROOT %y = f32[1,8]{1,0} call(%done), frontend_attributes={_xla_compute_type="host"}', ("call",)),
    ],
)  # fmt: skip
def test_what_computes_on_pinned_memory_is_found(line, found):
    assert _examined.host_operations(PROGRAM.format(line=line)) == found
