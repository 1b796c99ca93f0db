"""The golden net: every row is as stored; `make golden` shows what changed, and `--update` stores it."""

import copy

import jax
import numpy as np
import pytest

import exactness
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
    verdict = golden.compared(
        row.name, golden.read(row.theme).get(row.name, {}), golden.record(row)
    )
    assert verdict is None, f"{verdict.word} ({verdict.why})\n{verdict.diff}\n{HINT}"


def test_every_stored_text_has_a_row():
    themes = {row.theme for row in golden.ROWS.values()}
    assert {path.stem for path in golden.FOLDER.glob("*.txt")} == themes
    stored = {f"{theme}: {name}" for theme in themes for name in golden.read(theme)}
    assert stored == golden.ROWS.keys()


def test_every_option_occurs():
    evaluations = [row for row in golden.ROWS.values() if row.evaluates]
    trainings = [row for row in golden.ROWS.values() if not row.evaluates]
    # `_record` gives these to every row; those of jit and of NNX's steps are the families' own.
    always = {"mesh", "axis_names", "in_specs"}
    own = {"static_argnums", "static_argnames", "state_argnums", "state_argnames", "axis_name"}
    for options, rows in ((TrainStepOptions, trainings), (EvalStepOptions, evaluations)):
        found = {name for row in rows for name in row.options("folder")}
        found |= {name for row in rows for name in exactness.get(row.step).options}
        missing = options.__annotations__.keys() - found - always
        assert missing <= (
            own if options is EvalStepOptions else {"static_argnums", "state_argnames"}
        )


def test_every_memory_occurs():
    texts = "".join(path.read_text() for path in golden.FOLDER.glob("*.txt"))
    for memory in ("device", "pinned_host", "host", "nvme"):
        assert f" bytes, {memory}\n" in texts


RECORD = {
    "traffic": ["bytes over data: 1,024", "all-gather: 3"],
    "host transfers": ["to host: gradient, float32, 512 bytes"],
    "temporaries": ["100,000 bytes"],
    "values": ["['w']  float64[2,2]: norm 2.0, mixed 1.0"],
}


@pytest.mark.parametrize(
    ("section", "line", "word"),
    [
        ("traffic", "bytes over data: 1,000", "better"),
        ("traffic", "bytes over data: 1,025", "worse"),
        ("traffic", "all-reduce: 3", "worse"),
        ("host transfers", "to host: gradient, float32, 500 bytes", "better"),
        ("host transfers", "to device: gradient, float32, 512 bytes", "worse"),
        ("temporaries", "101,000 bytes", None),
        ("temporaries", "120,000 bytes", "worse"),
        ("values", "['w']  float64[2,2]: norm 2.000000001, mixed 1.000000001", None),
        ("values", "['w']  float64[2,2]: norm 2.00000001, mixed 1.0", "worse"),
        ("said", "arguments: x dim 0", "equal"),
    ],
)
def test_a_change_is_judged(section, line, word):
    new = copy.deepcopy(RECORD)
    new[section] = [line, *new.get(section, [])[1:]]
    verdict = golden.compared("row", RECORD, new)
    assert (verdict and verdict.word) == word


def test_one_wrong_element_shows():
    x = np.random.default_rng(0).normal(size=(300, 7))
    for i in range(0, x.size, 97):
        y = x.copy()
        y.reshape(-1)[i] += 1e-5
        old, new = ({"values": golden.values({"w": each})} for each in (x, y))
        assert golden.compared("row", old, new) is not None
    swapped = {"values": golden.values({"w": x[::-1]})}
    assert golden.compared("row", {"values": golden.values({"w": x})}, swapped) is not None
