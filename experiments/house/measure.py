"""Measures the house: the rooms, walks and words of a checkout of jzero.

make house                                             # this checkout, as "after"; a minute
python experiments/house/measure.py CHECKOUT --name before
python experiments/house/measure.py --table            # what results/ has, in Markdown

The state before is commit 9a4a2b1: `git worktree add FOLDER 9a4a2b1`. Adds a line to results/<date>.jsonl.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import rooms
import words
from experiments.shared import records

HERE = Path(__file__).parent


def measure(checkout: Path) -> dict[str, Any]:
    path = os.pathsep.join(map(str, (checkout, records.ROOT)))
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(HERE / "walks.py")]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return {
        "commit": records.git("rev-parse", "--short", "HEAD", root=checkout),
        "library": records.library(checkout),
        "rooms": rooms.numbers(checkout),
        "walks": json.loads(done.stdout),
        "words": words.numbers(checkout),
    }


def table(lines: list[dict[str, Any]]) -> str:
    """A column for the latest line of each name."""
    latest = {line["name"]: line for line in lines}
    header = ["", *(f"{name} ({line['commit']})" for name, line in latest.items())]
    rows: dict[str, list[str]] = {}  # Of what was not measured the cell is empty.
    for column, line in enumerate(latest.values()):
        sections = {**line["walks"], "": line["rooms"] | line["words"]}
        for section, numbers in sections.items():
            for name, number in numbers.items():
                title = f"{section}: {name}" if section else name
                rows.setdefault(title, [""] * len(latest))[column] = f"{number:g}"
    body = [header, ["---", *["---:"] * len(latest)], *([k, *v] for k, v in rows.items())]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in body)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, nargs="?", default=records.ROOT)
    parser.add_argument("--name", default="after", help="of the state (default: %(default)s)")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    if not args.table:
        about = records.versions("jax", "jaxlib", "optax", "numpy")
        result = {**about, "name": args.name, **measure(args.checkout.resolve())}
        records.append(args.out / f"{about['date']}.jsonl", result)
    paths = sorted(args.out.glob("*.jsonl"))
    print(table([line for path in paths for line in records.read_lines(path)]))


if __name__ == "__main__":
    main()
