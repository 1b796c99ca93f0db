"""Parameters and gradients that travel as codes: what trains is what one device trains with such numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

import jzero
import small
from jzero.sharding.passes import _quantize
from small import grouped

INT8, INT4 = jzero.Blocks("int8"), jzero.Blocks("int4", size=32)
D = 128


def init(dtype=jnp.float32, width=D):
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "layers": {
            "w": jax.random.normal(keys[0], (3, D, D), dtype) * 0.1,
            "scale": jnp.ones((3, D), dtype),
        },
        "out": jax.random.normal(keys[1], (D, width), dtype) * 0.1,
        "table": jax.random.normal(keys[2], (256, D), dtype),
    }


def loss_of(params, tokens, seen=lambda name, w: w):
    """Mean of rows; `seen` is what products see of a matrix."""

    @jax.checkpoint
    def layer(h, slices):
        return h + jnp.tanh(h @ seen("w", slices["w"]) * slices["scale"][None]), None

    h, _ = jax.lax.scan(layer, params["table"][tokens], params["layers"])
    return jnp.mean((h @ seen("out", params["out"])) ** 2)


def step(params, tokens):
    loss, grads = jax.value_and_grad(loss_of)(params, tokens)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss


def trained(train_step, params, tokens, num=3):
    losses = []
    for _ in range(num):
        params, loss = train_step(params, tokens)
        losses.append(float(loss))
    return jax.tree.map(np.asarray, params), losses


def assert_same(found, wanted, rtol):
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * np.abs(y).max(), err_msg=str(path))


def through(w, dim, num, codes):
    """`w`, each device's part of it made to codes and back; its gradient is that of `w`."""
    padded = jnp.pad(w, [(0, -n % num * (d == dim)) for d, n in enumerate(w.shape)])
    parts = jnp.stack(jnp.split(padded, num, axis=dim))
    rows = _quantize.quantize(parts.reshape(num, -1), codes)
    back = _quantize.dequantize(rows, parts[0].size, w.dtype, codes).reshape(parts.shape)
    whole = jax.lax.slice_in_dim(jnp.concatenate(list(back), axis=dim), 0, w.shape[dim], axis=dim)
    return w + jax.lax.stop_gradient(whole - w)


def dims_of(train_step, params, tokens):
    leaves = train_step.plan(params, tokens).leaves
    dims = {leaf.path.split("'")[-2]: leaf.layout.dim for leaf in leaves if leaf.coded}
    assert dims.keys() == {"w", "out"}
    return dims | {"w": dims["w"] - 1}


@pytest.mark.slow(but=[0])
@pytest.mark.parametrize("num", [2, 3])
@pytest.mark.parametrize("codes", [INT8, INT4], ids=str)
@pytest.mark.parametrize(
    ("width", "options"),
    [
        (D, {}),
        (130, {}),
        (D, {"gather": "once_per_step", "accumulate": 2}),
        (D, {"offload_params": jzero.PinnedHost(device_bytes=2**20)}),
    ],
    ids=["plain", "padded", "microbatches", "parameters on the host"],
)
def test_products_see_what_codes_say_and_nothing_else_changes(num, codes, width, options):
    with jax.enable_x64(True):
        params, tokens = init(jnp.float64, width), jnp.arange(48) % 256
        train_step = jzero.shard_train_step(
            step,
            mesh=small.auto_mesh(data=num),
            **grouped(gather_dtype=codes, min_shard_bytes=0, **options),
        )
        dims = dims_of(train_step, params, tokens)

        # One gather for all microbatches is of all layers: blocks may have numbers of two of them.
        at_once = options.get("gather") == "once_per_step"

        def seen(name, w):
            return w if at_once and name == "w" else through(w, dims[name], num, codes)

        def loss_in_codes(params, tokens):
            if at_once:
                stack = through(params["layers"]["w"], dims["w"] + 1, num, codes)
                params = params | {"layers": params["layers"] | {"w": stack}}
            return loss_of(params, tokens, seen)

        def reference(params, tokens):
            loss, grads = jax.value_and_grad(loss_in_codes)(params, tokens)
            return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

        wanted, losses = trained(jax.jit(reference), params, tokens)
        found, mine = trained(train_step, params, tokens)
        assert_same(found, wanted, 1e-9)
        np.testing.assert_allclose(mine, losses, rtol=1e-9)


def summed(parts, sources, dests, codes):
    """`parts[source, dest, ...]` of each device of an axis: what each has of all, summed up."""
    if sources == 1:  # Nothing travels.
        return parts[0]
    rows = parts.reshape(sources * dests, -1)
    back = _quantize.dequantize(_quantize.quantize(rows, codes), rows.shape[1], rows.dtype, codes)
    return back.reshape(parts.shape).sum(0)


def in_hops(grads, dim, node, local, hops):
    """The sum of gradients `[node * local, n, d]`, as it arrives over 'local', and then over 'node'."""
    shape = grads.shape[1:]
    cut = (*shape[:dim], node, local, shape[dim] // (node * local), *shape[dim + 1 :])
    x = jnp.moveaxis(grads.reshape(node, local, *cut), (2 + dim, 3 + dim), (2, 3))
    # [node, local, for node, for local, ...]
    x = jnp.stack(
        [summed(jnp.moveaxis(x[i], 2, 1), local, local, hops["local"]) for i in range(node)]
    )
    # [node, for local, for node, ...]
    x = jnp.stack([summed(x[:, j], node, node, hops["node"]) for j in range(local)], axis=1)
    # [for node, for local, ...]
    return jnp.moveaxis(x, (0, 1), (dim, dim + 1)).reshape(shape)


@pytest.mark.slow(but=[0])
@pytest.mark.parametrize("node", [1, 3])
@pytest.mark.parametrize("codes", [INT8, jzero.Blocks("int4", size=32, rotate=True)], ids=str)
@pytest.mark.parametrize(
    "microbatches",
    [{}, {"accumulate": 2, "reduce": "each"}, {"accumulate": 2, "reduce": "once"}],
    ids=["whole", "each", "once"],
)
def test_gradients_are_summed_hop_by_hop_as_codes_say(node, codes, microbatches):
    """Once in a step, or in each microbatch."""
    local, num = 2, microbatches.get("accumulate", 1)
    hops = {"local": INT8, "node": codes}
    with jax.enable_x64(True):
        w = jax.random.normal(jax.random.key(1), (3 * D, 3 * D))
        rows = jax.random.normal(jax.random.key(2), (node * local * 2, 3 * D))

        def loss_of(w, rows):
            return jnp.sum(jnp.sin(rows @ w))

        def plain(w, rows):
            return w - 0.1 * jax.grad(loss_of)(w, rows)

        train_step: Any = jzero.shard_train_step(
            plain,
            stage=3,
            mesh=small.auto_mesh(node=node, local=local),
            **grouped(reduce_dtype=hops, **microbatches),
        )
        parts = jnp.split(rows, node * local * num)
        grads = jnp.stack([jax.grad(loss_of)(w, part) for part in parts])
        dim = train_step.plan(w, rows).leaves[0].layout.dim
        terms = [grads[i::num] for i in range(num)]  # A device's microbatches are neighbours.
        once = microbatches.get("reduce") == "once"
        sums = (in_hops(term, dim, node, local, hops) for term in ([sum(terms)] if once else terms))
        found, wanted = np.asarray(train_step(w, rows)), np.asarray(w - 0.1 * sum(sums))
        # Of a number between two codes the last bit decides: that of a sum of two is another one.
        off = np.abs(found - wanted) > 1e-12 * np.abs(wanted).max()
        assert off.mean() < (1e-3 if once else 1e-9)


def with_masters(state, tokens):
    """Products see parameters in float32, which follow masters in float64."""

    def loss_here(params):
        return loss_of(jax.tree.map(lambda w: w.astype(jnp.float64), params), tokens)

    grads = jax.grad(loss_here)(state["params"])
    masters = jax.tree.map(lambda w, g: w - 0.1 * g, state["masters"], grads)
    new = jax.tree.map(lambda w: w.astype(jnp.float32), masters)
    return {"params": new, "masters": masters}, jnp.float32(0)


OTHERS = [
    {"accumulate": 2, "reduce": "each", "gather": "keep"},
    {"gather": "once_per_step", "accumulate": 2, "accumulate_dtype": jnp.float32},
    {"tile_bytes": 2**14, "accumulate": 2, "param_axes": "local"},
    {"param_axes": "local", "optimizer_axes": "local", "accumulate": 2},
    {"offload_activations": jzero.PinnedHost()},
    {"offload_params": jzero.PinnedHost(device_bytes=2**19), "accumulate": 2, "layer_major": True},
    {"auto_specs": {"'w'": jax.P(None, None, "model")}},
]


@pytest.mark.slow(but=[3])
@pytest.mark.parametrize("options", OTHERS, ids=str)
def test_codes_meet_every_other_option(options):
    """As without codes, to what 8 bits can say, and with fewer bytes."""
    sizes = (
        {"node": 2, "local": 2, "model": 2} if "auto_specs" in options else {"node": 2, "local": 4}
    )
    mesh = small.auto_mesh(**sizes)
    axes = ("node", "local")
    params, tokens = init(), jnp.arange(64) % 256
    exact = jzero.shard_train_step(step, mesh=mesh, **grouped(axis_names=axes, **options))
    coded = jzero.shard_train_step(
        step, mesh=mesh, **grouped(axis_names=axes, gather_dtype=INT8, reduce_dtype=INT8, **options)
    )
    wanted, losses = trained(exact, params, tokens)
    found, mine = trained(coded, params, tokens)
    np.testing.assert_allclose(mine, losses, rtol=2e-3)
    assert_same(found, wanted, 2e-3)
    rows = [r for r in coded.describe(params, tokens).traffic if r.dtype == "uint8"]
    assert {r.op for r in rows} >= {"all-gather", "all-to-all"}
    before, after = (
        sum(r.nbytes for r in x.describe(params, tokens).traffic) for x in (exact, coded)
    )
    assert after < 0.75 * before


def state_with_masters(width=D):
    masters = init(jnp.float64, width)
    return {"params": jax.tree.map(lambda w: w.astype(jnp.float32), masters), "masters": masters}


@pytest.mark.slow(but=[0])
@pytest.mark.parametrize(
    "options", [{"stage": 2, "accumulate": 2}, {"stage": 1, "offload": jzero.HostCPU()}], ids=str
)
def test_a_copy_that_rests_takes_up_the_difference(options):
    with jax.enable_x64(True):
        state, tokens = state_with_masters(130), jnp.arange(48) % 256
        train_step: Any = jzero.shard_train_step(
            with_masters, **grouped(gather_dtype=INT4, min_shard_bytes=0, **options)
        )
        leaves = {leaf.path: leaf for leaf in train_step.plan(state, tokens).leaves}
        assert sum(leaf.renewed_in_codes for leaf in leaves.values()) == 2

        def renewed(path, new, old):
            name = f"['params']{jax.tree_util.keystr(path)}"
            if not leaves[f"state{name}"].renewed_in_codes:
                return new
            dim = leaves[f"state{name}".replace("params", "masters")].layout.dim
            return old + through(new - old, dim, 8, INT4)

        @jax.jit
        def reference(state, tokens):
            new, loss = with_masters(state, tokens)
            params = jax.tree_util.tree_map_with_path(renewed, new["params"], state["params"])
            return {**new, "params": params}, loss

        found, _ = trained(train_step, state, tokens)
        wanted, _ = trained(reference, state, tokens)
        assert_same(found, wanted, 1e-6)


def test_copies_over_other_axes_stay_near_their_masters_and_alike():
    mesh = small.auto_mesh(node=2, local=4)
    with jax.enable_x64(True):
        state, tokens = state_with_masters(), jnp.arange(48) % 256
        train_step = jzero.shard_train_step(
            with_masters,
            comm=jzero.Comm(gather_dtype=INT8),
            mesh=mesh,
            axes=jzero.Axes(params="local"),
        )
        found = traffic(train_step, state, tokens)
        assert found["all-gather", "uint8", ("node",)] == 2 * (
            INT8.nbytes(3 * D * D // 8) + INT8.nbytes(D * D // 8)
        )
        for _ in range(12):
            state, _ = train_step(state, tokens)
        pairs = zip(
            jax.tree.leaves(state["params"]), jax.tree.leaves(state["masters"]), strict=True
        )
        for x, y in pairs:
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)
            assert_alike(x)


def assert_alike(x):
    parts: dict[str, list[np.ndarray]] = {}
    for shard in x.addressable_shards:
        parts.setdefault(str(shard.index), []).append(np.asarray(shard.data))
    assert all(np.array_equal(part, same[0]) for same in parts.values() for part in same)


def traffic(train_step, *args):
    rows = train_step.describe(*args).to_dict()["traffic"]
    return {(r["op"], r["dtype"], tuple(r["axes"])): r["bytes"] for r in rows}


@pytest.mark.parametrize("num", [2, 8])
def test_bytes_on_the_wire_are_codes_and_scales_to_the_byte(num):
    mesh = AbstractMesh((num,), ("data",))
    params, tokens = jax.eval_shape(init), jax.ShapeDtypeStruct((48,), jnp.int32)
    train_step = jzero.shard_train_step(
        step, mesh=mesh, comm=jzero.Comm(gather_dtype=INT8, reduce_dtype=INT4)
    )
    found = traffic(train_step, params, tokens)
    part = D * D // num  # of a matrix; four of them are gathered in each of two passes
    assert found["all-gather", "uint8", ("data",)] == 2 * 4 * num * INT8.nbytes(part)
    assert found["all-to-all", "uint8", ("data",)] == 4 * num * INT4.nbytes(part)
    # The scales and rows of the table, which no product reads.
    assert found["reduce-scatter", "float32", ("data",)] == 4 * 3 * D
    assert found["all-gather", "float32", ("data",)] == 4 * 2 * 3 * D
    assert found["all-to-all", "float32", ("data",)] == 4 * 2 * 48 // num * D


@pytest.mark.slow
def test_zero_plus_plus_by_the_names_of_its_parts():
    """Bytes between nodes, as a multiple M of the parameters in 16 bits: ZeRO-3 3, ZeRO++ 0.75."""
    mesh = AbstractMesh((4, 8), ("node", "local"))

    def between_nodes(**options):
        tx = jzero.master_weights(optax.sgd(0.1))

        def products(state, x):
            params, opt = state
            grads = jax.grad(lambda w: jnp.mean((x @ w @ w.T) ** 2))(params)
            updates, opt = tx.update(grads, opt, params)
            return optax.apply_updates(params, updates), opt

        w = jax.ShapeDtypeStruct((2048, 1024), jnp.bfloat16)
        state, x = (w, jax.eval_shape(tx.init, w)), jax.ShapeDtypeStruct((64, 2048), jnp.bfloat16)
        train_step = jzero.shard_train_step(products, mesh=mesh, **grouped(**options))
        moved = 0
        for row in train_step.describe(state, x).traffic:
            if "node" in row.axes and row.elements > 1:
                # What is gathered over 'node' alone is a shard of each of the node's devices.
                moved += row.nbytes * (1 if "local" in row.axes else 8)
        return moved / (2 * w.size)

    assert between_nodes() == 3
    qwz_and_qgz = dict(gather_dtype=jnp.int8, reduce_dtype={"local": jnp.int8, "node": jnp.int4})
    hpz = dict(param_axes="local")
    assert between_nodes(**hpz) == 2  # Reduced once, and gathered once.
    assert between_nodes(**hpz, **qwz_and_qgz) == pytest.approx(0.75, rel=0.04)
    int4 = dict(gather_dtype=jnp.int4, reduce_dtype={"local": jnp.int8, "node": jnp.int4})
    assert between_nodes(**hpz, **int4) == pytest.approx(0.5, rel=0.07)


def test_one_axis_may_stay_exact():
    mesh = AbstractMesh((2, 4), ("node", "local"))
    params, tokens = jax.eval_shape(init), jax.ShapeDtypeStruct((48,), jnp.int32)
    train_step = jzero.shard_train_step(
        step, mesh=mesh, comm=jzero.Comm(reduce_dtype={"node": INT4, "local": None})
    )
    found = traffic(train_step, params, tokens)
    assert found["reduce-scatter", "float32", ("local",)] == 4 * 4 * D * D
    assert found["all-to-all", "uint8", ("node",)] == 4 * 2 * INT4.nbytes(D * D // 8)
    assert ("all-to-all", "uint8", ("local",)) not in found


def update_of(loss_of, params, *args, **options):
    """What one step of gradient descent, by 1, takes from parameters."""

    def descend(params, *args):
        grads = jax.grad(loss_of)(params, *args)
        return jax.tree.map(lambda w, g: w - g, params, grads)

    train_step: Any = jzero.shard_train_step(
        descend, mesh=small.auto_mesh(data=4), **grouped(**options)
    )
    new = train_step(params, *args)
    return jax.tree.map(lambda w, v: np.asarray(w) - np.asarray(v), params, new), train_step


W, V, U = (np.random.default_rng(k).normal(size=(D, D)).astype(np.float32) / 11 for k in range(3))
X = np.random.default_rng(4).normal(size=(8, D)).astype(np.float32)
# Steps in which a sum over the devices is of what is computed from leaves, before their gradients are.
COMPUTED = {
    "weight norm": lambda p, x: x @ (p["w"] / jnp.linalg.norm(p["w"]) * p["v"]),
    "a scale of columns": lambda p, x: x @ (p["w"] * p["v"][:1]),
    "merged LoRA": lambda p, x: x @ (p["w"] + p["v"][:, :4] @ p["u"][:4]),
    "two side by side": lambda p, x: x @ jnp.concatenate([p["w"], p["v"]], 1),
}


@pytest.mark.slow(but=["1-a scale of columns"])
@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_that_are_computed_after_the_sum_are_exact(name, stage):
    params = {"w": W, "v": V, "u": U}

    def loss_of(params, x):
        return jnp.mean(jnp.sin(COMPUTED[name](params, x)))

    wanted, _ = update_of(loss_of, params, X, stage=stage)
    found, train_step = update_of(loss_of, params, X, stage=stage, reduce_dtype=jnp.int8)
    assert_same(found, wanted, 1e-5)
    listed = {path for path, _ in train_step.describe(params, X).exact}
    assert listed >= {"state['w']", "state['v']"}


@pytest.mark.slow
def test_complex_gradients_keep_both_parts():
    def loss_of(params, x):
        w = jax.lax.complex(params["w"], params["v"])
        return jnp.mean(jnp.abs(x.astype(jnp.complex64) @ w) ** 2)

    params = {"w": W, "v": V}
    wanted, _ = update_of(loss_of, params, X)
    for stage in (1, 3):
        options = dict(reduce_dtype=jnp.int8, stage=stage)
        found, _ = update_of(loss_of, params, X, **options)
        assert_same(found, wanted, 1e-5)


@pytest.mark.slow
def test_a_weight_of_every_turn_is_reduced_once_in_codes():
    def loss_of(params, x):
        h = jax.lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ params["w"]), x)
        return jnp.mean(h**2)

    params = {"w": W}
    wanted, _ = update_of(loss_of, params, X)
    found, train_step = update_of(loss_of, params, X, reduce_dtype=jnp.int8)
    assert_same(found, wanted, 0.02)
    row = 4 * INT8.nbytes(D * D // 4)
    assert traffic(train_step, params, X)["all-to-all", "uint8", ("data",)] == row


def of_slices(params, x, seen=lambda name, w: w):
    """Mean of rows; products read slices of a stack, and parts of fused weights."""
    q, k, v = (seen("qkv", w) for w in jnp.split(params["qkv"], 3, axis=1))
    h = jnp.tanh(x @ q) + jnp.tanh(x @ k) * (x @ v)
    for i in range(2):
        h = h + jnp.tanh(h @ seen("stack", params["stack"][i]))
    return jnp.mean(h**2)


@pytest.mark.slow
def test_slices_of_stacked_and_fused_weights_are_gathered_and_reduced_as_codes():
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 3)
        params = {
            "qkv": jax.random.normal(keys[0], (D, 3 * D)) * 0.1,
            "stack": jax.random.normal(keys[1], (2, D, D)) * 0.1,
        }
        x = jax.random.normal(keys[2], (8, D))

        def step(params, x):
            loss, grads = jax.value_and_grad(of_slices)(params, x)
            return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

        def seen(name, w):
            return through(w, 0, 4, INT8)

        def reference(params, x):
            grads = jax.grad(of_slices)(params, x, seen)
            new = jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
            return new, of_slices(params, x, seen)

        mesh = small.auto_mesh(data=4)
        train_step = jzero.shard_train_step(step, comm=jzero.Comm(gather_dtype=INT8), mesh=mesh)
        found, losses = trained(train_step, params, x, 2)
        wanted, expected = trained(jax.jit(reference), params, x, 2)
        assert_same(found, wanted, 1e-9)
        np.testing.assert_allclose(losses, expected, rtol=1e-9)
        both = jzero.shard_train_step(
            step, comm=jzero.Comm(gather_dtype=INT8, reduce_dtype=INT8), mesh=mesh
        )
        report = both.describe(params, x)
        assert report.exact == []
        moved = {each.dtype for each in report.traffic if each.leaf}
        assert moved == {"uint8"}
        assert_same(trained(both, params, x, 2)[0], wanted, 1e-2)


def test_what_stays_exact_is_listed_with_its_reason():
    params, tokens = jax.eval_shape(init), jax.ShapeDtypeStruct((48,), jnp.int32)
    mesh = AbstractMesh((2, 4), ("node", "local"))
    train_step = jzero.shard_train_step(
        step, mesh=mesh, comm=jzero.Comm(gather_dtype=jnp.int8, reduce_dtype={"node": "int4"})
    )
    report = train_step.describe(params, tokens)
    text = " ".join(str(report).split())
    assert "quantized: parameters are gathered as int8 in blocks of 256; gradients are" in text
    assert (
        "state['layers']['scale'], state['table']: no matrix product reads it as it is"
        in " ".join(str(report).split())
    )
    wire = report.to_dict()["wire"]
    assert wire["gather"] == "int8 in blocks of 256"
    assert wire["reduce"] == {"node": "int4 in blocks of 128", "local": None}
    assert wire["exact"] == [
        ["state['layers']['scale']", "no matrix product reads it as it is"],
        ["state['table']", "no matrix product reads it as it is"],
    ]
    train_step = jzero.shard_train_step(
        step, mesh=mesh, comm=jzero.Comm(gather_dtype=jnp.int8), axes=jzero.Axes(replicate="'w'")
    )
    exact = dict(train_step.describe(params, tokens).exact)
    assert exact["state['layers']['w']"] == "no part of it is sent quantized"


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (dict(gather_dtype=jnp.bfloat16), jzero.OptionError, "gather_dtype=.*bfloat16.*format of 8 or"),
        (dict(gather_dtype="int7"), jzero.OptionError, "gather_dtype='int7'.*Use jnp.int8"),
        (dict(gather_dtype=jnp.int8, stage=0), jzero.OptionError,
         r"stage=0 and Comm\(gather_dtype=int8 in blocks of 256\).*updated.*use stage=3"),
        (dict(gather_dtype=jnp.int8, stage=2), jzero.OptionError,
         r"2 .*state\['layers'\]\['w'\] is updated from its own old value.*gather_dtype=int8.*a master has it"
         ".*jzero.master_weights"),
        (dict(reduce_dtype=jnp.int8, stage=0), jzero.OptionError,
         r"stage=0 and Comm\(reduce_dtype=int8.*reduced as they are.*use stage=1"),
        (dict(reduce_dtype={"data": jnp.bfloat16}), jzero.OptionError,
         r"reduce_dtype\['data'\]=.*bfloat16.*quantized format"),
        (dict(reduce_dtype=jnp.uint8), jzero.OptionError,
         "reduce_dtype=.*uint8.*floating point numbers. Quantized: jnp.int8, jnp.int4 or a jzero.Blocks."),
        (dict(reduce_dtype={"nodes": jnp.int8}), jzero.MeshError,
         r"reduce_dtype=\) has \['nodes'\], and the data axes are \('data',\).*Correct reduce_dtype"),
    ],
)  # fmt: skip
def test_formats_that_cannot_be_obeyed_are_refused(options, error, text):
    params, tokens = jax.eval_shape(init), jax.ShapeDtypeStruct((48,), jnp.int32)
    with pytest.raises(error, match=f"(?s)(shard_train_step|Comm): .*{text}"):
        jzero.shard_train_step(step, **grouped(**options)).plan(params, tokens)


def test_replicas_along_one_axis_travel_as_codes_and_along_another_exactly():
    """Over each axis they are summed up once."""
    mesh = small.auto_mesh(pod=2, node=2, local=2)
    tokens = jnp.arange(48) % 256
    options: Any = dict(param_axes="local", optimizer_axes="local")
    reduce_dtype = {"node": INT8}
    train_step: Any = jzero.shard_train_step(
        step, mesh=mesh, **grouped(reduce_dtype=reduce_dtype, **options)
    )
    found, _ = trained(train_step, init(), tokens, num=1)
    expected, _ = trained(jax.jit(step), init(), tokens, num=1)
    for x, y, before in zip(*map(jax.tree.leaves, (found, expected, init())), strict=True):
        moved = np.abs(y - before).max()
        np.testing.assert_allclose(x, y, rtol=0, atol=0.05 * moved)
