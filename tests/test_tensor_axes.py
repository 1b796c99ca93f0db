"""Mesh axes that are not data axes stay XLA's: annotations for tensor parallelism keep their meaning."""

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jzero
import programs
import small
import zoo
from jzero.segments import _partitioned
from jzero.sharding.plan import _quantized_leaves
from small import grouped

WIDTH, HIDDEN, HEADS, SEQ, BATCH = 32, 64, 4, 8, 16
COLUMNS, ROWS = P(None, "model"), P("model", None)
AUTO_SPECS = {r"qkv|up": COLUMNS, r"project|down": ROWS}
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def mesh_of(data=4, model=2):
    devices = jax.devices()[: data * model]
    auto = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((data, model), ("data", "model"), auto, devices=devices)


def init():
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def weights(*shape):
        return jax.random.normal(next(keys), shape) / shape[0] ** 0.5

    params = {
        "qkv": weights(WIDTH, 3 * WIDTH),
        "project": weights(WIDTH, WIDTH),
        "up": weights(WIDTH, HIDDEN),
        "down": weights(HIDDEN, WIDTH),
        "scale": jnp.ones(WIDTH),
    }
    return {"params": params, "opt_state": TX.init(params)}


def make_step(constrain):
    """Attention and an MLP, each split over 'model' by columns, then by rows (Megatron)."""

    def loss_fn(params, x):
        qkv = constrain(x @ params["qkv"], P(None, None, "model"))
        q, k, v = (a.reshape(*a.shape[:2], HEADS, -1) for a in jnp.split(qkv, 3, axis=-1))
        q, k, v = (constrain(a, P(None, None, "model", None)) for a in (q, k, v))
        attention = jax.nn.dot_product_attention(q, k, v).reshape(x.shape)
        x = x + constrain(attention @ params["project"], P(None, None, None))
        hidden = constrain(jnp.tanh(x @ params["up"]), P(None, None, "model"))
        x = x + constrain(hidden @ params["down"], P(None, None, None))
        return jnp.mean(jnp.square(x * params["scale"][None, None] - 1))

    def step(state, x):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], x)
        updates, opt_state = TX.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": loss}

    return step


step = make_step(jax.lax.with_sharding_constraint)
plain_step = make_step(lambda x, spec: x)


def batches():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(BATCH, SEQ, WIDTH)).astype(np.float32) for _ in range(5)]


def sharded(stage, data=4, model=2, **options):
    mesh = mesh_of(data, model)
    return small.shard_train_step(
        step, stage=stage, mesh=mesh, axis_names="data", auto_specs=AUTO_SPECS, **options
    )


def bf16(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


SQUARE_USES = {
    "transposed": (lambda w, x: x @ bf16(w.T), (WIDTH, WIDTH)),
    "symmetric": (lambda w, x: x @ (w + w.T), (WIDTH, WIDTH)),
    "summed": (lambda w, x: x * bf16(jnp.sum(w, axis=1))[None, None], (WIDTH, WIDTH)),
    "scanned": (
        lambda w, x: jax.lax.scan(lambda h, w: (jnp.tanh(h @ bf16(w.T)), None), x, w)[0],
        (3, WIDTH, WIDTH),
    ),
}


@pytest.mark.slow(but=[3])
@pytest.mark.parametrize("spec", [("model", None), (None, "model")], ids=str)
@pytest.mark.parametrize("use", SQUARE_USES)
def test_square_leaves_are_not_mistaken_for_their_transposes(use, spec):
    forward, shape = SQUARE_USES[use]
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=4)

    def square_step(state, x):
        w, opt_state = state
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((forward(w, x) - 1) ** 2))(w)
        updates, opt_state = tx.update(grads, opt_state, w)
        return (optax.apply_updates(w, updates), opt_state), {"loss": loss}

    def start():
        w = jax.random.normal(jax.random.key(1), shape) / WIDTH**0.5
        return w, tx.init(w)

    auto_specs = {r"state\[0\]": P(*(None,) * (len(shape) - 2), *spec)}
    train_step = small.shard_train_step(
        square_step, stage=3, mesh=mesh_of(), axes=jzero.Axes("data", auto_specs=auto_specs)
    )
    state, expected = train_step.init(start), start()
    for x in batches()[:3]:
        state, metrics = train_step(state, x)
        expected, expected_metrics = jax.jit(square_step)(expected, x)
        np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=5e-3)
    # Sums in another order round to other bfloat16 numbers; elements in a wrong order are far off.
    loose = zoo.Tolerance(rtol=2e-2, leaf_rtol=1e-2)
    zoo.assert_trees_close(zoo.to_host(state), zoo.to_host(expected), loose, "state")


@pytest.mark.slow
def test_placeholders_of_optimizer_state_rest_as_they_can():
    """One pattern is for a parameter and its state: Adafactor has leaves of shape [1] and of fewer dims."""
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=4)

    def loss_fn(p, x):
        return jnp.mean((x @ p["w"] + p["b"][None, None] - 1) ** 2)

    def factored_step(state, x):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def start():
        params = {"w": jnp.ones((WIDTH, HIDDEN)) / WIDTH, "b": jnp.zeros(HIDDEN)}
        return params, tx.init(params)

    train_step = small.shard_train_step(
        factored_step,
        mesh=mesh_of(),
        axes=jzero.Axes("data", auto_specs={"'w'": COLUMNS, "'b'": P("model")}),
    )
    state, expected = train_step.init(start), start()
    said = " ".join(str(train_step.describe(state, batches()[0])).split())
    for x in batches()[:2]:
        state, loss = train_step(state, x)
        expected, expected_loss = jax.jit(factored_step)(expected, x)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    zoo.assert_trees_close(zoo.to_host(state), zoo.to_host(expected), zoo.FP32, "state")
    assert state[0]["b"].sharding.spec == P("model")
    factored = state[1][0]
    assert factored.v["b"].sharding.spec == P("model")
    assert factored.v_row["b"].shape == (1,)
    assert "leaves cannot be stored as auto_specs says for their parameters: " in said
    assert "it has a dim of size 1 where P('model',) cuts:" in said
    assert "it has fewer dims than P(None, 'model'):" in said


# -- a language model: looked up rows, tied logits, cross entropy over a vocabulary in parts --------

VOCAB = 48
WORDS = {r"embed": ROWS, r"up": P(None, None, "model"), r"down": P(None, "model", None)}


# As XLA writes groups of devices, by release.
OVER_DATA = (
    "{{0,2,4,6},{1,3,5,7}}",
    "[2,4]<=[4,2]T(1,0)",
    "mesh['data'=4,'model'=2] {'data'}",
)


def words_init(tx, dtype):
    keys = iter(jax.random.split(jax.random.key(2), 3))

    def weights(*shape):
        return (jax.random.normal(next(keys), shape) / shape[-2] ** 0.5).astype(dtype)

    params = {
        "embed": weights(VOCAB, WIDTH),
        "up": weights(2, WIDTH, HIDDEN),
        "down": weights(2, HIDDEN, WIDTH),
    }
    return params, tx.init(params)


def make_words_step(tx, constrain, remat=lambda layer: layer):
    def loss_fn(params, tokens):
        embed = params["embed"].astype(jnp.float32)

        def layer(x, layer):
            up, down = (layer[name].astype(jnp.float32) for name in ("up", "down"))
            hidden = constrain(jnp.tanh(x @ up), P(None, None, "model"))
            return x + constrain(hidden @ down, P(None, None, None)), None

        blocks = {name: params[name] for name in ("up", "down")}
        x, _ = jax.lax.scan(remat(layer), embed[tokens[:, :-1]], blocks)
        logits = constrain(x @ embed.T, P(None, None, "model"))
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(state, tokens):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


def words(tx, dtype, **options):
    """The sharded step over 4 x 2 devices, the same for one device, and a state."""
    constrained = make_words_step(tx, jax.lax.with_sharding_constraint)
    train_step = small.shard_train_step(
        constrained, mesh=mesh_of(), axis_names="data", auto_specs=WORDS, **options
    )
    return train_step, jax.jit(make_words_step(tx, lambda x, spec: x)), words_init(tx, dtype)


def sentences():
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCAB, (BATCH, SEQ + 1)).astype(np.int32) for _ in range(4)]


@pytest.mark.slow(but=["3-True"])
@pytest.mark.parametrize("in_slices", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_16_bit_parameters_with_masters_gather_what_is_due(stage, in_slices, monkeypatch):
    """New parameters are made of masters, and are cut over 'model' as their leaves are."""
    if in_slices:
        monkeypatch.setattr(_partitioned, "GATHERED_AT_ONCE", 4096)
    tx = jzero.master_weights(optax.sgd(0.1, momentum=0.9))
    train_step, plain, state = words(tx, jnp.bfloat16, stage=stage)
    due = sum(leaf.size // 2 for leaf in jax.tree.leaves(state[0]))
    due *= 2 if stage == 3 else 1  # It gathers for each pass.
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ + 1), jnp.int32)
    traffic = train_step.describe(state, tokens).traffic
    assert sum(c.total_elements for c in traffic if c.op == "all-gather") == due
    text = train_step.lower(state, tokens).compile().as_text()
    groups = re.findall(r" all-gather(?:-start)?\(.*?replica_groups=(.*)", text)
    assert groups
    assert all(group.startswith(OVER_DATA) for group in groups)

    state, expected = train_step.init(lambda: state), state
    for tokens in sentences():
        state, loss = train_step(state, tokens)
        expected, expected_loss = plain(expected, tokens)
        np.testing.assert_allclose(loss, expected_loss, rtol=2e-3)
    for leaf, wanted in zip(
        jax.tree.leaves(state[1].masters), jax.tree.leaves(expected[1].masters), strict=True
    ):
        np.testing.assert_allclose(leaf, wanted, rtol=0.02, atol=2e-3)
    # A parameter is its master, rounded: none was put in another's place.
    rounded = jax.tree.map(lambda master: np.asarray(master.astype(jnp.bfloat16)), state[1].masters)
    jax.tree.map(np.testing.assert_array_equal, zoo.to_host(state[0]), rounded)


# -- views, sums in 16 bits, and what is counted of both ----------------------------------------------

WIDE = 64


def make_experts_step(constrain):
    """One bias is read as a view with more dims, one from a stack, one is reduced whole."""

    def loss_fn(p, x):
        up = jnp.einsum("td,edf->etf", x, p["up"]) + p["bias"][:, None]
        hidden = constrain(jnp.tanh(up), P("model"))
        hidden, _ = jax.lax.scan(lambda h, w: (h * w[:, None], None), hidden, p["scales"])
        return jnp.mean((jnp.sum(hidden, 0)[:, :WIDTH] + p["few"][None]) ** 2)

    def step(state, x):
        loss, grads = jax.value_and_grad(loss_fn)(state, x)
        return jax.tree.map(lambda a, b: a - 0.1 * b.astype(a.dtype), state, grads), loss

    return step


def experts_init(dtype=jnp.float32):
    state = {
        "up": jnp.ones((4, WIDTH, WIDE)) / WIDTH,
        "bias": jnp.linspace(0, 1, 4 * WIDE).reshape(4, WIDE),
        "scales": jnp.linspace(0.5, 1, 2 * 4 * WIDE).reshape(2, 4, WIDE),
        "few": jnp.zeros(WIDTH),
    }
    return jax.tree.map(lambda a: a.astype(dtype), state)


EXPERTS = {"up|bias": P("model"), "scales": P(None, "model"), "few": P("model")}


@pytest.mark.slow
def test_views_and_what_stays_full_move_one_place_s_part():
    x = jnp.ones((BATCH, WIDTH))
    train_step = jzero.shard_train_step(
        make_experts_step(jax.lax.with_sharding_constraint),
        mesh=mesh_of(),
        axes=jzero.Axes("data", auto_specs=EXPERTS, min_shard_bytes=129),
    )
    state = train_step.init(experts_init)
    of_a_place = {name: leaf.size // 2 for name, leaf in experts_init().items()}
    traffic = train_step.describe(state, x).traffic
    assert {c.leaf for c in traffic if c.elements > 1} == {f"state[{k!r}]" for k in of_a_place}
    for op, names in (("reduce-scatter", ["up", "bias", "scales"]), ("all-reduce", ["few"])):
        moved: Counter[str] = Counter()
        for c in traffic:
            moved[c.leaf] += c.total_elements * (c.op == op and c.elements > 1)
        assert +moved == {f"state[{name!r}]": of_a_place[name] for name in names}
    text = train_step.lower(state, x).compile().as_text()
    gathers = re.findall(
        r"= f32\[([\d,]+)\]\S* all-gather(?:-start)?\(.*?replica_groups=(.*)", text
    )
    # A turn of the loop gathers one layer's scales. XLA's own gathers are over 'model'.
    sizes = {np.prod([*map(int, d.split(","))]) for d, at in gathers if at.startswith(OVER_DATA)}
    assert sizes == {of_a_place["up"], of_a_place["bias"]}
    assert of_a_place["scales"] == 2 * of_a_place["bias"]
    state, loss = train_step(state, x)
    expected, expected_loss = jax.jit(make_experts_step(lambda x, _: x))(experts_init(), x)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    zoo.assert_trees_close(zoo.to_host(state), zoo.to_host(expected), zoo.FP32, "state")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("auto_specs", [None, EXPERTS], ids=["no specs", "specs"])
@pytest.mark.parametrize("stage", [0, 3])
def test_16_bit_sums_beside_an_automatic_axis(stage, auto_specs, dtype):
    """XLA:CPU ended the process, with 16-bit parameters or `reduce_dtype`, in shards and full."""
    x = jnp.ones((BATCH, WIDTH), dtype)
    options = {"reduce_dtype": jnp.bfloat16} if dtype == jnp.float32 else {}
    floor = {"min_shard_bytes": 129} if stage else {}
    two = small.auto_mesh(data=2)
    results = []
    for mesh, specs in ((two, None), (mesh_of(2, 2), auto_specs)):
        constrain = jax.lax.with_sharding_constraint if specs else lambda x, _: x
        train_step = jzero.shard_train_step(
            make_experts_step(constrain),
            stage=stage,
            mesh=mesh,
            **grouped(axis_names="data", auto_specs=specs, **floor, **options),
        )
        state, loss = train_step(train_step.init(lambda: experts_init(dtype)), x)
        results.append((zoo.to_host(state), zoo.to_host(loss)))
    alone, beside = results
    for a, b in zip(jax.tree.leaves(beside), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), rtol=0.02, atol=1e-3)


def test_unknown_patterns_axes_and_dims():
    x, state = batches()[0], init()
    for auto_specs, texts in (
        ({"nothing": COLUMNS}, ["auto_specs has ['nothing'], which fit no leaf"]),
        ({"qkv": P(None, "rows")}, ["auto_specs['qkv'] is P(None, 'rows'), and 'rows' is no axis of"]),
        ({"qkv": P("data")}, ["auto_specs['qkv'] is P('data',), and 'data' is a data axis", "by itself"]),
        ({"qkv": P(None, None, "model")}, ["too long for every leaf that it matches (state['opt_state']"]),
        ({"up|scale": COLUMNS, "scale": P("model")},
         ["auto_specs['scale'] counts for no leaf: 'up|scale' stands before it, is found in state["]),
        ({"qkv": ROWS, "odd": P("model")},
         ["state['odd']: dim 0 of size 3 over ('model',)", r"begin it with ^state to mean"]),
        # A parameter is no placeholder.
        ({"qkv": ROWS, "one": P("model")}, ["state['one']: dim 0 of size 1 over ('model',)"]),
        # Nor is a leaf beside one of its name that is cut, unless it has a single element there.
        ({"qkv": ROWS, "size": P("model")}, ["state['size']: dim 0 of size 3 over ('model',)"]),
    ):  # fmt: skip
        leaves = {**state, "odd": jnp.ones(3), "one": jnp.ones((1, 8))}
        leaves |= {"size": jnp.ones(3), "even": {"size": jnp.ones(4)}}
        with pytest.raises(jzero.OptionError) as raised:
            small.shard_train_step(
                lambda s, x: ({**s, **step(s, x)[0]}, {}),
                mesh=mesh_of(),
                axes=jzero.Axes("data", auto_specs=auto_specs),
            ).plan(leaves, x)
        for text in texts:
            assert text in str(raised.value)


# -- codes of few bits, and tiles, of a place's part ----------------------------------------------------

INT8 = jzero.Blocks("int8", size=32)


def exact_codes():
    """Codes with a scale for each element: what travels so comes back but for the last bit."""
    codes = jzero.Blocks("int8")
    object.__setattr__(codes, "size", 1)
    return codes


def coded(codes, stage, monkeypatch):
    """Options with which leaves of every size travel as codes; parameters, too, if they need no masters."""
    monkeypatch.setattr(_quantized_leaves, "LEAST", 0)
    gathers = {"gather_dtype": codes} if stage == 3 else {}
    return {"stage": stage, "auto_specs": AUTO_SPECS, "reduce_dtype": codes, **gathers}


@pytest.mark.slow(but=[2])
@pytest.mark.parametrize(
    ("stage", "axes", "shards"),
    [
        (1, {"data": 4}, None),
        (3, {"data": 2, "local": 2}, None),
        (None, {"data": 2, "local": 2}, "local"),
    ],
    ids=str,
)
def test_codes_of_parts_come_back_in_their_places(stage, axes, shards, monkeypatch):
    """Also of two data axes, and of sums over replicas, which are the same on all of them."""
    options = coded(exact_codes(), stage, monkeypatch)
    if shards:
        del options["stage"]
        options |= {"param_axes": shards, "optimizer_axes": shards}
    types = (AxisType.Auto,) * (len(axes) + 1)
    mesh = jax.make_mesh((*axes.values(), 2), (*axes, "model"), types, devices=jax.devices()[:8])
    train_step = small.shard_train_step(step, mesh=mesh, axis_names=(*axes,), **options)
    plain, expected = jax.jit(plain_step), init()
    state = train_step.init(init)
    for x in batches()[:3]:
        state, _ = train_step(state, x)
        expected, _ = plain(expected, x)
    zoo.assert_trees_close(zoo.to_host(state), zoo.to_host(expected), zoo.FP32, "state")


@pytest.mark.slow(but=["3"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_place_moves_codes_of_its_part_alone(stage, monkeypatch):
    """And XLA moves nothing over its axes that it does not move without codes."""
    options, state, x = coded(INT8, stage, monkeypatch), jax.eval_shape(init), batches()[0]
    train_step = small.shard_train_step(step, mesh=mesh_of(), axis_names="data", **options)
    # A row for each of 4 shards of each of 2 parts.
    due = sum(
        4 * INT8.nbytes(state["params"][name].size // 8)
        for name in ("qkv", "project", "up", "down")
    )
    traffic = Counter[Any]()
    for c in train_step.describe(state, x).traffic:
        traffic[c.op, str(c.dtype)] += c.total_elements
    assert traffic["all-to-all", "uint8"] == due
    assert due * (stage == 3) <= traffic["all-gather", "uint8"] <= 2 * due * (stage == 3)
    found, wanted = (over_model(each, state, x) for each in (train_step, sharded(stage)))
    assert found == wanted


def over_model(train_step, state, x):
    """How many elements a compiled program moves over more axes than 'data', but for single ones."""
    text, found = train_step.lower(state, x).compile().as_text(), Counter[Any]()
    for computation, times in programs.compiled_times(text).items():
        for shapes, op, rest in re.findall(
            r"= (.*?) ((?:all|reduce|coll)-[a-z-]+)\((.*)", computation
        ):
            sizes = (
                np.prod([*map(int, d.split(","))]) for d in re.findall(r"\w\[([\d,]+)\]", shapes)
            )
            if not any(group in rest for group in OVER_DATA):
                found[op] += times * sum(int(size) for size in sizes if size > 1)
    return +found


@pytest.mark.slow(but=["3"])
@pytest.mark.parametrize("stage", [1, 3])
def test_matrices_run_in_tiles_of_each_place_s_part(stage):
    """In as many bytes as without tiles, and no product sums up tiles over XLA's axes one by one."""
    train_step, whole = (sharded(stage, tile_bytes=n) for n in (1024, 2**20))
    state, expected, x = train_step.init(init), init(), batches()[0]

    def moved(step):
        found = Counter[Any]()
        for c in step.describe(state, x).traffic:
            found[c.op] += c.total_elements
        return found

    assert moved(train_step) == moved(whole)
    text = train_step.lower(state, x).compile().as_text()
    assert text.count(" while(") > whole.lower(state, x).compile().as_text().count(" while(")
    assert over_model(train_step, state, x) == over_model(whole, state, x)
    for x in batches()[:3]:
        state, _ = train_step(state, x)
        expected, _ = jax.jit(plain_step)(expected, x)
    zoo.assert_trees_close(zoo.to_host(state), zoo.to_host(expected), zoo.FP32, "state")
