"""A training that is killed, or told to end, loses nothing that was complete."""

import signal
from collections.abc import Iterator

import pytest

import faults
import killing


@pytest.fixture(scope="module")
def children() -> Iterator[faults.Children]:
    with faults.Children(["killing"]) as children:
        yield children


@pytest.mark.slow
@pytest.mark.skipif(faults.why_not() is not None, reason=str(faults.why_not()))
@pytest.mark.parametrize("on_host", [False, True], ids=["on devices", "on the host"])
def test_killed_again_and_again(on_host, children, tmp_path):
    """A longer one: `python tests/killing.py --rounds 300`, with `--on-host`, too."""
    steps = killing.run(children, str(tmp_path), rounds=3, seed=0, on_host=on_host)
    assert steps == sorted(steps)
    assert steps[-1] > 0


@pytest.mark.slow
def test_sigterm_saves_and_ends(children, tmp_path):
    child = children.start("killing:train", directory=str(tmp_path), on_host=False)
    complete = child.hear()
    assert complete == 3, child.wait()
    child.send(signal.SIGTERM)
    assert child.wait().status == 0
    reference = killing.Reference()
    saved = killing.check(str(tmp_path), complete, reference)
    child = children.start("killing:train", directory=str(tmp_path), on_host=False)
    assert child.hear() > saved  # The next start went on from there.
    child.send(signal.SIGKILL)
    ended = child.wait()
    assert ended.status == -signal.SIGKILL
    killing.check(str(tmp_path), ended.said[-1], reference)
