"""Compares the golden net's rows with what is stored in tests/golden/stored, and shows what changed.

    python tests/run_golden.py --processes 2
    python tests/run_golden.py --h200         # 20 rows compiled for H200s, by the newest JAX and one process
    python tests/run_golden.py --traffic      # by another JAX: layouts, collectives and bytes alone

Each row that changed is printed as a diff, with a verdict: better or update (tests/golden/_judge.py).
The exit status is 1 if any did. `--update` writes what is new; words choose rows by their names.
"""

import argparse
import concurrent.futures
import multiprocessing
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

sys.path[:0] = [str(pathlib.Path(__file__).parents[i]) for i in (0, 1)]

if "--h200" in sys.argv:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # The devices are not there.
else:
    import conftest  # noqa: F401  # before JAX, whose environment it is
import jax  # noqa: E402

import golden  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="of the names of rows; all by default")
    parser.add_argument("--update", action="store_true", help="store what is new")
    parser.add_argument("--h200", action="store_true", help="the rows that are compiled for H200s")
    parser.add_argument(
        "--traffic", action="store_true", help="only what no release of JAX changes"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--times", type=int, default=0, help="print so many of the slowest rows")
    args = parser.parse_args()
    if args.traffic and args.update:
        parser.error("--update stores whole rows, --traffic looks at a part of them")
    themes = {"h200": golden.H200} if args.h200 else golden.themes()
    names = [name for name in rows_of(themes) if all(word in " ".join(name) for word in args.words)]
    stored = {theme: golden.read(theme) for theme in themes}
    times: list[tuple[float, str]] = []
    counts: dict[str, int] = {}
    found = map(recorded, names) if args.h200 else in_processes(names, args.processes)
    for (theme, name), (new, seconds) in zip(names, found, strict=True):
        times.append((seconds, f"{theme}: {name}"))
        records = stored[theme]
        old = records.get(name, {})
        if args.traffic:
            old, new = ({key: each[key] for key in TRAFFIC if key in each} for each in (old, new))
        verdict = golden.compared(name, old, new)
        if verdict is not None:
            print(f"{theme}: {name}: {verdict.word} ({verdict.why})\n{verdict.diff}\n", flush=True)
            counts[verdict.word] = counts.get(verdict.word, 0) + 1
            if "failed" not in new:
                records[name] = golden.with_tolerance(records.get(name, {}), new)
                if args.update:
                    keep(theme, themes[theme], records)
    gone = 0
    for theme, records in stored.items():
        gone += len(records.keys() - {*themes[theme]})
        if args.update:
            keep(theme, themes[theme], records)
    said = ", ".join(f"{num} {word}" for word, num in sorted(counts.items())) or "none changed"
    print(f"{len(names)} rows: {said}" + f"; {gone} stored and no row" * bool(gone))
    for seconds, name in sorted(times, reverse=True)[: args.times]:
        print(f"{seconds:6.1f} s  {name}")
    return int(bool(counts or gone) and not args.update)


TRAFFIC = ("failed", "refused", "layouts at rest", "traffic")


def rows_of(themes: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(theme, name) for theme, names in themes.items() for name in names]


def keep(theme: str, names: list[str], records: dict[str, Any]) -> None:
    """Writes a theme, its rows in the order of the table."""
    golden.write(theme, {name: records[name] for name in names if name in records})


def in_processes(names: list[tuple[str, str]], num: int) -> Iterator[tuple[Any, Any]]:
    """Each in a process of the tests' environment."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(num, spawn) as pool:
        yield from pool.map(recorded, names)


def recorded(name: tuple[str, str]) -> tuple[Any, float]:
    """The record of a row, and the seconds of processors that it took."""
    jax.config.update("jax_enable_x64", name[0] != "h200")
    start = time.process_time()
    try:
        found = golden.recorded(*name)
    except Exception:
        found = {"failed": traceback.format_exc().splitlines()}
    return found, time.process_time() - start


if __name__ == "__main__":
    sys.exit(main())
