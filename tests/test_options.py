"""Options of `shard_train_step`, alone and in pairs, against one device with the whole batch.

To a step with collectives of its own a microbatch is a device in time: k of them on n devices must train as
the zoo's reference for n * k devices does, statistics and dropout keys included.
"""

import functools
import itertools
import random
from typing import Any

import jax.numpy as jnp
import pytest

import jzero
import parity
import small
import zoo
from jzero.sharding.analysis import _residuals

MESHES = {
    "1": {"data": 1}, "2": {"data": 2}, "4": {"data": 4}, "8": {"data": 8},
    "2x2": {"node": 2, "local": 2}, "2x4": {"node": 2, "local": 4}, "4x2": {"node": 4, "local": 2},
}  # fmt: skip
FACTORS: dict[str, list[Any]] = {
    "mesh": list(MESHES),
    "stage": [0, 1, 2, 3],
    "accumulate": [1, 2, 4],
    "reduce": [None, "once", "each"],
    "gather": [None, "per_pass", "keep", "once_per_step"],
    "prefetch_bytes": [None, 0, 200],  # all, none, some
    "tile_bytes": [None, 100],
    "reduce_dtype": [None, jnp.float32],
    "full": [None, ""],  # none, all
    "min_shard_bytes": [0, 200],
    "param_axes": [None, "local"],
    "optimizer_axes": [None, "local"],
    "offload_activations": [None, jzero.PinnedHost()],
}
KEEPS = ("keep", "once_per_step")


def is_valid(setting):
    hybrid = "x" in setting["mesh"]
    num = parity.num_devices(MESHES[setting["mesh"]]) * setting["accumulate"]
    stage = setting["stage"]
    return (
        num <= 8
        and (hybrid or not (setting["param_axes"] or setting["optimizer_axes"]))
        and (stage == 3 or not (setting["gather"] or setting["param_axes"]))
        and (stage == 3 or setting["full"] is None)
        and (stage == 3 or setting["prefetch_bytes"] is None)
        and (stage > 0 or setting["optimizer_axes"] is None)
        and (stage > 0 or setting["min_shard_bytes"] == 0)
        and not (setting["tile_bytes"] and (stage == 0 or setting["gather"] in KEEPS))
        and not (stage < 2 and setting["reduce"] == "each")
        and not (stage == 2 and setting["reduce"] == "once")
        and not (stage == 3 and setting["optimizer_axes"] and not setting["param_axes"])
    )


def pairs_of(setting):
    return set(itertools.combinations(((name, str(value)) for name, value in setting.items()), 2))


def covering_settings():
    """Valid settings in which every pair of values of two factors occurs that can occur."""
    rng = random.Random(0)
    pool: list[dict[str, Any]] = []
    while len(pool) < 3000:
        setting = {name: rng.choice(values) for name, values in FACTORS.items()}
        if is_valid(setting):
            pool.append(setting)
    # A bit for each pair: every worker does this when it collects tests.
    bits: dict[Any, int] = {}
    pairs = [sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs_of(x)) for x in pool]
    missing, found = (1 << len(bits)) - 1, []
    while missing:
        best = max(range(len(pool)), key=lambda i: (pairs[i] & missing).bit_count())
        missing &= ~pairs[best]
        found.append(pool[best])
    return found


def name_of(setting):
    parts = [f"{k}={getattr(v, '__name__', v)}" for k, v in setting.items() if v is not None]
    return "-".join(parts)


SETTINGS = covering_settings()
ENTRIES = [name for name in zoo.CORE if name != "inner_steps"]


@pytest.fixture(autouse=True)
def _small_activations_move(monkeypatch):
    monkeypatch.setattr(_residuals, "LEAST_BYTES", 0)


def check(name, axes, **options):
    parity.check(name, axes, functools.partial(small.shard_train_step, **options), options)


@pytest.mark.slow
@pytest.mark.parametrize("i", range(len(SETTINGS)), ids=[*map(name_of, SETTINGS)])
def test_pairs_of_options(i, request):
    name, setting = ENTRIES[7 * i % len(ENTRIES)], SETTINGS[i]
    if setting["tile_bytes"]:
        request.getfixturevalue("no_compilation_cache")
    options = {k: v for k, v in setting.items() if k != "mesh" and v is not None}
    check(name, MESHES[setting["mesh"]], **options)


@pytest.mark.parametrize("name", ["inner_steps", "while_until_all_rows_converge"])
def test_steps_that_need_all_rows_in_a_loop(name):
    check(name, {"data": 4}, stage=3, accumulate=2)


@pytest.mark.slow
def test_every_pair_is_covered():
    covered = set().union(*map(pairs_of, SETTINGS))
    some = {(("gather", "keep"), ("param_axes", "local")), (("mesh", "8"), ("stage", "3"))}
    assert some <= covered
    assert (("mesh", "8"), ("accumulate", "2")) not in covered  # 16 rows: one each
    assert len(SETTINGS) < 80
