"""The golden net: every row is as stored; `make golden` shows what changed, and `--update` stores it."""

import jax
import pytest

import golden
from jzero._step_types import EvalStepOptions, TrainStepOptions

# What is stored is what the oldest release makes: others order some equations in another way.
pytestmark = pytest.mark.one_release
HINT = "If this is meant: make golden GOLDEN_ARGS=--update, and say why in the commit."


@pytest.fixture(autouse=True, scope="module")
def _double():
    """For all threads, and not for a context: callbacks run in XLA's threads."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("name", golden.ROWS)
def test_a_row_is_as_stored(name):
    row = golden.ROWS[name]
    verdict = golden.compared(row.name, golden.read(row.theme).get(row.name, {}), golden.record(row))
    assert verdict is None, f"{verdict.word} ({verdict.why})\n{verdict.diff}\n{HINT}"
