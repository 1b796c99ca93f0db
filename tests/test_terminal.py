"""The README's first example runs as it stands, and docs/terminal.md has what a terminal shows."""

import pathlib
import runpy

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "docs" / "terminal.py"))


@pytest.fixture(scope="module")
def names():
    """What the README's code leaves behind."""
    with SCRIPT["in_new_folder"]():
        return SCRIPT["run_readme"]()


@pytest.mark.slow
def test_the_readme_begins_with_examples_that_run(names):
    """A training, an evaluation and a checkpoint, with nothing but what they import."""
    first, second = SCRIPT["readme_programs"]()[0]
    assert "jzero.shard_train_step(train_step, stage=3)  # the one line" in first
    assert "shard_eval_step" in second
    assert "Checkpointer" in second
    assert names["metrics"]["loss"] < 0.5
    # Of what was restored last.
    assert names["evaluate"](names["state"], names["batch"])["accuracy"] > 0.9
    assert int(names["state"].step) == 100


def test_its_second_program_runs():
    """In Flax NNX, with objects that the step changes."""
    (code,) = SCRIPT["readme_programs"]()[1]
    assert "@jzero.shard_train_step(stage=3)  # the one line" in code
    assert SCRIPT["run_readme"](1)["loss"] < 0.5


def test_the_page_is_what_its_script_writes():
    page = SCRIPT["page"]()
    assert (ROOT / "docs" / "terminal.md").read_text() == page, "run `python docs/terminal.py`"
    blocks = page.split("```")[1::2]
    assert len(blocks) == 3
    assert max(len(line) for block in blocks for line in block.splitlines()) <= 80
