"""A state in files: leaves that are lone or frozen, read as a whole, range by range and under a pin."""

import dataclasses
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jzero
import small
from jzero.offload.kernels import _tiles
from jzero.offload.kernels._tiles import Together
from jzero.offload.memory import _filling
from jzero.offload.memory._file_storage import FileStorage
from jzero.offload.memory._filling import Filling
from jzero.offload.memory._leaf_array import wrap
from jzero.offload.memory._nvme_store import StoreSpec
from jzero.offload.memory._storage import HostPlacement
from jzero.offload.nvme._aligned import pages
from jzero.offload.nvme._files import TileFiles
from jzero.offload.nvme._header import Write

NUM, TILE_BYTES = 2, 2**14
# Of one device: two stacks of three slices with a moment each, a leaf of one slice; then what is frozen.
SHAPES: dict[str, tuple[tuple[int, ...], Any, int]] = {
    "w": ((3, 8192), jnp.bfloat16, 3), "m": ((3, 8192), jnp.float32, 0),
    "scale": ((3, 50), jnp.bfloat16, 3), "n": ((3, 50), jnp.float32, 0),
    "table": ((5, 1001), jnp.bfloat16, 1),
    "base": ((4, 5000), jnp.bfloat16, 4), "bias": ((4, 70), jnp.float32, 4), "kept": ((999,), jnp.int32, 0),
}  # fmt: skip
FROZEN = ("base", "bias", "kept")


def layouts() -> dict[str, Any]:
    names = list(SHAPES)
    shards = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in SHAPES.values()]
    sizes = [shard.size for shard in shards]
    found = [
        Together((0, 1), (2, 4), sizes[0], 0, frozenset([0]), 3),
        Together((2, 3), (2, 4), sizes[2], 0, frozenset([2]), 3),
        Together((4,), (2,), sizes[4], 0, frozenset([4]), 1),
    ]
    of_frozen = [SHAPES[name][2] for name in FROZEN]
    return {
        "layout": _tiles.laid_out(_tiles.cut(found, TILE_BYTES), found, names),
        "frozen": _tiles.of_whole_leaves(shards[5:], of_frozen, FROZEN, TILE_BYTES),
    }


def spec_in(folder: Path, **options: Any) -> StoreSpec:
    identity = {f"shard-{k}.tiles": {"place": [k]} for k in range(NUM)}
    spec = StoreSpec(
        folder, 2**18, False, False, identity=identity, mesh=small.mesh(data=NUM), **layouts()
    )  # fmt: skip
    return dataclasses.replace(spec, **options)


def placements(mesh: Mesh) -> dict[str, HostPlacement]:
    """Sharded along the last dim."""
    found = {}
    for name, (shape, dtype, _) in SHAPES.items():
        place = NamedSharding(mesh, PartitionSpec(*[None] * (len(shape) - 1), "data"))
        whole = (*shape[:-1], NUM * shape[-1])
        found[name] = HostPlacement(whole, whole, np.dtype(dtype), place, tuple(mesh.devices.flat))
    return found


def values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: rng.integers(-99, 99, (*shape[:-1], NUM * shape[-1])).astype(dtype)
        for name, (shape, dtype, _) in SHAPES.items()
    }


def filled(spec: StoreSpec, count: Write | None = None) -> dict[str, FileStorage]:
    """A state of these leaves, and of a count that is of this commit."""
    with Filling(spec, dict(enumerate(["count", *SHAPES])), range(1, 1 + len(SHAPES))) as filling:
        filling.start([count] * (1 + len(SHAPES)))
        return {
            name: filling.put(values()[name], name, at)
            for name, at in placements(spec.mesh).items()
        }


def shard(name: str, file: int) -> np.ndarray:
    """As bytes."""
    part = np.split(values()[name], NUM, axis=-1)[file]
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)


def test_leaves_come_back(tmp_path: Path):
    """Whole, slice by slice, and any bytes; some straight to where they belong."""
    leaves = filled(spec_in(tmp_path))
    rng = np.random.default_rng(1)
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(np.asarray(wrap(leaf, leaf.shape)), values()[name])
        buffer = pages(leaf.buffer_bytes)
        for file in range(NUM):
            whole = shard(name, file)
            num = max(SHAPES[name][2], 1)
            ends = np.arange(num + 1) * (len(whole) // num)
            ranges = [[*pair] for pair in zip(ends[:-1], ends[1:], strict=True)]
            ranges += [sorted(rng.integers(0, len(whole) + 1, 2)) for _ in range(5)]
            for start, stop in ranges:
                out = pages(-(-len(whole) // 4096) * 4096)[: stop - start]
                leaf.read_range(out, file, start, buffer)
                np.testing.assert_array_equal(out, whole[start:stop])
    assert leaves["w"].buffer_bytes < leaves["m"].buffer_bytes <= TILE_BYTES


def test_files_of_what_is_frozen(tmp_path: Path):
    """They come after the others, and steps go on without them; a leaf of them is renewed like any."""
    spec = spec_in(tmp_path)
    leaves = filled(spec)
    store = leaves["w"].store
    names = [path.name for path in store.files.paths]
    assert names == [f"shard-{k}{kind}.tiles" for kind in ("", ".frozen") for k in range(NUM)]
    pin = store.files.pin()
    step = store.begin()
    assert {at.file for at in store.files.tiles()} == set(range(NUM))
    for at in store.files.tiles():
        store.files.write(at, pages(spec.layout.most_bytes))
    store.files.commit(step)
    with pytest.raises(jzero.StateError, match="was already donated"):
        leaves["base"].buffer_bytes  # noqa: B018
    part = dict(FileStorage(leaves["w"].placement, store, "w").parts(pin))
    np.testing.assert_array_equal(
        np.concatenate([np.asarray(x) for x in part.values()], -1), values()["w"]
    )
    new = {name: leaf.renewed() for name, leaf in leaves.items()}
    for name, leaf in new.items():
        wanted = values()[name]
        np.testing.assert_array_equal(
            np.asarray(wrap(leaf, leaf.shape)), wanted if name in FROZEN else 0 * wanted
        )


def test_frozen_leaves_alone(tmp_path: Path):
    """As of a state that is only read."""
    spec = dataclasses.replace(spec_in(tmp_path), layout=type(spec_in(tmp_path).layout)(()))
    with Filling(spec, dict(enumerate(FROZEN)), range(len(FROZEN))) as filling:
        filling.start([None] * len(FROZEN))
        leaves = {
            name: filling.put(values()[name], name, placements(spec.mesh)[name]) for name in FROZEN
        }
    assert [path.name for path in leaves["base"].store.files.paths] == list(spec.files)
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(np.asarray(wrap(leaf, leaf.shape)), values()[name])


def end_of_process(leaves: Any, monkeypatch: Any) -> None:
    """What is left of its states: their files."""
    leaves["w"].store.files.close()
    monkeypatch.setattr(_filling, "_alive", weakref.WeakValueDictionary())
    monkeypatch.setattr(_filling, "_made", {})
    monkeypatch.setattr(_filling, "_gone_on", set())


def test_resumed(tmp_path: Path, monkeypatch: Any):
    """With all that is frozen; nothing of it is read then."""
    leaves = filled(spec_in(tmp_path))
    there = leaves["w"].store.files.committed
    assert there is not None
    end_of_process(leaves, monkeypatch)
    monkeypatch.delattr(TileFiles, "write_part")
    again = filled(spec_in(tmp_path, resume=True), there)
    for name, leaf in again.items():
        np.testing.assert_array_equal(np.asarray(wrap(leaf, leaf.shape)), values()[name])
    end_of_process(again, monkeypatch)
    for other in (there._replace(step=1), there._replace(run="0" * 32)):
        text = f"state-0 has {there}. The rest of the state is of {other}. With resume=True"
        with pytest.raises(jzero.StateError, match=text):
            filled(spec_in(tmp_path, resume=True), other)
    with pytest.raises(jzero.StateError, match="The rest of the state is of no step of files"):
        filled(spec_in(tmp_path, resume=True))


def test_what_is_damaged_while_it_is_written(tmp_path: Path, monkeypatch: Any):
    """Is found before the first step counts, and leaves nothing behind."""
    write_part = TileFiles.write_part

    def damaging(files: TileFiles, at: Any, offset: int, part: np.ndarray, buffer: Any) -> None:
        hit = at == (1, 2) and files.layouts[1].tiles[2][0].offset == offset
        write_part(files, at, offset, 1 - part if hit else part, buffer)

    monkeypatch.setattr(TileFiles, "write_part", damaging)
    with pytest.raises(
        jzero.StateError, match=r"m in tile 2 of .*shard-1.tiles is not what was just written"
    ):
        filled(spec_in(tmp_path))
    assert not list(tmp_path.rglob("*.tiles"))
