"""Checks many sampled train steps against one device, and goes on after each failure.

    python tests/run_sampled.py 20000 0 --processes 2

runs the seeds 0 to 19999, but for those that experiments/sampled/results has, of whichever library and
sampler. Each failing seed is printed with its setting, its source and what differs; the last line lists
the failing seeds, and the exit status is 1 if there are any. To look at one seed again, alone:
`python tests/run_sampled.py 1 SEED`. To print the table of all results: `run_sampled.py --report`.
With `--loops`, loops along the batch are drawn (tests/sampling/loops.py), and have results of their own.

Seeds run in chunks, each in a process of its own, so that a crash or a deadlock costs one bundle of one
chunk: the rest of the chunk runs in another process. A chunk is one line of results, with the hashes
that it holds for; to run it again, delete the line.

What differs runs again alone, one device and jzero both compiled without fused multiply-adds. XLA:CPU
computes a value anew in each fusion that reads it, and a product that is added at once is rounded in one
and not in another: `h - max(h) > 0` may then hold, and no element be the largest
(docs/facts.md#a-value-that-two-fusions-read-may-be-two-values). What is equal without them is noisy. Not so
with microbatches: there jzero computes values again, too, and must not let it show
(jzero/sharding/partition/_loops_in_time.py).
"""

import argparse
import collections
import concurrent.futures
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

HERE = pathlib.Path(__file__).parent
RESULTS = HERE.parent / "experiments" / "sampled" / "results"
CHUNK = 100
BUNDLE_SECONDS = 600
# In the environment of the processes that run chunks: loops along the batch.
LOOPS = "JZERO_SAMPLED_LOOPS"
# Of the instruction sets of x86 the largest without fused multiply-adds.
NO_FMA = "--xla_cpu_max_isa=AVX"
VERDICTS = ("equal", "refused", "noisy", "differs", "crashed")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("num_cases", type=int, metavar="N", nargs="?", default=20_000)
    parser.add_argument("seed", type=int, metavar="SEED", nargs="?", default=0, help="the first")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="also what is in the results")
    parser.add_argument("--report", action="store_true", help="print the table of all results")
    parser.add_argument("--loops", action="store_true", help="loops along the batch")
    parser.add_argument("--chunk", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    seeds = range(args.seed, args.seed + args.num_cases)
    if args.chunk:
        run_here(seeds)
        return 0
    if args.loops:
        os.environ[LOOPS] = "1"
    path = RESULTS / f"{'loops-' * args.loops}jax-{importlib.metadata.version('jax')}.jsonl"
    if args.report:
        print(table(lines_of(path)))
        return 0
    if args.num_cases < CHUNK:
        return 1 if report(run_in_processes(seeds), everything=args.num_cases == 1) else 0
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = library()
    known = set() if args.again else {line["first"] for line in lines_of(path)}
    chunks = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    chunks = [chunk for chunk in chunks if chunk[0] not in known]
    lock, failed = threading.Lock(), []

    def run(chunk: range) -> None:
        start = time.monotonic()
        results = run_in_processes(chunk)
        with lock:
            line = summary(chunk, results, time.monotonic() - start, tree)
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            failed.extend(report(results))
            print({name: line[name] for name in ("first", *VERDICTS, "seconds")}, flush=True)

    with concurrent.futures.ThreadPoolExecutor(args.processes) as pool:
        list(pool.map(run, chunks))
    print(f"failing seeds: {failed}" if failed else "no seed failed")
    return 1 if failed else 0


def report(results: list[dict[str, str]], everything: bool = False) -> list[int]:
    """Prints what failed, or all of it, and returns the seeds that failed."""
    failed = [r for r in results if r["verdict"] in ("differs", "crashed")]
    for r in results if everything else failed:
        print(f"{r['verdict'].upper()} {r['seed']}: {r['why']}\n{r['listing']}", flush=True)
    return [int(r["seed"]) for r in failed]


def summary(
    chunk: range, results: list[dict[str, str]], seconds: float, tree: str
) -> dict[str, Any]:
    counts = collections.Counter(r["verdict"] for r in results)
    reasons = collections.Counter(r["why"] for r in results if r["verdict"] == "refused")
    return {
        "first": chunk[0], "count": len(chunk), **{verdict: counts[verdict] for verdict in VERDICTS},
        "reasons": dict(reasons.most_common()),
        "failing": [r["seed"] for r in results if r["verdict"] in ("differs", "crashed")],
        "noisy seeds": [r["seed"] for r in results if r["verdict"] == "noisy"],
        "seconds": round(seconds, 1), "date": datetime.date.today().isoformat(), "library": tree,
        "python": platform.python_version(),
    }  # fmt: skip


def lines_of(path: pathlib.Path) -> list[dict[str, Any]]:
    """The latest results of each chunk that is done, in the order of the seeds."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    latest = {line["first"]: line for line in lines}
    return [latest[first] for first in sorted(latest)]


def table(lines: list[dict[str, Any]]) -> str:
    """What was found by each library and sampler and in all, and what was refused, in Markdown."""
    trees = dict.fromkeys(line["library"] for line in lines)
    groups = {f"`{tree}`": [line for line in lines if line["library"] == tree] for tree in trees}
    groups["**in all**"] = lines
    names = ("seeds", *VERDICTS, "minutes")
    rows = [f"| library/sampler | {' | '.join(names)} |", "| --- " * (1 + len(names)) + "|"]
    for name, group in groups.items():
        columns = ("count", *VERDICTS, "seconds")
        *counts, seconds = (sum(line[column] for line in group) for column in columns)
        rows.append(f"| {name} | {' | '.join(map(str, counts))} | {seconds / 60:.0f} |")
    reasons = collections.Counter[str]()
    for line in lines:
        reasons.update(line["reasons"])
    rows += ["", "| refused because | programs |", "| --- | --- |"]
    rows += [f"| {reason} | {count} |" for reason, count in reasons.most_common()]
    failing = [seed for line in lines for seed in line["failing"]]
    return "\n".join([*rows, "", f"Failing seeds: {', '.join(failing) or 'none'}."])


def library() -> str:
    """The hashes that git gives the library's files and the sampler's, marked if not all are committed."""

    def git(*args: str) -> str:
        command = ["git", *args]
        return subprocess.run(
            command, cwd=HERE.parent, capture_output=True, text=True, check=True
        ).stdout.strip()

    hashes = (git("rev-parse", "--short", f"HEAD:{path}") for path in ("jzero", "tests/sampling"))
    return "/".join(hashes) + "+" * bool(git("status", "--porcelain", "jzero", "tests/sampling"))


def run_in_processes(seeds: range) -> list[dict[str, str]]:
    """Runs the seeds in other processes, and again without fused multiply-adds what differs."""
    return [_without_fma(r) for r in _run(seeds, os.environ)]


def _without_fma(result: dict[str, str]) -> dict[str, str]:
    if result["verdict"] != "differs" or int(result["accumulate"]) > 1:
        return result
    seed = int(result["seed"])
    flags = f"{os.environ.get('XLA_FLAGS', '')} {NO_FMA}"
    (again,) = _run(range(seed, seed + 1), {**os.environ, "XLA_FLAGS": flags})
    if again["verdict"] != "equal":
        return result
    return result | {
        "verdict": "noisy", "why": f"equal without fused multiply-adds; with them {result['why']}"
    }  # fmt: skip


def _run(seeds: range, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Runs the seeds in another process, and in a further one what a crash left over."""
    results: list[dict[str, str]] = []
    while seeds:
        command = [sys.executable, __file__, "--chunk", str(len(seeds)), str(seeds[0])]
        try:
            limit = 60 + BUNDLE_SECONDS * (1 + len(seeds) // 10)
            run = subprocess.run(
                command, capture_output=True, text=True, timeout=limit, env=environment
            )
            output, errors, status = run.stdout, run.stderr, f"exit status {run.returncode}"
        except subprocess.TimeoutExpired as late:
            output, errors, status = (
                _text(late.stdout),
                _text(late.stderr),
                f"no end after {limit} s",
            )
        results += [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        done = int(results[-1]["seed"]) + 1 if results else seeds[0]
        done = max(done, seeds[0])
        if done > seeds[-1]:
            break
        started = [line for line in output.splitlines() if line.startswith("bundle ")]
        bundle = range(done, int(started[-1].split()[2]) + 1) if started else range(done, done + 1)
        why = f"{status} in the bundle of {bundle[0]} to {bundle[-1]}\n{errors[-2000:]}"
        results += [
            {
                "seed": str(s),
                "verdict": "crashed",
                "why": why if s == bundle[0] else "",
                "listing": "",
            }
            for s in bundle
        ]
        seeds = range(bundle[-1] + 1, seeds[-1] + 1)
    return results


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def run_here(seeds: range) -> None:
    """Runs the seeds in this process, a line for each. Programs are all different: no cache on disk."""
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    import conftest  # noqa: F401  (8 virtual devices; before JAX)
    from sampling import check, loops

    family = loops if os.environ.get(LOOPS) else check
    for bundle in check.bundles(seeds):
        print(f"bundle {bundle[0]} {bundle[-1]}", flush=True)
        for r in family.check(bundle):
            line = {"seed": str(r.seed), "verdict": r.verdict, "why": r.why, "listing": r.listing}
            line["accumulate"] = str(family.setting_of(r.seed).options.get("accumulate", 1))
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
