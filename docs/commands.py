"""Writes reference/commands.md: what `jzero --help` and that of each command print, so that the page is true.

python docs/commands.py
"""

import contextlib
import io
import os
import pathlib
import re
from unittest import mock

from jzero.cli._main import main

DOCS = pathlib.Path(__file__).parent
HEAD = """\
# Commands

Written by `python docs/commands.py`. `python -m jzero` is the same as `jzero`.
"""


def page() -> str:
    general = help_of()
    commands = re.findall(r"^    (\w+)\b", general, re.MULTILINE)
    parts = [f"\n## jzero {name}\n\n```text\n{help_of(name)}```\n" for name in commands]
    return "".join([HEAD, f"\n```text\n{general}```\n", *parts])


def help_of(*command: str) -> str:
    out = io.StringIO()
    width = mock.patch.dict(os.environ, COLUMNS="80", NO_COLOR="1")
    with width, contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*command, "--help"])
    return out.getvalue()


if __name__ == "__main__":
    (DOCS / "reference" / "commands.md").write_text(page())
