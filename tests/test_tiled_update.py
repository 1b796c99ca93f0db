"""TiledUpdate: a tile at a time, the same numbers to the bit as the whole update; and what it cannot do."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from host_updates import call, compiler, on_host, problem  # noqa: F401
from host_updates import random as random_like
from jzero.offload.kernels import _tiles
from jzero.offload.kernels._code_paths import TracedUpdate
from jzero.offload.kernels._host_update import HostUpdate
from jzero.offload.kernels._loops import BLOCK
from jzero.offload.kernels._tiled_update import TiledUpdate
from jzero.offload.kernels._tiles import GRAIN, Together
from jzero.offload.memory._addresses import host_empty
from optimizers import ENTRIES
from test_host_update import SIZES as ALL_SIZES
from test_host_update import adamw, bfloat16, host

SIZES = [size for size in ALL_SIZES if size != 1]  # A leaf of one element stays on the devices.


pytestmark = pytest.mark.usefixtures("compiler", "optax_promotions")


def by_tiles(engine: TiledUpdate, states: Any, inputs: Any, outputs: Any) -> None:
    """One update, through one buffer; tiles in another order than they were cut."""
    names, buffer = engine._names, host_empty((engine.layout.most_bytes + 64,), np.uint8)
    buffer = buffer[64:]
    engine.prepare((), inputs)
    engine.begin(outputs)
    for shard, state in enumerate(states):
        bytes_of = {name: x.reshape(-1).view(np.uint8) for name, x in zip(names, state)}  # noqa: B905
        for index in reversed(range(len(engine.tiles))):
            buffer[:] = 255  # What nobody wrote is NaN.
            if index >= engine.layout.num_tiles:
                engine.update_tile(shard, index)
                continue
            extents = engine.layout.tiles[index]
            for extent, view in zip(extents, engine.layout.views(index, buffer), strict=True):
                view[:] = bytes_of[extent.leaf][extent.start : extent.start + extent.nbytes]
            engine.update_tile(shard, index, buffer)
            for extent, view in zip(extents, engine.layout.views(index, buffer), strict=True):
                bytes_of[extent.leaf][extent.start : extent.start + extent.nbytes] = view
    engine.end()


def update_of_vectors() -> tuple[Any, list[np.ndarray], Any]:
    """AdamW, whose count stays where scalars do: among the inputs."""
    update, state = adamw([host(size, seed=i) for i, size in enumerate(SIZES)])
    where = next(i for i, x in enumerate(state) if x.dtype == np.int32)
    count = state.pop(where)

    def on_vectors(vectors: Any, inputs: Any) -> tuple[Any, Any]:
        *grads, count = inputs
        vectors = [*vectors[:where], count, *vectors[where:]]
        new, outs = update(vectors, grads)
        return [*new[:where], *new[where + 1 :]], outs

    return on_vectors, state, [*bfloat16([(size,) for size in SIZES]), count]


@pytest.mark.slow(but=[1, 2, 4, 5])
@pytest.mark.parametrize("tile_bytes", [4096, 2**20, 2**26])
@pytest.mark.parametrize("threads", [1, 3])
def test_tiles_make_what_the_whole_update_makes(tile_bytes: int, threads: int):
    update, state, inputs = update_of_vectors()
    whole = HostUpdate(update, state, inputs)
    expected, outputs = [on_host(x) for x in state], whole.make_outputs()
    engine = TiledUpdate(
        update, state, inputs, tile_bytes=tile_bytes, threads=threads, portion_bytes=2**18
    )
    states = [state, [on_host(x) for x in state]]
    outs = [engine.make_outputs(), engine.make_outputs()]
    assert engine.layout.most_bytes <= max(tile_bytes, 4096)
    assert tile_bytes > 4096 or engine.layout.num_tiles > 3 * BLOCK * 12 // 4096
    for _ in range(2):
        call(whole, expected, inputs, outputs)
        by_tiles(engine, states, [inputs, inputs], outs)
    for shard in (0, 1):
        for a, b in zip([*expected, *outputs], [*states[shard], *outs[shard]], strict=True):
            np.testing.assert_array_equal(a, b)


def of_large(update: Any, large: list[int], num: int) -> Any:
    """The update of some of its leaves, the others of which are inputs."""

    def on_large(vectors: Any, inputs: Any) -> tuple[Any, Any]:
        few, given = iter(inputs[: num - len(large)]), iter(vectors)
        leaves = [next(given) if i in large else next(few) for i in range(num)]
        new, outs = update(leaves, inputs[num - len(large) :])
        return [new[i] for i in large], outs

    return on_large


@pytest.mark.parametrize("name", ["amsgrad", "lookahead", "schedule_free_adamw"])
def test_optimizers(name: str):
    update, leaves, avals, _ = problem(ENTRIES[name], jnp.float32)
    state = [on_host(leaf) for leaf in leaves]
    large = [i for i, x in enumerate(state) if x.size > 1]
    on_large = of_large(update, large, len(state))
    rng = np.random.default_rng(0)
    inputs = [x for x in state if x.size <= 1] + [random_like(rng, aval) for aval in avals]
    vectors = [state[i] for i in large]
    assert not TracedUpdate(on_large, vectors, inputs).untiled()
    expected = [on_host(x) for x in vectors]
    call(HostUpdate(on_large, vectors, inputs), expected, inputs)
    by_tiles(TiledUpdate(on_large, vectors, inputs, tile_bytes=4096), [vectors], [inputs], [[]])
    for a, b in zip(expected, vectors, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_is_kept_and_what_reads_no_state():
    """A leaf that nobody changes is carried along; an output of inputs alone needs no tile of a disk."""
    state, grad = [host(1000), host(70, seed=1)], host(500, seed=2)
    kept = state[1].copy()

    def update(state: Any, inputs: Any) -> tuple[Any, Any]:
        return [2 * state[0], state[1]], [3 * inputs[0]]

    engine = TiledUpdate(update, state, [grad], tile_bytes=2**20, portion_bytes=1)
    outs = engine.make_outputs()
    expected = 2 * state[0]
    by_tiles(engine, [state], [[grad]], [outs])
    assert len(engine.tiles) == engine.layout.num_tiles + 1
    np.testing.assert_array_equal(state[0], expected)
    np.testing.assert_array_equal(state[1], kept)
    np.testing.assert_array_equal(outs[0], 3 * grad)


def test_what_has_no_tiles():
    """Leaves that are not elementwise, and those that something reads whole, are named."""
    state = [host(8, 8), host(64, seed=1)]

    def update(state: Any, inputs: Any) -> tuple[Any, Any]:
        w, m = state
        return [w @ w, m * jnp.sum(m)], []

    assert TracedUpdate(update, state, (), ("w", "m")).untiled() == [
        "w is updated by XLA (dot_general of float32[8,8])",
        "m is read whole, by XLA",
    ]


def test_residents_are_updated_where_they_are():
    """Beside what comes in tiles; also where nothing does, and where XLA reads all of it."""
    w, m, v = host(1000), host(1000, seed=1), host(70, seed=2)
    grad = host(1000, seed=3)

    def update(state: Any, inputs: Any) -> tuple[Any, Any]:
        w, m, v = state
        m = 0.5 * m + inputs[0]
        return [w - m / jnp.sum(w), m, 2 * v], []

    names = ("w", "m", "v")
    traced = TracedUpdate(update, (w, m, v), [grad], names)
    assert traced.untiled() == ["w is read whole, by XLA"]
    assert not traced.untiled(resident=(0, 2))
    expected = [on_host(x) for x in (w, m, v)]
    call(HostUpdate(update, expected, [grad]), expected, [grad])
    engine = TiledUpdate(traced, tile_bytes=4096, resident=(0, 2))
    assert {extent.leaf for tile in engine.layout.tiles for extent in tile} == {"m"}
    engine.prepare([[w, v]], [[grad]])
    engine.begin([[]])
    buffer = host_empty((engine.layout.most_bytes,), np.uint8)
    for tile in range(len(engine.tiles)):
        if tile >= engine.layout.num_tiles:
            engine.update_tile(0, tile)
            continue
        ((extent,), (view,)) = engine.layout.tiles[tile], engine.layout.views(tile, buffer)
        place = slice(extent.start, extent.start + extent.nbytes)
        view[:] = m.view(np.uint8)[place]
        engine.update_tile(0, tile, buffer)
        m.view(np.uint8)[place] = view
    for a, b in zip(expected, (w, m, v), strict=True):
        np.testing.assert_array_equal(a, b)


def test_tiles_are_cut_at_whole_lines_and_never_across_portions():
    found = [
        Together((0, 1), (4, 2), 1000, 0),
        Together((2,), (1,), 1, 0),
        Together((), (), 5000, 0),
        Together((3,), (8,), 3 * GRAIN, 1),
    ]
    tiles = list(_tiles.cut(found, 2048))
    for i, each in enumerate(found):
        spans = [s for tile in tiles for s in tile.spans if s.together == i]
        assert [s.first for s in spans] == [
            sum(t.num for t in spans[:k]) for k in range(len(spans))
        ]
        assert sum(s.num for s in spans) == each.size
        assert all(s.first % GRAIN == 0 for s in spans)
    for tile in tiles:
        assert {found[s.together].portion for s in tile.spans} == {tile.portion}
        assert sum(found[s.together].nbytes(s.num) for s in tile.spans) <= 2048
    # The least there can be, whoever asks for less.
    assert max(s.num for tile in _tiles.cut(found, 1) for s in tile.spans) == 5000
    assert _tiles.least_bytes(found) == 8 * GRAIN


def masters_of_stacks(shapes: list[tuple[int, ...]]) -> tuple[Any, list[np.ndarray], list[Any]]:
    """Per shape a bfloat16 parameter, its master and a moment, all of them state."""
    state = [
        x
        for i, shape in enumerate(shapes)
        for x in (
            *map(on_host, bfloat16([shape])),
            host(*shape, seed=2 * i),
            host(*shape, seed=2 * i + 1),
        )
    ]

    def update(state: Any, inputs: Any) -> tuple[Any, Any]:
        new: list[Any] = []
        for i, grad in enumerate(inputs):
            _, master, moment = state[3 * i : 3 * i + 3]
            moment = 0.9 * moment + grad.astype(jnp.float32)
            master = master - 0.1 * moment
            new += [master.astype(jnp.bfloat16), master, moment]
        return new, []

    return update, state, bfloat16(shapes)


STACKS = [(6, 70), (6, 33, 65), (501,), (3, 5000)]
SLICES = {0: 6, 3: 6, 6: 1, 9: 3}  # parameters


@pytest.mark.parametrize("tile_bytes", [4096, 2**16, 2**26])
def test_lone_parameters_are_updated_in_their_tiles(tile_bytes: int):
    """To the bit; a slice is whole extents, each of pages of its own, one turn's after the other."""
    update, state, grads = masters_of_stacks(STACKS)
    expected = [on_host(x) for x in state]
    call(HostUpdate(update, state, grads), expected, grads)
    engine = TiledUpdate(
        update, state, grads, tile_bytes=tile_bytes, lone=SLICES, portion_bytes=2**14
    )
    by_tiles(engine, [state], [grads], [[]])
    for a, b in zip(expected, state, strict=True):
        np.testing.assert_array_equal(a, b)
    extents = [x for tile in engine.layout.tiles for x in tile]
    assert {x.leaf for x in extents if x.lone} == {engine._names[i] for i in SLICES}
    for i, num in SLICES.items():
        slice_bytes = state[i].nbytes // num
        found = [x for x in extents if x.leaf == engine._names[i]]
        assert all(x.offset % 4096 == 0 for x in found)
        assert all(x.start // slice_bytes == (x.start + x.nbytes - 1) // slice_bytes for x in found)
        if tile_bytes > 4096:  # All but the last of a slice are whole pages.
            assert all(
                x.nbytes % 4096 == 0 or (x.start + x.nbytes) % slice_bytes == 0 for x in found
            )
    turns = [
        x.start // (state[i].nbytes // 6)
        for x in extents
        for i in (0, 3)
        if x.leaf == engine._names[i]
    ]
    assert turns == sorted(turns)
    assert engine.layout.most_bytes <= max(tile_bytes, 2 * 4096)
