"""HostUpdate: in place, in one pass, for leaves of any size and number; and what it refuses."""

import os
import tracemalloc
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jzero
import small
from host_updates import call, compiler, on_host, problem, random, reference, ulps  # noqa: F401
from jzero.offload.kernels._code_paths import KERNEL, XLA, code_paths_text
from jzero.offload.kernels._host_update import HostUpdate, default_threads
from jzero.offload.kernels._kernel import LANES
from jzero.offload.kernels._loops import BLOCK
from jzero.offload.kernels._machine import processor
from jzero.offload.memory._addresses import host_empty
from optimizers import ENTRIES

pytestmark = pytest.mark.usefixtures("compiler", "optax_promotions")


def described(engine: HostUpdate) -> str:
    kernels = {loop.program for portion in engine._portions for loop in portion}
    return f"{len(kernels)} kernels\n{code_paths_text(engine.code_paths)}"


def host(*shape: int, dtype: Any = jnp.float32, seed: int = 0) -> np.ndarray:
    return on_host(random(np.random.default_rng(seed), jax.ShapeDtypeStruct(shape, dtype)))


def adamw(leaves: list[np.ndarray]) -> tuple[Any, list[np.ndarray]]:
    """AdamW on gradients in bfloat16, with copies of the parameters in bfloat16, and its state."""
    tx = optax.adamw(1e-3, weight_decay=1e-2)
    state, tree = jax.tree.flatten((leaves, tx.init(leaves)))

    def update(state: Any, grads: Any) -> tuple[Any, Any]:
        params, opt = jax.tree.unflatten(tree, state)
        updates, opt = tx.update([grad.astype(jnp.float32) for grad in grads], opt, params)
        params = optax.apply_updates(params, updates)
        return jax.tree.leaves((params, opt)), [p.astype(jnp.bfloat16) for p in params]

    return update, [on_host(leaf) for leaf in state]


def bfloat16(shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    rng = np.random.default_rng(1)
    return [random(rng, jax.ShapeDtypeStruct(shape, jnp.bfloat16)) for shape in shapes]


SIZES = [0, 1, 2, LANES - 1, LANES, LANES + 1, BLOCK, 2 * BLOCK + LANES + 3]


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3])
def test_every_size_in_one_update(threads: int):
    update, state = adamw([host(size) for size in SIZES])
    grads = bfloat16([(size,) for size in SIZES])
    expected = reference(update, state, grads)
    engine = HostUpdate(update, state, grads, threads=threads)
    outputs = engine.make_outputs()
    call(engine, state, grads, outputs)
    assert max(ulps(*pair) for pair in zip([*state, *outputs], expected, strict=True)) <= 4


def test_leaves_of_many_shapes_are_one_kernel():
    shapes = [(3, 1 + i % 7) for i in range(50)]
    update, state = adamw([host(*shape) for shape in shapes])
    engine = HostUpdate(update, state, bfloat16(shapes))
    assert described(engine).startswith("1 kernels\n200 of 201 leaves in one pass each")


@pytest.mark.slow(but=10)
@pytest.mark.parametrize("special", [np.nan, -np.inf, -0.0, 1e-40, 1e18])
@pytest.mark.parametrize("name", ["adamw", "lion", "sgd(momentum)", "rmsprop", "adagrad", "yogi"])
def test_special_gradients(name: str, special: float):
    """What one gradient element does stays in its own element, and is what XLA makes of it."""
    update, leaves, inputs, _ = problem(ENTRIES[name], jnp.float32)
    state, rng = [on_host(leaf) for leaf in leaves], np.random.default_rng(0)
    engine = HostUpdate(update, state, inputs)
    for _ in range(2):
        grads = [random(rng, aval) for aval in inputs]
        grads[:-1] = [grad.at[(0,) * grad.ndim].set(special) for grad in grads[:-1]]
        expected = reference(update, state, grads)
        call(engine, state, grads)
        assert max(ulps(*pair) for pair in zip(state, expected, strict=True)) <= 16


def test_leaves_may_change_places():
    a, b, c = host(100), host(100, seed=1), host(100, seed=2)
    expected = [b.copy(), a.copy(), (a + b).copy()]
    state = (a, b, c)
    engine = HostUpdate(lambda s, _: ((s[1], s[0], s[0] + s[1]), ()), state, ())
    call(engine, state, ())
    for got, want in zip((a, b, c), expected, strict=True):
        np.testing.assert_array_equal(got, want)


def test_scalars_may_change_places():
    """XLA returns an argument as a view of the memory that the next leaf is written to."""
    scalars = [host() for _ in range(3)]
    for i, scalar in enumerate(scalars):
        scalar[...] = i
    update = HostUpdate(
        lambda state, inputs: ((inputs[0], state[0], state[1]), ()), scalars, [jnp.float32(7)]
    )
    call(update, scalars, [jnp.float32(7)])
    assert [float(scalar) for scalar in scalars] == [7, 0, 1]


@pytest.mark.parametrize("dtype", ["bool", "int32"])
def test_selection(dtype: str):
    """`lax.select_n` takes booleans or the numbers of the cases."""
    x, y, w = host(100, seed=1), host(100, seed=2), host(100)
    which = on_host(jnp.arange(100) % 3 == 0).astype(dtype)
    update = HostUpdate(lambda state, inputs: ((lax.select_n(*inputs),), ()), (w,), (which, x, y))
    assert [code_path.by for code_path in update.code_paths] == [KERNEL]
    call(update, (w,), (which, x, y))
    np.testing.assert_array_equal(w, np.where(which, y, x))


@pytest.mark.parametrize("taken", [False, True])
def test_branches_become_selections(taken: bool):
    """What the branch not taken makes of NaN does not matter; one with a norm in it stays a branch."""
    grad = np.full(40, np.nan, np.float32) if taken else np.ones(40, np.float32)
    mask = np.arange(40) % 2 == 0

    def update(state: Any, inputs: Any) -> tuple[Any, Any]:
        w, unit = state
        skip = jnp.isnan(inputs[0]).any()
        inner = jnp.where(mask, w * 2, w)
        w = lax.cond(
            skip, lambda: w + 1, lambda: lax.cond(skip, lambda: w, lambda: inner - inputs[0])
        )
        unit = lax.cond(skip, lambda: unit, lambda: unit / jnp.linalg.norm(unit))
        return (w, unit), ()

    state = [host(40), host(40, seed=1)]
    expected = reference(update, state, [grad])
    engine = HostUpdate(update, state, [grad])
    assert [code_path.by for code_path in engine.code_paths] == [KERNEL, XLA]
    call(engine, state, [grad])
    assert max(ulps(*pair) for pair in zip(state, expected, strict=True)) <= 2


def test_xla_reads_what_a_kernel_overwrites():
    """The norm is that of the old leaf, and so is the sum over its rows."""
    w, rows = host(20, 8), host(8)
    expected = [w / np.linalg.norm(w), w.sum(0)]
    update = HostUpdate(
        lambda state, _: ((state[0] / jnp.linalg.norm(state[0]), state[0].sum(0)), ()),
        (w, rows),
        (),
    )
    assert [code_path.by for code_path in update.code_paths] == [KERNEL, XLA]
    call(update, (w, rows), ())
    np.testing.assert_allclose(w, expected[0], rtol=1e-5)
    np.testing.assert_allclose(rows, expected[1], rtol=1e-5)


@pytest.mark.slow
def test_nothing_of_the_state_is_copied():
    """NumPy's allocations in a step, for a state of 12 MB and outputs of 2 MB."""
    update, state = adamw([host(1 << 20)])
    grads = bfloat16([(1 << 20,)])
    engine = HostUpdate(update, state, grads)
    outputs, before = engine.make_outputs(), [leaf.ctypes.data for leaf in state]
    call(engine, state, grads, outputs)
    tracemalloc.start()
    call(engine, state, grads, outputs)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000
    assert [leaf.ctypes.data for leaf in state] == before


def test_other_outputs_in_each_call():
    """As a caller with two buffers passes them, who reads one while the next step fills the other."""
    update, state = adamw([host(100)])
    grads = bfloat16([(100,)])
    engine = HostUpdate(update, state, grads)
    first, second = engine.make_outputs(), engine.make_outputs()
    for outputs in (first, second, first):
        outputs[0][:] = 0
        call(engine, state, grads, outputs)
        np.testing.assert_array_equal(outputs[0], state[0].astype(jnp.bfloat16))


def test_inputs_of_any_kind():
    """Gradients may lie in NumPy arrays, in any order, or on several devices."""
    grad = random(np.random.default_rng(1), jax.ShapeDtypeStruct((8, 16), jnp.float32))
    spread = jax.device_put(grad, jax.NamedSharding(small.mesh(x=8), jax.P("x")))
    results = []
    for given in (grad, np.asarray(grad), np.asfortranarray(grad), spread):
        w = host(8, 16)
        engine = HostUpdate(lambda state, inputs: ((state[0] - inputs[0],), ()), (w,), (grad,))
        call(engine, (w,), (given,))
        results.append(w)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def three_leaves() -> tuple[Any, list[np.ndarray], list[jax.Array]]:
    """An update of a master, its moment and a factor of XLA's, with copies of the first and the last."""

    def update(state: Any, inputs: Any) -> tuple[Any, Any]:
        w, m, row, count = state
        m = 0.9 * m + inputs[0] / (count + 1)
        w, row = w - m * inputs[1], row + m.sum(0)
        return (w, m, row, count + 1), (w.astype(jnp.bfloat16), row * 2, count * 2)

    inputs = [jnp.ones((64, 32)), jnp.float32(0.5)]
    return update, [host(64, 32), host(64, 32, seed=1), host(32), host()], inputs


@pytest.mark.slow
def test_shards_are_updated_together():
    """Each from its own state and inputs, as it would be alone, and again with other arrays."""
    update, state, inputs = three_leaves()
    engine = HostUpdate(update, state, inputs)
    for seed in range(3):
        states = [[leaf + shard for leaf in map(on_host, state)] for shard in range(8)]
        states = [[on_host(leaf) for leaf in shard] for shard in states]
        given = [[inputs[0] * shard, inputs[1] + seed] for shard in range(8)]
        expected = [reference(update, *pair) for pair in zip(states, given, strict=True)]
        outputs = [engine.make_outputs() for _ in range(8)]
        engine.prepare(states, given)
        assert sorted(i for done in engine.run(outputs) for i in done) == [0, 1, 2]
        for state, out, want in zip(states, outputs, expected, strict=True):
            assert max(ulps(*pair) for pair in zip([*state, *out], want, strict=True)) <= 4


def many_leaves(portion_leaves: int = 3) -> tuple[HostUpdate, list[np.ndarray], list[jax.Array]]:
    """An update of 12 leaves in portions, the first of which has no output."""
    shapes = [(BLOCK + 1,)] * 12
    update, state = adamw([host(*shape) for shape in shapes])
    nbytes = (BLOCK + 1) * (7 * 4 + 2 + 2)

    def without_first(state: Any, inputs: Any) -> tuple[Any, Any]:
        state, outputs = update(state, inputs)
        return state, outputs[1:]

    grads = bfloat16(shapes)
    portion_bytes = portion_leaves * nbytes
    engine = HostUpdate(without_first, state, grads, threads=2, portion_bytes=portion_bytes)
    return engine, state, grads


@pytest.mark.parametrize("threads", [1, 3])
def test_updates_under_way_at_once(threads: int):
    """Slices of a stack, each begun while others may still run: as the stack in one update."""
    update, stacks = adamw([host(3, BLOCK + 1)])
    update_slice, leaves = adamw([host(BLOCK + 1)])
    grads = bfloat16([(3, BLOCK + 1)])
    # Without copies of the parameters: nobody could wait for these.
    whole = HostUpdate(lambda state, g: (update(state, g)[0], ()), stacks, grads)
    expected = [x.copy() for x in stacks]
    call(whole, expected, grads)
    engine = HostUpdate(
        lambda state, g: (update_slice(state, g)[0], ()), leaves, [grads[0][0]], threads=threads
    )
    scalars = [np.array(x) for _ in range(3) for x in stacks if x.size == 1]
    started = [
        engine.start(
            [[x[i] if x.size > 1 else scalars[i] for x in stacks]], [[grads[0][i]]]
        )
        for i in range(3)
    ]  # fmt: skip
    for each in started:
        each.finish()
        assert each.is_over
    for got, want in zip(stacks, expected, strict=True):
        if got.size > 1:
            np.testing.assert_array_equal(got, want)
    assert [int(x) for x in scalars] == [1, 1, 1]


def test_who_stops_asking_gets_the_whole_update():
    engine, state, grads = many_leaves()
    expected = [on_host(leaf) for leaf in state]
    call(engine, expected, grads, engine.make_outputs())
    engine.prepare([state], [grads])
    running = engine.run([engine.make_outputs()])
    next(running)
    running.close()
    for got, want in zip(state, expected, strict=True):
        np.testing.assert_array_equal(got, want)


def test_what_fails_has_changed_nothing():
    """An error in XLA's part, of one of two shards, and the same call again without it."""
    fails = [True]

    def check(x: Any) -> Any:
        if fails[0] and x > 1:
            raise FloatingPointError("no such step")
        return x

    def update(state: Any, inputs: Any) -> tuple[Any, Any]:
        count = jax.pure_callback(check, jax.ShapeDtypeStruct((), jnp.float32), state[1])
        return (state[0] - inputs[0] * count, count + 1), (state[0],)

    states = [[host(100), host()] for _ in range(2)]
    states[1][1][...] = 2
    before = [[leaf.copy() for leaf in state] for state in states]
    engine = HostUpdate(update, states[0], [jnp.ones(100)])
    with pytest.raises(Exception, match="no such step"):
        engine.prepare(states, [[jnp.ones(100)]] * 2)
    for got, want in zip([*states[0], *states[1]], [*before[0], *before[1]], strict=True):
        np.testing.assert_array_equal(got, want)
    fails[0] = False
    engine.prepare(states, [[jnp.ones(100)]] * 2)
    list(engine.run([engine.make_outputs() for _ in range(2)]))
    assert states[1][1] == 3
    assert not np.array_equal(states[1][0], before[1][0])


@pytest.mark.parametrize(
    ("leaf", "new", "found"),
    [
        (jnp.zeros(4), lambda x: x.astype(jnp.bfloat16), r"w float32\[4\] becomes bfloat16\[4\]"),
        (jnp.zeros(4), lambda x: x[:2], r"w float32\[4\] becomes float32\[2\]"),
        (jax.random.key(0), lambda x: x, r"w key<fry>\[\] holds PRNG keys"),
    ],
)  # fmt: skip
def test_state_that_cannot_be_updated_in_place(leaf: Any, new: Any, found: str):
    with pytest.raises(ValueError, match=rf"HostUpdate: {found}. .* keep keys on the devices"):
        HostUpdate(lambda state, _: ((new(state[0]),), ()), (leaf,), (), names=["w"])


def test_state_that_changes_its_structure():
    with pytest.raises(ValueError, match="HostUpdate: 1 leaves become 2"):
        HostUpdate(lambda state, _: ((state[0], state[0]), ()), (host(4),), ())


W = np.zeros((2, 4), np.float32)


@pytest.mark.parametrize(
    ("states", "found"),
    [
        ([[W.T.copy(), W]], r"w float32\[4,2\] instead of float32\[2,4\]"),

        ([[W.copy("F"), W]], r"w float32\[2,4\] is no writable NumPy array in C order"),
        ([[jnp.zeros((2, 4)), W]], r"w float32\[2,4\] is no writable NumPy array in C order"),
        ([[W, W]], r"ema float32\[2,4\] is in the memory of w"),
        ([[W, W.copy()], [W.copy(), W]], r"ema of shard 1 float32\[2,4\] is in the memory of w of shard 0"),
        ([[W]], "1 arrays instead of 2"),
        ([[W, W.copy()], [W.copy()]], "1 arrays of shard 1 instead of 2"),
    ],
)  # fmt: skip
def test_memory_that_cannot_be_updated(states: Any, found: str):
    engine = HostUpdate(lambda state, _: (state, ()), (W, W), (), names=["w", "ema"])
    with pytest.raises(ValueError, match=rf"HostUpdate: {found}. .* arrays of host_empty"):
        engine.prepare(states, [[]] * len(states))


@pytest.mark.parametrize(
    ("inputs", "outputs", "found"),
    [
        ([jnp.zeros(4), jnp.zeros(4)], [host_empty((4,), np.float32)], "2 arrays instead of 1"),
        ([jnp.zeros(3)], [host_empty((4,), np.float32)], r"inputs\[0\] float32\[3\] instead of float32\[4\]"),
        ([jnp.zeros(4)], [], "0 arrays instead of 1"),

        ([jnp.zeros(4)], [jnp.zeros(4)], r"outputs\[0\] float32\[4\] is no writable NumPy array in C order"),
    ],
)  # fmt: skip
def test_calls_that_do_not_fit(inputs: Any, outputs: Any, found: str):
    update = HostUpdate(lambda state, inputs: ((), (inputs[0] * 2,)), (), (jnp.zeros(4),))
    with pytest.raises(ValueError, match=rf"HostUpdate: {found}. .*arrays of host_empty"):
        call(update, (), inputs, outputs)


def test_a_jax_without_the_host():
    with pytest.raises(jzero.MeshError, match=r"no nowhere backend\. .*Set JAX_PLATFORMS=cuda,cpu"):
        processor("nowhere")


@pytest.mark.parametrize(("processors", "threads"), [(1, 1), (2, 2), (4, 4), (5, 3), (16, 14)])
def test_two_of_many_processors_are_left_to_others(monkeypatch: Any, processors: int, threads: int):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    assert default_threads() == threads
