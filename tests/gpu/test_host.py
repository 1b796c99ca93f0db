"""What tiers ask of the machine's processors; of its memory, test_checks.py does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from host_updates import call, on_host, problem, random, reference, ulps
from jzero.offload import _bandwidth
from jzero.offload.kernels._host_update import HostUpdate
from optimizers import ENTRIES


@pytest.mark.parametrize("name", ["adamw", "lamb", "lion", "sgd(momentum)", "adafactor"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_updates_by_this_machines_processors(name: str, dtype: object):
    """Kernels are compiled for the processor at hand; XLA, on the same one, says what they must make."""
    pytest.importorskip("llvmlite")
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            given = problem(ENTRIES[name], dtype, jnp.bfloat16)
            rng = np.random.default_rng(0)
            state = [on_host(leaf) for leaf in given.state]
            inputs = [random(rng, aval) for aval in given.inputs]
            expected = reference(given.update, state, inputs)
            engine = HostUpdate(given.update, state, inputs)
            outputs = engine.make_outputs()
            call(engine, state, inputs, outputs)
    assert max(ulps(*pair) for pair in zip([*state, *outputs], expected, strict=True)) <= 4


def test_bandwidths_are_measured():
    pytest.importorskip("llvmlite")
    found = _bandwidth.measure(jax.devices()[0], 1, None)
    assert min(found) > 1e6
    print(found)
