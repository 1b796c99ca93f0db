"""Who keeps what of a step once it is planned."""

import gc

import jax.numpy as jnp
import pytest

import zoo
from jzero.sharding.plan._trace import WholeBatch
from zoo import configured


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer_scanned", "sorted_rows", "debug_print"])
def test_nobody_keeps_the_whole_batchs_jaxpr(name):
    others = whole_batches()  # Of a test that failed, pytest keeps the frames.
    family = zoo.get(name)
    with configured(family):
        step = zoo.sharded(family, zoo.Setting(3))
        state = family.init(jnp.dtype("float32"))
        step.plan(state, *family.batches(1, jnp.dtype("float32"))[0])
    assert not whole_batches() - others, step


def whole_batches():
    gc.collect()
    return {id(x) for x in gc.get_objects() if isinstance(x, WholeBatch)}
