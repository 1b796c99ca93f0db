# SPDX-License-Identifier: Apache-2.0
"""On CPUs, XLA refuses to donate pinned memory of which somebody has a view, as it does on a GPU.

PYTHONPATH=tests python -m pytest -p refuse_like_a_gpu ...    # a whole run; in one test: `with refusing():`

`np.asarray` of an array in pinned memory is a view of it. A program that donates the array is refused where
XLA runs on a GPU; XLA's CPU client copies the array, says nothing, and leaves it undeleted, by which it is
found here. So every program that donates pinned memory runs, whoever asks for it. Where a GPU would have
refused it, its results are dropped, and on that device arrays that it has consumed have their values back. On
other devices they stay consumed: each device of a process takes its operands by itself.
"""

import contextlib
import re
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

PINNED = "pinned_host"
REFUSED = "INVALID_ARGUMENT: Donation requested for buffer with external reference"
_ALIASED = re.compile(r"\{[\d, ]*\}: \((\d+),")
_DONOR = re.compile(r"\((\d+), ")

# Of each program that was run, which of its operands it consumes.
_donated: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()


@pytest.fixture(autouse=True, scope="session")
def _all_tests() -> Iterator[None]:
    with refusing():
        yield


@contextlib.contextmanager
def refusing() -> Iterator[list[str]]:
    """Meanwhile donations are refused as on a GPU; the shapes of what was refused are listed."""
    import jax  # tests/conftest.py sets it up, after plugins are loaded.
    from jax._src import pjit
    from jax._src.interpreters import pxla

    found: list[str] = []
    plain, fast_jit = pxla.ExecuteReplicated.__call__, pjit._get_fastpath_data
    fast_aot = pxla.MeshExecutable.create_cpp_call

    def call(self: Any, *args: Any) -> Any:
        kept = [x for i, x in enumerate(args) if i in self.kept_var_idx]
        if not any(_is_pinned(x) for x in kept):
            return plain(self, *args)
        if self not in _donated:
            _donated[self] = _consumed(self.xla_executable)
        given = [(x, _shards(x)) for x in map(kept.__getitem__, _donated[self]) if _is_pinned(x)]
        before = [(shard, _copied(shard)) for _, shards in given for shard in shards]
        made = plain(self, *args)
        jax.block_until_ready(made)
        refused = [shard for shard, _ in before if not shard.is_deleted()]
        if not refused:
            return made
        found.extend(f"{shard.dtype}{list(shard.shape)}" for shard in refused)
        there = {device for shard in refused for device in shard.sharding.device_set}
        for shard, values in before:
            if shard.is_deleted() and shard.sharding.device_set <= there:
                shard._replace_with(jax.block_until_ready(jax.device_put(values, shard.sharding)))
        for x, shards in given:
            if x.is_deleted() and not any(shard.is_deleted() for shard in shards):
                x._replace_with(
                    jax.make_array_from_single_device_arrays(x.shape, x.sharding, [*shards])
                )
        raise jax.errors.JaxRuntimeError(REFUSED)

    def fastpath(executable: Any, *args: Any) -> Any:
        return None if _takes_pinned(executable) else fast_jit(executable, *args)

    def create(self: Any, *args: Any) -> Any:
        return None if _takes_pinned(self) else fast_aot(self, *args)

    jax.clear_caches()  # What runs without Python from here on was compiled before.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pxla.ExecuteReplicated, "__call__", call)
        patch.setattr(pjit, "_get_fastpath_data", fastpath)
        patch.setattr(pxla.MeshExecutable, "create_cpp_call", create)
        yield found
    jax.clear_caches()


def _is_pinned(x: Any) -> bool:
    import jax

    return isinstance(x, jax.Array) and x.nbytes > 0 and x.sharding.memory_kind == PINNED


def _takes_pinned(executable: Any) -> bool:
    places = getattr(executable, "_in_shardings", ())
    return any(getattr(place, "memory_kind", None) == PINNED for place in places)


def _consumed(executable: Any) -> list[int]:
    """Which operands XLA was told that it may consume."""
    head = executable.hlo_modules()[0].to_string().partition("entry_computation_layout=")[0]
    aliases, _, donors = head.partition("buffer_donor=")
    return sorted({int(i) for i in [*_ALIASED.findall(aliases), *_DONOR.findall(donors)]})


def _shards(x: Any) -> Sequence[Any]:
    """Each device's part, as JAX keeps it beside the array; of one device the array itself."""
    parts = [shard.data for shard in x.addressable_shards]
    return [x] if len(parts) == 1 else parts


def _copied(x: Any) -> Any:
    """The values, read by address: NumPy's view would be a reference of our own."""
    from jzero.offload.memory._pinned_leaf import view

    return view(x.block_until_ready()).copy()
