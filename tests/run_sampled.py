"""Checks many sampled train steps against one device, and goes on after each failure.

    python tests/run_sampled.py 20000 0 --processes 2

runs the seeds 0 to 19999. Each failing seed is printed with the listing of its step and the error; the last
line lists the failing seeds, and the exit status is 1 if there are any. To look at one seed
again: `python tests/run_sampled.py 1 SEED`.

Seeds run in chunks, each in a process of its own, so that a crash or a deadlock costs one chunk: its seed is
named, and the next chunk starts after it.
"""

import argparse
import concurrent.futures
import os
import pathlib
import subprocess
import sys
import time
import traceback

CHUNK = 50
SECONDS_PER_SEED = 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("num_cases", type=int, metavar="N")
    parser.add_argument("seed", type=int, metavar="SEED", help="the first seed")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--chunk", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    seeds = range(args.seed, args.seed + args.num_cases)
    if args.chunk:
        run_chunk(seeds)
        return 0
    chunks = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    start, done, failed = time.monotonic(), 0, []
    with concurrent.futures.ThreadPoolExecutor(args.processes) as pool:
        for chunk, failures in zip(chunks, pool.map(run_in_processes, chunks), strict=True):
            done += len(chunk)
            failed += failures
            seconds = (time.monotonic() - start) / done
            print(f"{done} seeds, {len(failed)} failed, {seconds:.2f} s each", flush=True)
    print(f"failing seeds: {failed}" if failed else "no seed failed")
    return 1 if failed else 0


def run_in_processes(seeds: range) -> list[int]:
    """Runs the seeds in another process, and in a further one what a crash left over."""
    failed: list[int] = []
    while seeds:
        command = [sys.executable, __file__, "--chunk", str(len(seeds)), str(seeds[0])]
        timeout = 60 + SECONDS_PER_SEED * len(seeds)
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
            output, errors, status = run.stdout, run.stderr, f"exit status {run.returncode}"
            finished = run.returncode == 0
        except subprocess.TimeoutExpired as late:
            output, errors = _text(late.stdout), _text(late.stderr)
            finished, status = False, f"no end after {timeout} s"
        lines = output.splitlines()
        print(
            "\n".join(line for line in lines if not line.startswith("start ")), end="", flush=True
        )
        failed += [int(line.split()[1]) for line in lines if line.startswith("FAILED ")]
        if finished:
            break
        started = [int(line.split()[1]) for line in lines if line.startswith("start ")]
        last = started[-1] if started else seeds[0]
        print(f"FAILED {last}: {status}\n{errors[-2000:]}", flush=True)
        failed.append(last)
        seeds = range(last + 1, seeds[-1] + 1)
    return failed


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def run_chunk(seeds: range) -> None:
    """Runs the seeds here. Programs are all different: no compilation cache on disk."""
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    tests = pathlib.Path(__file__).parent
    sys.path[:0] = [str(tests), str(tests.parent)]
    import conftest  # noqa: F401  (8 virtual devices; before JAX)
    import sampled

    for seed in seeds:
        print(f"start {seed}", flush=True)
        try:
            sampled.check(seed)
        except Exception as error:
            where = "" if isinstance(error, AssertionError) else traceback.format_exc(limit=-4)
            listing = "" if isinstance(error, AssertionError) else listing_of(seed)
            print(f"FAILED {seed} {type(error).__name__}: {error}\n{listing}\n{where}", flush=True)


def listing_of(seed: int) -> str:
    import sampled

    return str(sampled.draw_well_conditioned(seed)[0])


if __name__ == "__main__":
    sys.exit(main())
