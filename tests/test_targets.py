"""Targets: what their files say, which links a collective runs over, and how long it takes there."""

import dataclasses

import pytest

from jzero.preflight._links import collective_seconds, level_along, level_of, members
from jzero.preflight._targets import LinkDomain, Topology, find_target

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
    free = tuple(dataclasses.replace(links, latency=0.0) for links in target.domains)
    return collective_seconds(op, group, N, dataclasses.replace(target, domains=free), topology)


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
        found = collective_seconds("collective-permute", pair, N, H200, TWO_HOSTS)
        of = H200.domains[links]
        assert found == of.latency + N / of.bandwidth


def test_link_domains_decide_and_not_hosts():
    """18 hosts of 4 devices are one domain of 72; 36 are two, whose 72 adapters each send at once."""
    inner, outer = RACKS.domains
    assert level_of(range(72), RACKS, Topology(18, 4)) == 0
    one = collective_seconds("all-gather", range(72), N, RACKS, Topology(18, 4))
    assert one == pytest.approx(N * 71 / 72 / inner.bandwidth + 71 * inner.latency)
    assert level_of(range(144), RACKS, Topology(36, 4)) == 1
    two = collective_seconds("all-gather", range(144), N, RACKS, Topology(36, 4))
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


def test_three_domains_are_three_rings_at_once():
    boards = LinkDomain("board", "host", 8e11, 1e-6)
    target = dataclasses.replace(RACKS, domains=(boards, *RACKS.domains))
    topology = Topology(36, 4)
    assert [level_of(group, target, topology) for group in ({0, 3}, {3, 4}, {71, 72})] == [0, 1, 2]
    _, inner, outer = target.domains
    seconds = N * max(3 / 4 / 8e11, 17 / 18 / (4 * inner.bandwidth), 1 / 2 / (72 * outer.bandwidth))
    waits = 36 * 3 * 1e-6 + 2 * 17 * inner.latency + outer.latency
    found = collective_seconds("all-gather", range(144), N, target, topology)
    assert found == pytest.approx(seconds + waits)
