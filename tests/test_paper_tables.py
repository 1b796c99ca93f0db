"""The paper's printed figures against the estimate, and the experiment's page against its scripts."""

import importlib
import json
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "experiments" / "paper_tables"


@pytest.fixture(scope="module", autouse=True)
def _importable():
    """Scripts of an experiment import each other by their bare names."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))
    for name in ("paper", "theory", "figure", "tables"):
        sys.modules.pop(name, None)


def module(name):
    return importlib.import_module(name)


def test_every_digit_of_table_1():
    cells = module("theory").table_1()
    assert len(cells) == 54
    prints = module("paper").as_table_1_prints
    assert [prints(cell.found) for cell in cells] == [cell.printed for cell in cells]


def test_every_digit_of_table_2():
    cells = module("theory").table_2()
    found = [f"{module('paper').rounded(cell.found, 1)}B" for cell in cells]
    assert found == [cell.printed for cell in cells] == ["2B", "7.6B", "14.4B", "128B"]
    measured = module("paper").TABLE_2_MEASURED
    assert all(float(measured[c.stage][:-1]) < c.found for c in cells if c.stage in measured)


def test_what_was_trained_on_eight_devices_lies_below_theory():
    for cell in module("theory").eight_devices("32GiB"):
        assert float(cell.printed[:-1]) <= cell.found


def test_figure_1():
    rows = module("theory").figure_1()
    assert [module("paper").rounded(row["total"], 1) for row in rows] == [
        row["printed"] for row in rows
    ]
    assert [sum(row["roles"].values()) for row in rows] == [row["total"] for row in rows]


def test_rounding_of_the_paper():
    paper = module("paper")
    cases = {41.25: "41.3", 257.75: "257", 1.875: "1.88", 0.1171875: "0.12", 2.0: "2", 62.5: "62.5"}
    assert {number: paper.as_table_1_prints(number) for number in cases} == cases


def test_the_page_shows_what_the_scripts_compute():
    page = (FOLDER / "README.md").read_text()
    for heading, table in module("tables").sections().items():
        assert table in page.partition(f"### {heading}\n")[2], heading


def test_the_command(tmp_path):
    command = [sys.executable, str(FOLDER / "tables.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    (numbers,) = tmp_path.glob("*-tables.json")
    (picture,) = tmp_path.glob("*-figure-1.png")
    committed = max((FOLDER / "results").glob("*-tables.json"))
    found, expected = (json.loads(file.read_text()) for file in (numbers, committed))
    assert found["table_1_gb"] == expected["table_1_gb"]
    assert picture.read_bytes().startswith(b"\x89PNG")
