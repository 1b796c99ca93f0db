"""What tiers ask of the machine: pinned memory that the host writes in place, and a CPU beside the GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from host_updates import call, on_host, problem, random, reference, ulps
from jzero.offload import _bandwidth
from jzero.offload.kernels._host_update import HostUpdate
from jzero.offload.memory import _addresses
from jzero.offload.memory._pinned_leaf import pinned_zeros, view
from optimizers import ENTRIES


def pinned(shape: tuple[int, ...]) -> jax.Array:
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    return pinned_zeros(shape, jnp.bfloat16, NamedSharding(mesh, P()))


def test_pinned_memory_is_written_in_place_and_copied():
    """The host writes outputs through a pointer, and the device must get what stands there now."""
    x = pinned((1024, 1024))
    (written,) = [view(shard.data) for shard in x.addressable_shards]
    place = x.sharding.with_memory_kind("device")
    for value in (1, 2, 3):
        written[...] = value
        there = jax.block_until_ready(jax.device_put(x, place))
        assert there.sharding.memory_kind == "device"
        np.testing.assert_array_equal(np.asarray(there), np.full((1024, 1024), value, jnp.bfloat16))


def test_gradients_are_read_where_they_were_pinned():
    """What a program leaves in pinned memory is read through its address, and is no copy."""
    place = pinned((64, 64)).sharding
    program = jax.jit(lambda x: jax.device_put(x + 1, place), out_shardings=place)
    x = jax.block_until_ready(program(jnp.ones((64, 64), jnp.bfloat16))).addressable_data(0)
    assert x.sharding.memory_kind == "pinned_host"
    (here,) = _addresses.on_host([x])
    assert here is x
    np.testing.assert_array_equal(view(x), np.full((64, 64), 2, jnp.bfloat16))


def test_a_cpu_is_there_beside_the_gpu():
    """It computes what is not elementwise: `JAX_PLATFORMS=cuda` alone would take it away."""
    assert jax.local_devices(backend="cpu")


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
