"""Compares the golden net's rows with what is stored in tests/golden/stored, and shows what changed.

    python tests/run_golden.py --processes 2

Each row that changed is printed as a diff, with a verdict: better, equal or worse (tests/golden/_judge.py).
The exit status is 1 if any did. `--update` writes what is new; words choose rows by their names.
"""

import argparse
import concurrent.futures
import multiprocessing
import pathlib
import sys
import time
import traceback
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import conftest  # noqa: F401, I001  # before JAX, whose environment it is
import jax

import golden


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="of the names of rows; all by default")
    parser.add_argument("--update", action="store_true", help="store what is new")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--times", type=int, default=0, help="print so many of the slowest rows")
    args = parser.parse_args()
    times: list[tuple[float, str]] = []
    names = [name for name in golden.ROWS if all(word in name for word in args.words)]
    stored = {theme: golden.read(theme) for theme in {golden.ROWS[n].theme for n in names}}
    counts: dict[str, int] = {}
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.processes, spawn) as pool:
        for name, (new, seconds) in zip(names, pool.map(recorded, names), strict=True):
            times.append((seconds, name))
            row = golden.ROWS[name]
            records = stored[row.theme]
            verdict = golden.compared(row.name, records.get(row.name, {}), new)
            if verdict is not None:
                print(f"{name}: {verdict.word} ({verdict.why})\n{verdict.diff}\n", flush=True)
                counts[verdict.word] = counts.get(verdict.word, 0) + 1
                if "failed" not in new:
                    records[row.name] = golden.with_tolerance(records.get(row.name, {}), new)
                if args.update:
                    keep(row.theme, records)
    gone = 0
    for theme, records in stored.items():
        gone += len(
            records.keys() - {row.name for row in golden.ROWS.values() if row.theme == theme}
        )
        if args.update:
            keep(theme, records)
    said = ", ".join(f"{num} {word}" for word, num in sorted(counts.items())) or "none changed"
    print(f"{len(names)} rows: {said}" + f"; {gone} stored and no row" * bool(gone))
    if args.times:
        for seconds, name in sorted(times, reverse=True)[: args.times]:
            print(f"{seconds:6.1f} s  {name}")
    return int(bool(counts or gone) and not args.update)


def keep(theme: str, records: dict[str, Any]) -> None:
    """Writes a theme, its rows in the order of the table."""
    rows = [row.name for row in golden.ROWS.values() if row.theme == theme]
    golden.write(theme, {name: records[name] for name in rows if name in records})


def recorded(name: str) -> Any:
    """The record of a row, in a process of its own environment, and the seconds that it took."""
    start = time.process_time()
    return _recorded(name), time.process_time() - start


def _recorded(name: str) -> Any:
    jax.config.update("jax_enable_x64", True)
    try:
        return golden.record(golden.ROWS[name])
    except Exception:
        return {"failed": traceback.format_exc().splitlines()}


if __name__ == "__main__":
    sys.exit(main())
