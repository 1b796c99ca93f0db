# SPDX-License-Identifier: Apache-2.0
"""Saves, exports, imports and restores keep their promises when a request to a bucket fails, or is the last.

A sample of what experiments/checkpoint_faults/run.py --in s3 runs in full.
"""

import random
import re
from collections.abc import Iterator

import pytest

import faults
import jzero
from faults import RequestFault
from faults._scripts import new_train_step, values
from jzero.checkpoint._bucket import Bucket

# How many faults of each script are tried: 7 in all.
SAMPLE = {"save, in the background": 2, "restore": 1, "export files over files": 2, "import": 2}


@pytest.fixture(scope="module")
def place() -> Iterator[faults.Place]:
    pytest.importorskip("moto", reason="no S3 server: moto[server] is not installed")
    with faults.place("s3") as place:
        yield place


def met(name: str, place: faults.Place, count: int, seed: int = 0) -> list[faults.Outcome]:
    scenario = faults.BUCKET_SCENARIOS[name]
    every = list(faults.faults_at(place.requests(scenario)))
    return [place.meet(scenario, fault) for fault in random.Random(seed).sample(every, count)]


def assert_kept(outcomes: list[faults.Outcome]) -> None:
    broken = [str(outcome) for outcome in outcomes if outcome.broken]
    assert not broken, "\n".join(broken)
    assert any(outcome.operation for outcome in outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("name", faults.BUCKET_SCENARIOS)
def test_promises_are_kept(name, place):
    assert_kept(met(name, place, SAMPLE[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", faults.BUCKET_SCENARIOS)
def test_promises_are_kept_in_the_double_of_googles(name):
    with faults.place("gs") as place:
        assert_kept(met(name, place, 20, seed=1))


# A writer that stands still before its look for a claim found another's seal there, and replaced it.
STOPS = ["GET steps/3/_JZERO_SEAL", "PUT steps/3/_JZERO_SEAL"]
MORE_STOPS = ["PUT steps/3/state/", "GET steps/1/_JZERO_SEAL", "PUT steps/1/", "DELETE steps/1/"]


@pytest.mark.slow(but=["GET steps/3/_JZERO_SEAL-stop", "PUT steps/3/_JZERO_SEAL-stop_after"])
@pytest.mark.parametrize("action", ["stop", "stop_after"])
@pytest.mark.parametrize(
    "only", [*STOPS, *(pytest.param(x, marks=pytest.mark.slow) for x in MORE_STOPS)]
)
def test_a_writer_that_stood_still_beyond_its_lease(only, action, place):
    """Another one saves meanwhile: what it has written stays, and the first says who has taken over."""
    assert faults.stopped_beyond_its_lease(place, RequestFault(action, 1, only=only)) == []


BEGUN_STOPS = ["DELETE steps/3/state/d/", "PUT steps/3/state/manifest", "PUT steps/3/_JZERO_SEAL"]


@pytest.mark.slow
@pytest.mark.parametrize("action", ["stop", "stop_after"])
@pytest.mark.parametrize("only", [*BEGUN_STOPS, "GET steps/3/state/manifest", "GET steps/3/_JZERO"])
def test_a_writer_that_stood_still_in_a_step_that_was_begun(only, action, place):
    """By a third one, which is dead: the second goes on with it, the first changes nothing any more."""
    fault = RequestFault(action, 1, only=only)
    assert faults.stopped_beyond_its_lease(place, fault, begun=True) == []


@pytest.mark.slow
def test_nothing_is_removed_that_another_writer_may_write(place):
    """S3 removes under no condition: who stood still would remove the new object of such a name."""
    url = faults.begun_step(place)
    place.proxy.arm(RequestFault())
    ended = place.children.run("faults._scripts:save", root=url, steps=[3, 4])
    assert [said.get("complete") for said in ended.said] == [3, 4]
    removed = [request.target for request in place.proxy.log if request.name == "DELETE"]
    of_step = [name for name in removed if name.startswith("steps/3/")]
    assert of_step
    assert not [name for name in of_step if not re.search(r"/d/\w{32}$", name)]


CUT = {
    "state/d/": "missing or cut short in the bucket",
    "state/manifest.ocdbt": "manifest.ocdbt",
    "_JZERO_SEAL": "_JZERO_SEAL is damaged",
}


@pytest.mark.parametrize("name", CUT)
def test_an_object_that_is_cut_short_is_named(name, place):
    url = place.prepared(faults.BUCKET_SCENARIOS["restore"])
    bucket = Bucket.of("test", f"{url}/steps/2")
    assert bucket is not None
    (found,) = [each for each in bucket.names() if each.startswith(name)]
    whole = bucket.read(found)
    assert whole is not None
    bucket.write(found, whole.data[: len(whole.data) // 2])
    with pytest.raises(jzero.CheckpointError, match=rf"(?s)steps/2.*{CUT[name]}"):
        jzero.restore(f"{url}/steps/2", new_train_step(), values(2))


@pytest.mark.slow(but=["ahead"])
@pytest.mark.parametrize("seconds", [-1e8, 1e8], ids=["behind", "ahead"])
def test_a_clock_that_differs_takes_nobody_for_dead(seconds, place):
    """Of a writer that lives: whoever comes says that it writes."""
    url, train_step = place.prepared(faults.BUCKET_SCENARIOS["restore"]), new_train_step()
    # On a loaded machine a beat comes late: by a lease of less than a second such a writer is dead.
    lease = 10.0
    with (
        faults.another_machine(lease),
        jzero.Checkpointer(f"{url}/steps", train_step, max_to_keep=2) as writer,
    ):
        writer.save(3, train_step.shard(values(3)))
        ended = place.children.run(
            "faults._scripts:save", root=url, steps=[9], lease=lease, clock=seconds
        )
        assert ended.status == 0
        assert [said["failed"] for said in ended.said if "failed" in said] == ["save 9"]
        assert all(" writes in s3://" in said["error"] for said in ended.said)
        writer.save(4, train_step.shard(values(4)))
        writer.wait()
        assert writer.steps() == [3, 4]
