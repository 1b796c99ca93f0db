"""Tables in Markdown, the worst rows first: python experiments/rivals/report.py [results.jsonl]"""

import sys
from pathlib import Path
from typing import Any

from experiments.rivals import zoo
from experiments.shared import records

RESULTS = Path(__file__).parent / "results"
Cell = tuple[str, int, str]
Rivals = dict[str, dict[str, Any]]


def read(path: Path) -> dict[Cell, Rivals]:
    """`{(model, devices, flags): {rival: numbers}}`, the worst peak first; of equal cells the last counts."""
    cells: dict[Cell, Rivals] = {}
    for row in records.read_lines(path):
        cells.setdefault((row["model"], row["devices"], row["flags"]), {})[row["rival"]] = row
    complete = {cell: rivals for cell, rivals in cells.items() if {"jzero", "expert"} <= {*rivals}}
    return dict(sorted(complete.items(), key=lambda item: -ratio(item[1], peak)))


def peak(row: dict[str, Any]) -> float:
    return row["peak_bytes"] / 2**30


def moved(row: dict[str, Any]) -> float:
    """Bytes per parameter."""
    return sum(row["moved_bytes"].values()) / row["parameters"]


def exposed(row: dict[str, Any]) -> float:
    return 1000 * row["exposed_seconds"]


def step(row: dict[str, Any]) -> float:
    return 1000 * row["step_seconds"]


def compiled(row: dict[str, Any]) -> float:
    return row["compile_seconds"]


def lowered(row: dict[str, Any]) -> float:
    return row["lower_seconds"]


def gathers(row: dict[str, Any]) -> str:
    return f"{row['times']['all-gather']} in {1000 * row['seconds']['all-gather']:.0f} ms"


def reductions(row: dict[str, Any]) -> str:
    times, seconds = (
        sum(row[name].get(op, 0) for op in ("reduce-scatter", "all-reduce"))
        for name in ("times", "seconds")
    )
    return f"{times} in {1000 * seconds:.0f} ms"


def ratio(rivals: Rivals, figure: Any, of: str = "expert") -> float:
    return figure(rivals["jzero"]) / max(figure(rivals[of]), 1e-9)


COLUMNS = (
    ("peak, GiB", peak, "{:.2f}", True),
    ("moved, bytes per parameter", moved, "{:.2f}", True),
    ("exposed, ms", exposed, "{:.0f}", True),
    ("step, ms", step, "{:.0f}", True),
    ("gathers", gathers, "{}", False),
    ("reductions", reductions, "{}", False),
    ("compile, s", compiled, "{:.0f}", True),
    ("trace and lower, s", lowered, "{:.1f}", False),
)


def table(cells: dict[Cell, Rivals]) -> str:
    header = ["model", "devices", "flags"]
    for name, _, _, compared in COLUMNS:
        header += [name, *["of expert's"] * compared]
    lines = [f"| {' | '.join(header)} |", "| --- " * len(header) + "|"]
    for cell, rivals in cells.items():
        texts = [*map(str, cell)]
        for _, figure, form, compared in COLUMNS:
            values = [form.format(figure(rivals[x])) if x in rivals else "-" for x in zoo.RIVALS]
            texts.append(" / ".join(values))
            if compared:
                texts.append(f"{ratio(rivals, figure):.3f}")
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)


def at_logits(cell: Cell, rivals: Rivals) -> bool:
    """Whether the largest values at the peak have the vocabulary as a dim."""
    row = zoo.ROWS[cell[0]]
    vocab = str(getattr(row.small if cell[1] == 8 else row.model, "vocab", "none"))
    return any(vocab in value["shape"] for value in rivals["jzero"]["held"][:3])


def missed(cells: dict[Cell, Rivals]) -> str:
    """Each target of the aims in README.md, and the rows that miss it."""
    scanned = {cell: rivals for cell, rivals in cells.items() if zoo.ROWS[cell[0]].scanned}
    transformers = {cell: rivals for cell, rivals in scanned.items() if cell[0] != "Mamba"}
    away = {cell: rivals for cell, rivals in scanned.items() if not at_logits(cell, rivals)}
    targets = [
        ("peak at most the expert's", cells, peak, 1.0),
        ("peak at most 0.95 of it: scanned, memory not at the logits", away, peak, 0.95),
        ("bytes at most the expert's: scanned", scanned, moved, 1.0),
        ("exposed time at most the expert's", cells, exposed, 1.0),
        ("exposed time at most 0.8 of it: scanned transformers", transformers, exposed, 0.8),
        ("compile time at most 1.5 of the expert's", cells, compiled, 1.5),
    ]
    lines = ["| target | met | missed by |", "| --- | --- | --- |"]
    for name, of, figure, most in targets:
        found = {cell: ratio(rivals, figure) for cell, rivals in of.items()}
        above = sorted(
            ((value, cell) for cell, value in found.items() if round(value, 3) > most), reverse=True
        )
        texts = [f"{' '.join(map(str, cell))} {value:.3f}" for value, cell in above]
        lines.append(f"| {name} | {len(of) - len(above)} of {len(of)} | {'; '.join(texts)} |")
    return "\n".join(lines)


def holding(cells: dict[Cell, Rivals], most: int = 4) -> str:
    """The largest values at the peak, beside the arguments."""
    lines = ["| model | devices | flags | jzero | expert |", "| --- | --- | --- | --- | --- |"]
    for cell, rivals in cells.items():
        texts = [
            "; ".join(f"{x['bytes'] >> 20} MiB {x['shape']}" for x in rivals[name]["held"][:most])
            for name in ("jzero", "expert")
        ]
        lines.append(f"| {' | '.join(map(str, [*cell, *texts]))} |")
    return "\n".join(lines)


def main() -> None:
    latest = sorted(RESULTS.glob("*.jsonl"))[-1]
    cells = read(Path(sys.argv[1]) if sys.argv[1:] else latest)
    worst = dict(list(cells.items())[:8])
    print(
        f"In a cell: {' / '.join(zoo.RIVALS)}.",
        table(cells),
        missed(cells),
        holding(worst),
        sep="\n\n",
    )


if __name__ == "__main__":
    main()
