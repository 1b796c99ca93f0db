"""The ZeRO paper's tables, reproduced: by formula, to the printed digit, and by compiling for H200s.

python experiments/paper_tables/tables.py                     # prints them, writes results/
python experiments/paper_tables/tables.py --out /tmp/x        # elsewhere
python experiments/paper_tables/tables.py --compile           # compiles what results/compiled.json lacks
python experiments/paper_tables/tables.py --again 'stage 3'   # and whose name has this in it; '' is all

Writes <date>-tables.json (every figure, versions), <date>-figure-1.png and <date>-table-1.png. Compiling
needs jzero[preflight], JAX_PLATFORMS=cpu and no GPU.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import figure
import jzero
import measured
import paper
import theory
from compiled import Compiled
from experiments.shared import records

RESULTS = Path(__file__).with_name("results")


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def by_devices(cells: Sequence[Any], text: Callable[[Any], str]) -> str:
    """Table 1's form: `text` of the cells of every model, at stages 1 / 2 / 3."""
    models = list(dict.fromkeys(cell.model for cell in cells))
    found = {(c.devices, c.model, c.stage): text(c) for c in cells}
    return markdown(
        ["devices", *models],
        [[str(n), *(" / ".join(found[n, model, stage] for stage in (1, 2, 3)) for model in models)]
         for n in paper.TABLE_1],
    )  # fmt: skip


def models(cells: Sequence[measured.Cell]) -> str:
    """The models' shapes, and how far bytes at rest are from the paper's at most."""
    rows = []
    for name, gpt in measured.MODELS.items():
        mine = [c for c in cells if c.model == name]
        off = max(abs(c.at_rest / at_rest_in_theory(c) - 1) for c in mine)
        rows.append([name, f"{gpt.layers} x {gpt.dim}, {gpt.heads} heads", f"{mine[0].params:,}",
                     f"{100 * off:.2f} %"])  # fmt: skip
    return markdown(["model", "layers x hidden", "parameters", "at rest, off by at most"], rows)


def at_rest_in_theory(cell: measured.Cell) -> float:
    """The paper's bytes of parameters and optimizer state, for the paper's number of parameters."""
    found = jzero.estimate(cell.model, devices=cell.devices, stage=cell.stage)
    return found.nbytes("parameter") + found.nbytes("optimizer state")


def table_2(cells: Sequence[theory.Cell], compiled: Sequence[measured.Largest]) -> str:
    return markdown(
        ["model parallel", "devices", "stage", "paper, theory", "jzero, theory", "paper, measured",
         "jzero, compiled", "layers x hidden"],
        [[str(found.degree), str(c.devices), f"{c.stage}: {paper.STAGES[c.stage]}", c.printed,
          f"{paper.rounded(c.found, 1)}B",
          paper.TABLE_2_MEASURED[found.degree].get(c.stage, "not given"), *largest(found)]
         for c, found in zip(cells, compiled, strict=True)],
    )  # fmt: skip


def eight_devices(
    decimal: Sequence[theory.Cell], binary: Sequence[theory.Cell], compiled: Sequence[measured.Largest]
) -> str:  # fmt: skip
    return markdown(
        ["stage", "32 GB, theory", "32 GiB, theory", "trained by the authors", "jzero, compiled",
         "layers x hidden"],
        [[f"{d.stage}: {paper.STAGES[d.stage]}", f"{paper.rounded(d.found, 2)}B",
          f"{paper.rounded(b.found, 2)}B", d.printed, *largest(found)]
         for d, b, found in zip(decimal, binary, compiled, strict=True)],
    )  # fmt: skip


def largest(found: measured.Largest) -> list[str]:
    return [f"{paper.rounded(found.params / 1e9, 2)}B", f"{found.gpt.layers} x {found.gpt.dim}"]


def activations(rows: Sequence[measured.Activations]) -> str:
    return markdown(
        ["scores", "computed again", "vocabulary", "within a step", "without gradients"],
        [[row.attention, row.recompute, f"{row.vocab:,}", gigabytes(row.within),
          gigabytes(row.within - row.gradients)] for row in rows],
    )  # fmt: skip


def kept(rows: Sequence[measured.Kept]) -> str:
    return markdown(
        ["a layer's input is kept", "at rest", "within a step", "peak", "over model", "over data"],
        [["in eight parts" if row.kept_in_parts else "whole", gigabytes(row.at_rest),
          gigabytes(row.within), gigabytes(row.peak),
          "; ".join(f"{op} {gigabytes(n)}" for op, n in row.over_model.items()),
          gigabytes(row.over_data)] for row in rows],
    )  # fmt: skip


def traffic(rows: Sequence[measured.Traffic]) -> str:
    def column(row: measured.Traffic, op: str) -> str:
        found = {key: n for key, n in row.moved.items() if key.startswith(op) and n > 0.005}
        return "; ".join(
            f"{paper.rounded(row.psi.get(key, 0), 2)} Psi, {paper.rounded(n, 2)} B"
            + (f" over {key.partition(' over ')[2]}" if "node" in str(row.moved) else "")
            for key, n in found.items()
        )

    ops = ("all-gather", "reduce-scatter", "all-reduce")
    return markdown(
        ["step", *ops, "elements sent and received", "as described"],
        [[row.name, *(column(row, op) for op in ops), f"{paper.rounded(row.elements, 2)} Psi",
          f"{row.more:+,} B" if row.more else "to the byte"] for row in rows],
    )  # fmt: skip


def gigabytes(nbytes: float) -> str:
    """Three digits."""
    gb = nbytes / 1e9
    return f"{gb:.0f}" if gb >= 100 else f"{gb:.1f}" if gb >= 10 else f"{gb:.2f}"


def sections(compiled: Compiled) -> dict[str, str]:
    """Every table of the README, by its heading."""
    cells = measured.table_1(compiled)
    largest = [
        measured.largest(compiled, paper.TABLE_2_DEVICES, stage, degree)
        for degree, row in paper.TABLE_2_THEORY.items()
        for stage in row
    ]
    return {
        "Table 1": by_devices(theory.table_1(), lambda c: paper.as_table_1_prints(c.found)),
        "The models": models(cells),
        "At rest, compiled": by_devices(cells, lambda c: gigabytes(c.at_rest)),
        "Within a step, compiled": by_devices(cells, lambda c: gigabytes(c.within)),
        "Peak, compiled": by_devices(cells, lambda c: gigabytes(c.peak)),
        "Table 2": table_2(theory.table_2(), largest),
        "Eight devices": eight_devices(
            theory.eight_devices("32GB"),
            theory.eight_devices("32GiB"),
            [measured.largest(compiled, 8, stage) for stage in (0, 1, 2, 3)],
        ),
        "Activations": activations(measured.activations(compiled)),
        "Activations over the model's axis": kept(measured.kept(compiled)),
        "Traffic": traffic(measured.traffic(compiled)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--compile", action="store_true", help="what was not compiled before")
    parser.add_argument("--again", metavar="REGEX", help="compile these programs again")
    args = parser.parse_args()
    compiled = Compiled(allowed=args.compile or args.again is not None)
    if args.again is not None:
        compiled.forget(args.again)
    for heading, table in sections(compiled).items():
        print(f"{heading}\n\n{table}\n")
    result = {
        **records.versions("jax"),
        "table_1_gb": [cell._asdict() for cell in theory.table_1()],
        "table_2_billions": [cell._asdict() for cell in theory.table_2()],
        "eight_devices_32gb_billions": [cell._asdict() for cell in theory.eight_devices("32GB")],
        "eight_devices_32gib_billions": [cell._asdict() for cell in theory.eight_devices("32GiB")],
        "figure_1_gb": theory.figure_1(),
    }
    stem = f"{args.out / result['date']}"
    records.write(Path(f"{stem}-tables.json"), result)
    figure.plot(Path(f"{stem}-figure-1.png"), theory.figure_1())
    figure.plot_table_1(Path(f"{stem}-table-1.png"), theory.table_1(), measured.table_1(compiled))


if __name__ == "__main__":
    main()
