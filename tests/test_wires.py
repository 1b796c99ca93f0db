"""Whether codes on the wire pay: the verdict's arithmetic, by hand, and of a step that is compiled."""

import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import gpu_compiler
import jzero
from jzero._quantities import parse_bandwidth, readable_bits
from jzero.preflight import _hlo, _kernels
from jzero.preflight._schedule import CompiledSchedule, read_schedule
from jzero.preflight._targets import with_bandwidth
from jzero.preflight._wires import Wire, WireTime, WireVerdict, check_wire, formats, rates_of
from jzero.targets._target import Topology, find_target
from small import grouped

H200 = find_target("test", "h200")
PREFLIGHT: Any = jzero.preflight
TWO_NODES, MESH = Topology(2, 8), {"node": 2, "local": 8}
# An eighth of a Gb/s and so on, so that the seconds of a byte are 8e-9, 4e-9, ...: 1, 2, 4 and 8 Gb/s.
RATES = tuple(n * 10**9 // 8 for n in (1, 2, 4, 8))


def verdict(exact, coded, asked=0, coding=0.0):
    nbytes = int(coding * H200.memory_bandwidth)
    schedules = [
        tuple(schedule(s, 0.0, 0) for s in exact),
        tuple(schedule(s, coding, nbytes) for s in coded),
    ]
    int8 = formats(MESH, H200, TWO_NODES, MESH)[0]
    times = [
        WireTime(wire, 0, found, schedules[0][0])
        for wire, found in zip([Wire("exact", {}), int8], schedules, strict=True)
    ]
    return WireVerdict(RATES, asked, "the network", tuple(times))


def schedule(exposed, computing, nbytes):
    """Of a step that waits so long for collectives, and computes so long."""
    times = (exposed + computing, computing, 0.0, exposed, 0.0, exposed, 0.0, 0.0)
    return CompiledSchedule((), *times, nbytes)


def test_codes_pay_up_to_the_speed_at_which_their_arithmetic_takes_what_they_save():
    """Exact wires take 8 s at 1 Gb/s; codes a half, and 1 s of arithmetic: at 4 Gb/s both take 2."""
    exact = [8.0, 4.0, 2.0, 1.0]
    found = verdict(exact, [s / 2 for s in exact], coding=1.0)
    _, coded = found.times
    assert coded.seconds == pytest.approx([5.0, 3.0, 2.0, 1.5])
    assert found.pays_below(coded) == pytest.approx(4e9 / 8)
    assert [dataclasses.replace(found, asked=i).pays for i in range(4)] == [
        True,
        True,
        False,
        False,
    ]
    found = verdict(exact, [s / 2 for s in exact], coding=0.4)
    assert found.pays_below(found.times[1]) == math.inf
    # Even between columns: 8/x = 4/x + 4/3, so that x is 3 Gb/s.
    found = verdict(exact, [s / 2 for s in exact], coding=4 / 3)
    assert found.pays_below(found.times[1]) == pytest.approx(3e9 / 8)


def test_what_the_verdict_says():
    exact = [8.0, 4.0, 2.0, 1.0]
    half = [s / 2 for s in exact]
    text = " ".join(str(verdict(exact, half, 0, 1.0)).split())
    assert (
        "At 1 Gb/s of the network for each device quantization pays: the fastest format takes 5000.0"
        in text
    )
    assert (
        "where exact communication takes 8000.0 ms. Write comm=jzero.Comm(gather_dtype=jnp.int8)."
        in text
    )
    assert "comm=jzero.Comm(gather_dtype=jnp.int8) pays below 4 Gb/s." in text
    assert "to which quantization adds 1000.0 ms for 4.4 TiB of memory traffic" in text
    text = " ".join(str(verdict(exact, half, 3, 1.0)).split())
    assert (
        "pay: exact communication takes 1000.0 ms, and the fastest quantized format 1500.0 ms"
        in text
    )
    assert "pays at all of these speeds" in str(verdict(exact, half))
    assert "pays at none of these speeds" in str(verdict(exact, exact, coding=1.0))
    assert max(map(len, verdict(exact, half).lines())) <= 80
    found = verdict(exact, half, 1, 1.0).to_dict()
    assert json.loads(json.dumps(found)) == found
    assert (found["pays"], found["cheapest"], found["rate"]) == (True, "int8 gathers", RATES[1])
    assert found["wires"][1]["seconds"] == pytest.approx([5.0, 3.0, 2.0, 1.5])
    assert found["wires"][1]["pays_below"] == pytest.approx(4e9 / 8)


def test_formats_by_where_axes_lie():
    names = [wire.written for wire in formats(MESH, H200, TWO_NODES, MESH)]
    rotated = "jzero.Blocks(jnp.int4, rotate=True)"
    assert names == [
        "comm=jzero.Comm(gather_dtype=jnp.int8)",
        "comm=jzero.Comm(gather_dtype=jnp.int8, reduce_dtype=jnp.int8)",
        "comm=jzero.Comm(gather_dtype=jnp.int8, reduce_dtype="
        f"{{'node': {rotated}, 'local': jnp.int8}})",
    ]
    data = {"data": 16}
    assert formats(data, H200, TWO_NODES, data)[-1].written.endswith(f"reduce_dtype={rotated})")
    assert len(formats({"local": 8}, H200, Topology(1, 8), {"local": 8})) == 2
    assert rates_of(H200, TWO_NODES) == tuple(
        int(x * 1e9 / 8) for x in (12.5, 25, 50, 100, 200, 400)
    )
    assert rates_of(H200, Topology(1, 8)) == (int(H200.domains[0].bandwidth),)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("100Gb/s", 12_500_000_000), ("12.5 Gbit/s", 1_562_500_000), ("450GB/s", 450 * 10**9),
     (10**9, 10**9), ("100Gb", None), ("0Gb/s", None), ("-1Gb/s", None), (0, None), (-5, None),
     ("fast", None)],
)  # fmt: skip
def test_bandwidths_in_bits_and_in_bytes(value, expected):
    assert parse_bandwidth(value) == expected
    if isinstance(value, str) and expected and "b" in value:
        assert parse_bandwidth(readable_bits(expected).replace(" ", "")) == expected


def test_bandwidths_are_those_of_links_and_of_the_network():
    found = with_bandwidth("test", H200, TWO_NODES, MESH, {"node": "100Gb/s", "local": "200GB/s"})
    assert [links.bandwidth for links in found.domains] == [200e9, 12.5e9]
    # Neighbours along the first axis are four devices apart, and so are hosts; of the second, on one host.
    axes = {"data": 2, "model": 8}
    found = with_bandwidth("test", H200, TWO_NODES, axes, {"model": 10**9})
    assert [links.bandwidth for links in found.domains] == [10**9, H200.domains[1].bandwidth]
    assert with_bandwidth("test", H200, TWO_NODES, MESH, None) is H200


@pytest.mark.parametrize(
    ("bandwidth", "error", "text"),
    [
        ("100Gb/s", jzero.OptionError, "bandwidth='100Gb/s'. It has a rate for each .*{'pod': '100Gb"),
        ({"nodes": "1Gb/s"}, jzero.MeshError, r"has \['nodes'\], and the mesh's axes are \('pod', 'no"),
        ({"node": "0Gb/s"}, jzero.OptionError, r"bandwidth\['node'\] is '0Gb/s'. .* above 0, in bytes"),
        ({"node": -1}, jzero.OptionError, r"bandwidth\['node'\] is -1"),
        ({"node": "fast", "pod": 0}, jzero.OptionError, "2 rates fail"),
        ({"node": "1Gb/s", "pod": "2Gb/s"}, jzero.OptionError, "another axis over the network has 125 MB/s"),
    ],
)  # fmt: skip
def test_bandwidths_that_are_none(bandwidth, error, text):
    with pytest.raises(error, match=text):
        with_bandwidth("t", H200, Topology(4, 4), {"pod": 2, "node": 2, "local": 4}, bandwidth)


PROGRAM = """\
%fused_slice (p0: f32[8,1024], p1: s32[]) -> f32[1,1024] {
  %p0 = f32[8,1024]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %same = f32[8,1024]{1,0} bitcast(%p0)
  ROOT %slice = f32[1,1024]{1,0} dynamic-slice(%same, %p1, %p1), dynamic_slice_sizes={1,1024}
}

%fused_update (p0.1: f32[8,1024], p1.1: f32[1,1024], p2.1: s32[]) -> f32[8,1024] {
  %p0.1 = f32[8,1024]{1,0} parameter(0)
  %p1.1 = f32[1,1024]{1,0} parameter(1)
  %p2.1 = s32[] parameter(2)
  ROOT %update = f32[8,1024]{1,0} dynamic-update-slice(%p0.1, %p1.1, %p2.1, %p2.1)
}

%body (arg: (s32[], f32[8,1024])) -> (s32[], f32[8,1024]) {
  %arg = (s32[], f32[8,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = f32[8,1024]{1,0} get-tuple-element(%arg), index=1
  %row = f32[1,1024]{1,0} fusion(%x, %i), kind=kLoop, calls=%fused_slice
  %new = f32[8,1024]{1,0} fusion(%x, %row, %i), kind=kLoop, calls=%fused_update
  ROOT %out = (s32[], f32[8,1024]{1,0}) tuple(%i, %new)
}

ENTRY %main (x.1: f32[8,1024]) -> u8[8192] {
  %x.1 = f32[8,1024]{1,0} parameter(0)
  %start = s32[] constant(0)
  %state = (s32[], f32[8,1024]{1,0}) tuple(%start, %x.1)
  %loop = (s32[], f32[8,1024]{1,0}) while(%state), body=%body, backend_config={"known_trip_count":{"n":"8"}}
  %last = f32[8,1024]{1,0} get-tuple-element(%loop), index=1
  ROOT %codes = u8[8192]{0} convert(%last)
}
"""


def test_bytes_of_kernels_are_those_of_what_they_read_and_write():
    """Slices of a buffer, not all of it: a loop that reads and writes a row a turn moves each row twice."""
    row, whole = 4 * 1024, 4 * 8 * 1024
    found = read_schedule(PROGRAM, {"data": 1}, H200, Topology(1, 1))
    turn = (row + 4 + row) + (row + 4 + row)  # both kernels read the number of the turn
    assert found.kernel_bytes == 8 * turn + whole + 8192
    computations, entry = _hlo.parse(PROGRAM)
    shapes = {line.name: line.shape for line in computations[entry]}
    nothing = [
        x for x in computations[entry] if x.op in ("parameter", "tuple", "while", "constant")
    ]
    assert not any(any(_kernels.work_of(x, shapes, computations)) for x in nothing)


def step(state, x):
    params, opt_state = state

    def loss_fn(params):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jnp.mean(jax.lax.scan(layer, x, params)[0].astype(jnp.float32) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


TX, DIM, NUM_LAYERS = jzero.master_weights(optax.adamw(1e-3)), 1024, 4


def test_of_a_step_that_is_compiled():
    """Less crosses in codes, so they gain more the slower the network is."""
    gpu_compiler.skip_without_it()
    params = jax.ShapeDtypeStruct((NUM_LAYERS, DIM, DIM), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((16 * 16, DIM), jnp.bfloat16)
    state = params, jax.eval_shape(TX.init, params)

    found = jzero.preflight(
        jzero.shard_train_step(step), state, x, topology="2x8", axes=MESH,
        bandwidth={"node": "10Gb/s"}, search_wire=True,
    )  # fmt: skip
    wires: Any = found.wires
    assert wires.rates[wires.asked] == 10**10 // 8
    assert found.target.domains[1].bandwidth == 10**10 // 8
    assert wires.times[0].exposed[wires.asked] == found.schedule.exposed_seconds
    exact, *coded = wires.times
    assert (exact.coding, exact.kernel_bytes, len(coded)) == (0, 0, 3)
    for time in wires.times:
        assert list(time.exposed) == sorted(time.exposed, reverse=True)
    for time in coded:
        # Less may be read and written than of exact weights: what is gathered ahead are codes.
        seconds = time.kernel_bytes / found.target.memory_bandwidth
        assert time.coding == pytest.approx(seconds, rel=0.01) or time.coding > seconds
        gains = [x - y for x, y in zip(exact.seconds, time.seconds, strict=True)]
        assert gains == sorted(gains, reverse=True)
        assert gains[0] > 0
    assert coded[1].coding < coded[2].coding  # which rotates
    assert "At 10 Gb/s of the network for each device quantization pays" in " ".join(
        str(found).split()
    )
    assert found.to_dict()["wires"] == wires.to_dict()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gather_dtype": jnp.int8, "reduce_dtype": jnp.int8},
         "search_wire=True, and the step has gather_dtype=int8 in blocks of 256 and reduce_dtype=int8 in "
         "blocks of 256. Quantized formats are compared .* Drop gather_dtype and reduce_dtype from the step"),
        ({"stage": 0}, "search_wire=True and stage=0. At stage 0 nothing is sent quantized"),
    ],
)  # fmt: skip
def test_steps_whose_wires_cannot_be_compared(options, text):
    with pytest.raises(jzero.OptionError, match=text):
        check_wire(
            "preflight", jzero.shard_train_step(step, **grouped(**options))._programs.options
        )


@pytest.mark.parametrize("option", ["search_wire", "search_batch"])
def test_a_program_that_is_lowered_already_is_not_compiled_in_another_form(option):
    lowered, options = jax.jit(jnp.sin).lower(1.0), {option: True}
    with pytest.raises(
        jzero.OptionError, match=f"{option}=True, and a lowered program. A search compiles"
    ):
        PREFLIGHT(lowered, **options)
