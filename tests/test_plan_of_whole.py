"""The plan of a step that is partitioned, of the whole batch's jaxpr: it is the interpreter's."""

import gc
from unittest import mock

import jax.numpy as jnp
import pytest

import exactness
from exactness import _check
from exactness._compare import configured
from jzero.sharding.plan import _trace
from jzero.sharding.plan._trace import WholeBatch

pytestmark = pytest.mark.alternating

# One of each kind whose rows the jaxpr itself tells.
SURE = (
    "batch_norm",
    "cond_on_the_loss",
    "dp_sgd_by_vmap",
    "embeddings",
    "loss_scaling",
    "maml_by_vmap",
    "resnet_with_batch_norm",
    "transformer_scanned",
    "transformer_unrolled",
    "vision_transformer",
)
# Rows are mixed or picked, are added to the state, or decide how a loop goes on.
UNSURE = (
    "cond_for_each_row",
    "dp_sgd_by_scan",
    "histogram",
    "neighbouring_rows",
    "simclr",
    "sorted_rows",
)


def planned(name, stage, switch, monkeypatch):
    """A step and its plan, with the partitioner or without."""
    monkeypatch.setenv("JZERO_PARTITION", switch)
    family = exactness.get(name)
    with configured(family):
        step = _check.sharded(family, _check.Setting(stage))
        state = family.init(jnp.dtype("float32"))
        return step, step.plan(state, *family.batches(1, jnp.dtype("float32"))[0])


@pytest.mark.parametrize("stage", [3, 1])
@pytest.mark.parametrize("name", SURE)
def test_it_is_the_same_as_of_the_rewritten_step(name, stage, monkeypatch):
    _, expected = planned(name, stage, "0", monkeypatch)
    with mock.patch.object(_trace, "rewritten", side_effect=AssertionError("it was rewritten")):
        _, plan = planned(name, stage, "1", monkeypatch)
    for part in ("leaves", "arguments", "outputs", "owned", "updates", "donates"):
        assert getattr(plan, part) == getattr(expected, part), part


@pytest.mark.parametrize("name", UNSURE)
def test_what_the_jaxpr_does_not_tell_the_rewriting_does(name, monkeypatch):
    _, expected = planned(name, 3, "0", monkeypatch)
    with mock.patch.object(_trace, "rewritten", side_effect=_trace.rewritten) as rewritten:
        _, plan = planned(name, 3, "1", monkeypatch)
    assert rewritten.called
    assert plan.leaves == expected.leaves
    assert plan.outputs == expected.outputs


@pytest.mark.parametrize("switch", ["0", "1"])
@pytest.mark.parametrize("name", ["transformer_scanned", "sorted_rows", "debug_print"])
def test_nobody_keeps_the_whole_batchs_jaxpr(name, switch, monkeypatch):
    others = whole_batches()  # Of a test that failed, pytest keeps the frames.
    step, _ = planned(name, 3, switch, monkeypatch)
    assert not whole_batches() - others, step


def whole_batches():
    gc.collect()
    return {id(x) for x in gc.get_objects() if isinstance(x, WholeBatch)}
