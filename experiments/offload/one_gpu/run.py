"""Checks and measures jzero on a machine with one GPU, the most wanted first, in nine minutes a call.

python3 experiments/offload/one_gpu/run.py                             # goes on where the last call stopped
python3 experiments/offload/one_gpu/run.py --again "speed host" pool   # these anew
JAX_PLATFORMS=cpu python3 experiments/offload/one_gpu/run.py --tiny    # all with a toy, without a GPU

Nothing need be installed but what jzero itself imports. Results go to the folder that OUT names in the
environment, and to results/ beside this file without it: a line each in figures.jsonl, what pytest says in
tests.txt, and page.md, written anew after each. What results/ has already is not measured again.
"""

import argparse
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

# jzero need not be installed; processes that begin here have this checkout on their path, too.
ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))
import machine  # noqa: E402
import page  # noqa: E402
from driver import FINAL, UNDER_WAY, Driver, Job, Part, Result, Results  # noqa: E402

HERE = Path(__file__).parent
GIB = 2**30
# Statuses of a trial of the search after which a smaller one is next; crashes (by a signal) among them.
TOO_LARGE = (*FINAL[2:], "killed", "cut", UNDER_WAY, "failed, exit -")
# Nothing is tried when a program compiles: products are cuBLAS's, by its own heuristics. With the first flag
# alone they are Triton's, in default tiles that nobody would train with.
QUICK = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
# ---------------------------------------------------------------------------------------------
checks = """machine saved looked_at pinned renewed slices reads trains trains_host trains_layers reversed_scan
    trains_turns trains_pinned trains_activations trains_half trains_late direct trains_nvme""".split()
check_figures = ["overlap", "peak", "pool"]
sizes = {"0.35B": (24, 1024), "1.3B": (24, 2048), "2.6B": (32, 2560), "6.7B": (32, 4096)}
wanted = [  # policy, size, sequences of 1024 tokens, seconds at most
    ("jit", "1.3B", 8, 90), ("host", "1.3B", 8, 100), ("layers", "1.3B", 8, 100), ("stage 3", "1.3B", 8, 90),
    ("pinned", "1.3B", 8, 100), ("stage 1", "1.3B", 8, 90), ("jit", "1.3B", 32, 90),
    ("layers", "1.3B", 32, 100), ("host", "1.3B", 32, 100), ("nvme", "1.3B", 8, 170),
]  # fmt: skip
wanted_later = [
    ("activations", "1.3B", 32, 100), ("delayed", "1.3B", 8, 100), ("turns", "1.3B", 8, 130),
    ("layers", "1.3B", 1, 100), ("host", "6.7B", 4, 200), ("layers", "6.7B", 4, 200), ("jit", "2.6B", 8, 120),
    ("host", "2.6B", 8, 120), ("half", "1.3B", 8, 100), ("auto", "1.3B", 8, 100),
]  # fmt: skip
largest_dim, largest_rows = 4096, 4
# Bytes of device and host memory per parameter, to begin the search near its end; None where it is no limit.
bytes_per_param = {"host": (4.6, 17.0), "jit": (16.5, None), "layers": (None, 17.0)}
caps_gib = (80, 32)
predicted = ("jit", "stage 3", "host", "pinned", "layers")
decode_rows = [64, 512]
share_of_device = 0.92
# ---------------------------------------------------------------------------------------------


class Plan:
    """What is to be measured on this machine."""

    def __init__(self, described: Result, tiny: bool):
        self.tiny, self._machine = tiny, described

    def parts(self) -> list[Part]:
        """The seconds of the first two are what nine minutes have; a second call goes on from there."""
        return [
            Part("checks", 180, lambda _: self.checks()), Part("speed", 300, lambda _: self.speed()),
            Part("largest", 150, self.largest), Part("preflight", 60, lambda _: self.preflight()),
            Part("tests", 300, self.tests), Part("more", 300, lambda _: self.more()),
        ]  # fmt: skip

    def checks(self) -> Iterable[Job]:
        env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # They share the device.
        for name in checks + check_figures:
            yield Job(f"check {name}", [str(HERE / "checks.py"), name], 75, name in checks, env)

    def speed(self) -> Iterable[Job]:
        script, env = str(HERE / "machine.py"), {"XLA_CLIENT_MEM_FRACTION": "0.5"}
        yield Job("links", [script, "links"], 60, self.tiny, env)
        yield Job("disk", [script, "disk", *[str(2**26)] * self.tiny], 40, self.tiny, env)
        first, *others = self.trainings(wanted)
        yield from (first, self.autotuned("jit"), *others)

    def more(self) -> Iterable[Job]:
        """Also decoding with weights on the host."""
        yield self.autotuned("host")
        for policy in ("layers", "jit"):
            size = [*self.size("6.7B"), "--rows", *map(str, [4] if self.tiny else decode_rows)]
            size += ["--context", "4"] * self.tiny
            command = [str(HERE / "decode.py"), *size, "--policy", policy]
            yield Job(f"decode {policy}", command, 120, self.tiny, self.memory())
        yield from self.trainings(wanted_later)
        job = self.training("host", "1.3B", 8, 200)
        yield job._replace(name=f"{job.name}, unrolled", command=[*job.command, "--unrolled"])

    def largest(self, known: dict[str, Result]) -> Iterable[Job]:
        """Of each search the next trial: the most layers that train within so much of the device."""
        dim = 64 if self.tiny else largest_dim
        whole = share_of_device * (self._machine["device_bytes"] or 80 * GIB)
        searches = itertools.product(caps_gib[: 1 if self.tiny else None], bytes_per_param.items())
        for gib, (policy, needs) in searches:
            prefix = f"largest {gib} GiB {policy} "
            tried = {int(x.split()[-2]): known[x]["status"] for x in known if x.startswith(prefix)}
            works = max((n for n, status in tried.items() if status == "ok"), default=0)
            above = {n: status for n, status in tried.items() if n > works}
            fails = [n for n, status in above.items() if status.startswith(TOO_LARGE)]
            memory = (min(gib * GIB, whole), self._machine["host_bytes"])
            guess = 2 if self.tiny else first_guess(dim, zip(memory, needs, strict=True))
            layers = next_trial(works or None, min(fails, default=None), guess)
            if layers is None:  # Then what was cut, again, when all else is done.
                layers = min((n for n in fails if above[n] not in FINAL), default=None)
            if layers is not None and not (self.tiny and works):
                size, rows = self.size("6.7B", layers), 1 if self.tiny else largest_rows
                command, env = worker(size, policy, rows, 1), self.memory(gib * GIB)
                yield Job(f"{prefix}{layers} layers", command, 150, self.tiny, env)

    def preflight(self) -> Iterable[Job]:
        """On the CPU alone, so all at once."""
        kinds = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "cpu": "h100"}
        if (target := kinds.get(self._machine["kind"])) is not None:
            for policy in predicted[: 1 if self.tiny else None]:
                job = self.training(policy, "1.3B", 8, 100)
                yield job._replace(
                    name=job.name.replace("speed", "preflight"), together=True,
                    command=[*job.command, "--preflight", target], env={"JAX_PLATFORMS": "cpu"},
                )  # fmt: skip

    def tests(self, known: dict[str, Result]) -> Iterable[Job]:
        """Those of `tests/gpu` that have not passed yet; each file by one process, since it measures once."""
        command = ["-m", "pytest", "tests/gpu", "-v", "-rfE", "--tb=short", "-o", "minversion=0"]
        # A warning of a driver is no reason to lose the rest; what `checks` has is not run again.
        command += ["-W", "default", "--ignore=tests/gpu/test_checks.py"]
        needed = ("pytest", "hypothesis", "flax", "rich")
        lacks = [x for x in needed if importlib.util.find_spec(x) is None]
        if lacks:
            told = f"{' and '.join(lacks)} not installed"
            said = json.dumps({"status": "left out", "told": told})
            command = ["-c", f"print({said!r})"]
        elif importlib.util.find_spec("xdist") is not None and not self.tiny:
            command += ["-p", "xdist.plugin", "-n", "6", "--dist", "loadfile"]
        env = {"JZERO_TEST_GPU": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # Whatever else is installed there.
        if self._machine["platform"] != "gpu":
            env["JZERO_TEST_GPU"] = "cpu"
        if self.tiny:
            command += ["-k", "sgd or test_bandwidths"] * (not lacks)
        passed = [x for x in known if x.startswith("tests/") and known[x]["status"] in FINAL]
        command += [word for name in passed if not lacks for word in ("--deselect", name)]
        yield Job("tests", command, 300, env=env, read=None if lacks else test_result)

    def trainings(self, lines: Iterable[tuple[str, str, int, float]]) -> Iterable[Job]:
        """Of toys one of each policy; all have one size."""
        seen = set()
        for line in lines:
            if not (self.tiny and line[0] in seen):
                seen.add(line[0])
                yield self.training(*line)

    def training(self, policy: str, size: str, rows: int, seconds: float) -> Job:
        """One policy at one size; see worker.py."""
        timed = (1, 0.3) if self.tiny else (rows, 4)
        command = worker(self.size(size), policy, *timed)
        name = f"speed {policy} {size}, {rows} rows"
        return Job(name, command, seconds, self.tiny, self.memory())

    def autotuned(self, policy: str) -> Job:
        """XLA chooses kernels by trying them only here, and every other figure is held against it."""
        job = self.training(policy, "1.3B", 8, 200)
        env = {**job.env, "XLA_FLAGS": os.environ.get("XLA_FLAGS", "").replace(QUICK, "").strip()}
        return job._replace(name=f"{job.name}, autotuned", env=env)

    def size(self, name: str, layers: int | None = None) -> list[str]:
        if self.tiny:
            return ["--layers", "2", "--dim", "64", "--vocab", "256", "--context", "64"]
        return ["--layers", str(layers or sizes[name][0]), "--dim", str(sizes[name][1])]

    def memory(self, cap: float | None = None) -> dict[str, str]:
        """Of the device, for one process."""
        total, share = self._machine["device_bytes"], share_of_device
        if cap and total:
            share = min(share, cap / total)
        return {"XLA_CLIENT_MEM_FRACTION": f"{share:.4f}"}


def worker(size: list[str], policy: str, rows: int, seconds: float) -> list[str]:
    options = ["--policy", policy, "--rows", str(rows), "--seconds", str(seconds)]
    return [str(HERE / "worker.py"), *size, *options]


def first_guess(dim: int, memory: Iterable[tuple[float, float | None]]) -> int:
    """Layers for which there may be room: pairs of bytes, and how many of them a parameter takes."""
    params = min(room / each for room, each in memory if each)
    return max(1, round((params - 32_768 * dim) / (12 * dim**2)))


def next_trial(works: int | None, fails: int | None, guess: int) -> int | None:
    """What to try, until the most that works and the least that does not are a tenth apart."""
    if works is None and fails is None:
        return guess
    if fails is None:
        return works + max(1, works // 6)  # type: ignore[operator]
    if works is None:
        return None if fails == 1 else max(1, fails - max(1, fails // 6))
    return None if fails - works <= max(1, works // 10) else (works + fails) // 2


def test_result(line: str) -> tuple[str, str] | None:
    """A test and its outcome, of pytest's `-v`, with pytest-xdist or without."""
    outcome = r"(PASSED|FAILED|ERROR|SKIPPED)"
    beside = re.search(rf"{outcome} (tests/\S+::.+?)\s*$", line)
    behind = re.match(rf"(tests/\S+::.+?) {outcome}\b.*\[ *\d+%\]", line)
    found = beside.group(2, 1) if beside else behind.group(1, 2) if behind else None
    names = {"PASSED": "ok", "SKIPPED": "skipped", "FAILED": "FAIL", "ERROR": "FAIL"}
    return None if found is None or " - " in found[0] else (found[0], names[found[1]])


def environment(scratch: str) -> dict[str, str]:
    """Of every process: this checkout, one cache of programs, half of the memory for pinned pools."""
    env = dict(os.environ)
    # JAX refuses to have both names.
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"):
        env.pop(name, None)
    platforms = env.get("JAX_PLATFORMS")
    if platforms and "cpu" not in platforms:
        env["JAX_PLATFORMS"] = f"{platforms},cpu"  # for what XLA computes on the host
    return env | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")])),
        "JAX_COMPILATION_CACHE_DIR": os.path.join(scratch, "compiled"), "DISK": scratch,
        # The pool doubles when it grows, and what it pins nobody can swap.
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": str(max(1, machine.memory_bytes() // 2 // GIB)),
        "XLA_FLAGS": f"{env.get('XLA_FLAGS', '')} {QUICK}".strip(),
        "PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "2",
    }  # fmt: skip


def describe(env: dict[str, str], tiny: bool, seconds: float) -> Result:
    """Ends this process where there is no GPU."""
    command = [sys.executable, str(HERE / "machine.py"), "describe"]
    # With a CPU behind it, JAX goes on in silence where it has no CUDA.
    env = env | {"JAX_PLATFORMS": env.get("JAX_PLATFORMS", "").removesuffix(",cpu")}
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        sys.exit(f"no answer from JAX in {seconds:.0f} s: does it start here?")
    said = f"It said last:\n{done.stderr.decode(errors='replace')[-2000:]}"
    if done.returncode:
        sys.exit(f"the machine could not be described. {said}")
    found: Result = json.loads(done.stdout.splitlines()[-1])
    if found.get("platform") != "gpu" and not tiny:
        seen = found.get("kind", found)
        sys.exit(f"JAX sees no GPU here, only {seen}: use --tiny to try the script. {said}")
    return {"status": "ok"} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=540, help="for all (default: %(default)s)")
    parser.add_argument("--again", nargs="+", default=[], metavar="WORDS", help="these anew")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="default: all, in order")
    parser.add_argument("--tiny", action="store_true", help="a toy, on any platform")
    parser.add_argument("--disk", default=str(ROOT / ".cache"), help="a folder on what to measure")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    results_here = ROOT / ".cache" / "one-gpu" if args.tiny else HERE / "results"
    out = Path(os.environ.get("OUT") or results_here)
    path, committed = out / "figures.jsonl", HERE / "results" / "figures.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    if committed.exists() and not path.exists():
        shutil.copy(committed, path)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    with scratch_folder(Path(args.disk)) as scratch:
        env = environment(scratch)
        if args.tiny:  # Programs compile twice as fast, and those that compile soon are kept, too.
            env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
            env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ |= env
        found = describe(env, args.tiny, min(240, args.seconds))
        results = Results(path, "toy on " * args.tiny + found["kind"], found["jax"])
        results.add("machine", found)
        plan = Plan(found, args.tiny)
        parts = [part for part in plan.parts() if part.name in (args.parts or part.name)]
        with contextlib.ExitStack() as ending:
            write = functools.partial(write_page, results, plan, out / "page.md")
            ending.callback(lambda: print(write()))

            def tell(name: str, result: Result) -> None:
                left = end - time.monotonic()
                print(f"{page.brief(name, result)}  ({left:.0f} s left)", flush=True)
                write()

            Driver(results, end, env, again=args.again, tell=tell).run(parts)


@contextlib.contextmanager
def scratch_folder(disk: Path) -> Iterator[str]:
    """A folder of the disk that is measured; those that calls have left that were killed are removed."""
    try:
        disk.mkdir(parents=True, exist_ok=True)
        for left in disk.glob("one-gpu-*-*"):
            if not Path("/proc", left.name.split("-")[2]).exists():
                shutil.rmtree(left, ignore_errors=True)
        folder = tempfile.mkdtemp(prefix=f"one-gpu-{os.getpid()}-", dir=disk)
    except OSError as error:
        sys.exit(f"{error}: name a folder that can be written, by --disk")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_page(results: Results, plan: Plan, path: Path) -> str:
    """The page, also where it cannot be written."""
    names = [job.name for part in plan.parts() for job in part.jobs(results.here)]
    pending = [name for name in names if name not in results.here]
    beside = path.with_suffix(".tmp")
    text = page.text(results.groups(), pending, results.unreadable)
    try:
        beside.write_text(text)
        beside.replace(path)
    except OSError as error:  # A full disk ends no measurement.
        print(f"{path} could not be written: {error}", flush=True)
    return text


if __name__ == "__main__":
    main()
