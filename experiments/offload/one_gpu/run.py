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
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

# jzero need not be installed; processes that begin here have this checkout on their path, too.
ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))
import machine  # noqa: E402
import page  # noqa: E402
from driver import FINAL, Driver, Job, Part, Result, Results  # noqa: E402

HERE = Path(__file__).parent
GIB = 2**30
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
            Part("checks", 180, lambda _: self.checks()),
            Part("speed", 300, lambda _: self.speed()),
            Part("largest", 150, self.largest),
            Part("preflight", 60, lambda _: self.preflight()),
            Part("tests", 300, self.tests),
            Part("more", 300, lambda _: self.more()),
        ]

    def checks(self) -> Iterable[Job]:
        env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # They share the device.
        for name in checks + check_figures:
            command = [str(HERE / "checks.py"), name]
            yield Job(f"check {name}", command, 75, name in checks, env)

    def speed(self) -> Iterable[Job]:
        script, disk = str(HERE / "machine.py"), os.environ["DISK"]
        env = {"XLA_CLIENT_MEM_FRACTION": "0.5"}
        yield Job("links", [script, "links"], 60, self.tiny, env)
        yield Job("disk", [script, "disk", disk, *[str(2**26)] * self.tiny], 40, self.tiny, env)
        yield from self.trainings(wanted)

    def more(self) -> Iterable[Job]:
        """XLA chooses kernels by trying them only here; and decoding with weights on the host."""
        flags = os.environ.get("XLA_FLAGS", "").replace("--xla_gpu_autotune_level=0", "")
        for policy in ("jit", "host"):
            job = self.training(policy, "1.3B", 8, 200)
            env = {**job.env, "XLA_FLAGS": flags}
            yield job._replace(name=f"{job.name}, autotuned", env=env)
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
        for gib in caps_gib[: 1 if self.tiny else None]:
            for policy, needs in bytes_per_param.items():
                prefix = f"largest {gib} GiB {policy} "
                tried = {
                    int(x.split()[-2]): known[x]["status"] for x in known if x.startswith(prefix)
                }
                works = [layers for layers, status in tried.items() if status == "ok"]
                fails = [layers for layers, status in tried.items() if status in FINAL[2:]]
                memory = (min(gib * GIB, whole), self._machine["host_bytes"])
                guess = 2 if self.tiny else first_guess(dim, zip(memory, needs, strict=True))
                layers = next_trial(max(works, default=None), min(fails, default=None), guess)
                if layers is not None and not (self.tiny and works):
                    rows, size = 1 if self.tiny else largest_rows, self.size("6.7B", layers)
                    command = [
                        str(HERE / "worker.py"),
                        *size,
                        "--policy",
                        policy,
                        "--rows",
                        str(rows),
                    ]
                    command += ["--seconds", "1"]
                    env = self.memory(gib * GIB)
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
        lacks = [x for x in ("pytest", "hypothesis") if importlib.util.find_spec(x) is None]
        if lacks:
            said = json.dumps(
                {"status": "left out", "told": f"{' and '.join(lacks)} not installed"}
            )
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
        command = [str(HERE / "worker.py"), *self.size(size), "--policy", policy]
        command += [
            "--rows",
            "1" if self.tiny else str(rows),
            "--seconds",
            "0.3" if self.tiny else "4",
        ]
        name = f"speed {policy} {size}, {rows} rows"
        return Job(name, command, seconds, self.tiny, self.memory())

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
        "XLA_FLAGS": f"{env.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip(),
        "PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "2",
    }  # fmt: skip


def describe(env: dict[str, str], tiny: bool) -> Result:
    """Ends this process where there is no GPU."""
    command = [sys.executable, str(HERE / "machine.py"), "describe"]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        sys.exit("the machine could not be described within two minutes: does JAX start here?")
    if done.returncode:
        sys.exit(f"the machine could not be described:\n{done.stderr[-2000:]}")
    found: Result = json.loads(done.stdout.splitlines()[-1])
    if found.get("platform") != "gpu" and not tiny:
        sys.exit(
            f"JAX sees no GPU here, only {found.get('kind', found)}: use --tiny to try the script"
        )
    return {"status": "ok"} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=540, help="for all (default: %(default)s)")
    parser.add_argument(
        "--again", nargs="+", default=[], metavar="WORDS", help="measure anew what has one"
    )
    parser.add_argument("--parts", nargs="+", metavar="PART", help="default: all, in order")
    parser.add_argument("--tiny", action="store_true", help="a toy, on any platform")
    parser.add_argument(
        "--disk", default=str(ROOT / ".cache"), help="a folder of the disk to measure"
    )
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    out = Path(
        os.environ.get("OUT") or (ROOT / ".cache" / "one-gpu" if args.tiny else HERE / "results")
    )
    path, committed = out / "figures.jsonl", HERE / "results" / "figures.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    if committed.exists() and not path.exists():
        shutil.copy(committed, path)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    Path(args.disk).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.disk, ignore_cleanup_errors=True) as scratch:
        env = environment(scratch)
        if args.tiny:  # Programs compile twice as fast, and those that compile soon are kept, too.
            env |= {
                "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }
        os.environ |= env
        found = describe(env, args.tiny)
        results = Results(path, "toy on " * args.tiny + found["kind"], found["jax"])
        results.add("machine", found)
        plan = Plan(found, args.tiny)
        parts = [part for part in plan.parts() if part.name in (args.parts or part.name)]
        with contextlib.ExitStack() as ending:
            write = functools.partial(write_page, results, plan, out / "page.md")
            ending.callback(write)

            def tell(name: str, result: Result) -> None:
                left = end - time.monotonic()
                print(f"{page.brief(name, result)}  ({left:.0f} s left)", flush=True)
                write()

            Driver(results, end, env, again=args.again, tell=tell).run(parts)
    print((out / "page.md").read_text())


def write_page(results: Results, plan: Plan, path: Path) -> None:
    names = [job.name for part in plan.parts() for job in part.jobs(results.here)]
    pending = [name for name in names if name not in results.here]
    beside = path.with_suffix(".tmp")
    beside.write_text(page.text(results.groups(), pending))
    beside.replace(path)


if __name__ == "__main__":
    main()
