"""experiments/offload/one_gpu: what its driver keeps, cuts and goes on with, by toys; its plan and page."""

import argparse
import importlib
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import pytest

import gpu_compiler
import jzero
import waiting

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "experiments" / "offload" / "one_gpu"
NAMES = ("checks", "driver", "machine", "model", "page", "run", "worker")


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


FIRST = "print('{\"phase\": 1}', flush=True); "
HANGS = FIRST + "import time; time.sleep(60)"


def job(name: str, text: str, seconds: float = 50, **more: Any) -> Any:
    return module("driver").Job(name, ["-c", text], seconds, **more)


def drive(
    path: pathlib.Path, jobs: Sequence[Any], seconds: float = 50, budget: float = 50, **more: Any
) -> tuple[dict[str, Any], list[str]]:
    """All results when a call has ended, and the order in which they came."""
    driver = module("driver")
    results, told = driver.Results(path, "toy", "1.2.3"), []
    runs = driver.Driver(
        results, time.monotonic() + seconds, os.environ, tell=lambda name, _: told.append(name), **more
    )  # fmt: skip
    runs.run([driver.Part("part", budget, lambda _: jobs)])
    return results.here, told


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (FIRST, "ok"),
        (FIRST + 'print(\'{"status": "no device memory"}\')', "no device memory"),
        (FIRST + "raise SystemExit(3)", "failed, exit 3"),
        (FIRST + "import os; os.abort()", "failed, exit -6"),
        (FIRST + "import os; os.kill(os.getpid(), 9)", "killed: host memory?"),
    ],
)
def test_a_process_that_ends_badly_is_kept_as_far_as_it_came(
    tmp_path: pathlib.Path, text: str, status: str
):
    path = tmp_path / "figures.jsonl"
    found, _ = drive(path, [job("it", text)])
    assert (found["it"]["status"], found["it"]["phase"]) == (status, 1)
    last = json.loads(path.read_text().splitlines()[-1])
    assert last == found["it"]


def test_a_result_that_was_known_counts_however_its_process_ends(tmp_path: pathlib.Path):
    """Libraries crash or hang when a process ends; then nothing is measured again."""
    ok = 'print(\'{"status": "ok"}\', flush=True); import os, time; '
    jobs = [job("hung", ok + "time.sleep(60)", 1.5), job("aborted", ok + "os.abort()")]
    found, told = drive(tmp_path / "figures.jsonl", jobs)
    assert [found[x]["status"] for x in told] == ["ok", "ok"]
    assert [found[x]["ended"] for x in told] == ["cut after 2 s", "failed, exit -6"]
    assert drive(tmp_path / "figures.jsonl", jobs)[1] == []
    text = module("page").text({("toy", "1.2.3"): found}, [])
    assert "* aborted: ok, then failed, exit -6" in text


def test_what_a_job_left_on_the_disk_is_removed(tmp_path: pathlib.Path, monkeypatch: Any):
    monkeypatch.setenv("DISK", str(tmp_path / "disk"))
    (tmp_path / "disk").mkdir()
    text = "import os, pathlib; (pathlib.Path(os.environ['DISK']) / 'x').touch(); os.kill(os.getpid(), 9)"
    found, _ = drive(tmp_path / "figures.jsonl", [job("it", text)])
    assert found["it"]["status"] == "killed: host memory?"
    assert list((tmp_path / "disk").iterdir()) == []


BAD_LINES = (
    b'{"device": "toy", "na{"device": "toy"}',
    b"\0" * 9,
    b"",
    b"<<<<<<< HEAD",
    b'{"a": "\xff"}',
)


def test_lines_that_are_no_results_are_left_out_and_said(tmp_path: pathlib.Path):
    path, it = tmp_path / "figures.jsonl", [job("it", FIRST)]
    first = drive(path, it)[0]["it"]
    other = {**first, "device": "other", "runs": [{"rows": 8}]}  # as another version may write it
    path.write_bytes(
        b"\n".join([*BAD_LINES, json.dumps(other).encode(), *path.read_bytes().splitlines(), b"{"])
    )
    driver = module("driver")
    results = driver.Results(path, "toy", "1.2.3")
    assert results.here == {"it": first}
    results.add("next", {"status": "ok"})
    assert path.read_bytes().startswith(b"\n".join(BAD_LINES))  # for somebody to look at
    results = driver.Results(path, "toy", "1.2.3")
    assert [*results.here] == ["it", "next"]
    text = module("page").text(results.groups(), [], results.unreadable)
    assert "5 lines of figures.jsonl are no results" in text
    assert "Not shown, since they have another form: it." in text


def test_a_disk_that_is_full_ends_no_call(tmp_path: pathlib.Path, capsys: Any):
    path, before = tmp_path / "figures.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # Nobody can write to files.
    try:
        found, told = drive(path, [job("it", FIRST)])
        results = module("driver").Results(path, "toy", "1.2.3")
        page = module("run").write_page(results, plan(), tmp_path / "page.md")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (told, found["it"]["status"]) == (["it"], "ok")
    assert "Not measured yet" in page
    said = capsys.readouterr().out
    assert "figures.jsonl could not be written" in said
    assert "page.md could not be written" in said


def test_the_folder_on_the_disk(tmp_path: pathlib.Path):
    """What killed calls have left is removed, and a folder that cannot be is refused by name."""
    run, ours = module("run"), tmp_path / f"one-gpu-{os.getpid()}-x"
    for left in (ours, tmp_path / "one-gpu-4194305-x"):  # more than a process can have
        (left / "compiled").mkdir(parents=True)
    with run.scratch_folder(tmp_path) as folder:
        assert {*tmp_path.iterdir()} == {ours, pathlib.Path(folder)}
    assert [*tmp_path.iterdir()] == [ours]
    with pytest.raises(SystemExit, match="--disk"), run.scratch_folder(pathlib.Path("/dev/null/x")):
        pass


def test_files_for_which_the_disk_has_no_room_are_not_begun(
    tmp_path: pathlib.Path, monkeypatch: Any
):
    monkeypatch.setenv("DISK", str(tmp_path))
    worker, told = module("worker"), {}
    monkeypatch.setattr(worker.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10**5}))
    args = argparse.Namespace(
        layers=1, dim=64, vocab=64, context=8, unrolled=False, policy="nvme", rows=[8], seconds=1
    )
    worker.measure(args, lambda phase, **found: told.update(found))
    assert told["status"] == "left out"
    assert "the disk has 100 KB" in told["told"]
    for memory, where in (("Failed to allocate pinned host", "host"), ("Out of memory", "device")):
        assert worker.short_of(f"RESOURCE_EXHAUSTED: {memory}") == where


@pytest.mark.slow
def test_a_second_call_goes_on_where_the_first_was_cut(tmp_path: pathlib.Path):
    path, good = tmp_path / "figures.jsonl", FIRST
    first = [job("done", good), job("bad", "raise SystemExit(1)"), job("late", HANGS, 1.6)]
    found, told = drive(path, first)
    assert told == ["done", "bad", "late"]
    assert found["late"]["status"] == "cut after 2 s"
    assert found["late"]["phase"] == 1
    with path.open("a") as file:
        file.write('{"device": "toy", "name": "done", "sta')  # Cut off by whoever ended it.
    second = [*(job(x.name, good) for x in first), job("new", good)]
    found, told = drive(path, second)
    assert told == ["new", "bad", "late"]  # What was never tried comes first.
    assert {x["status"] for x in found.values()} == {"ok"}
    assert drive(path, second)[1] == []
    assert drive(path, second, again=["done", "ne"])[1] == ["done", "new"]
    # Another device or JAX has results of its own.
    driver = module("driver")
    assert driver.Results(path, "toy", "1.2.4").here == {}
    assert len(driver.Results(path, "other", "1.2.3").groups()) == 1


def running(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state.rpartition(")")[2].split()[0] not in "ZX"


def test_what_a_process_started_ends_with_it(tmp_path: pathlib.Path):
    text = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1); "
    found, _ = drive(tmp_path / "x.jsonl", [job("it", text + "print('{\"pid\": %d}' % p.pid)")])
    assert found["it"]["status"] == "ok"
    # Killed when the job is over, but the kernel takes a moment to end it.
    waiting.wait_until(lambda: not running(found["it"]["pid"]), "it ends", 60)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_driver_that_is_killed(tmp_path: pathlib.Path, how: signal.Signals):
    path = tmp_path / "figures.jsonl"
    text = f"""
import os, pathlib, signal, sys, time
sys.path[:0] = {[str(FOLDER), str(ROOT)]!r}
from driver import Driver, Job, Part, Results
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
said = "import os, time; print('{{\\"pid\\": %d}}' % os.getpid(), flush=True); time.sleep(60)"
job = Job("it", ["-c", said], 50)
Driver(Results(pathlib.Path({str(path)!r}), "toy", "1.2.3"), time.monotonic() + 50, os.environ).run(
    [Part("part", 50, lambda _: [job])])
"""
    process = subprocess.Popen([sys.executable, "-c", text])
    read = module("driver").Results
    waiting.wait_until(lambda: path.exists() and '"pid"' in path.read_text(), "it begins", 60)
    process.send_signal(how)
    assert process.wait(60) != 0
    left = read(path, "toy", "1.2.3").here["it"]
    waiting.wait_until(lambda: not running(left["pid"]), "it ends", 60)
    # A driver that is told to end still says so.
    assert left["status"] == "under way" if how == signal.SIGKILL else "cut" in left["status"]
    found, told = drive(path, [job("it", FIRST)])
    assert (told, found["it"]["status"]) == (["it"], "ok")


@pytest.mark.parametrize("most", [0, 1, 2, 7, 10, 11, 40, 100])
@pytest.mark.parametrize("guess", [1, 10, 38])
def test_the_search_ends_at_the_largest_that_trains(guess: int, most: int):
    next_trial = module("run").next_trial
    works, fails, tried = None, None, []
    while (number := next_trial(works, fails, guess)) is not None:
        tried.append(number)
        works = number if number <= most else works
        fails = number if number > most else fails
    assert len(tried) == len(set(tried))
    assert fails is not None
    assert fails > most >= (works or 0)
    assert fails - (works or 0) <= max(1, most // 10)


def plan(tiny: bool = False) -> Any:
    described = {"kind": "NVIDIA H200", "platform": "gpu", "host_bytes": 2**37}
    return module("run").Plan(described | {"device_bytes": 2**37}, tiny)


def test_the_plan_asks_for_all_checks_and_goes_on_with_searches(monkeypatch: Any):
    mine = os.environ.get("XLA_FLAGS", "")
    monkeypatch.setenv("XLA_FLAGS", module("run").environment("scratch")["XLA_FLAGS"])
    checks, run, all_jobs = module("checks"), module("run"), plan()
    assert {*run.checks} == {*checks.CHECKS}
    assert {*run.check_figures} == {*checks.FIGURES}
    assert len(run.checks) == len(checks.CHECKS) == 18
    (first, *_), *_ = [list(all_jobs.largest({}))]
    assert first.name == "largest 80 GiB host 39 layers"  # What the host has room for.
    share = {x.env["XLA_CLIENT_MEM_FRACTION"] for x in all_jobs.largest({})}
    assert share == {"0.6250", "0.2500"}
    for status in ("no host memory", "killed: host memory?", "failed, exit -11", "cut after 9 s"):
        known = {first.name: {"status": status}}
        assert next(iter(all_jobs.largest(known))).name == "largest 80 GiB host 33 layers"
    # Left out, and errors of ours, say nothing about sizes.
    assert next(iter(all_jobs.largest({first.name: {"status": "left out"}}))).name == first.name
    # What was cut is tried again when nothing smaller is left.
    ended = {33: "ok", 36: "cut", 39: "cut"}.items()
    known = {f"largest 80 GiB host {n} layers": {"status": status} for n, status in ended}
    assert next(iter(all_jobs.largest(known))).name == "largest 80 GiB host 36 layers"
    jit, tuned = [x for x in all_jobs.speed() if x.name.startswith("speed ")][:2]
    assert tuned.name == f"{jit.name}, autotuned"
    assert (jit.env.get("XLA_FLAGS"), tuned.env["XLA_FLAGS"]) == (None, mine)
    names = [x.name for part in all_jobs.parts() for x in part.jobs({})]
    assert len(names) == len(set(names))
    passed = {"tests/gpu/test_host.py::test_b": {"status": "ok"}}
    assert next(iter(all_jobs.tests(passed))).command[-2:] == ["--deselect", *passed]


AT = "tests/gpu/test_host.py::b"


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (f"[gw0] [  7%] PASSED {AT}[x-1.5] \n", (f"{AT}[x-1.5]", "ok")),
        (f"{AT}[float32 x] FAILED       [ 50%]\n", (f"{AT}[float32 x]", "FAIL")),
        (f"{AT} SKIPPED (needs a GPU)  [100%]\n", (AT, "skipped")),
        (f"[gw1] [ 9%] ERROR {AT} \n", (AT, "FAIL")),
        (f"FAILED {AT} - AssertionError: no\n", None),
        (f"{AT} \n", None),
    ],
)
def test_lines_of_pytest(line: str, wanted: Any):
    assert module("run").test_result(line) == wanted


@pytest.mark.parametrize(
    ("given", "wanted"), [(None, None), ("", ""), ("cuda", "cuda,cpu"), ("cpu", "cpu")]
)
def test_the_environment_of_a_process(monkeypatch: Any, given: str | None, wanted: str | None):
    """A CPU beside the GPU, one name for the share of memory, and pools of half the machine's."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    if given is None:
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    else:
        monkeypatch.setenv("JAX_PLATFORMS", given)
    env = module("run").environment("scratch")
    assert env.get("JAX_PLATFORMS") == wanted
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in env  # JAX refuses both at once.
    pool, whole = int(env["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"]), module("machine").memory_bytes()
    assert whole / 2 - 2**30 < pool * 2**30 <= whole / 2


def run(out: pathlib.Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "run.py"), "--disk", str(out / "disk"), *options]
    # One device, and not the tests' eight.
    env = {**os.environ, "XLA_FLAGS": "", "OUT": str(out), **env}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_where_there_is_no_gpu(tmp_path: pathlib.Path):
    (tmp_path / "sitecustomize.py").write_text("import sys; print('no cuDNN', file=sys.stderr)")
    ended = run(tmp_path, PYTHONPATH=str(tmp_path))
    assert ended.returncode == 1
    assert "JAX sees no GPU here, only cpu: use --tiny" in ended.stderr
    assert "no cuDNN" in ended.stderr.partition("It said last:")[2]  # JAX logs why, and goes on.
    # And its own error, where it has been told that there is one.
    ended = run(tmp_path, JAX_PLATFORMS="cuda")
    assert "the machine could not be described. It said last:" in ended.stderr
    assert "xla_bridge.py" in ended.stderr


@pytest.mark.parametrize("name", ["pinned", "renewed", "slices", "reads", "direct"])
def test_checks_of_memory_run_here(name: str):
    """With what jzero has today; on a CPU they show no more."""
    checks = module("checks")
    checks.CHECKS[name]()


def test_products_are_the_vendors():
    """What is measured without trying kernels has them: Triton's default tiles are many times slower."""
    gpu_compiler.skip_without_it()
    whole = jax.NamedSharding(jzero.target_mesh("h100", "1x1"), jax.P())
    x = jax.ShapeDtypeStruct((2048, 2048), "bfloat16", sharding=whole)
    flags = (flag.removeprefix("--").split("=") for flag in module("run").QUICK.split())
    options = {name: json.loads(value) for name, value in flags}
    compiled = jax.jit(lambda x: x @ x).lower(x).compile(options)
    assert "__cublas" in str(compiled.as_text())


@pytest.mark.slow
def test_a_toy_from_end_to_end(tmp_path: pathlib.Path):
    pytest.importorskip("llvmlite")
    ended = run(tmp_path, "--tiny")
    assert ended.returncode == 0, ended.stderr
    lines = map(json.loads, (tmp_path / "figures.jsonl").read_text().splitlines())
    found = {line["name"]: line for line in lines if line["device"] == "toy on cpu"}
    # Where XLA's compiler for GPUs is not installed.
    states = {name: x["status"] for name, x in found.items() if "preflight" not in name}
    assert set(states.values()) == {"ok"}, states
    losses = {
        name.split(" 1.3B")[0]: x["runs"][0]["third_loss"]
        for name, x in found.items()
        if name.startswith("speed") and not name.endswith("unrolled")
    }
    late = losses.pop("speed delayed")
    # bfloat16 rounds differently in different programs.
    assert max(losses.values()) - min(losses.values()) < 1e-2 < late - max(losses.values())
    (fetched,), (there,) = (found[f"decode {policy}"]["decodes"] for policy in ("layers", "jit"))
    assert fetched["mean_logit"] == pytest.approx(there["mean_logit"], rel=0.1)
    text = (tmp_path / "page.md").read_text()
    assert "Not measured yet" not in text
    assert text in ended.stdout
    assert len(list(tmp_path.iterdir())) <= 8
