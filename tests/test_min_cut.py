"""Minimum cuts against all subsets of vertices, on small graphs."""

import itertools
import math
import random

import pytest

from jzero.sharding.cut._min_cut import MinCut, min_cut


def reachable(starts, edges, removed=()):
    found = {v for v in starts if v not in removed}
    while more := {b for a, b in edges if a in found and b not in removed} - found:
        found |= more
    return found


def graph(seed: int):
    """Edges go up, as in a program; every third vertex is free, as leaves that are read anyhow."""
    rng = random.Random(seed)
    num = rng.randint(2, 8)
    pairs = itertools.combinations(range(num), 2)
    edges = [pair for pair in pairs if rng.random() < 0.4]
    sizes = {v: rng.choice([0, 1, 2, 2, 4]) * 2**40 for v in range(num)}
    starts = [v for v in range(num) if v == 0 or rng.random() < 0.2]
    ends = [v for v in range(num) if v == num - 1 or rng.random() < 0.3]
    return sizes, edges, starts, ends


@pytest.mark.parametrize("seed", range(200))
def test_cuts_are_smallest_and_nearest_to_the_starts(seed):
    sizes, edges, starts, ends = graph(seed)
    subsets = [set(s) for n in range(len(sizes) + 1) for s in itertools.combinations(sizes, n)]
    cuts = [s for s in subsets if not reachable(starts, edges, s).intersection(ends)]
    least = min(sum(sizes[v] for v in cut) for cut in cuts)
    smallest = [cut for cut in cuts if sum(sizes[v] for v in cut) == least]
    found = min_cut(sizes, edges, starts, ends)
    assert found in smallest
    before = reachable(starts, edges, found)
    assert all(before <= reachable(starts, edges, cut) for cut in smallest)


def test_long_chains_and_wide_graphs():
    """A thousand layers under one value, and one of a thousand equations."""
    sizes = dict.fromkeys(itertools.product(range(1000), range(3)), 2)
    edges = [((i, j), (i, j + 1)) for i in range(1000) for j in range(2)]
    edges += [((i, 2), (1000, 0)) for i in range(1000)]
    starts = [(i, 0) for i in range(1000)]
    assert min_cut(sizes | {(1000, 0): 1999}, edges, starts, [(1000, 0)]) == {(1000, 0)}
    assert min_cut(sizes | {(1000, 0): 2000}, edges, starts, [(1000, 0)]) == set(starts)
    chain = [(i, i + 1) for i in range(1000)]
    assert min_cut(dict.fromkeys(range(1001), 4), chain, [0], [1000]) == {0}


@pytest.mark.parametrize("seed", range(50))
def test_a_cut_grows_while_it_stays_small(seed):
    """As if all starts that were taken had been there from the beginning, and the others never."""
    sizes, edges, starts, ends = graph(seed)
    most = sum(sizes.values()) // 4
    growing: MinCut[int] = MinCut(sizes, edges, ends)
    taken: list[int] = []
    for start in starts:
        wanted = min_cut(sizes, edges, [*taken, start], ends)
        if growing.add([start], most):
            taken.append(start)
            assert sum(sizes[v] for v in wanted) <= most
        else:
            assert sum(sizes[v] for v in wanted) > most
    found = growing.found()
    before = reachable(taken, edges, found)
    assert not before.intersection(ends) - found
    assert sum(sizes[v] for v in found) == sum(sizes[v] for v in min_cut(sizes, edges, taken, ends))


def test_what_cannot_be_cut_is_not():
    cut = MinCut({"a": math.inf, "b": 3}, [("a", "b")], ["a", "b"])
    assert not cut.add(["a"])
    assert cut.add(["b"])
    assert cut.found() == {"b"}
