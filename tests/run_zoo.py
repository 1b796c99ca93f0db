"""The table of programs x options x mesh, against one device: more of it than the tests have.

    python tests/run_zoo.py table                                # every program in every setting: hours
    python tests/run_zoo.py table --stages 3 --meshes 8 2x4 --dtypes float64 --microbatches 1 --every 5
    python tests/run_zoo.py sampled 20000 0 --processes 2        # programs drawn by seed: hours
    python tests/run_zoo.py sampled 200 0 --microbatches 2       # without their settings' other options
    python tests/run_zoo.py sampled 200 0 --offload              # those whose setting has offload
    python tests/run_zoo.py times 5                              # trace and lower, so often

Each goes on where it stopped, of the same library. `table` adds a line for each program and setting to
experiments/exactness/results; a step that ends the process leaves the line 'unfinished'. Steps are compiled
as users compile them, with all of XLA's and LLVM's optimizations, unlike in the tests.

`sampled` runs seeds in chunks, each in a process of its own, so that a crash or a deadlock costs one bundle
of one chunk: the rest of the chunk runs in another process. A chunk is one line of
experiments/sampled/results, with the hashes that it holds for; to run it again, delete the line. Each failing
seed is printed with its setting, its source and what differs; the exit status is 1 if there are any. To look
at one seed again, alone: `sampled 1 SEED`. To print the table of all results: `sampled --report`. With
`--loops`, loops along the batch are drawn (tests/zoo/sampling/loops.py), and have results of their own.

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
import dataclasses
import datetime
import gc
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

HERE = pathlib.Path(__file__).parent
EXPERIMENTS = HERE.parent / "experiments"
RESULTS = EXPERIMENTS / "sampled" / "results"
CHUNK = 100
BUNDLE_SECONDS = 600
# Of the instruction sets of x86 the largest without fused multiply-adds.
NO_FMA = "--xla_cpu_max_isa=AVX"
VERDICTS = ("equal", "refused", "noisy", "differs", "crashed")
# Options that only the plan reads, which seeds in microbatches keep.
ALONE = ("min_shard_bytes", "reduce", "full", "optimizer_axes", "param_axes")
TIMED = (
    "Llama, stage 3", "our GPT, stage 3", "Flax GPT, stage 3", "Llama, stage 1", "layers unrolled",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    kinds = parser.add_subparsers(dest="what", required=True)
    of_table = kinds.add_parser("table", help="every program in every setting")
    of_table.add_argument("--stages", type=int, nargs="+", default=(3, 2, 1, 0))
    of_table.add_argument("--meshes", nargs="+", default=("8", "4", "2", "1", "2x4"))
    of_table.add_argument("--dtypes", nargs="+", default=("float64", "float32"))
    of_table.add_argument("--microbatches", type=int, nargs="+", default=(1, 2))
    of_table.add_argument("--names", nargs="+", help="of programs; all by default")
    of_table.add_argument("--every", type=int, default=1, help="each fifth program, and so on")
    of_table.add_argument("--name", help="of the file of results")
    of_table.add_argument("--part", default="0/1", help="which part of the programs: 0/2, 1/2")
    of_table.add_argument("--out", type=pathlib.Path, default=EXPERIMENTS / "exactness" / "results")
    of_seeds = kinds.add_parser("sampled", help="programs drawn by seed")
    of_seeds.add_argument("num", type=int, nargs="?", default=20_000)
    of_seeds.add_argument("seed", type=int, nargs="?", default=0, help="the first")
    of_seeds.add_argument("--processes", type=int, default=1)
    of_seeds.add_argument("--again", action="store_true", help="also what is in the results")
    of_seeds.add_argument("--report", action="store_true", help="print the table of all results")
    of_seeds.add_argument("--loops", action="store_true", help="loops along the batch")
    of_seeds.add_argument("--microbatches", type=int, default=1)
    of_seeds.add_argument("--offload", action="store_true", help="those whose setting has it")
    of_seeds.add_argument("--chunk", action="store_true", help=argparse.SUPPRESS)
    kinds.add_parser("times", help="of tracing and lowering").add_argument("num", type=int)
    args = parser.parse_args()
    return {"table": whole_table, "sampled": sampled, "times": times}[args.what](args)


# -- the table --------------------------------------------------------------------------------------
def whole_table(args: argparse.Namespace) -> int:
    os.environ["JZERO_TEST_OPTIMIZED"] = "1"
    _before_jax()
    import jax

    import zoo
    from experiments.shared import records

    path = args.out / f"{args.name or f'jax-{jax.__version__}'}.jsonl"
    tree, (part, parts) = records.library(), map(int, args.part.split("/"))
    made_with = {**records.versions("jax", "jaxlib"), "cpu": records.processor(), "optimized": True}
    known = {(x["family"], x["setting"]) for x in records.read_lines(path) if x["library"] == tree}
    meshes = [tuple(map(int, mesh.split("x"))) for mesh in args.meshes]
    settings = [
        zoo.Setting(stage, mesh, dtype, num)
        for num in args.microbatches for mesh in meshes for dtype in args.dtypes for stage in args.stages
    ]  # fmt: skip
    failed = False
    for name in (args.names or zoo.NAMES)[:: args.every][part::parts]:
        for setting in settings:
            if not zoo.applies(zoo.get(name), setting) or (name, str(setting)) in known:
                continue
            about = {"family": name, "setting": str(setting), "library": tree, **made_with}
            # It may end the process.
            records.append(path, {**about, "result": "unfinished", "found": []})
            done = {**about, **one(name, setting)}
            records.append(path, done)
            if done["result"] not in ("equal", "refused"):
                failed = True
                print(name, setting, done["result"], *done["found"], sep="; ", flush=True)
        jax.clear_caches()
    return int(failed)


def one(name: str, setting: Any) -> dict[str, Any]:
    """The result of a program in a setting, and how long it took."""
    import jax

    import zoo

    jax.config.update("jax_enable_x64", setting.dtype == "float64")
    start = time.perf_counter()
    try:
        result, found, most = zoo.check(name, setting)
    except Exception as error:  # What jzero does not refuse by name is a defect, and is listed.
        result, found, most = "fails", [f"{type(error).__name__}: {error}"], 0.0
    return {
        "result": result,
        "found": [without_paths(text)[:300] for text in found[:3]],
        "largest": float(f"{most:.2g}"),
        "seconds": round(time.perf_counter() - start, 2),
    }


def without_paths(text: str) -> str:
    """The text, with files named from the repository's root or from where packages are installed."""
    return re.sub(r"[^\s(]*/site-packages/", "", text).replace(f"{HERE.parent}/", "")


def times(args: argparse.Namespace) -> int:
    """A table: seconds of processors to trace and lower large steps, in turns, `num` times each."""
    _before_jax()
    import jax

    import golden

    print("| step | jax.jit, s | jzero | in turns |")
    print("| --- " * 4 + "|")
    for name in TIMED:
        seconds: dict[str, list[float]] = {"jit": [], "jzero": []}
        for _, which in itertools.product(range(args.num), seconds):
            step, state, batch = golden.sharded(name)
            jax.clear_caches()
            gc.collect()
            start = time.process_time()
            if which == "jit":
                jax.jit(step.__wrapped__, donate_argnums=0).trace(state, batch).lower()
            else:
                step.lower(state, batch)
            seconds[which].append(time.process_time() - start)
        jit, own = map(min, seconds.values())
        ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
        middle = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {name} | {jit:.2f} | {own / jit:.2f}x | {middle} |", flush=True)
    return 0


# -- programs drawn by seed ---------------------------------------------------------------------------------
def sampled(args: argparse.Namespace) -> int:
    seeds = range(args.seed, args.seed + args.num)
    if args.chunk:
        run_here(seeds, args)
        return 0
    path = RESULTS / f"{'loops-' * args.loops}jax-{importlib.metadata.version('jax')}.jsonl"
    if args.report:
        print(table(lines_of(path)))
        return 0
    more = ["--loops"] * args.loops + ["--offload"] * args.offload
    more += ["--microbatches", str(args.microbatches)] if args.microbatches > 1 else []
    is_kept = args.num >= CHUNK and more in ([], ["--loops"])
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = library()
    known = {line["first"] for line in lines_of(path)} if is_kept and not args.again else set()
    chunks = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    chunks = [chunk for chunk in chunks if chunk[0] not in known]
    lock, failed = threading.Lock(), list[int]()

    def run(chunk: range) -> None:
        start = time.monotonic()
        results = run_in_processes(chunk, more)
        with lock:
            line = summary(chunk, results, time.monotonic() - start, tree)
            if is_kept:
                with path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            failed.extend(report(results, everything=args.num == 1))
            names = ("first", *VERDICTS, *(() if is_kept else ("reasons",)), "seconds")
            print({name: line[name] for name in names}, flush=True)

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
        done = subprocess.run(
            ["git", *args], cwd=HERE.parent, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    folders = ("jzero", "tests/zoo/sampling")
    hashes = (git("rev-parse", "--short", f"HEAD:{path}") for path in folders)
    return "/".join(hashes) + "+" * bool(git("status", "--porcelain", *folders))


def run_in_processes(seeds: range, options: Sequence[str] = ()) -> list[dict[str, str]]:
    """Runs the seeds in other processes, and again without fused multiply-adds what differs."""
    return [_without_fma(r, options) for r in _run(seeds, options, os.environ)]


def _without_fma(result: dict[str, str], options: Sequence[str]) -> dict[str, str]:
    if result["verdict"] != "differs" or int(result["accumulate"]) > 1:
        return result
    seed = int(result["seed"])
    flags = f"{os.environ.get('XLA_FLAGS', '')} {NO_FMA}"
    (again,) = _run(range(seed, seed + 1), options, {**os.environ, "XLA_FLAGS": flags})
    if again["verdict"] != "equal":
        return result
    return result | {
        "verdict": "noisy", "why": f"equal without fused multiply-adds; with them {result['why']}"
    }  # fmt: skip


def _run(seeds: range, options: Sequence[str], environment: Mapping[str, str]) -> list[Any]:
    """Runs the seeds in another process, and in a further one what a crash left over."""
    results: list[dict[str, str]] = []
    while seeds:
        chunk = ["--chunk", *options, str(len(seeds)), str(seeds[0])]
        command = [sys.executable, __file__, "sampled", *chunk]
        limit = 60 + BUNDLE_SECONDS * (1 + len(seeds) // 10)
        try:
            run = subprocess.run(
                command, capture_output=True, text=True, timeout=limit, env=environment
            )
            output, errors, status = run.stdout, run.stderr, f"exit status {run.returncode}"
        except subprocess.TimeoutExpired as late:
            output, errors = _text(late.stdout), _text(late.stderr)
            status = f"no end after {limit} s"
        results += [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        started = [line.split() for line in output.splitlines() if line.startswith("bundle ")]
        if output.endswith("done\n"):
            break
        first = max(seeds[0], *(int(r["seed"]) + 1 for r in results)) if results else seeds[0]
        last = int(started[-1][2]) if started else first
        why = f"{status} in the bundle of {first} to {last}\n{errors[-2000:]}"
        results += [
            {"seed": str(s), "verdict": "crashed", "why": why if s == first else "", "listing": ""}
            for s in range(first, last + 1)
        ]
        seeds = range(last + 1, seeds[-1] + 1)
    return results


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def run_here(seeds: range, args: argparse.Namespace) -> None:
    """Runs the seeds in this process, a line for each. Programs are all different: no cache on disk."""
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    _before_jax()
    from zoo.sampling import check, loops

    family = loops if args.loops else check
    for bundle in check.bundles(seeds):
        setting = family.setting_of(bundle[0])
        if args.offload and "offload" not in setting.options:
            continue
        if args.microbatches > 1:
            setting = _in_microbatches(setting, args.microbatches)
        print(f"bundle {bundle[0]} {bundle[-1]}", flush=True)
        for r in family.check(bundle, setting):
            line = {"seed": str(r.seed), "verdict": r.verdict, "why": r.why, "listing": r.listing}
            print(json.dumps({**line, "accumulate": str(setting.accumulate)}), flush=True)
    print("done", flush=True)


def _in_microbatches(setting: Any, num: int) -> Any:
    """The setting with so many microbatches and rows for each, and options that only the plan reads."""
    options = {name: value for name, value in setting.options.items() if name in ALONE}
    num_rows = num * setting.num_devices
    rows = -(-setting.rows // num_rows) * num_rows
    return dataclasses.replace(setting, rows=rows, accumulate=num, options=options)


def _before_jax() -> None:
    """The tests' environment: 8 virtual devices."""
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    import conftest  # noqa: F401


if __name__ == "__main__":
    sys.exit(main())
