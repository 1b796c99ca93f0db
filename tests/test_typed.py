"""jzero's types reach whoever checks their own program: what each public name is, and what is an error."""

import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys
import typing

import pytest

import jzero
from jzero._step_types import EvalStepOptions, TrainStepOptions

ROOT = pathlib.Path(__file__).parents[1]
USER = ROOT / "tests" / "typed" / "user.py"


def check(program: pathlib.Path, path: pathlib.Path) -> str:
    """What `mypy --strict` says of a program for which jzero is an installed package, found at `path`."""
    # Elsewhere: in its own checkout jzero would be source, and its `py.typed` not looked at.
    options = [
        "--strict",
        "--config-file=",
        f"--cache-dir={ROOT / '.cache' / 'mypy-user'}",
        "--no-pretty",
        "--disable-error-code=import-untyped",  # optax has no types
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, program], cwd=program.parent, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(path)},
    )  # fmt: skip
    assert not done.stderr, done.stderr
    return done.stdout


def said(output: str) -> dict[int, list[str]]:
    """By line: the types revealed, and the codes of errors."""
    lines: dict[int, list[str]] = {}
    pattern = r"^\S+?:(\d+): (?:note: Revealed type is [\"'](.*)[\"']|error: .*  (\[[\w-]+\]))$"
    for number, revealed, code in re.findall(pattern, output, re.MULTILINE):
        lines.setdefault(int(number), []).append(revealed or code)
    return lines


def expected(source: str) -> dict[int, list[str]]:
    """What the comments say that mypy says."""
    lines = {}
    for number, line in enumerate(source.splitlines(), 1):
        code, _, comment = line.partition("  # ")
        if code.lstrip().startswith("reveal_type("):
            lines[number] = [comment]
        elif comment.startswith("error: "):
            lines[number] = comment.removeprefix("error: ").split()
    return lines


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """The program, outside of the checkout."""
    return pathlib.Path(shutil.copy(USER, tmp_path_factory.mktemp("user")))


def test_what_a_user_sees(user):
    output = check(user, ROOT)
    assert said(output) == expected(USER.read_text()), output


def test_every_public_name_is_used():
    source = USER.read_text()
    names = {
        name
        for name in dir(jzero)
        if name[0].isalpha() and not hasattr(getattr(jzero, name), "__path__")
    }
    names -= {"testing"}  # a module, imported by name
    assert {name for name in names if not re.search(rf"\bjzero\.{name}\b", source)} == set()


@pytest.mark.parametrize(
    ("function", "options", "named"),
    [
        (jzero.shard_train_step, TrainStepOptions, {"step_fn"}),
        (jzero.shard_eval_step, EvalStepOptions, {"eval_step", "like"}),
    ],
)
def test_the_forms_have_the_options_of_the_function(function, options, named):
    """What checkers read (`Unpack[...]`) is what runs: the same options, of the same types."""
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.keys() - named
    assert typing.get_type_hints(options) == {name: hints[name] for name in parameters}
