"""Evaluations whose parameters rest in pinned memory: the outputs of one device, layer by layer."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jzero
import small
import test_eval_step as gpt
import zoo
from jzero._compare import TOLERANCES
from jzero.offload.execute import _stream
from jzero.segments import _programs
from jzero.sharding.analysis import _traffic
from jzero.sharding.cut import _layer_parts
from small import grouped, shard_train_step
from test_eval_step import CONTEXT, DIM, VOCAB, empty_cache, new_params, tokens_of

pytestmark = pytest.mark.usefixtures("float64")

BEAMS, GIVEN = 2, 3
ITEM = 8  # bytes of float64


# -- what is asked of a model ----------------------------------------------------------------------


def unrolled(params):
    """Layers in a list, in the place of stacks of them."""
    num = len(params["blocks"]["qkv"])
    layers = [jax.tree.map(lambda x, i=i: x[i], params["blocks"]) for i in range(num)]
    return params | {"blocks": layers}


def logits_of(params, tokens, cache, t):
    """Of a position, with stacks of layers or a list of them; the cache `[layers, rows, context, dim]`."""
    if not isinstance(params["blocks"], list):
        return gpt.logits_of(params, tokens, cache, t)
    x = params["embed"][tokens] + params["positions"][t][None]
    for i, weights in enumerate(params["blocks"]):
        x, new = gpt.block(x, weights, [old[i] for old in cache], t)
        cache = [old.at[i].set(y) for old, y in zip(cache, new, strict=True)]
    return x @ params["embed"].T, tuple(cache)


def cache_of(params, rows):
    blocks = params["blocks"]
    num = len(blocks) if isinstance(blocks, list) else len(blocks["qkv"])
    return empty_cache({"blocks": {"qkv": range(num)}}, rows)


def forward(params, tokens, key):
    return logits_of(params, tokens[:, 0], cache_of(params, len(tokens)), 0)


def greedy(params, prompt, key):
    """Decodes by a `scan`: tokens `[rows, context]`, and the logits of each."""

    def iteration(carry, t):
        token, cache = carry
        logits, cache = logits_of(params, token, cache, t)
        following = jnp.where(
            t + 1 < GIVEN, prompt[:, jnp.minimum(t + 1, GIVEN - 1)], logits.argmax(-1)
        )
        return (following.astype(prompt.dtype), cache), (following, logits.max(-1))

    start = prompt[:, 0], cache_of(params, len(prompt))
    (_, cache), made = lax.scan(iteration, start, jnp.arange(CONTEXT - 1))
    return made, cache[0].sum()


def stopped(params, prompt, key):
    """A `while_loop` until each row has ended, or there is no room."""

    def goes_on(carry):
        t, _, _, done, _ = carry
        return (t < CONTEXT - 1) & ~done.all()

    def iteration(carry):
        t, out, cache, done, key = carry
        logits, cache = logits_of(params, out[:, t], cache, t)
        key, own = jax.random.split(key)
        token = jax.random.categorical(own, logits, axis=-1).astype(out.dtype)
        done |= token % 4 == 1
        out = lax.dynamic_update_index_in_dim(out, jnp.where(done, 0, token), t + 1, 1)
        return t + 1, out, cache, done, key

    rows = len(prompt)
    out = jnp.zeros((rows, CONTEXT), prompt.dtype).at[:, 0].set(prompt[:, 0])
    start = 0, out, cache_of(params, rows), jnp.zeros(rows, bool), key
    return lax.while_loop(goes_on, iteration, start)[:2]


def beams(params, prompt, key):
    """In a `scan` over two prompts a `scan` over tokens; each row keeps its best beams."""
    rows = len(prompt)

    def of_prompt(_, first):
        def iteration(carry, t):
            token, scores, cache = carry
            logits, cache = logits_of(params, token.reshape(-1), cache, t)
            logits = jax.nn.log_softmax(logits).reshape(rows, BEAMS, VOCAB)
            total = (scores[..., None] + logits).reshape(rows, -1)
            scores, best = lax.top_k(total, BEAMS)
            beam, token = best // VOCAB, best % VOCAB

            def of_beam(x):
                x = x.reshape(-1, rows, BEAMS, CONTEXT, DIM)
                x = jnp.take_along_axis(x, beam[None, :, :, None, None], 2)
                return x.reshape(-1, rows * BEAMS, CONTEXT, DIM)

            return (token, scores, tuple(map(of_beam, cache))), (token, beam)

        token = jnp.stack([first, (first + 1) % VOCAB], 1).astype(jnp.int32)
        start = token, jnp.zeros((rows, BEAMS)), cache_of(params, rows * BEAMS)
        (_, scores, _), made = lax.scan(iteration, start, jnp.arange(4))
        return None, (scores, made)

    return lax.scan(of_prompt, None, prompt[:, :2].T)[1]


ASKED = {f.__name__: f for f in (forward, greedy, stopped, beams)}
one_device = functools.cache(jax.jit)


def same(actual, expected):
    zoo.assert_trees_close(
        zoo.to_host(actual), zoo.to_host(expected), TOLERANCES["float64"], "output"
    )


def asked_of(fn, params, num, device_bytes, **options):
    """The evaluation on so many devices, and the parameters where it reads them."""
    policy = jzero.PinnedHost(device_bytes=device_bytes)
    mesh = small.auto_mesh(data=num)
    eval_step = jzero.shard_eval_step(fn, mesh=mesh, **grouped(offload_params=policy, **options))
    placed = eval_step.shard(params)
    assert "pinned_host" in {x.sharding.memory_kind for x in jax.tree.leaves(placed)}
    return eval_step, placed


def smallest(fn, params, num, *args):
    """The evaluation with the smallest window that is accepted."""
    device_bytes = 1
    while True:
        eval_step, placed = asked_of(fn, params, num, device_bytes)
        try:
            eval_step.plan(placed, *args)
        except jzero.OptionError as refused:
            (needed,) = map(int, re.findall(r"device_bytes=(\d+)\) or more", str(refused)))
            assert needed > device_bytes
            device_bytes = needed
        else:
            return eval_step, placed, device_bytes


def parts_of(eval_step, *args):
    return eval_step._programs.of(eval_step._programs.bind(args, {})).step.layered.parts


def nested_in(eval_step, *args):
    return [*_layer_parts.outer_loops(parts_of(eval_step, *args))]


# -- equal to one device ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 4])
@pytest.mark.parametrize(
    ("asked", "layers"),
    [*((asked, "scanned") for asked in ASKED), ("forward", "unrolled"), ("greedy", "unrolled"),
     ("stopped", "unrolled")],
)  # fmt: skip
def test_what_one_device_computes(asked, layers, num):
    fn, params = ASKED[asked], new_params()
    params = unrolled(params) if layers == "unrolled" else params
    args = tokens_of(16, GIVEN), jax.random.key(0)
    eval_step, placed, device_bytes = smallest(fn, params, num, *args)
    wider, _ = asked_of(fn, params, num, 2 * device_bytes)
    for step, rows in ((eval_step, 16), (eval_step, 5), (wider, 16)):
        args = tokens_of(rows, GIVEN), jax.random.key(rows)
        same(step(placed, *args), one_device(fn)(params, *args))
    loops = nested_in(eval_step, placed, *args)
    assert len(loops) == {"forward": 0, "beams": 2}.get(asked, 1)
    held = sum(x.nbytes for x in jax.tree.leaves(params))
    assert device_bytes < held, "the smallest window has room for all"


def test_tiles():
    """Matrices that are gathered tile by tile, within a part."""
    params, args = new_params(), (tokens_of(16, GIVEN), jax.random.key(0))
    eval_step, placed = asked_of(greedy, params, 4, 2**14, tile_bytes=600)
    same(eval_step(placed, *args), one_device(greedy)(params, *args))
    assert nested_in(eval_step, placed, *args)


def test_a_loop_that_takes_slices_of_a_leaf_and_closes_over_others():
    """Positions come with the tokens: a row of theirs in each iteration."""

    def decoded(params, prompt):
        def iteration(carry, position):
            token, cache, t = carry
            own = params | {"positions": jnp.broadcast_to(position, (CONTEXT, DIM))}
            logits, cache = logits_of(own, token, cache, t)
            return (logits.argmax(-1), cache, t + 1), logits.max(-1)

        start = prompt[:, 0], cache_of(params, len(prompt)), 0
        return lax.scan(iteration, start, params["positions"])[1]

    params, prompt = new_params(), tokens_of(16, GIVEN).astype(np.int64)
    for num in (1, 4):
        eval_step, placed, _ = smallest(decoded, params, num, prompt)
        same(eval_step(placed, prompt), one_device(decoded)(params, prompt))
        assert len(nested_in(eval_step, placed, prompt)) == 1


def test_a_loop_that_hands_on_a_parameter():
    """And swaps what it carries, has one value twice, and stops at once in a `while`."""

    def handed(params, x):
        def iteration(carry):
            a, b, last, x, t = carry
            for w in params:
                x = jnp.tanh(x @ w)
            return b, a + 1, params[0], jnp.tanh(x @ last), t + 1

        start = x[0], x[0], jnp.ones((DIM, DIM)), x, 0
        scanned, _ = lax.scan(
            lambda carry, _: (iteration(carry), None), start, None, length=3, reverse=True
        )
        twice = lax.while_loop(lambda carry: carry[-1] < 2, iteration, start)
        return scanned, twice, lax.while_loop(lambda carry: carry[-1] < 0, iteration, start)

    keys = jax.random.split(jax.random.key(0), 3)
    params = [jax.random.normal(key, (DIM, DIM)) / 4 for key in keys]
    x = np.random.default_rng(0).normal(size=(16, DIM))
    for num in (1, 4):
        eval_step, placed, _ = smallest(handed, params, num, x)
        same(eval_step(placed, x), one_device(handed)(params, x))
        assert len(nested_in(eval_step, placed, x)) == 3


@pytest.mark.slow
def test_padded_and_quantized_leaves():
    params = new_params(vocab=VOCAB + 1)
    scales = jax.tree.map(lambda x: jnp.abs(x).max() / 127, params["blocks"])
    rounded = jax.tree.map(lambda x, s: jnp.round(x / s).astype(jnp.int8), params["blocks"], scales)
    params = params | {"blocks": rounded, "scales": scales}

    def decoded(params, prompt, key):
        blocks = jax.tree.map(lambda x, s: x * s, params["blocks"], params["scales"])
        return greedy(params | {"blocks": blocks}, prompt, key)

    args = tokens_of(16, GIVEN), jax.random.key(0)
    for num in (1, 8):
        eval_step, placed, _ = smallest(decoded, params, num, *args)
        assert placed["blocks"]["up"].sharding.memory_kind == "pinned_host"
        same(eval_step(placed, *args), one_device(decoded)(params, *args))


# -- with the state of a train step ----------------------------------------------------------------


@pytest.mark.slow
def test_the_state_of_a_train_step_is_read_where_it_rests():
    train_step = shard_train_step(
        gpt.step_fn,
        mesh=small.auto_mesh(data=4),
        offload=jzero.HostCPU(),
        offload_params=jzero.PinnedHost(device_bytes=2**15),
    )
    params = new_params()
    state, _ = train_step((params, gpt.TX.init(params)), tokens_of(16))
    args = tokens_of(16, GIVEN), jax.random.key(0)
    expected = one_device(greedy)(zoo.to_host(state[0]), *args)
    kinds = [x.sharding.memory_kind for x in jax.tree.leaves(state[0])]
    assert set(kinds) == {"pinned_host"}
    by_default = jzero.shard_eval_step(greedy, like=train_step)
    assert by_default.plan(state[0], *args).device_bytes == 2**15
    memory = jzero.Memory(params=jzero.PinnedHost(device_bytes=2**20))
    wider = jzero.shard_eval_step(greedy, like=train_step, memory=memory)
    for eval_step, nested in ((by_default, 1), (wider, 0)):
        same(eval_step(state[0], *args), expected)
        assert len(nested_in(eval_step, state[0], *args)) == nested
    # What reads no parameter that rests there is one program; what reads moments has them copied.
    moments = jzero.shard_eval_step(lambda state: optax.tree.norm(state[1][0].nu), like=train_step)
    same(moments(state), optax.tree.norm(zoo.to_host(state[1][0].nu)))
    train_step(state, tokens_of(16))  # Nothing was consumed.


# -- what it costs ---------------------------------------------------------------------------------


def test_gathers_of_every_part_are_counted():
    """The embedding is gathered where tokens are looked up, and again for the logits, in another program."""

    def fn(params, tokens):
        x, _ = lax.scan(
            lambda x, w: (jnp.tanh(x @ w), None), params["embed"][tokens], params["layers"]
        )
        return jnp.mean((x @ params["embed"].T) ** 2)

    params = {"embed": jnp.ones((VOCAB, DIM)), "layers": jnp.ones((6, DIM, DIM))}
    tokens = jnp.zeros((8, CONTEXT), jnp.int32)
    eval_step, placed, _ = smallest(fn, params, 4, tokens)
    program = eval_step._programs.of(call := eval_step._programs.bind((placed, tokens), {}))
    started = program.step.dispatched(*_programs.stored_inputs(call, program))

    def gathers(collectives):
        found: collections.Counter[int] = collections.Counter()
        for each in collectives:
            if each.op == "all-gather":
                found[each.elements] += each.times
        return found

    told = gathers(eval_step.describe(placed, tokens).traffic)
    assert told == gathers(_traffic.collectives(started)) == {VOCAB * DIM: 2, DIM * DIM: 6}


def nbytes_of(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.slow(but=["1-16-scanned", "8-8-unrolled"])
@pytest.mark.parametrize("layers", ["scanned", "unrolled"])
@pytest.mark.parametrize(("num", "rows"), [(1, 16), (1, 1), (8, 16), (8, 8)])
def test_bytes_over_the_link_in_each_token(layers, num, rows):
    """Each layer once, and the tied embedding twice: to look up, and to make logits. Of one row, too."""
    params = new_params()
    args = tokens_of(rows, GIVEN), jax.random.key(0)
    placed_as = unrolled(params) if layers == "unrolled" else params
    of_token = (nbytes_of(params) + nbytes_of(params["embed"])) // num
    for fn, iterations in ((greedy, CONTEXT - 1), (stopped, None)):
        eval_step, placed, _ = smallest(fn, placed_as, num, *args)
        report = eval_step.describe(placed, *args)
        assert {x.loop.num for x in report.transfers} == {iterations}
        # Positions that the devices do not divide are padded.
        padding = (nbytes_of(jax.tree.map(at_rest, placed)) - nbytes_of(params)) // num
        assert sum(x.nbytes for x in report.transfers) == (of_token + padding) * (iterations or 1)
        (row,) = report.to_dict()["transfers"]
        assert row["each_iteration"] == (iterations is None)
        text = " ".join(str(report).split())
        each = "each iteration" if iterations is None else f"each of the {iterations} iterations"
        assert f"{of_token + padding:,} bytes to each device in {each} of the loop at" in text
        assert "Parameters come from the hosts' pinned memory, part by part: at most" in text
        assert "6 of 6 leaves are stored in pinned_host memory" in text or layers == "unrolled"


def at_rest(x):
    return x.storage if isinstance(x, jzero.LeafArray) else x


def watched(monkeypatch, call, look):
    """Calls, and looks after each visit."""
    original = _stream.stream

    def stream(visits, *limits):
        def looked_at(visit):
            def update(arrays):
                waits = visit.update(arrays)
                jax.block_until_ready(waits)
                look()
                return waits

            return visit and visit._replace(update=update)

        original(map(looked_at, visits), *limits)

    with monkeypatch.context() as patched:
        patched.setattr(_stream, "stream", stream)
        return call()


def on_devices(least=0):
    arrays = [x for x in jax.live_arrays() if x.sharding.memory_kind == "device"]
    return [x for x in arrays if x.nbytes >= least]


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["scanned", "unrolled"])
def test_depth_costs_its_cache_only(layers, monkeypatch):
    """Between any two programs the devices hold a part's parameters, and the cache, once."""
    args = tokens_of(4, GIVEN), jax.random.key(0)

    def peak(depth):
        params = new_params(layers=depth)
        params = unrolled(params) if layers == "unrolled" else params
        eval_step, placed, window = smallest(greedy, params, 1, *args)
        eval_step(placed, *args)
        before, found = nbytes_of(on_devices()), [0]

        def look():
            found[0] = max(found[0], nbytes_of(on_devices()) - before)

        watched(monkeypatch, lambda: eval_step(placed, *args), look)
        return found[0], window

    (few, window), (many, same_window) = peak(4), peak(12)
    assert window == same_window
    cache = 2 * 4 * CONTEXT * DIM * ITEM  # of a layer
    weights = 12 * DIM * DIM * ITEM
    assert 8 * cache <= many - few <= 8 * cache + weights // 2


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"offload_params": jzero.HostCPU()}, r"shard_eval_step: Memory\(params=HostCPU.*Parameters are on"),
        ({"offload_params": 2**20}, "Memory: params=1048576. It is a policy"),
        ({"gather": "once_per_step"}, r"shard_eval_step: Comm\(gather='once_per_step'\) and Memory\("),
        ({"like": shard_train_step(gpt.step_fn)}, "and the parameters of the train step are on the devices"),
    ],
    ids=["HostCPU", "int", "gather", "like"],
)  # fmt: skip
def test_options_that_cannot_be_obeyed(options, told):
    given = {"offload_params": jzero.PinnedHost(device_bytes=2**20)} | options
    with pytest.raises(jzero.OptionError, match=told):
        jzero.shard_eval_step(greedy, **grouped(**given))


def test_a_window_that_is_too_small():
    params, args = new_params(), (tokens_of(16, GIVEN), jax.random.key(0))
    eval_step, placed = asked_of(greedy, params, 1, 1000)
    with pytest.raises(jzero.OptionError, match="device_bytes=24576. or more; from 49152 one"):
        eval_step(placed, *args)


def test_beside_an_axis_over_which_xla_shards():
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=types)
    policy = jzero.PinnedHost(device_bytes=2**20)
    memory = jzero.Memory(params=policy)
    eval_step = jzero.shard_eval_step(forward, mesh=mesh, axes="data", memory=memory)
    params, args = new_params(), (tokens_of(16, GIVEN), jax.random.key(0))
    found = eval_step(eval_step.shard(params, *args), *args)
    same(found, one_device(forward)(params, *args))


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [False, True], ids=["whole", "3 prompts"])
def test_a_batch_that_comes_whole_to_each_device(mapped):
    """Nothing of it is split over the devices; the window is obeyed as ever."""

    def forward(params, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0]

    def evaluate(params, xs):
        return lax.map(lambda x: forward(params, x), xs) if mapped else forward(params, xs)

    params = jax.random.normal(jax.random.key(0), (6, 32, 32)) / 8
    x = jax.random.normal(jax.random.key(1), (3, 8, 32) if mapped else (8, 32))
    options = dict(mesh=small.auto_mesh(data=4), in_specs=None if mapped else {1: jax.P()})

    def asked(device_bytes):
        policy = jzero.PinnedHost(device_bytes=device_bytes)
        eval_step = jzero.shard_eval_step(evaluate, **grouped(offload_params=policy, **options))
        return eval_step, eval_step.shard(params)

    eval_step, placed = asked(64)
    with pytest.raises(jzero.OptionError, match="What one part of the step reads") as refused:
        eval_step(placed, x)
    (number,) = re.findall(r"Use PinnedHost\(device_bytes=(\d+)\)", str(refused.value))
    least = int(number)
    assert least <= 3 * 32 * 32 * ITEM  # a layer, its shard, and what is gathered
    eval_step, placed = asked(least)
    np.testing.assert_allclose(eval_step(placed, x), evaluate(params, x), rtol=1e-12, atol=1e-15)
    assert any(c.what == "parameter" for c in eval_step.describe(placed, x).transfers)
