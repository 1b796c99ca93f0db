"""The table of results/*.jsonl: families by theme, settings, and what of them is equal or refused.

python experiments/exactness/report.py
"""

import collections
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))
import conftest  # noqa: E402, F401
import exactness  # noqa: E402


def main() -> None:
    for path in sorted((HERE / "results").glob("jax-*.jsonl")):
        last = {}
        for line in path.read_text().splitlines():
            found = json.loads(line)
            last[found["family"], found["setting"]] = found
        counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for (family, _), found in last.items():
            counts[exactness.module_of(family)][found["result"]] += 1
        print(f"{path.stem}: {len(last)} trainings\n")
        print(
            "| theme | equal | refused by name | differs | fails |\n| --- | --- | --- | --- | --- |"
        )
        for theme, found in sorted(counts.items()):
            row = [str(found[key]) for key in ("equal", "refused", "differs", "fails")]
            print(f"| {theme.replace('_', ' ')} | {' | '.join(row)} |")
        print()


if __name__ == "__main__":
    main()
