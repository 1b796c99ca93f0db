"""Tables and picture of results/*.jsonl: what trains as on one device, what is refused, and what differs.

python experiments/exactness/report.py            # prints the tables, draws results/differences.png
"""

import collections
from pathlib import Path
from typing import Any

# isort: off
import experiments.shared.as_tests  # noqa: F401
import zoo
from experiments.shared import pictures, records
# isort: on

HERE = Path(__file__).parent
RESULTS = ("equal", "refused", "differs", "fails", "unfinished")
BEFORE = "68416ea"  # the library when it traced steps at one device's shapes
LENGTH = 200  # of what is shown of a message
NOTHING, ALL = 1e-17, 10.0  # where equality to the bit is drawn, and what differs by more than this


def read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The last line for each family and setting."""
    return {(line["family"], line["setting"]): line for line in records.read_lines(path)}


def theme(name: str) -> str:
    return zoo.module_of(name) if name in zoo.NAMES else "no longer in the table"


def table(title: str, found: dict[tuple[str, str], dict[str, Any]]) -> None:
    """A row for each theme, a column for each result."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for (family, _), line in found.items():
        counts[theme(family)][line["result"]] += 1
    print(f"\n{title}: {len(found)} trainings of {len({family for family, _ in found})} families\n")
    print(f"| theme | {' | '.join(RESULTS)} |\n| --- |{' --- |' * len(RESULTS)}")
    for title, results in [
        *sorted(counts.items()),
        ("all", sum(counts.values(), collections.Counter())),
    ]:
        row = " | ".join(str(results[result]) for result in RESULTS)
        print(f"| {title.replace('_', ' ')} | {row} |")


def refusals(found: dict[tuple[str, str], dict[str, Any]]) -> None:
    """A row for each family that is refused, with what it is told, and where if not in every setting."""
    told = collections.defaultdict[str, dict[str, str]](dict)
    for (family, setting), line in found.items():
        if line["result"] == "refused":
            told[family][setting] = " ".join(line["found"][0].partition(": ")[2].split())
    rows = []
    for family, texts in told.items():
        asked = [setting for name, setting in found if name == family]
        where = "" if len(texts) == len(asked) else f" ({'; '.join(texts)})"
        rows.append(f"| {family}{where} | {next(iter(texts.values()))[:LENGTH]}... |")
    if rows:
        print("\n| refused | text |\n| --- | --- |", *rows, sep="\n")


def picture(before: dict[Any, Any], after: dict[Any, Any], setting: str) -> None:
    """The largest difference of each family to one device, before and now."""
    names = [name for name in zoo.NAMES if (name, setting) in before and (name, setting) in after]
    path = HERE / "results" / "differences.png"
    with pictures.drawn(path, font=10, figsize=(11, 4)) as (_, axes):
        for label, found, marker in (("before", before, "x"), ("now", after, ".")):
            pairs = [(i, found[name, setting]) for i, name in enumerate(names)]
            pairs = [(i, x["largest"]) for i, x in pairs if x["result"] in ("equal", "differs")]
            axes.plot(
                [i for i, _ in pairs],
                [min(max(y, NOTHING), ALL) for _, y in pairs],
                marker,
                label=label,
            )
        themes = list(map(theme, names))
        starts = [i for i, theme in enumerate(themes) if not i or theme != themes[i - 1]]
        axes.set_xticks(
            starts, [themes[i].replace("_", " ") for i in starts], rotation=40, ha="right"
        )
        axes.set_yscale("log")
        axes.set_ylim(NOTHING / 10, ALL * 10)
        axes.set_ylabel("largest difference to one device,\nrelative to its leaf")
        axes.set_title(f"Families of train steps: {setting}; equal to the bit at {NOTHING:g}")
        axes.legend()


def num_lines(revision: str, folder: str) -> int:
    """Lines of Python in a folder of the repository."""
    paths = records.git("ls-tree", "-r", "--name-only", revision, folder).splitlines()
    sources = (records.git("show", f"{revision}:{p}") for p in paths if p.endswith(".py"))
    return sum(source.count("\n") + 1 for source in sources)


def main() -> None:
    before = read(HERE / "results" / "before.jsonl")
    for path in sorted((HERE / "results").glob("*.jsonl")):
        table(path.stem, read(path))
        if path.stem != "before":
            refusals(read(path))
    now = sorted((HERE / "results").glob("jax-0.10*.jsonl"))
    for folder in ("jzero", "jzero/sharding/partition", "jzero/checkpoint", "tests"):
        print(
            f"{folder}: {num_lines(BEFORE, folder):,} lines at {BEFORE}, {num_lines('HEAD', folder):,} now"
        )
    if before and now:
        picture(before, read(now[-1]), "stage 3, 8 devices, float64")


if __name__ == "__main__":
    main()
