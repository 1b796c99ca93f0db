"""experiments/offload/one_gpu: its script, with a toy on the CPU, and what decides what it tries next."""

import importlib
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

import waiting

FOLDER = pathlib.Path(__file__).parents[1] / "experiments" / "offload" / "one_gpu"
NAMES = ("machine", "report", "run", "runner", "search")


@pytest.fixture(scope="module", autouse=True)
def _importable():
    """Scripts of an experiment import each other by their bare names."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))
    for name in NAMES:
        sys.modules.pop(name, None)


def module(name: str) -> Any:
    return importlib.import_module(name)


@pytest.mark.parametrize("most", [0, 1, 2, 7, 10, 11, 40, 100])
@pytest.mark.parametrize("guess", [1, 10, 38])
def test_the_search_ends_at_the_largest_that_trains(guess: int, most: int):
    search = module("search").Search(guess)
    tried = []
    for number in search.candidates():
        tried.append(number)
        search.learn(number, number <= most)
    assert len(tried) == len(set(tried))
    assert search.fails > most >= (search.trains or 0)
    assert search.fails - (search.trains or 0) <= max(1, most // 10)


@pytest.mark.parametrize(
    ("policy", "host", "layers"),
    [
        ("jit", 2**37, 10), ("host", 2**40, 36), ("host", 2**36, 19), ("layers", 2**37, 39),
        ("layers", None, 1),
    ],
)  # fmt: skip
def test_the_search_begins_where_device_or_host_may_end(policy: str, host: int | None, layers: int):
    assert module("run").first_guess(policy, 4096, 2**35, host) == layers


@pytest.fixture
def runner(tmp_path: pathlib.Path) -> Any:
    return module("runner").Runner(tmp_path / "found.json", 1, 2**35, str(tmp_path), tiny=True)


def program(text: str) -> list[str]:
    return ["-c", text]


FIRST = "print('{\"phase\": 1}', flush=True); "


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (FIRST, "ok"),
        (FIRST + 'print(\'{"status": "no device memory"}\')', "no device memory"),
        (FIRST + "raise SystemExit(3)", "failed, exit 3"),
        (FIRST + "import os; os.kill(os.getpid(), 9)", "killed: host memory?"),
        (FIRST + "import time; time.sleep(60)", "stopped after"),
    ],
)
def test_a_process_that_ends_badly_is_kept_as_far_as_it_came(runner: Any, text: str, status: str):
    stopped = status == "stopped after"
    # It must have begun, on a busy machine too.
    found = runner.run("it", program(text), limit=8 if stopped else 50, least=1)
    assert found["status"] == status or (stopped and found["status"].startswith(status))
    assert "phase" in found or status == "no device memory"
    assert json.loads(runner.path.read_text())["it"] == found


def running(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state.rpartition(")")[2].split()[0] not in "ZX"


def test_what_a_process_started_ends_with_it(runner: Any):
    text = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1); "
    found = runner.run("it", program(text + "print('{\"pid\": %d}' % p.pid)"), limit=20, least=1)
    # Killed when run() returns, but the kernel takes a moment to end it.
    waiting.wait_until(lambda: not running(found["pid"]), "it ends", 60)


def test_nothing_begins_without_time(runner: Any):
    runner.tiny = False
    found = runner.run("it", program("assert False"), limit=1, least=100)
    assert found["status"].startswith("no time: ")


@pytest.mark.parametrize(
    ("given", "wanted"), [(None, None), ("", ""), ("cuda", "cuda,cpu"), ("cpu", "cpu")]
)
def test_the_environment_of_a_process(monkeypatch: Any, given: str | None, wanted: str | None):
    """A CPU beside the GPU, and one name for the share of memory: JAX refuses both at once."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    if given is None:
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    else:
        monkeypatch.setenv("JAX_PLATFORMS", given)
    env = module("runner").environment("cache")
    assert env.get("JAX_PLATFORMS") == wanted
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in env
    assert int(env["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"]) > 64


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "run.py"), *options]
    env = {**os.environ, "XLA_FLAGS": ""}  # One device, and not the tests' eight.
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


def test_where_there_is_no_gpu(tmp_path: pathlib.Path):
    ended = run("--out", str(tmp_path))
    assert ended.returncode == 1
    assert "JAX sees no GPU here, only cpu: use --tiny" in ended.stderr


@pytest.mark.slow
def test_a_toy_from_end_to_end(tmp_path: pathlib.Path):
    pytest.importorskip("llvmlite")
    ended = run(
        "--tiny", "--parts", "speed", "link", "largest", "decode", "state", "--out", str(tmp_path)
    )
    assert ended.returncode == 0, ended.stderr
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())
    states = {name: x["status"] for name, x in found.items() if "status" in x}
    assert set(states.values()) == {"ok"}, states
    losses = {
        name: found[f"speed {name}"]["runs"][0]["third_loss"]
        for name in ("jit", "host", "layers", "activations", "delayed", "pinned", "none")
    }
    late = losses.pop("delayed")
    # bfloat16 rounds differently in different programs.
    assert max(losses.values()) - min(losses.values()) < 1e-2 < late - max(losses.values())
    assert "What did not run" not in ended.stdout
    assert "delayed update, " in ended.stdout
    for policy in ("host", "layers", "activations"):
        assert f"times as many parameters with {policy} as with jit" in ended.stdout
    # Parameters (2 bytes) for two passes, gradients; and with all state in turns 12 bytes each way.
    params = found["link layers"]["parameters"]
    for policy, down, up in (("layers", 2, 4), ("turns", 14, 16)):
        crossed = found[f"link {policy}"]["runs"][0]["crossing_bytes"]
        assert crossed["to host"] >= down * params
        assert crossed["to device"] >= up * params - 2**16
    (fetched,), (there,) = (found[f"decode {policy}"]["decodes"] for policy in ("layers", "jit"))
    assert fetched["crossing_bytes"]["to device"] > 2 * 4 * found["decode jit"]["parameters"]
    assert fetched["mean_logit"] == pytest.approx(there["mean_logit"], rel=0.1)
    for table in ("GB to device", "ceiling"):
        assert table in ended.stdout
    assert path.with_suffix(".md").read_text() in ended.stdout
