"""Writes terminal.md: what commands and reports print, so that the page is true.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python docs/terminal.py
"""

import contextlib
import io
import os
import pathlib
import re
import shlex
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

from jzero.cli._main import main
from jzero.reports._lines import wrapped

DOCS = pathlib.Path(__file__).parent
COLUMNS = 80
HOME = "/home/you"
HEAD = """\
# Terminal output

Written by `python docs/terminal.py`. Output fits a terminal of 80 columns; `--json` and `to_dict()` give the
same numbers exactly.
"""
ESTIMATE = (
    "estimate --params 70B --devices 8 --stage 3 --offload host --offload-params 2GiB "
    "--tokens 8K --peak 989TFLOP/s --pcie 55GB/s --host-update 40GB/s"
)


def page() -> str:
    with in_new_folder() as folder:
        report = described(run_readme())
        saved = shown("inspect checkpoints")
        text = "".join([
            HEAD, section("What the README's step stores and communicates",
                          f">>> print(train_step.describe(state, batch))\n{report}\n\n", "text"),
            section("What it saved", saved),
            section("How long a step of 70B parameters takes, by an estimate", shown(ESTIMATE)),
        ])  # fmt: skip
        text = text.replace(str(folder), HOME)
    return re.sub(r"Written \S+ by", "Written 2026-11-22T12:00:00+00:00 by", text)


def section(title: str, text: str, language: str = "console") -> str:
    return f"\n## {title}\n\n```{language}\n{text.strip()}\n```\n"


@contextlib.contextmanager
def in_new_folder() -> Iterator[pathlib.Path]:
    """A folder to work in, on a terminal."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        version = mock.patch(
            "jzero.checkpoint._checkpointer.__version__", "0.1.0"
        )  # not this commit's
        with mock.patch.dict(os.environ, {"COLUMNS": str(COLUMNS)}), version:
            yield pathlib.Path.cwd()


def readme_programs() -> list[list[str]]:
    """The README's blocks of code: those of each program that it shows, which begins with its imports."""
    text = (DOCS.parent / "README.md").read_text()
    programs: list[list[str]] = []
    for code in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if code.startswith("import "):
            programs.append([])
        programs[-1].append(code)
    return programs


def run_readme(program: int = 0) -> dict[str, Any]:
    """The names that one of the README's programs has made."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        for code in readme_programs()[program]:
            exec(code, names)
    return names


def described(names: dict[str, Any]) -> str:
    return str(names["train_step"].describe(names["state"], names["batch"]))


def shown(command: str) -> str:
    """What a command prints, below it."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main(shlex.split(command))
        except SystemExit as ended:
            if isinstance(ended.code, str):
                print("\n".join(in_my_home(ended.code)))
    typed = " \\\n".join(wrapped(f"$ jzero {command}", "    ", COLUMNS - 2))
    return f"{typed}\n{out.getvalue().rstrip()}\n\n"


def in_my_home(message: str) -> list[str]:
    """A message with the page's paths; its lines end where theirs do, not where this folder's do."""
    text = " ".join(message.split()).replace(str(pathlib.Path.cwd()), HOME)
    return wrapped(text, "  ", COLUMNS, cut=False)


if __name__ == "__main__":
    (DOCS / "terminal.md").write_text(page())
