"""Weights at rest in codes: an evaluation is that of one device with the weights that the codes say."""

import copy
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax import lax

import jzero
import small
from jzero.sharding.plan import _make
from small import grouped

INT8, INT4 = jzero.Blocks("int8"), jzero.Blocks("int4", size=32, rotate=True)
D, LAYERS, VOCAB, CONTEXT = 128, 3, 130, 6


def new_params(dtype=jnp.float32):
    shapes = {
        "table": (VOCAB, D),
        "positions": (CONTEXT, D),
        "layers": {"qkv": (LAYERS, D, 3 * D), "out": (LAYERS, D, D), "scale": (LAYERS, D)},
        "stack": (2, D, D),
        "looked_up": (VOCAB, D),
        "head": (D, 4, D // 4),
    }
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape) * D**-0.5, dtype),
        shapes,
        is_leaf=lambda x: type(x) is tuple,
    )


def logits_of(params, tokens, cache, t, compute):
    """Of the rows' tokens: a tied table, layers in a loop, fused weights, slices of a stack."""
    x = params["table"][tokens] + params["looked_up"][tokens] + params["positions"][t][None]

    def layer(x, layer_and_cache):
        w, cache = layer_and_cache
        q, k, v = jnp.split(w["qkv"].astype(compute), 3, axis=1)
        cache = lax.dynamic_update_index_in_dim(cache, jnp.tanh(x @ k), t, 1)
        seen = jnp.einsum("bd,bcd->bc", x @ q, cache) / D
        seen = jnp.einsum("bc,bcd->bd", seen, cache)
        x = x + jnp.tanh(seen + x @ v) @ w["out"].astype(compute)
        return x * (1 + w["scale"].astype(compute)[None]), cache

    x, cache = lax.scan(layer, x.astype(compute), (params["layers"], cache))
    x = jnp.tanh(x @ params["stack"][0].astype(compute)) @ params["stack"].astype(compute)[1]
    x = jnp.tanh(jnp.einsum("bd,dhk->bhk", x, params["head"].astype(compute))).reshape(x.shape)
    return (x @ params["table"].T.astype(compute)).astype(jnp.float32), cache


def generate(params, tokens, compute=jnp.float32):
    """Decodes with a cache: `([rows, context, vocab], [rows])`, logits of every position and the last."""

    def turn(carry, t):
        tokens, cache = carry
        logits, cache = logits_of(params, tokens, cache, t, compute)
        return (logits.argmax(axis=1).astype(tokens.dtype), cache), logits

    cache = jnp.zeros((LAYERS, len(tokens), CONTEXT, D), compute)
    (tokens, _), logits = lax.scan(turn, (tokens, cache), jnp.arange(CONTEXT))
    return jnp.moveaxis(logits, 0, 1), tokens


def plain(params):
    """What the codes say, as arrays of one device."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), params)


def coded_leaves(params):
    return [x for x in jax.tree.leaves(params) if getattr(x, "codes", None)]


def assert_as_one_device(eval_step, coded, *args, tolerance=1e-5):
    wanted = jax.jit(eval_step.__wrapped__)(plain(coded), *args)
    for x, y in zip(jax.tree.leaves(eval_step(coded, *args)), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max())


@pytest.mark.slow(but=[2, 3])
@pytest.mark.parametrize(
    ("num", "codes", "dtype", "compute", "options"),
    [
        (1, INT8, jnp.float32, jnp.float32, {}),
        (4, INT4, jnp.float32, jnp.bfloat16, {"gather": "per_pass"}),
        (4, INT8, jnp.bfloat16, jnp.float32, {"offload_params": jzero.PinnedHost(device_bytes=2**17)}),
        (2, INT8, jnp.float32, jnp.float32, {"offload_params": "files"}),
    ],
)  # fmt: skip
def test_generates_what_one_device_generates_with_what_codes_say(
    num, codes, dtype, compute, options, tmp_path
):
    if options.get("offload_params") == "files":
        options = {"offload_params": jzero.NVMe(str(tmp_path), device_bytes=2**18)}
    tokens = np.arange(4, dtype=np.int32)
    fn = functools.partial(generate, compute=compute)
    eval_step: Any = jzero.shard_eval_step(
        fn, weight_dtype=codes, mesh=small.auto_mesh(data=num), **grouped(**options)
    )
    coded = eval_step.shard(new_params(dtype), tokens)
    assert len(coded_leaves(coded)) == 5
    tolerance = 1e-5 if compute == jnp.float32 else 2e-2
    assert_as_one_device(eval_step, coded, tokens, tolerance=tolerance)
    report = eval_step.describe(coded, tokens)
    found = {x["path"]: x["gathered_bytes"] for x in report.to_dict()["weights"]["coded"]}
    assert {x.dtype for x in report.traffic if x.leaf in found} == ({"uint8"} if num > 1 else set())
    # Once for all who read a leaf: the loop over tokens, casts, slices, a transposed table.
    times = CONTEXT if "offload_params" in options or options.get("gather") == "per_pass" else 1
    nbytes = sum(x.storage.nbytes for x in coded_leaves(coded))
    assert sum(found.values()) == (times * nbytes if num > 1 else 0)


def by_hand(w, dim, num, blocks, first):
    """A leaf through codes, in NumPy: each matrix of each part, in blocks, by a scale."""
    w = np.asarray(w, np.float32)
    widths = [(0, -n % num * (d == dim)) for d, n in enumerate(w.shape)]
    parts = np.split(np.pad(w, widths), num, axis=dim)

    def through(row):
        padded = np.pad(row, (0, -len(row) % blocks.size)).reshape(-1, blocks.size)
        scale = np.abs(padded).max(1, keepdims=True) / np.float32(blocks.largest)
        codes = np.round(padded * np.where(scale > 0, 1 / scale, 0).astype(np.float32))
        return (codes * scale).reshape(-1)[: len(row)]

    def part(x):
        rows = x.reshape(int(np.prod(x.shape[:first])), -1)
        return np.stack(list(map(through, rows))).reshape(x.shape)

    whole = np.concatenate(list(map(part, parts)), axis=dim)
    return whole[tuple(map(slice, w.shape))]


def test_each_part_of_each_matrix_has_blocks_of_its_own():
    num = 4
    blocks, tokens, params = jzero.Blocks("int8", size=64), np.arange(4), new_params()
    eval_step = jzero.shard_eval_step(generate, weight_dtype=blocks, mesh=small.auto_mesh(data=num))
    coded = eval_step.shard(params, tokens)
    for x, w in zip(jax.tree.leaves(coded), jax.tree.leaves(params), strict=True):
        if not getattr(x, "codes", None):
            np.testing.assert_array_equal(x, w)
            continue
        assert x.codes is not None
        assert x.storage.shape == x.codes.rows_shape
        dim = 0 if x.codes.dim is None else x.codes.dim
        # The rows of this table are padded: 130 of them, on four devices.
        wanted = by_hand(w, dim, num, blocks, w.ndim - 2)
        np.testing.assert_allclose(np.asarray(x), wanted, rtol=0, atol=1e-6)
        lost = np.asarray(w) - wanted
        assert x.error is not None
        assert x.error.rms == pytest.approx(np.sqrt((lost**2).sum() / (w**2).sum()), rel=1e-3)
        assert x.error.largest == pytest.approx(np.abs(lost).max() / np.abs(w).max(), rel=1e-3)


def over_stack(w, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]


def by_index(w, x):
    return lax.fori_loop(0, 3, lambda i, h: h @ w[i], x)


@pytest.mark.slow(but=[1, 2])
@pytest.mark.parametrize(
    ("shape", "rows", "fn"),
    [
        ((1100, 4, 4), (4, 4676), over_stack),  # Matrices smaller than a block: one row of all.
        ((3, 2, 128, 128), (3, 2, 4, 4352), lambda w, x: over_stack(w[:, 1], x) @ w[2][0]),
        ((512, 16, 16), (512, 1, 272), by_index),
    ],
)
def test_rows_of_stacks(shape, rows, fn):
    w = np.random.default_rng(0).normal(size=shape).astype(np.float32) * shape[-1] ** -0.5
    blocks, x = jzero.Blocks("int8", size=64), np.ones((4, shape[-1]), np.float32)
    eval_step = jzero.shard_eval_step(fn, weight_dtype=blocks, mesh=small.auto_mesh(data=4))
    coded = eval_step.shard(w, x)
    assert coded.storage.shape == rows
    assert_as_one_device(eval_step, coded, x, tolerance=1e-4)  # hundreds of layers
    traffic = eval_step.describe(coded, x).traffic
    if fn is by_index:  # Of 512 rows a turn needs one, which its owner decodes.
        assert sum(each.elements * each.times for each in traffic) < 10 * 16 * 16
    else:
        assert {each.dtype for each in traffic} == {"uint8"}


def test_an_index_far_below_zero_is_clamped_and_counted_from_the_end_once():
    def fn(w, x, i):
        first = lax.dynamic_slice(w, (i, 0, 0), (1, 128, 128), allow_negative_indices=False)[0]
        return x @ lax.dynamic_index_in_dim(w, i, 0, keepdims=False), x @ first

    w, x = new_params()["stack"], np.ones((4, 128), np.float32)
    w = np.concatenate([w, 2 * w])
    eval_step = jzero.shard_eval_step(fn, weight_dtype=jnp.int8, mesh=small.auto_mesh(data=2))
    coded = eval_step.shard(w, x, jnp.int32(0))
    for i in (-1, -len(w) - 1, -len(w) - 2, len(w) + 1):
        assert_as_one_device(eval_step, coded, x, jnp.int32(i))


def test_a_decoding_loop_keeps_codes_where_weights_have_no_room(monkeypatch):
    """Between what is kept decoded, and what is gathered in every turn: codes, which each turn decodes."""
    tokens, params = np.arange(4), new_params()
    eval_step: Any = jzero.shard_eval_step(
        generate, weight_dtype=jnp.int8, mesh=small.auto_mesh(data=4)
    )
    whole = sum(x.size * 4 for x in coded_leaves(eval_step.shard(params, tokens)))
    found = {}
    for room in (2 * whole, whole // 2, whole // 8):
        monkeypatch.setattr(_make, "_loop_bytes", lambda setting, room=room: room)
        eval_step = jzero.shard_eval_step(
            generate, weight_dtype=jnp.int8, mesh=small.auto_mesh(data=4)
        )
        coded = eval_step.shard(params, tokens)
        assert_as_one_device(eval_step, coded, tokens)
        traffic = eval_step.describe(coded, tokens).to_dict()["traffic"]
        gathered = sum(x["bytes"] for x in traffic if x["dtype"] == "uint8")
        temp = eval_step.lower(coded, tokens).compile().memory_analysis().temp_size_in_bytes
        found[room] = gathered, temp
    (once, decoded), (again, in_codes), (each, freed) = found.values()
    assert once == again == sum(x.storage.nbytes for x in coded_leaves(coded))
    assert once < each <= CONTEXT * once
    assert decoded > whole > in_codes > freed


def test_other_evaluations_read_what_one_has_coded():
    tokens, params = np.arange(4), new_params()
    eval_step = jzero.shard_eval_step(generate, weight_dtype=jnp.int8, mesh=small.auto_mesh(data=2))
    coded = eval_step.shard(params, tokens)

    def norms(params, x):
        """Reads leaves otherwise than products do, and one as it is; and a gradient by one."""
        slope = jax.grad(lambda w: jnp.sum((x @ w) ** 2))(params["stack"][1])
        return {
            "norm": optax.tree.norm(params),
            "rows": x @ (params["head"].reshape(D, D) + params["stack"][0] * 2),
            "leaf": params["layers"]["qkv"],
            "slope": slope,
            "scan": lax.scan(lambda c, w: (c + w, w.sum()), params["stack"][0], params["stack"]),
            "copied": lax.scan(lambda c, w: (c, (w, params["head"])), 0.0, params["stack"])[1],
            "cond": lax.cond(x.sum() > 0, lambda w: w[0], lambda w: w[1].T, params["stack"]),
        }

    other = jzero.shard_eval_step(norms, mesh=small.auto_mesh(data=2))
    assert_as_one_device(other, coded, np.ones((4, D), np.float32))
    assert not coded_leaves(other(coded, np.ones((4, D), np.float32)))
    assert coded["stack"].shape == (2, D, D)
    assert jnp.sum(coded["stack"]).shape == ()
    assert isinstance(copy.deepcopy(coded["stack"]), np.ndarray)
    assert not isinstance(jax.jit(lambda x: x)(coded["stack"]), jzero.LeafArray)


def test_the_state_of_a_training_is_coded_where_it_lies():
    tx = optax.adam(1e-2)

    def step_fn(state, x):
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(predict(p, x) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def predict(params, x):
        return jnp.tanh(x @ params["in"]) @ params["out"]

    x, key = np.ones((8, 130), np.float32), jax.random.key(0)
    params = {"in": jax.random.normal(key, (130, 256)), "out": jax.random.normal(key, (256, 66))}
    for options in ({"stage": 1}, {"offload_params": jzero.PinnedHost(device_bytes=2**20)}, {}):
        train_step = jzero.shard_train_step(
            step_fn, mesh=small.auto_mesh(data=4), **grouped(**options)
        )
        state, _ = train_step((params, tx.init(params)), x)
        eval_step = jzero.shard_eval_step(predict, like=train_step, weight_dtype=jnp.int4)
        coded = eval_step.shard(state[0], x)
        assert_as_one_device(eval_step, coded, x)
        kinds = {x.storage.sharding.memory_kind for x in coded_leaves(coded)}
        assert kinds == {"pinned_host" if "offload_params" in options else "device"}
    (found,) = {type(x) for x in jax.tree.leaves(train_step.unshard(coded))}
    assert not issubclass(found, jzero.LeafArray)
    with pytest.raises(
        jzero.StateError, match=r"(?s)in'\] is quantized.*Training updates the exact"
    ):
        train_step((coded, state[1]), x)


def test_rows_are_saved_and_restored_without_the_weights(tmp_path):
    x, params = np.ones((4, D), np.float32), {"w": new_params()["stack"], "bias": jnp.ones(130)}

    def predict(params, x):
        return x @ params["w"][0] @ params["w"][1] + params["bias"].mean()

    eval_step = jzero.shard_eval_step(predict, weight_dtype=jnp.int8, mesh=small.auto_mesh(data=4))
    coded = eval_step.shard(params, x)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "rows", eval_step.rows(coded))
        checkpointer.wait_until_finished()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        restored = checkpointer.restore(tmp_path / "rows", eval_step.rows(shapes, x))
    found = eval_step.from_rows(restored, shapes, x)
    assert found["w"].error is None
    assert "%" not in str(eval_step.describe(found, x))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(coded), strict=True):
        assert type(a) is type(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    np.testing.assert_array_equal(eval_step(found, x), eval_step(coded, x))
    other = jzero.shard_eval_step(predict, weight_dtype=jnp.int8, mesh=small.auto_mesh(data=2))
    with pytest.raises(
        jzero.StateError,
        match=r"state\['w'\] is uint8\[2, 4, 4160\], and its rows are uint8\[2, 2, 8",
    ):
        other.from_rows(restored, shapes, x)
    train_step = jzero.shard_train_step(lambda params, x: (params, x), mesh=small.auto_mesh(data=4))
    with jzero.Checkpointer(tmp_path / "steps", train_step) as checkpoints:
        with pytest.raises(jzero.StateError, match="w is quantized; eval_step.rows gives it"):
            checkpoints.save(1, coded)


def test_what_cannot_be_obeyed_is_refused():
    x, w = np.ones((4, D), np.float32), new_params()["stack"][0]

    def predict(w, x):
        return x @ w

    make: Any = functools.partial(jzero.shard_eval_step, predict, mesh=small.auto_mesh(data=4))
    eval_step = make(weight_dtype=jnp.int8)
    coded = eval_step.shard(w, x)
    tiles = jzero.Comm(tile_bytes=1024)
    calls = [
        (
            "weight_dtype=.*float32.*It is a quantized format",
            lambda: make(weight_dtype=jnp.float32),
        ),
        (
            "from_rows: 2 leaves of rows, and 1 of the state",
            lambda: eval_step.from_rows([coded.storage, x], w, x),
        ),
        ("the step's other arguments are not known", lambda: make(weight_dtype=jnp.int4).shard(w)),
        (
            "state is not quantized. weight_dtype=int8 in blocks of 256 is the format",
            lambda: eval_step(w, x),
        ),
        (
            "state is stored as int8 in blocks of 256. weight_dtype=int4 in blocks of 128",
            lambda: make(weight_dtype=jnp.int4)(coded, x),
        ),
        (r"tile_bytes=1024\), and state is quantized", lambda: make(comm=tiles)(coded, x)),
        ("and the step is called under an outer jax.jit", lambda: jax.jit(eval_step)(w, x)),
        (
            r"was quantized on the mesh {'data': 4}, and is read on {'data': 2}",
            lambda: jzero.shard_eval_step(predict, mesh=small.auto_mesh(data=2))(coded, x),
        ),
    ]
    for text, call in calls:
        with pytest.raises((jzero.OptionError, jzero.StateError), match=text):
            call()
    alone: Any = jzero.shard_eval_step(
        lambda w: w @ w, weight_dtype=jnp.int8, mesh=small.auto_mesh(data=4)
    )
    assert isinstance(alone.shard(w), jzero.LeafArray)  # there are no others
    coded.delete()
    with pytest.raises(jzero.StateError, match=r"LeafArray\(shape=\(128, 128\).*already donated"):
        jnp.asarray(coded)
