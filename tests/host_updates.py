"""Updates of state on the host, as `HostUpdate` takes them, for the optimizers of the table."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optimizers
from jzero.offload import _host_engine, _memory_updates
from jzero.offload.kernels import _machine
from jzero.offload.kernels._host_update import HostUpdate
from jzero.offload.memory._addresses import host_empty
from optimizers import Entry


@pytest.fixture(params=["LLVM", "XLA"])
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What compiles loops: LLVM, or XLA as where llvmlite is not installed."""
    if request.param == "XLA":
        monkeypatch.setattr(_machine, "llvm", lambda: None)
    else:
        pytest.importorskip("llvmlite")
    return request.param


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of all devices that came to the host, and that it sent, by dtype."""
    down: dict[str, int] = {}
    up: dict[str, int] = {}

    def count(into: dict[str, int], arrays: Any) -> None:
        for x in arrays:
            nbytes = sum(shard.data.nbytes for shard in x.addressable_shards)
            into[str(x.dtype)] = into.get(str(x.dtype), 0) + nbytes

    class Watched(_host_engine.HostEngine):
        def prepare(self, state: Any, reads: Any) -> None:
            assert {x.sharding.memory_kind for x in reads} == {"pinned_host"}
            count(down, reads)
            super().prepare(state, reads)

        def run(self) -> Any:
            for portion in super().run():
                assert {x.sharding.memory_kind for x in portion.values()} == {"device"}
                count(up, portion.values())
                yield portion

    monkeypatch.setattr(_memory_updates, "HostEngine", Watched)
    return down, up


class Problem(NamedTuple):
    """An update of flat arrays, the state that it starts from, and shapes and dtypes of its inputs."""

    update: Callable[[Any, Any], tuple[Any, Any]]
    state: list[Any]
    inputs: list[jax.ShapeDtypeStruct]
    names: list[str]


def problem(entry: Entry, grad_dtype: Any, copy_dtype: Any = None) -> Problem:
    """One optimizer's update: gradients of `grad_dtype` and a loss come in, copies of parameters go out."""
    tx, batch = entry.make(), optimizers.make_batches()[0]
    start = optimizers.make_state(entry)
    # Keys never rest on the host: their data does here.
    leaves, tree = jax.tree.flatten((start["params"], start["opt"]))
    are_keys = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    params, params_tree = jax.tree.flatten(fast(entry, start["params"]))

    def update(state: Any, inputs: Any) -> tuple[Any, Any]:
        state = [
            jax.random.wrap_key_data(x) if key else x
            for x, key in zip(state, are_keys, strict=True)
        ]
        params, opt = jax.tree.unflatten(tree, state)
        *grads, loss = inputs
        grads = jax.tree.unflatten(params_tree, grads)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, fast(entry, params))
        new = entry.call(tx, grads, opt, params, loss, lambda p: optimizers.mse(p, batch))
        copies = jax.tree.leaves(fast(entry, new[0])) if copy_dtype else []
        return data(jax.tree.leaves(new)), [x.astype(_kept(x.dtype, copy_dtype)) for x in copies]

    examples = (optimizers.BATCH,) if entry.per_example else ()
    grads = [
        jax.ShapeDtypeStruct((*examples, *p.shape), _kept(p.dtype, grad_dtype)) for p in params
    ]
    paths = jax.tree.leaves_with_path((start["params"], start["opt"]))
    return Problem(
        update,
        data(leaves),
        [*grads, jax.ShapeDtypeStruct((), jnp.float32)],
        [jax.tree_util.keystr(path) for path, _ in paths],
    )


def data(leaves: list[Any]) -> list[Any]:
    """The leaves, with the data of PRNG keys in their places."""
    return [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in leaves
    ]


def fast(entry: Entry, params: Any) -> Any:
    """The parameters that gradients are taken at."""
    return params.fast if entry.lookahead else params


def _kept(dtype: Any, wanted: Any) -> Any:
    return dtype if jnp.issubdtype(dtype, jnp.complexfloating) else wanted


def random(rng: np.random.Generator, aval: Any) -> jax.Array:
    """An array of normally distributed values."""
    values = rng.standard_normal(aval.shape)
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        values = values + 1j * rng.standard_normal(aval.shape)
    return jnp.asarray(values, aval.dtype)


def on_host(leaf: Any) -> Any:
    """A copy in memory of its own."""
    copy = host_empty(leaf.shape, leaf.dtype)
    copy[...] = np.asarray(leaf)
    return copy


def call(engine: HostUpdate, state: Any, inputs: Any, outputs: Any = ()) -> None:
    """One update of one shard."""
    engine.prepare([state], [inputs])
    for _ in engine.run([outputs]):
        pass


def reference(update: Callable[[Any, Any], tuple[Any, Any]], state: Any, inputs: Any) -> list[Any]:
    """New state and outputs as XLA computes them, with every 16-bit value rounded where it is written."""
    # The arrays' memory is about to change.
    state = [jnp.array(leaf, copy=True) for leaf in state]
    options = {"xla_allow_excess_precision": False}
    new_state, outputs = jax.jit(update, compiler_options=options)(state, inputs)
    return [*new_state, *outputs]


def ulps(actual: Any, expected: Any) -> float:
    """The largest distance in units in the last place; infinite if anything but finite floats differs.

    In units of the element, or of an eighth of its leaf's largest: where numbers of that size cancel,
    nobody's digits are left.
    """
    got, want = np.asarray(actual), np.asarray(expected)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    if not jnp.issubdtype(got.dtype, jnp.inexact):
        return 0.0 if np.array_equal(got, want) else np.inf
    info = jnp.finfo(got.dtype)
    wide = np.complex128 if np.iscomplexobj(got) else np.float64
    got, want = got.astype(wide), want.astype(wide)
    finite = np.isfinite(want)
    if not np.array_equal(np.where(finite, 0, got), np.where(finite, 0, want), equal_nan=True):
        return np.inf
    if not np.isfinite(got[finite]).all():
        return np.inf
    got, want = got[finite], want[finite]
    size = np.maximum(np.abs(want), np.max(np.abs(want), initial=0.0) / 8)
    unit = np.maximum(float(info.eps) * size, float(info.tiny))
    return float(np.max(np.abs(got - want) / unit, initial=0.0))
