"""Tests and measures offload on a machine with one NVIDIA GPU, in one call within ten minutes.

python experiments/offload/one_gpu/run.py                             # the most important first
python experiments/offload/one_gpu/run.py --parts decode state        # what there was no time for
JAX_PLATFORMS=cpu python experiments/offload/one_gpu/run.py --tiny    # all of it with a toy, without a GPU

Each part is a process of its own, with its own memory settings and limit, so that one that crashes or hangs
loses nothing else. Writes <date>.json after each, and <date>.md, which it prints, at the end.
"""

import argparse
import datetime
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import report
from runner import GIB, HERE, Runner
from search import Search

# ---------------------------------------------------------------------------------------------
sizes = {"0.35B": (24, 1024), "1.3B": (24, 2048), "2.6B": (32, 2560), "6.7B": (32, 4096)}
main_size = "1.3B"
rows = [8, 32]  # sequences of 1024 tokens: a small batch, and a larger one
largest_dim, largest_rows = 4096, 4
# Bytes of memory per parameter, to begin the search near its end; None where that memory is no limit.
device_bytes_per_param = {"jit": 16.5, "host": 4.6, "layers": None, "activations": None}
host_bytes_per_param = {"jit": None, "host": 17.0, "layers": 17.0, "activations": 17.0}
decode_size, decode_rows = "6.7B", [64, 512]
# ---------------------------------------------------------------------------------------------


def describe(runner: Runner, touch_gib: float) -> None:
    """Ends the run where there is no GPU."""
    command = [str(HERE / "machine.py"), "describe"]
    found = runner.run("machine", command, limit=90, least=1, XLA_CLIENT_MEM_FRACTION="0.5")
    if found["status"] != "ok":
        sys.exit(f"the machine could not be described:\n{found['error']}")
    if found["platform"] != "gpu" and not runner.tiny:
        sys.exit(f"JAX sees no GPU here, only {found['device']}: use --tiny to try the script")
    limit = found["bytes_limit"]
    found["device_bytes"] = limit and 2 * limit  # as JAX counts it
    runner.keep("machine", found)
    if touch_gib:
        runner.run("touch", [str(HERE / "machine.py"), "touch", str(touch_gib)], limit=60, least=1)


def tests(runner: Runner) -> None:
    command = ["-m", "pytest", "-q", "tests/gpu", "-rfE", "--tb=short"]
    # A warning of a driver is no reason to lose the rest; pytest counts them.
    command += ["-W", "default"]
    command += ["-n", "0", "-k", "in_place"] if runner.tiny else ["-n", "4", "--dist", "worksteal"]
    on_gpu = runner.found["machine"]["platform"] == "gpu"
    env = {"JZERO_TEST_GPU": "1" if on_gpu else "cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if on_gpu:  # Choosing kernels by trying them takes longer than these tests run.
        env["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    found = runner.run("tests", command, limit=170, least=20, keep_output=True, **env)
    lines = found.pop("output", "").splitlines()
    (runner.path.parent / "tests.txt").write_text("\n".join(lines) + "\n")
    last = [line for line in lines if re.search(r"\d (passed|failed|skipped|error)", line)]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    summary = last[-1] if last else "no summary: see tests.txt"
    runner.keep("tests", {**found, "summary": summary, "failures": failed})


def speed(runner: Runner) -> None:
    """Tiers side by side at one size and two batches: none, optimizer state, parameters, activations."""
    layers, dim = shape(runner, main_size)
    for policy in ("jit", "host", "layers", "activations"):
        runner.measure(f"speed {policy}", layers, dim, policy, batch=batches(runner, policy))


def state(runner: Runner) -> None:
    """Other policies of optimizer state, beside the same."""
    layers, dim = shape(runner, main_size)
    for policy in ("delayed", "pinned", "none"):
        runner.measure(f"speed {policy}", layers, dim, policy, batch=batches(runner, policy))


def bandwidth(runner: Runner) -> None:
    """How fast the link is, once."""
    if "bandwidth" not in runner.found:
        command = [str(HERE / "machine.py"), "link"]
        runner.run("bandwidth", command, limit=60, least=15, XLA_CLIENT_MEM_FRACTION="0.5")


def link(runner: Runner) -> None:
    """What the link can do, and two steps whose products have least to hide it behind."""
    bandwidth(runner)
    layers, dim = shape(runner, main_size)
    for policy in ("turns", "layers"):
        runner.measure(f"link {policy}", layers, dim, policy, batch=[1], seconds=3)


def decode(runner: Runner) -> None:
    """Weights on the host, and a large batch; `report` has the ceiling beside it."""
    bandwidth(runner)
    # Deeper than its window: what fits is fetched once.
    layers, dim = (8, 64) if runner.tiny else sizes[decode_size]
    for policy in ("layers", "jit"):
        batch = [4] if runner.tiny else decode_rows
        runner.decode(f"decode {policy}", layers, dim, policy, batch=batch)


def ratio(runner: Runner) -> None:
    layers, dim = shape(runner, main_size)
    for policy in ("auto", "half"):
        runner.measure(f"speed {policy}", layers, dim, policy, batch=batches(runner, policy))


def unrolled(runner: Runner) -> None:
    """Whether gradients leave the device as they are made, when layers are no loop."""
    layers, dim = shape(runner, main_size)
    for policy in ("host", "jit"):
        name = f"speed {policy}, unrolled"
        runner.measure(
            name, layers, dim, policy, batch=few(runner), unrolled=True, limit=200, least=60
        )


def largest(runner: Runner) -> None:
    """The most layers that train within the cap and what the host has, without offload and with."""
    dim = 64 if runner.tiny else largest_dim
    # The longer searches first: there may be time for one.
    for policy in ("layers", "host", "jit", "activations"):
        # Asked for here: a machine may have grown since it was described.
        host = machine.host()["host_available"]
        search = Search(2 if runner.tiny else first_guess(policy, dim, runner.cap, host))
        probes: list[Any] = []
        for layers in search.candidates():
            if len(probes) >= (1 if runner.tiny else 5):
                break
            name = f"largest {policy} {layers} layers"
            found = runner.measure(
                name, layers, dim, policy, batch=[1 if runner.tiny else largest_rows],
                cap=runner.cap, seconds=1, limit=200, least=40 if policy == "jit" else 75,
            )  # fmt: skip
            if found["status"] not in ("ok", "no device memory", "no host memory"):
                break  # Neither trained nor was refused: it says nothing.
            search.learn(layers, found["status"] == "ok")
            probes.append({"layers": layers, "status": found["status"]})
            runner.keep(
                f"largest {policy}",
                {"trains": search.trains, "fails": search.fails, "probes": probes, "dim": dim},
            )


def first_guess(policy: str, dim: int, cap: float, host: int | None) -> int:
    """Layers for which `cap` bytes of the device and `host` of the host, if known, may have room."""
    limits = [(cap, device_bytes_per_param[policy]), (host, host_bytes_per_param[policy])]
    params = [room / each for room, each in limits if room and each]
    return max(1, round((min(params, default=0) - 32_768 * dim) / (12 * dim**2)))


def large(runner: Runner) -> None:
    """Near what the host's memory holds: 12 bytes per parameter, and 4 in pinned memory."""
    layers, dim = shape(runner, "6.7B")
    for policy in ("host", "jit", "delayed", "pinned"):
        name = f"6.7B {policy}"
        runner.measure(name, layers, dim, policy, batch=few(runner), limit=200, least=60)


def other_sizes(runner: Runner) -> None:
    for size in ("2.6B", "0.35B"):
        layers, dim = shape(runner, size)
        for policy in ("jit", "host", "delayed"):
            runner.measure(f"{size} {policy}", layers, dim, policy, batch=few(runner))


def shape(runner: Runner, size: str) -> tuple[int, int]:
    return (2, 64) if runner.tiny else sizes[size]


def few(runner: Runner) -> list[int]:
    return [1] if runner.tiny else rows[:1]


def batches(runner: Runner, policy: str) -> list[int]:
    # What is compiled twice takes twice as long, and these do not ask about small batches.
    both = policy in ("jit", "host", "layers", "delayed")
    return few(runner) if runner.tiny else rows if both else rows[-1:]


PARTS: dict[str, Callable[[Runner], None]] = {
    "tests": tests, "speed": speed, "link": link, "largest": largest, "decode": decode, "state": state,
    "ratio": ratio, "unrolled": unrolled, "large": large, "sizes": other_sizes,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: all, in this order")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all (default: %(default)s)")
    parser.add_argument("--cap-gib", type=float, default=32, help="of device memory, for 'largest'")
    parser.add_argument("--touch-gib", type=float, default=0, help="host memory to write first")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--tiny", action="store_true", help="a toy, on any platform")
    args = parser.parse_args()
    path = args.out.resolve() / f"{datetime.datetime.now():%Y-%m-%d-%H%M}.json"
    with tempfile.TemporaryDirectory() as cache:
        runner = Runner(path, args.minutes, args.cap_gib * GIB, cache, args.tiny)
        describe(runner, args.touch_gib)
        # With a toy, the others do the same again.
        for part in args.parts or [p for p in PARTS if not (args.tiny and p in ("large", "sizes"))]:
            try:
                PARTS[part](runner)
            except Exception as error:  # A mistake in one part must not cost the others.
                runner.keep(f"{part} itself", {"status": f"failed: {error!r}"})
                print(f"{part}: {error!r}", flush=True)
    runner.keep("ended", datetime.datetime.now().isoformat(timespec="seconds"))
    text = report.tables(runner.found)
    path.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
