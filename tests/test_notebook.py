"""The notebook runs in a process of its own, and prints what is stored in it; its page is the same."""

import json
import os
import pathlib
import runpy
import subprocess
import sys
import time

import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "notebook.py"))
NOTEBOOK = json.loads((DOCS / "quickstart.ipynb").read_text())


@pytest.mark.slow
def test_it_prints_what_is_stored_in_it(tmp_path):
    environment = os.environ | {"JAX_NUMPY_RANK_PROMOTION": "allow"}  # as for whoever opens it
    command = [sys.executable, DOCS / "notebook.py", "--out", tmp_path]
    started = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 300  # what it promises to take at most
    for path in (DOCS / "quickstart.ipynb", DOCS / "guide" / "notebook.md"):
        assert (tmp_path / path.name).read_text() == path.read_text(), (
            "run `python docs/notebook.py`"
        )


def test_jupyter_can_open_it():
    """The keys that the format asks for; each cell has an id of its own."""
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    cells = NOTEBOOK["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells) > 15
    for cell in cells:
        keys = {"cell_type", "id", "metadata", "source"}
        code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert cell.keys() == keys | code


def test_a_cell_that_fails_or_only_shows_a_value_is_named():
    run = SCRIPT["run"]

    def notebook(*codes: str) -> dict[str, object]:
        return {"cells": [{"cell_type": "code", "source": [code]} for code in codes]}

    done = run(notebook("x = 2", "print(x + 1)"))
    assert [cell["outputs"] for cell in done["cells"]][1][0]["text"] == ["3\n"]
    with pytest.raises(AssertionError, match="cell 2 shows a value"):
        run(notebook("x = 2", "x + 1"))
    with pytest.raises(ZeroDivisionError):
        run(notebook("1 / 0\nx = 1"))
