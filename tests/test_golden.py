"""The golden net: every row is as stored; `make golden` shows what changed, and `--update` stores it."""

import copy
import importlib.metadata
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import golden
import zoo
from jzero import _groups
from jzero._moved_options import MOVED
from jzero._step_types import EvalStepOptions, TrainStepOptions
from jzero.ir import _rules, _writer
from jzero.ir._rules import Cost
from jzero.offload._layer_programs import LayerPrograms
from jzero.offload.execute import _stream
from jzero.segments import _partitioned
from jzero.sharding.passes import _quantize
from zoo import configured

pytestmark = pytest.mark.usefixtures("float64")

as_stored = pytest.mark.skipif(
    importlib.metadata.version("jax") >= "0.11",
    reason="what is stored is what JAX 0.10 makes: others order some equations in another way",
)
HINT = "If this is meant: make golden GOLDEN_ARGS=--update, and say why in the commit."


@pytest.mark.slow  # In `.ci/run` this is `make golden`, which shows all differences.
@as_stored
@pytest.mark.parametrize(
    ("theme", "name"), [(t, n) for t, names in golden.themes().items() for n in names]
)
def test_a_row_is_as_stored(theme, name):
    stored = golden.read(theme).get(name, {})
    verdict = golden.compared(name, stored, golden.recorded(theme, name))
    assert verdict is None, f"{verdict.word} ({verdict.why})\n{verdict.diff}\n{HINT}"


# Wider floats on the wire or in a sum, and codes, are not one device's.
INEXACT = {"reduce_dtype", "gather_dtype", "accumulate_dtype"}


def with_options() -> dict[str, list[golden.Row]]:
    """By step and dtype, the rows of options that train as one device does, to rounding."""
    found: dict[str, list[golden.Row]] = {}
    for row in golden.ROWS.values():
        options = row.options("folder")
        is_late = getattr(options.get("offload"), "delayed_update", False)
        if row.theme.startswith("options") and not (is_late or INEXACT & options.keys()):
            found.setdefault(f"{row.step}, {row.dtype}", []).append(row)
    return found


WITH_OPTIONS = with_options()


@as_stored
@pytest.mark.parametrize("key", WITH_OPTIONS)
def test_stored_values_are_those_of_one_device(key):
    """A row that is as stored then trains what `jax.jit` trains, whatever its options and mesh."""
    rows = WITH_OPTIONS[key]
    family, dtype = zoo.get(rows[0].step), jnp.dtype(rows[0].dtype)
    alone = zoo.train_alone(family, family.batches(golden.NUM_STEPS, dtype), dtype)
    trained = {"values": golden.values({"outputs": alone.outputs[-1], "state": alone.state})}
    for row in rows:
        stored = {"values": golden.read(row.theme)[row.name]["values"]}
        verdict = golden.compared(row.name, stored, trained)
        assert verdict is None, f"{row.theme}: {row.name}\n{verdict.diff}"


def test_every_stored_text_has_a_row():
    themes = golden.themes() | {"h200": golden.H200}
    assert {path.stem for path in golden.FOLDER.glob("*.txt")} == themes.keys()
    assert {theme: [*golden.read(theme)] for theme in themes} == themes


# Fields of groups that an evaluation takes, by their single names.
EVALUATED = ("offload_params", "gather", "max_gather_bytes", "tile_bytes", "axis_names")


def test_every_option_occurs():
    evaluations = [row for row in golden.ROWS.values() if row.evaluates]
    trainings = [row for row in golden.ROWS.values() if not row.evaluates]
    # `_record` gives these to every row; those of jit and of NNX's steps are the families' own.
    always = {"mesh", "axis_names", "in_specs", "state"}
    own = {"static_argnums", "static_argnames", "state_argnums", "state_argnames", "axis_name"}
    own |= {name for name in MOVED if name not in EVALUATED}
    for options, rows in ((TrainStepOptions, trainings), (EvalStepOptions, evaluations)):
        found = {name for row in rows for name in row.options("folder")}
        found |= {name for row in rows for name in zoo.get(row.step).options}
        known = {
            name for name, x in MOVED.items() if x.partition(".")[0] in options.__annotations__
        }
        missing = (known | options.__annotations__.keys() - _groups.GROUPS.keys()) - found - always
        of_calls = {"static_argnums", "static_argnames", "state_argnums", "state_argnames"}
        assert missing <= (own if options is EvalStepOptions else of_calls)


def test_every_memory_occurs():
    texts = "".join(path.read_text() for path in golden.FOLDER.glob("*.txt"))
    for memory in ("device", "pinned_host", "host", "nvme"):
        assert f" bytes, {memory}\n" in texts


ONLY_IN_TEST_IR_RULES = {"scatter-sub", "lu_pivots_to_permutation"}


@pytest.mark.slow
def test_every_rule_occurs():
    """Of primitives with the same factors, cost and linearity, one; of each kind of scatter, one."""
    missing: dict[Any, list[str]] = {}
    for name, rule in _rules.RULES.items():
        of_other_steps = rule.cost in (Cost.IDENTITY, Cost.COLLECTIVE)  # which are not traced here
        if of_other_steps or name in ONLY_IN_TEST_IR_RULES:
            continue
        alike = (rule.factors, rule.cost, str(rule.linear))
        missing.setdefault(name if name.startswith("scatter") else alike, []).append(name)
    for step in dict.fromkeys(row.step for row in reversed(golden.ROWS.values())):
        try:
            found = set(_primitives(zoo.get(step)))
        except NameError:  # A step with collectives of its own.
            continue
        missing = {rule: names for rule, names in missing.items() if found.isdisjoint(names)}
        if not missing:
            return
    names = [*missing.values()]
    assert not names, f"write a family of tests/zoo with one of each of {names}"


def _primitives(family: zoo.Program) -> Iterator[str]:
    if family.options.get("axis_name"):  # It can be traced on devices alone.
        return
    with configured(family):
        state, (batch,) = family.init(jnp.dtype("float64")), family.batches(1, jnp.dtype("float64"))
        static = family.options.get("static_argnums", ())
        yield from _of(jax.make_jaxpr(family.step, static_argnums=static)(state, *batch))


def _of(closed: Any) -> Iterator[str]:
    for eqn in getattr(closed, "jaxpr", closed).eqns:
        yield eqn.primitive.name
        for value in eqn.params.values():
            for each in value if isinstance(value, list | tuple) else [value]:
                if hasattr(getattr(each, "jaxpr", each), "eqns"):
                    yield from _of(each)


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
        ("traffic", "bytes over data: 1,025", "update"),
        ("traffic", "all-reduce: 3", "update"),
        ("host transfers", "to host: gradient, float32, 500 bytes", "better"),
        ("host transfers", "to device: gradient, float32, 512 bytes", "update"),
        ("temporaries", "101,000 bytes", None),
        ("temporaries", "120,000 bytes", "update"),
        ("values", "['w']  float64[2,2]: norm 2.000000001, mixed 1.000000001", None),
        ("values", "['w']  float64[2,2]: norm 2.00000001, mixed 1.0", "update"),
        ("said", "arguments: x dim 0", "update"),
        ("warnings", "UserWarning: slow", "update"),
        ("refused", "OptionError by shard_train_step", "update"),
    ],
)
def test_a_change_is_judged(section, line, word):
    new = copy.deepcopy(RECORD)
    new[section] = [line, *new.get(section, [])[1:]]
    verdict = golden.compared("row", RECORD, new)
    assert (verdict and verdict.word) == word


def test_collectives_are_counted_in_all():
    """Another kind is no worse than the one that it replaces; one more, though fewer bytes, is no gain."""
    for line, word in (("all-reduce: 3", "better"), ("all-reduce: 4", "update")):
        new = {**RECORD, "traffic": ["bytes over data: 512", line]}
        verdict = golden.compared("row", RECORD, new)
        assert verdict is not None
        assert verdict.word == word


@pytest.mark.parametrize("section", ["values", "refused", "warnings", "aliased", "streamed"])
def test_what_no_gain_outweighs(section):
    new = {**RECORD, "traffic": ["bytes over data: 512", "all-gather: 3"], section: ["another"]}
    verdict = golden.compared("row", RECORD, new)
    assert verdict is not None
    assert verdict.word == "update"


@pytest.mark.parametrize("lost", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_shows(lost):
    x = np.arange(6.0)
    x[3], x[4] = lost, np.inf
    stored = {"values": golden.values({"w": x})}
    assert golden.compared("row", stored, {"values": golden.values({"w": x.copy()})}) is None
    for index, value in ((3, 7.0), (2, 2.1), (4, np.nan)):
        y = x.copy()
        y[index] = value
        assert golden.compared("row", stored, {"values": golden.values({"w": y})}) is not None


def test_one_wrong_element_shows():
    x = np.random.default_rng(0).normal(size=(300, 7))
    for i in range(0, x.size, 97):
        y = x.copy()
        y.reshape(-1)[i] += 1e-5
        old, new = ({"values": golden.values({"w": each})} for each in (x, y))
        assert golden.compared("row", old, new) is not None
    swapped = {"values": golden.values({"w": x[::-1]})}
    assert golden.compared("row", {"values": golden.values({"w": x})}, swapped) is not None


_STREAM, _ITERATION, _ENCODE = _stream.stream, LayerPrograms.iteration, _quantize.quantize


def _without_room(visits, device_bytes, under_way=None):
    """A visit fetches though there is no room."""
    return _STREAM(visits, 2 * device_bytes, under_way)


def _not_awaited(visits, *args, **kwargs):
    """Room is taken for free while copies to the host are under way."""
    with mock.patch.object(jax, "block_until_ready", lambda x: x):
        return _STREAM(visits, *args, **kwargs)


def _one_group(jaxpr, nbytes):
    """Reductions wait for nothing."""
    return jaxpr


def _finite(x, blocks):
    """What is not finite does not survive codes."""
    return _ENCODE(jnp.nan_to_num(x, posinf=0.0, neginf=0.0), blocks)


GROUPS, FEW_BYTES = "optimizer state in groups", "parameters, few bytes"


@as_stored
@pytest.mark.parametrize(
    ("theme", "name", "holder", "attribute", "fault"),
    [
        ("options_pinned", GROUPS, _stream, "stream", _not_awaited),
        ("options_pinned", FEW_BYTES, _stream, "stream", _without_room),
        ("options_wire", "not finite", _quantize, "quantize", _finite),
        ("large", "Llama, stage 3", _partitioned, "order", _one_group),
    ],
)
def test_a_planted_fault_shows(theme, name, holder, attribute, fault, monkeypatch):
    monkeypatch.setattr(holder, attribute, fault)
    # It keeps what is right.
    monkeypatch.setattr(_writer, "_traced", _writer._traced.__wrapped__)
    verdict = golden.compared(name, golden.read(theme)[name], golden.recorded(theme, name))
    assert verdict is not None
    assert verdict.word == "update"
