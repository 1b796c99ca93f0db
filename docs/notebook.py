"""Runs quickstart.ipynb cell by cell, puts in what it prints, and writes it as a page, guide/notebook.md.

python docs/notebook.py                  # in their place; 8 virtual CPU devices, a minute
python docs/notebook.py --out /tmp       # elsewhere
"""

import argparse
import ast
import contextlib
import io
import json
import os
import pathlib
import sys
import tempfile
from typing import Any

DOCS = pathlib.Path(__file__).parent
NOTEBOOK, PAGE = DOCS / "quickstart.ipynb", DOCS / "guide" / "notebook.md"
FOOT = "\n<!-- Written by `python docs/notebook.py` from quickstart.ipynb. -->\n"


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with what its cells print now, as Jupyter would store it."""
    space: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            printed = output(source(cell), f"cell {count}", space)
            stream = {"name": "stdout", "output_type": "stream", "text": printed.splitlines(True)}
            cell = cell | {"execution_count": count, "outputs": [stream] if printed else []}
        cells.append(cell)
    return notebook | {"cells": cells}


def output(code: str, name: str, space: dict[str, Any]) -> str:
    """What a cell prints, run among the names of those before it."""
    tree = ast.parse(code)
    # Jupyter also shows the value of a last expression; what is printed is the same everywhere.
    last = tree.body[-1]
    shows = isinstance(last, ast.Expr) and ast.unparse(last).partition("(")[0] != "print"
    assert not shows, f"{name} shows a value: print it"
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(tree, name, "exec"), space)
    return out.getvalue()


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def page(notebook: dict[str, Any]) -> str:
    return "\n".join(map(section, notebook["cells"])) + FOOT


def section(cell: dict[str, Any]) -> str:
    if cell["cell_type"] == "markdown":
        # The page is one folder below the notebook.
        return source(cell).replace("](../", "](../../").replace("](guide/", "](") + "\n"
    printed = "".join("".join(stream["text"]) for stream in cell["outputs"])
    code = f"```python no-test\n{source(cell)}\n```\n"
    return f"{code}\n```text\n{printed.rstrip()}\n```\n" if printed else code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, help="folder for both; their place by default")
    out = parser.parse_args().out
    os.environ["COLUMNS"] = "80"
    sys.path.insert(0, str(DOCS.parent))
    notebook = json.loads(NOTEBOOK.read_text())
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        notebook = run(notebook)
    to = (out / NOTEBOOK.name, out / PAGE.name) if out else (NOTEBOOK, PAGE)
    to[0].write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    to[1].write_text(page(notebook))


if __name__ == "__main__":
    main()
