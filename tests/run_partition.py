"""Trains steps by the partitioner, against one device with the whole batch, and counts what becomes of them.

    python tests/run_partition.py families --stages 3 1 --meshes 8 2x4   # of tests/exactness
    python tests/run_partition.py sampled 200 0                          # seeds of tests/sampling
    python tests/run_partition.py loops 200 0                            # scans and whiles along the batch
    python tests/run_partition.py times 5                                # trace and lower, so often

    python tests/run_partition.py sampled 200 0 --accumulate 2           # in two microbatches
    python tests/run_partition.py sampled 200 0 --offload                # those whose setting has offload

Each is 'equal', 'differs', 'fails' or 'refused', by whatever the message says, which is counted. The exit
status is 1 if any differs or fails. `--every 5` runs each fifth family, or seed.
"""

import argparse
import concurrent.futures
import dataclasses
import gc
import itertools
import math
import multiprocessing
import pathlib
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

sys.path[:0] = [str(pathlib.Path(__file__).parents[i]) for i in (0, 1)]

# isort: off
import conftest  # noqa: E402, F401  # before JAX, whose environment it is
import jax  # noqa: E402

import exactness  # noqa: E402
import golden  # noqa: E402
from exactness._check import Setting, applies  # noqa: E402
# isort: on


JOBS = 40  # of a process


class Outcome(NamedTuple):
    """Of one training: its word, what it is about, and why it is not equal."""

    word: str
    name: str
    why: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("families", "sampled", "loops", "times"))
    parser.add_argument("num", type=int, nargs="?", default=200, help="of seeds, or of repetitions")
    parser.add_argument("seed", type=int, nargs="?", default=0, help="the first")
    parser.add_argument("--stages", type=int, nargs="+", default=(3,))
    parser.add_argument("--meshes", nargs="+", default=("8",))
    parser.add_argument(
        "--accumulate",
        type=int,
        default=1,
        help="microbatches: of sampled programs, without their other options",
    )
    parser.add_argument("--names", nargs="+", help="of families; all by default")
    parser.add_argument(
        "--offload", action="store_true", help="of sampled programs, those with offload"
    )
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    if args.what == "times":
        print(*times(args.num), sep="\n")
        return 0
    jobs: list[tuple[Any, ...]]
    if args.what == "families":
        names = args.names or [x for x in exactness.NAMES if x not in exactness.SLOW]
        meshes = [tuple(map(int, mesh.split("x"))) for mesh in args.meshes]
        settings = [
            Setting(stage, mesh, accumulate=args.accumulate)
            for mesh in meshes
            for stage in args.stages
        ]
        jobs = [("family", name, setting) for name in names[:: args.every] for setting in settings]
    else:
        seeds = [*range(args.seed, args.seed + args.num, args.every)]
        seeds = [*filter(_has_offload, seeds)] if args.offload else seeds
        jobs = [(args.what, seed, args.accumulate) for seed in seeds]
    counts, whys = Counter[str](), Counter[str]()
    for outcome in _in_processes(jobs, args.processes):
        counts[outcome.word] += 1
        if outcome.word == "refused":
            whys[outcome.why] += 1
        elif outcome.word in ("differs", "fails"):
            print(f"{outcome.word}: {outcome.name}: {outcome.why}", flush=True)
    print(", ".join(f"{num} {word}" for word, num in sorted(counts.items())))
    print(*(f"{num} x {why}" for why, num in whys.most_common()), sep="\n")
    return int(bool(counts["differs"] or counts["fails"]))


TIMED = (
    "Llama, stage 3",
    "our GPT, stage 3",
    "Flax GPT, stage 3",
    "Llama, stage 1",
    "layers unrolled",
)


def times(num: int) -> Iterator[str]:
    """A table: seconds of processors to trace and lower large steps, in turns, `num` times each."""
    jax.config.update("jax_enable_x64", False)
    yield "| step | jax.jit, s | jzero | in turns |"
    yield "| --- " * 4 + "|"
    for name in TIMED:
        seconds: dict[str, list[float]] = {"jit": [], "jzero": []}
        for _, which in itertools.product(range(num), seconds):
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
        yield (
            f"| {name} | {jit:.2f} | {own / jit:.2f}x "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )


def _in_processes(jobs: list[tuple[Any, ...]], num: int) -> Iterator[Outcome]:
    """In processes of their own, which end after some jobs: programs are all different."""
    spawn = multiprocessing.get_context("spawn")
    for i in range(0, len(jobs), JOBS * num):
        with concurrent.futures.ProcessPoolExecutor(num, spawn) as pool:
            yield from pool.map(_outcome, jobs[i : i + JOBS * num])


def _outcome(job: tuple[Any, ...]) -> Outcome:
    kind, *rest = job
    name = ", ".join(map(str, rest))
    try:
        return {"family": _family, "sampled": _sampled, "loops": _sampled}[kind](job, name)
    except Exception:
        lines = traceback.format_exc().splitlines()
        return Outcome("fails", name, "\n".join(lines[-5:]))
    finally:
        jax.clear_caches()


def _family(job: tuple[Any, ...], name: str) -> Outcome:
    """A step of tests/exactness."""
    from exactness import _check, _compare

    _, family_name, setting = job
    family = exactness.get(family_name)
    if not applies(family, setting):
        return Outcome("does not apply", name)
    jax.config.update("jax_enable_x64", True)
    step = _check.sharded(family, setting)
    try:
        actual = _compare.train(family, step, "float64")
    except _check.jzero.JzeroError as error:
        return Outcome("refused", name, f"{error}".splitlines()[0])
    expected = _compare.train(family, _compare.reference(family), "float64")
    found = _compare.differences(expected, actual, "float64")
    return Outcome("differs" if found else "equal", name, "; ".join(found[:2])[:300])


def _sampled(job: tuple[Any, ...], name: str) -> Outcome:
    """A program drawn by its seed, in the setting of its bundle."""
    from sampling import check, loops

    kind, seed, accumulate = job
    family = loops if kind == "loops" else check
    setting = family.setting_of(seed)
    if accumulate > 1:
        setting = _in_microbatches(setting, accumulate)
    program = loops.draw(seed, setting.rows) if kind == "loops" else check.program_of(seed, setting)
    (result,) = check.compare([program], setting)
    why = (result.why or "").splitlines()
    return Outcome(result.verdict, name, why[0][:300] if why else "")


ALONE = ("stage", "min_shard_bytes", "reduce", "full", "optimizer_axes", "param_axes")


def _has_offload(seed: int) -> bool:
    from sampling import check

    return any(name.startswith("offload") for name in check.setting_of(seed).options)


def _in_microbatches(setting: Any, num: int) -> Any:
    """The setting with so many microbatches and rows for each, and options that only the plan reads."""
    options = {name: value for name, value in setting.options.items() if name in ALONE}
    num_rows = num * math.prod(setting.axes)
    rows = -(-setting.rows // num_rows) * num_rows
    return dataclasses.replace(setting, rows=rows, options={**options, "accumulate": num})


if __name__ == "__main__":
    sys.exit(main())
