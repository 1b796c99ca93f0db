"""The ZeRO paper's memory tables, reproduced: by formula, to the printed digit.

python experiments/paper_tables/tables.py                # prints them, writes results/
python experiments/paper_tables/tables.py --out /tmp/x   # elsewhere

Writes <date>-tables.json (every figure, versions) and <date>-figure-1.png.
"""

import argparse
import datetime
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

import figure
import paper
import theory

RESULTS = Path(__file__).with_name("results")


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table_1(cells: Sequence[theory.Cell]) -> str:
    models = list(dict.fromkeys(cell.model for cell in cells))
    found = {(c.devices, c.model, c.stage): paper.as_table_1_prints(c.found) for c in cells}
    return markdown(
        ["devices", *models],
        [[str(n), *(" / ".join(found[n, model, stage] for stage in (1, 2, 3)) for model in models)]
         for n in paper.TABLE_1],
    )  # fmt: skip


def table_2(cells: Sequence[theory.Cell]) -> str:
    return markdown(
        ["stage", "paper, theory", "jzero, theory", "paper, measured"],
        [[f"{c.stage}: {paper.STAGES[c.stage]}", c.printed, f"{paper.rounded(c.found, 1)}B",
          paper.TABLE_2_MEASURED.get(c.stage, "not given")] for c in cells],
    )  # fmt: skip


def eight_devices(decimal: Sequence[theory.Cell], binary: Sequence[theory.Cell]) -> str:
    return markdown(
        ["stage", "32 GB, theory", "32 GiB, theory", "trained by the authors"],
        [[f"{d.stage}: {paper.STAGES[d.stage]}", f"{paper.rounded(d.found, 2)}B",
          f"{paper.rounded(b.found, 2)}B", d.printed] for d, b in zip(decimal, binary, strict=True)],
    )  # fmt: skip


def sections() -> dict[str, str]:
    """Every table of the README, by its heading."""
    return {
        "Table 1": table_1(theory.table_1()),
        "Table 2, without model parallelism": table_2(theory.table_2()),
        "Eight devices": eight_devices(theory.eight_devices("32GB"), theory.eight_devices("32GiB")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    date = datetime.date.today().isoformat()
    for heading, table in sections().items():
        print(f"{heading}\n\n{table}\n")
    result = {
        "date": date,
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
        "table_1_gb": [cell._asdict() for cell in theory.table_1()],
        "table_2_billions": [cell._asdict() for cell in theory.table_2()],
        "eight_devices_32gb_billions": [cell._asdict() for cell in theory.eight_devices("32GB")],
        "eight_devices_32gib_billions": [cell._asdict() for cell in theory.eight_devices("32GiB")],
        "figure_1_gb": theory.figure_1(),
    }
    (out / f"{date}-tables.json").write_text(json.dumps(result, indent=1) + "\n")
    figure.plot(out / f"{date}-figure-1.png", theory.figure_1())


if __name__ == "__main__":
    main()
