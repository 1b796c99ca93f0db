"""Steps compiled for TPUs that are not there, and what is read of their text: collectives, and no times."""

import json
from typing import Any

import jax
import pytest

import gpu_compiler
import jzero
import programs
import small
from jzero.preflight._schedule import Started, schedule_of
from jzero.preflight._targets import read_topology
from jzero.preflight._tpu_text import read_tpu_program
from jzero.targets._target import Topology, find_target

V5E = find_target("test", "tpu-v5e")

# As XLA writes it: a fusion starts the gather, another computes while it moves, a third awaits it.
PROGRAM = """\
%start_body (p0: f32[4,64]) -> (f32[4,64], f32[16,64]) {
  %p0 = f32[4,64]{1,0:T(8,128)} parameter(0)
  ROOT %all-gather.1 = f32[16,64]{1,0:T(8,128)S(1)} all-gather(%p0), channel_id=1, replica_groups=mesh['data'=4] {'data'}, dimensions={0}, frontend_attributes={chain_id="7"}
}

%middle_body (p1: f32[4,64]) -> f32[16,64] {
  %p1 = f32[4,64]{1,0:T(8,128)} parameter(0)
  ROOT %all-gather.2 = f32[16,64]{1,0:T(8,128)S(1)} all-gather(%p1), channel_id=1, replica_groups=mesh['data'=4] {'data'}, dimensions={0}, frontend_attributes={chain_id="7"}
}

%middle (p2: f32[4,64]) -> f32[16,64] {
  %p2 = f32[4,64]{1,0:T(8,128)} parameter(0)
  ROOT %inner = f32[16,64]{1,0:T(8,128)S(1)} fusion(%p2), kind=kCustom, calls=%middle_body
}

%turn (arg: (s32[], f32[32,4,64])) -> (s32[], f32[32,4,64]) {
  %arg = (s32[]{:T(128)}, f32[32,4,64]{2,1,0:T(8,128)}) parameter(0)
  %stack = f32[32,4,64]{2,1,0:T(8,128)} get-tuple-element(%arg), index=1
  %async-collective-start = (f32[4,64]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) fusion(%stack), kind=kCustom, calls=%start_body
  %busy = (f32[4,64]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) fusion(%async-collective-start), kind=kOutput, calls=%middle
  %async-collective-done = f32[16,64]{1,0:T(8,128)S(1)} fusion(%busy), kind=kCustom, calls=%middle_body
  %sum = f32[16,64]{1,0:T(8,128)S(1)} all-reduce(%async-collective-done), channel_id=2, replica_groups=mesh['data'=4] {'data'}, to_apply=%add
  ROOT %out = (s32[]{:T(128)}, f32[32,4,64]{2,1,0:T(8,128)}) tuple(%arg)
}

%condition (arg.1: (s32[], f32[32,4,64])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5), metadata={op_name="cond"}
  %arg.1 = (s32[]{:T(128)}, f32[32,4,64]{2,1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%arg.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

ENTRY %main (x: f32[32,4,64]) -> f32[32,4,64] {
  %x = f32[32,4,64]{2,1,0:T(8,128)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %carry = (s32[]{:T(128)}, f32[32,4,64]{2,1,0:T(8,128)}) tuple(%zero, %x)
  %loop = (s32[]{:T(128)}, f32[32,4,64]{2,1,0:T(8,128)}) while(%carry), condition=%condition, body=%turn
  ROOT %y = f32[32,4,64]{2,1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def schedule(text):
    program = read_tpu_program(text)
    return schedule_of([Started(program)], {"data": 4}, V5E, Topology(1, 4, "2x2"))


def test_a_collective_in_several_fusions_is_one_and_loops_are_multiplied_out():
    found = schedule(PROGRAM)
    assert [(c.op, c.axes, c.whole_bytes, c.times) for c in found.collectives] == [
        ("all-gather", ("data",), 4 * 16 * 64, 5),
        ("all-reduce", ("data",), 4 * 16 * 64, 5),
    ]
    # A line of four: three hops of a quarter each, over one link one way.
    gather, reduction = found.collectives
    assert gather.seconds == pytest.approx(3 * (1e-6 + 4 * 16 * 64 / 4 / 5e10))
    assert reduction.seconds == pytest.approx(2 * gather.seconds)


def test_a_loop_of_unknown_length_counts_once():
    text = PROGRAM.replace("constant(5)", "constant(5)\n  %other = s32[]{:T(128)} constant(6)")
    found = schedule(text)
    assert [c.times for c in found.collectives] == [1, 1]


SCATTERED = """\
%all-reduce-scatter.1 (input: f32[4096,4096]) -> f32[1040,4096] {
  %input = f32[4096,4096]{1,0:T(8,128)} parameter(0)
  %zero = f32[] constant(0)
  %pad = f32[4160,4096]{1,0:T(8,128)} pad(%input, %zero), padding=0_64x0_0
  %all-reduce.1 = f32[4160,4096]{1,0:T(8,128)} all-reduce(%pad), channel_id=2, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %slice = f32[1040,4096]{1,0:T(8,128)S(1)} dynamic-slice(%all-reduce.1, %i, %j), dynamic_slice_sizes={1040,4096}
}

ENTRY %main (x: f32[4096,4096]) -> f32[1040,4096] {
  %x = f32[4096,4096]{1,0:T(8,128)} parameter(0)
  %fusion = f32[1040,4096]{1,0:T(8,128)S(1)} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  %rest = f32[48,4096]{1,0:T(8,128)S(1)} slice(%fusion), slice={[992:1040], [0:4096]}
  %send = (f32[48,4096]{1,0:T(8,128)S(1)}, f32[48,4096]{1,0:T(8,128)S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%rest), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3}}
  ROOT %sent = f32[48,4096]{1,0:T(8,128)S(1)} collective-permute-done(%send)
}
"""  # noqa: E501


def test_a_fused_reduce_scatter_is_one_and_semaphores_are_no_bytes():
    found = schedule(SCATTERED)
    scattered, sent = found.collectives
    assert (scattered.op, scattered.axes, scattered.whole_bytes) == (
        "reduce-scatter", ("data",), 4 * 4096 * 4096,
    )  # fmt: skip
    assert (sent.op, sent.whole_bytes) == ("collective-permute", 4 * 48 * 4096)


def test_slices_have_hosts_of_four_chips():
    assert read_topology("t", V5E, "4x4") == Topology(4, 4, "4x4")
    assert read_topology("t", V5E, "2x4").num_devices == 8
    assert read_topology("t", V5E, "1x1") == Topology(1, 1, "1x1")


def totals(traffic: Any) -> dict[str, int]:
    """Bytes of gathers, and of reductions: XLA makes all-reduces of small reduce-scatters."""
    found = {"gathers": 0, "reductions": 0}
    for c in traffic:
        found["gathers" if c.op == "all-gather" else "reductions"] += c.nbytes
    return found


@pytest.mark.slow(but=["tpu-v5e-1", "tpu-v5e-2", "tpu-v5e-3"])
@pytest.mark.parametrize(
    ("target", "stage"),
    [("tpu-v5e", 1), ("tpu-v5e", 2), ("tpu-v5e", 3),
     pytest.param("tpu-v6e", 3, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_step_compiles_for_sixteen_chips(target, stage):
    gpu_compiler.skip_without_that_for_tpus()
    train_step = small.shard_train_step(programs.train_step, stage=stage)
    state, batch = programs.abstract_state(programs.Model()), programs.tokens(64)
    found: Any = jzero.preflight(train_step, state, batch, target=target, topology="4x4")
    assert found.report.plan.axes == (("data", 16),)
    actual, described = totals(found.schedule.collectives), totals(found.report.traffic)
    assert actual["reductions"] == described["reductions"]
    # XLA rounds what only products read before it gathers it.
    assert described["gathers"] / 2 < actual["gathers"] <= described["gathers"]
    # TPUs keep arrays in tiles, and pad them.
    assert found.at_rest < found.argument_bytes < found.peak_bytes < found.usable_bytes
    text = " ".join(str(found).split())
    assert f"16 x {found.target.name} (4 hosts of 4)" in text
    assert "no step time is given" in text
    assert "hidden" not in text
    said = found.to_dict()
    assert json.loads(json.dumps(said)) == said
    assert [said[key] for key in ("product_seconds", "exposed_seconds", "kernel_bytes")] == [
        None
    ] * 3
    assert {c["hidden"] for c in said["collectives"]} == {said["hidden"]} == {None}
    assert found.schedule.step_seconds is found.schedule.kernel_bytes is None
    assert found.schedule.unknown_loops == 0


@pytest.mark.slow
def test_a_step_with_state_on_the_hosts_compiles():
    gpu_compiler.skip_without_that_for_tpus()
    train_step = small.shard_train_step(
        programs.train_step,
        memory=jzero.Memory(
            optimizer=jzero.PinnedHost(), params=jzero.PinnedHost(device_bytes=2**20)
        ),
    )
    state, batch = programs.abstract_state(programs.Model()), programs.tokens(64)
    found: Any = jzero.preflight(train_step, state, batch, target="tpu-v5e", topology="4x4")
    assert found.host_bytes >= found.report.plan.nbytes_at_rest(tier="pinned_host") > 0
    assert not any(part.host_operations for part in found.parts)


def test_axes_of_a_slice():
    gpu_compiler.skip_without_that_for_tpus()
    mesh = jzero.target_mesh("tpu-v5e", "4x4", {"data": 4, "model": 4})
    places = [[device.coords[:2] for device in row] for row in mesh.devices]
    # Each axis is a dim of the slice: a device's neighbours along it are its neighbours there.
    for line in [*places, *zip(*places, strict=True)]:
        assert len({x for x, _ in line}) == 1 or len({y for _, y in line}) == 1
    assert jax.sharding.AxisType.Auto in mesh.axis_types
