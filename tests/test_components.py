"""Components: what is together because it has something in common, directly or by way of others."""

import random

import pytest

from jzero._components import Components, grouped


@pytest.mark.parametrize("seed", range(20))
def test_groups_are_those_that_merging_finds(seed: int):
    random.seed(seed)
    things = [frozenset(random.choices(range(30), k=random.randrange(4))) for _ in range(12)]
    merged: list[list[int]] = []
    for number, thing in enumerate(things):
        near = [group for group in merged if any(things[other] & thing for other in group)]
        rest = [group for group in merged if group not in near]
        merged = [*rest, sorted([number, *(other for group in near for other in group)])]
    # By their first things, and each in order.
    assert grouped(range(len(things)), lambda number: things[number]) == sorted(merged)


def test_a_long_chain_is_one_component():
    components: Components[int] = Components()
    for i in reversed(range(5000)):
        components.join(i, i + 1)
    assert len({components.of(i) for i in range(5001)}) == 1
    assert components.of(5001) == 5001
