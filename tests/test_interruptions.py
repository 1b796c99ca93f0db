"""A training that is killed, or told to end, loses nothing that was complete."""

import time

import pytest

import jzero
import killing


@pytest.mark.parametrize("offload", [jzero.NoOffload(), jzero.HostCPU()], ids=str)
def test_sigkill_at_random_moments(offload, tmp_path):
    """A longer one: `python tests/killing.py --rounds 300`, with `--on-host`, too."""
    steps = killing.run(str(tmp_path), rounds=2, seconds=5.0, seed=0, offload=offload)
    assert steps == sorted(steps)


def test_sigterm_saves_and_ends(tmp_path):
    child, complete = killing.start(str(tmp_path))
    deadline = time.monotonic() + 120
    while complete.value < 3:
        assert child.is_alive(), child.exitcode
        assert time.monotonic() < deadline, "no step was complete"
        time.sleep(0.05)
    child.terminate()
    child.join(timeout=120)
    assert child.exitcode == 0
    saved = killing.check(str(tmp_path), complete.value, killing.Reference())
    assert saved >= 3
    child, complete = killing.start(str(tmp_path))  # The next start goes on from there.
    while complete.value <= saved:
        assert child.is_alive(), child.exitcode
        assert time.monotonic() < deadline, "no step was complete"
        time.sleep(0.05)
    child.kill()
    child.join()
    killing.check(str(tmp_path), complete.value, killing.Reference())
