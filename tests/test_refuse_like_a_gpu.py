# SPDX-License-Identifier: Apache-2.0
"""The emulated refusal itself: it comes where a GPU's would, and leaves all arrays as they were."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refuse_like_a_gpu import REFUSED, refusing

SHARDED, REPLICATED = jax.P("data"), jax.P()
SPECS = pytest.mark.parametrize("spec", [SHARDED, REPLICATED])


def array(spec: Any, first: float = 0.0, num: int = 2, kind: str = "pinned_host") -> jax.Array:
    mesh = jax.sharding.Mesh(jax.devices()[:num], ("data",))
    place = jax.NamedSharding(mesh, spec, memory_kind=kind)
    return jax.jit(lambda: first + jnp.arange(64.0), out_shardings=place)()


def donating(*xs: jax.Array) -> Any:
    places = tuple(x.sharding for x in xs)
    return jax.jit(lambda *xs: xs, donate_argnums=range(len(xs)), out_shardings=places)


@pytest.fixture(autouse=True)
def refused():
    with refusing() as found:
        yield found


@pytest.mark.parametrize("compiled", [False, True])
def test_of_what_somebody_has_a_view_nothing_is_donated(compiled, refused):
    xs = [array(REPLICATED, i, num=1) for i in range(3)]
    held = np.asarray(xs[1])
    program = donating(*xs)
    program = program.lower(*xs).compile() if compiled else program
    for _ in range(2):  # The second call would be one without Python.
        with pytest.raises(jax.errors.JaxRuntimeError, match=REFUSED):
            program(*xs)
    assert refused == ["float32[64]"] * 2
    assert not any(x.is_deleted() for x in xs)
    np.testing.assert_array_equal(np.stack(xs), np.arange(3)[:, None] + np.arange(64))
    del held


@SPECS
def test_other_devices_consume_their_shards(spec, refused):
    x, whole = array(spec), array(spec)
    shards = [[shard.data for shard in y.addressable_shards] for y in (x, whole)]
    held = np.asarray(shards[0][1])
    with pytest.raises(jax.errors.JaxRuntimeError, match=REFUSED):
        donating(whole, x)(whole, x)
    for first, second in shards:
        assert (first.is_deleted(), second.is_deleted()) == (True, False)
        np.testing.assert_array_equal(second, held)


@SPECS
def test_of_what_nobody_has_a_view_all_is_donated(spec, refused):
    x, kept = array(spec), array(spec)
    held = np.asarray(kept.addressable_shards[0].data)
    program = jax.jit(lambda x, y: (x, y), donate_argnums=0, out_shardings=(x.sharding,) * 2)
    new, _ = program(x, kept)
    assert (x.is_deleted(), kept.is_deleted(), refused) == (True, False, [])
    np.testing.assert_array_equal(new.addressable_shards[0].data, held)


@pytest.mark.slow
def test_what_is_on_the_devices_is_donated_whoever_has_a_view(refused):
    x = array(SHARDED, kind="device")
    held = np.asarray(x.addressable_shards[0].data)
    (new,) = donating(x)(x)
    assert not refused
    np.testing.assert_array_equal(new.addressable_shards[0].data, held)
