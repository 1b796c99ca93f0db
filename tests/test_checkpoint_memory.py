# SPDX-License-Identifier: Apache-2.0
"""A save needs no more memory of the host than it may, and what it writes in parts is the state."""

import asyncio
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

import jzero
from jzero.checkpoint import _chunks, _inspect, _ocdbt, _reading, _writing

MIB = 2**20


def step_fn(state: Any, batch: jax.Array) -> Any:
    return jax.tree.map(lambda x: x + batch.mean().astype(x.dtype), state)


def new_state() -> dict[str, jax.Array]:
    return {
        "w": jax.random.normal(jax.random.key(0), (512, 1024)),
        "uneven": jax.random.normal(jax.random.key(1), (1021, 33)).astype(jnp.bfloat16),
        "wide": jax.random.normal(jax.random.key(2), (3, 70_000)),
        "number": jnp.float32(3),
    }


BATCH: Any = np.ones((8, 1), np.float32)
PLACES = {
    "devices": lambda folder: jzero.NoOffload(),
    "host": lambda folder: jzero.HostCPU(),
    "pinned": lambda folder: jzero.PinnedHost(),
    "files": lambda folder: jzero.NVMe(str(folder / "nvme"), host_bytes=2**20),
}


@pytest.mark.slow(but=["host-copies", "pinned-copies", "files-copies"])
@pytest.mark.parametrize("are_copied", [False, True], ids=["views", "copies"])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_written_in_parts_is_the_state(place, are_copied, tmp_path, monkeypatch):
    """And little is held at a time, while the next step has consumed the state."""
    if are_copied:  # as on devices with memory of their own
        monkeypatch.setattr(_writing, "_is_copied", lambda x: not _writing.is_pinned(x))
    held, most = set(), 0
    values, release = _writing._Part.values, _writing._Part.release

    def watched(part: Any) -> Any:
        nonlocal most
        found = values(part)
        held.add(part)
        most = max(most, sum(each.nbytes for each in held))
        return found

    monkeypatch.setattr(_writing._Part, "values", watched)

    def released(part: Any) -> None:
        held.discard(part)
        release(part)

    monkeypatch.setattr(_writing._Part, "release", released)
    train_step = jzero.shard_train_step(step_fn, stage=3, memory=PLACES[place](tmp_path))
    state = train_step.init(new_state)
    state = train_step(state, BATCH)
    expected = jax.tree.map(np.asarray, train_step.unshard(state))
    total = sum(x.nbytes for x in expected.values())
    with jzero.Checkpointer(tmp_path / "steps", train_step, save_bytes=MIB) as checkpointer:
        checkpointer.save(1, state)
        train_step(state, BATCH)
        checkpointer.wait()
        restored = train_step.unshard(checkpointer.restore(jax.eval_shape(new_state)))
    jax.tree.map(np.testing.assert_array_equal, restored, expected)
    assert not held
    assert 5 * MIB // 8 - MIB // 8 <= most <= 5 * MIB // 8 + MIB // 8 or place == "files"
    assert most <= MIB < total / 2
    assert not _inspect.verify(_inspect.inspect(tmp_path / "steps" / "1")[1]).damaged


def test_what_is_copied_is_not_kept_in_the_state(tmp_path, monkeypatch):
    """NumPy's copy of a JAX array lives as long as the array, if it is made of that one."""
    monkeypatch.setattr(_writing, "_is_copied", lambda x: True)
    seen: list[int] = []
    on_host = _writing._on_host

    def watched(data: Any, *args: Any) -> np.ndarray:
        seen.append(id(data))
        return on_host(data, *args)

    monkeypatch.setattr(_writing, "_on_host", watched)
    train_step = jzero.shard_train_step(step_fn, stage=3)
    state: Any = train_step.init(new_state)
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        checkpointer.save(1, state)
    arrays: list[Any] = [getattr(x, "storage", x) for x in jax.tree.leaves(state)]
    own = {id(shard.data) for x in arrays for shard in x.addressable_shards}
    assert seen
    assert not own & set(seen)


def test_chunks_in_several_transactions(tmp_path, monkeypatch):
    """A shard of a prime size has parts of chunks, and the parts come in transactions of their own."""
    monkeypatch.setattr(_chunks, "MAX_BYTES", 1000)
    monkeypatch.setattr(_chunks, "MIN_BYTES", 400)
    train_step = jzero.shard_train_step(step_fn, stage=3, axes=jzero.Axes(min_shard_bytes=0))
    shapes = {"w": (8 * 1009,), "odd": (8 * 101, 3)}
    values = {name: np.random.default_rng(0).normal(size=shape).astype(np.float32)
              for name, shape in shapes.items()}  # fmt: skip
    state = train_step.shard(values)
    with jzero.Checkpointer(tmp_path, train_step, save_bytes=40_000) as checkpointer:
        checkpointer.save(1, state)
        restored = checkpointer.restore(state)
    jax.tree.map(np.testing.assert_array_equal, restored, values)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_part_of_a_shared_chunk_is_there_or_missed(is_there, tmp_path):
    """Of one chunk of three, the middle one, two processes have parts."""
    values, base = np.arange(1, 11, dtype=np.float32), _ocdbt.directory(tmp_path)
    boxes: dict[int, Any] = {0: (slice(0, 5),), 1: (slice(5, 10),)}
    for i, box in boxes.items():
        own = _ocdbt.array_spec(_ocdbt.directory(tmp_path / _ocdbt.part_of(i)), "w")
        spec = own | {"metadata": _writing.metadata((10,), (4,)), "dtype": "float32"}
        store = tensorstore.open(spec, open=True, create=True, context=_ocdbt.context()).result()
        store[box].write(values[box]).result()
        if i and not is_there:
            chunks: Any = store.kvstore
            chunks.write("c/1", None).result()
    pieces = [
        (i, piece)
        for i, box in boxes.items()
        for piece in _chunks.parts_of_chunks(box, (10,), (4,))
    ]
    assert pieces == [(0, (slice(4, 5),)), (1, (slice(5, 8),))]
    merge = _ocdbt.merge(base, boxes, {"w": pieces})
    if not is_there:
        with pytest.raises(ValueError, match="c/1.* is missing"):
            asyncio.run(merge)
        return
    asyncio.run(merge)
    asyncio.run(_ocdbt.check_complete(base, {"w": ((10,), (4,))}))
    merged = tensorstore.open(
        _ocdbt.array_spec(base, "w"), open=True, context=_ocdbt.context()
    ).result()
    found = merged.read().result()
    np.testing.assert_array_equal(found, values)


def test_wrong_numbers_of_bytes(tmp_path):
    train_step = jzero.shard_train_step(step_fn)
    wrong: Any
    for wrong in (0, -1, "much", None, 1.5):
        with pytest.raises(jzero.OptionError, match=r"save_bytes is .*a whole number from 1"):
            jzero.Checkpointer(tmp_path, train_step, save_bytes=wrong)


def test_who_waits_for_memory_goes_on_together():
    """Of a restore, when a quarter of it is free: neighbours in a bucket are asked for at once."""
    started = []

    async def one(budget: _reading.Budget, number: int) -> None:
        await budget.take(10)
        started.append(number)

    async def act() -> list[int]:
        budget, counts = _reading.Budget(100), []
        tasks = [asyncio.create_task(one(budget, number)) for number in range(25)]
        for given in (0, 10, 10, 10, 120):
            budget.give(given)
            for _ in range(50):
                await asyncio.sleep(0)
            counts.append(len(started))
        await asyncio.gather(*tasks)
        return counts

    assert asyncio.run(act()) == [10, 10, 10, 13, 25]
    assert started == [*range(25)]
