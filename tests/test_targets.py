"""Targets: what their files say, which links a collective runs over, and how long it takes there."""

import dataclasses
import re
import types

import pytest

from jzero.sharding.passes._late_gathers import balance
from jzero.targets._links import (
    AxisTimes,
    axis_times,
    collective_time,
    level_along,
    level_of,
    members,
    with_links,
)
from jzero.targets._target import (
    _FOLDER,
    DEFAULT,
    TARGETS,
    LinkDomain,
    Topology,
    find_target,
    target_of,
    topology_of,
)

H200 = find_target("test", "h200")
AXES, TWO_HOSTS = {"node": 2, "local": 4}, Topology(2, 4)
# 72 devices reach each other by the same links, whatever their hosts.
RACKS = dataclasses.replace(
    H200, domains=(LinkDomain("inner", 72, 9e11, 3e-6), LinkDomain("outer", "any", 5e10, 1e-5))
)
INNER, OUTER = (links.bandwidth for links in H200.domains)
N = 10**9


def wire_seconds(op, group, target, topology):
    """Without latencies."""
    return collective_time(op, group, 10**15, target, topology).wire / 10**15 * N


@pytest.mark.parametrize(
    ("op", "axes", "seconds"),
    [
        # Each device receives 3/4 over its links; each host half, over the adapters of its members.
        ("all-gather", ("local",), 3 / 4 / INNER),
        ("reduce-scatter", ("node",), 1 / 2 / OUTER),
        ("all-gather", ("node", "local"), 1 / 2 / (4 * OUTER)),
        ("all-reduce", ("local",), 2 * 3 / 4 / INNER),
    ],
)
def test_seconds_by_bandwidth(op, axes, seconds):
    group = members(AXES, axes)
    assert wire_seconds(op, group, H200, TWO_HOSTS) == pytest.approx(N * seconds)


def test_a_permutation_takes_the_time_of_its_link():
    for pair, links in (((0, 1), 0), ((3, 4), 1), ((1, 5), 1)):
        found = collective_time("collective-permute", pair, N, H200, TWO_HOSTS).seconds
        of = H200.domains[links]
        assert found == of.latency + N / of.bandwidth


def test_an_all_to_all_takes_each_device_s_own_links():
    """All of a group's devices send at once, each to every other one what is for that one alone."""
    for axes, seconds in (
        (("local",), 3 / 4 / INNER),
        (("node",), 1 / 2 / OUTER),
        (("node", "local"), 4 / 8 / OUTER),
    ):
        found = wire_seconds("all-to-all", members(AXES, axes), H200, TWO_HOSTS)
        assert found == pytest.approx(N * seconds)
    # Of three domains, 4 of 144 devices are on the board, 68 more in the rack, 72 in the other one.
    boards = LinkDomain("board", "host", 8e11, 1e-6)
    for slow in range(3):
        target = with_links(
            dataclasses.replace(RACKS, domains=(boards, *RACKS.domains)), {slow: 1e6}
        )
        found = wire_seconds("all-to-all", range(144), target, Topology(36, 4))
        assert found == pytest.approx(N * (3, 68, 72)[slow] / 144 / 1e6)


def test_link_domains_decide_and_not_hosts():
    """18 hosts of 4 devices are one domain of 72; 36 are two, whose 72 adapters each send at once."""
    inner, outer = RACKS.domains
    assert level_of(range(72), RACKS, Topology(18, 4)) == 0
    one = collective_time("all-gather", range(72), N, RACKS, Topology(18, 4)).seconds
    assert one == pytest.approx(N * 71 / 72 / inner.bandwidth + 71 * inner.latency)
    assert level_of(range(144), RACKS, Topology(36, 4)) == 1
    two = collective_time("all-gather", range(144), N, RACKS, Topology(36, 4)).seconds
    wire = max(N * 71 / 72 / inner.bandwidth, N / 2 / (72 * outer.bandwidth))
    # A ring through all 144 leaves each domain once.
    assert two == pytest.approx(wire + 142 * inner.latency + outer.latency)
    # Of the same hosts, H200s have but the network between them.
    assert level_of(range(72), H200, Topology(18, 4)) == 1


def test_levels_along_axes():
    axes = {"rack": 2, "node": 18, "local": 4}
    topology = Topology(36, 4)
    assert [level_along(axes, name, RACKS, topology) for name in axes] == [1, 0, 0]
    assert [level_along(axes, name, H200, topology) for name in axes] == [1, 1, 0]
    assert level_along({"data": 1}, "data", H200, Topology(1, 1)) == 0


def test_what_collectives_along_an_axis_take():
    """Femtoseconds: NCCL's LL128 latencies of a ring's messages, and bytes by the links along the axis."""
    times = dict(axis_times({"node": 2, "local": 4, "one": 1}, H200, TWO_HOSTS))
    assert times == {
        "node": AxisTimes(4_000_000_000, 20_000, 20_000),
        "local": AxisTimes(5_700_000_000, 2_222, 2_222),
    }
    # All devices of two hosts: rings use the adapters of all four, an exchange each device's own.
    ((_, both),) = axis_times({"data": 8}, H200, TWO_HOSTS)
    assert both.ring == round(20_000 / 4 / 2 * 8 / 7)
    assert both.direct == round(20_000 * 4 / 8 * 8 / 7)
    assert both.of("gather", 10) == both.latency + 10 * both.ring
    assert both.of("exchange", 10) == both.latency + 10 * both.direct
    assert both.of("reduce", 10) == 2 * both.latency + 10 * both.ring


def test_three_domains_are_three_rings_at_once():
    boards = LinkDomain("board", "host", 8e11, 1e-6)
    target = dataclasses.replace(RACKS, domains=(boards, *RACKS.domains))
    topology = Topology(36, 4)
    assert [level_of(group, target, topology) for group in ({0, 3}, {3, 4}, {71, 72})] == [0, 1, 2]
    _, inner, outer = target.domains
    seconds = N * max(3 / 4 / 8e11, 17 / 18 / (4 * inner.bandwidth), 1 / 2 / (72 * outer.bandwidth))
    waits = 36 * 3 * 1e-6 + 2 * 17 * inner.latency + outer.latency
    found = collective_time("all-gather", range(144), N, target, topology).seconds
    assert found == pytest.approx(seconds + waits)


@pytest.mark.parametrize("name", TARGETS)
def test_every_file_names_its_sources_and_has_sane_figures(name):
    text = (_FOLDER / f"{name}.toml").read_text()
    assert re.search(r"^# Sources: .{40}", text, re.MULTILINE)
    target = find_target("test", name)
    assert 2**33 < target.memory_bytes < 2**39
    assert 1e13 < target.f32_flops < target.bf16_flops < 1e16 or target.platform == "tpu"
    # Nearer is faster: a device's memory, links from the innermost outwards, the host's share.
    outwards = [target.memory_bandwidth, *(links.bandwidth for links in target.domains)]
    assert outwards == sorted(outwards, reverse=True)
    assert target.host.bandwidth < target.memory_bandwidth
    assert 1e9 < target.host.bandwidth <= target.host.memory_bandwidth * 1.2
    assert target.host.memory_bytes > target.memory_bytes / 2
    assert target.disk.read >= target.disk.write > 0
    *inner, outermost = target.domains
    assert outermost.devices == "any"
    assert all(links.devices == "host" or 1 < int(links.devices) < 1024 for links in inner)
    assert all(0 <= links.latency < 1e-4 for links in target.domains)
    assert target.platform in ("cuda", "rocm", "tpu")
    if target.platform == "cuda":  # XLA's description says the same.
        assert f"device_memory_size: {target.memory_bytes}\n" in target.xla
        assert f'device_description_str: "{target.name}"' in target.xla
        found = re.search(r"memory_bandwidth: (\d+)", target.xla)
        assert found
        assert int(found[1]) == pytest.approx(target.memory_bandwidth, rel=1e-3)


def test_small_values_take_the_protocol_with_less_latency():
    """As NCCL chooses: LL128 has 0.92 of the bandwidth."""
    group, topology = range(64), Topology(8, 8)
    inner, outer = H200.domains
    assert inner.ll128_latency is not None
    assert outer.ll128_latency is not None
    small = collective_time("all-gather", group, 1000, H200, topology)
    assert small.latency == pytest.approx(56 * inner.ll128_latency + 7 * outer.ll128_latency)
    large = collective_time("all-gather", group, 10 * N, H200, topology)
    assert large.latency == pytest.approx(56 * inner.latency + 7 * outer.latency)
    assert small.wire / 1000 == pytest.approx(large.wire / (10 * N) / 0.92)
    # PCIe has but the one.
    cards = find_target("test", "rtx4090")
    assert collective_time("all-gather", range(2), 1000, cards, Topology(1, 2)).latency == 5.7e-6


def devices_of(kind, hosts, per_host, processes=None):
    """As JAX describes them, a process for each host if it is not said."""
    num = hosts * per_host
    return [
        types.SimpleNamespace(device_kind=kind, process_index=i * (processes or hosts) // num)
        for i in range(num)
    ]


def test_a_program_is_ordered_for_the_devices_of_its_mesh():
    """Multiplications for each byte, by the target of the devices' kind; else by the default one."""
    nodes = devices_of("NVIDIA H200", 8, 8)
    assert (target_of(nodes), topology_of(nodes)) == (H200, Topology(8, 8))
    # A ring of 8 hosts, each with the links of its 8 devices; 494.7e12 multiplications a second.
    assert balance(nodes, range(64)) == pytest.approx(494.7e12 * 7 / 8 / (8 * 50e9))
    assert balance(nodes, range(8)) == pytest.approx(494.7e12 * 7 / 8 / 450e9)
    older = devices_of("NVIDIA A100-SXM4-80GB", 8, 8)
    assert target_of(older) == find_target("test", "a100-80gb")
    assert balance(older, range(8)) == pytest.approx(156e12 * 7 / 8 / 300e9, rel=1e-3)
    assert target_of(devices_of("cpu", 1, 8)) == find_target("test", DEFAULT)
    # A process for each device says nothing of hosts.
    assert topology_of(devices_of("NVIDIA H200", 2, 8, processes=16)) == Topology(2, 8)
    assert topology_of(devices_of("NVIDIA H200", 1, 4, processes=4)) == Topology(1, 4)
    assert topology_of(devices_of("NVIDIA H200", 2, 4)) == Topology(2, 4)
    assert balance(devices_of("cpu", 1, 1), range(1)) == 0  # nothing is moved


def test_every_kind_of_device_is_found_by_its_name():
    for name in TARGETS:
        target = find_target("test", name)
        assert target_of(devices_of(target.name, 1, 1)).name == target.name
