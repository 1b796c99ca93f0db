"""300 checkpoints that are damaged, or made to do harm, through everything that reads one.

Each is read right or refused by name, within seconds and in bounded memory; no process hangs or aborts.
"""

import collections
import json
import os
import pathlib
import subprocess
import sys

import pytest

import hostile_checkpoints
from hostile_checkpoints import CHANGES, KINDS

pytestmark = pytest.mark.one_release
NUM = 330
# Each change once, each kind of checkpoint three or four times.
SAMPLE = [len(KINDS) * i + (3 * i + 2) % len(KINDS) for i in range(15)]


def outcomes(folder: pathlib.Path, numbers: list[int]) -> dict[str, list[str]]:
    """What became of each case, by reader; a process that dies is an outcome, and the next goes on."""
    left, found = list(numbers), dict[str, list[str]]()
    while left:
        command = [sys.executable, hostile_checkpoints.__file__, str(folder), *map(str, left)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment())
        name = ""
        for line in map(json.loads, done.stdout.splitlines()):
            if "case" in line:
                name = f"{line['case']}, {line['of']}"
                found[name] = []
                left.pop(0)
            else:
                found[name].append(line["outcome"])
        if done.returncode or not name:
            assert name, done.stderr[-2000:]
            found[name].append(f"DIED of {-done.returncode}: {done.stderr[-500:]}")
    return found


def environment() -> dict[str, str]:
    here = pathlib.Path(__file__).parent
    paths = os.pathsep.join([str(here.parent), str(here)])
    flags = "--xla_force_host_platform_device_count=2"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": paths}


@pytest.mark.parametrize(
    "numbers", [SAMPLE, pytest.param([*range(NUM)], marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_mutated_checkpoints(numbers, tmp_path):
    found = outcomes(tmp_path, numbers)
    counts = collections.Counter(outcome for each in found.values() for outcome in each)
    bad = {name: each for name, each in found.items() if not {*each} <= {"right", "named", "other"}}
    assert not bad, "\n".join(f"{name}: {each}" for name, each in bad.items())
    assert all(len(each) == 5 for each in found.values())
    print(f"{len(found)} checkpoints:", dict(counts))
    assert len(found) == len(numbers)
    assert counts["right"] > len(numbers) // 2
    assert counts["named"] > len(numbers)


def test_the_sample_has_every_change_of_every_kind():
    assert {number % len(KINDS) for number in SAMPLE} == {*range(len(KINDS))}
    assert {number // len(KINDS) % len(CHANGES) for number in SAMPLE} == {*range(len(CHANGES))}
