"""State in files whose headers are damaged: a new start resumes it bit for bit, or refuses it by name."""

import pathlib
import sys

import pytest

import nvme_damage
from test_processes import by_hand, run

pytest.importorskip("llvmlite")
# Files that were damaged may leave nothing but zeros to a checkpoint.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:restore. .* leaves of:UserWarning"),
]


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("way", nvme_damage.WAYS)
def test_damaged_headers(way: str, num_devices: int, tmp_path: pathlib.Path):
    found = nvme_damage.run(tmp_path, way, num_devices, 17, 1)
    nvme_damage.end_of_process()
    assert sum(found.values()) == 17
    assert found["refused"]
    assert any(what.startswith("resumed") for what in found) or "moments in place" in way


@pytest.mark.slow
def test_damaged_headers_of_two_processes(tmp_path: pathlib.Path):
    command = [sys.executable, nvme_damage.__file__, "--cases", "17", "--devices", "2"]
    root = {"NVME_DAMAGE_ROOT": str(tmp_path)}
    run(command, [one | root for one in by_hand(2, 1)], tmp_path)
