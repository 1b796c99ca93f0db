"""The results as a table in Markdown, and as a picture: python experiments/rivals/report.py"""

from pathlib import Path
from typing import Any

from experiments.shared import pictures, records

RESULTS = Path(__file__).parent / "results"
RIVALS = ("jzero", "annotated jit", "jit")
COLORS = ("#2b6cb0", "#dd8452", "#a0a0a0")

Cell = tuple[int, str]


def read(path: Path) -> dict[Cell, dict[str, Any]]:
    """`{(devices, style): {rival: numbers}}`."""
    cells: dict[Cell, dict[str, Any]] = {}
    for row in records.read_lines(path):
        cells.setdefault((row["devices"], row["style"]), {})[row["rival"]] = row
    return dict(sorted(cells.items()))


def table(cells: dict[Cell, dict[str, Any]]) -> str:
    lines = [
        "| devices | layers | peak, bytes per parameter | of annotated | of jit "
        "| moved, bytes per parameter | hidden | exposed ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (devices, style), rivals in cells.items():
        rows = [rivals[name] for name in RIVALS]
        peaks = [row["peak_bytes_per_parameter"] for row in rows]
        texts = [
            " / ".join(f"{peak:.3f}" for peak in peaks),
            f"{peaks[0] / peaks[1]:.2f}",
            f"{peaks[0] / peaks[2]:.2f}",
            " / ".join(f"{row['moved_bytes_per_parameter']:.2f}" for row in rows),
            " / ".join(records.percent(row.get("hidden")) for row in rows),
            " / ".join(f"{1000 * row['exposed_seconds']:.0f}" for row in rows),
        ]
        lines.append(f"| {devices} | {style} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def picture(cells: dict[Cell, dict[str, Any]], path: Path) -> None:
    with pictures.drawn(path, figsize=(9, 3.6), font=10) as (_, axes):
        for place, (name, color) in enumerate(zip(RIVALS, COLORS, strict=True)):
            peaks = [rivals[name]["peak_bytes_per_parameter"] for rivals in cells.values()]
            places = [i + 0.27 * (place - 1) for i in range(len(cells))]
            axes.bar(places, peaks, 0.25, label=name, color=color)
        axes.set_yscale("log")
        axes.set_ylabel("peak bytes per parameter, each device")
        labels = [f"{devices}\n" + style.replace(" + ", "\n+ ") for devices, style in cells]
        axes.set_xticks(range(len(cells)), labels, fontsize=8)
        axes.set_xlabel("H200s, and how the layers are written")
        axes.legend(frameon=False)


def main() -> None:
    path = sorted(RESULTS.glob("*.jsonl"))[-1]
    cells = read(path)
    print(table(cells))
    picture(cells, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
