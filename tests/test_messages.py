"""Wrong uses, each refused with who, what was found, the rule and the edit; nothing is consumed."""

import importlib.util
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jzero
import small
from jzero.segments import _program
from jzero.targets._target import TARGETS
from small import grouped

W = jnp.ones((8, 8))
X = jnp.ones((16, 8))


def loss_fn(w, x):
    return jnp.mean((x @ w) ** 2)


def step(w, x):
    loss, g = jax.value_and_grad(loss_fn)(w, x)
    return w - 0.1 * g, {"loss": loss}


def written(w, x):
    """The same for one device, as `jax.pmap(..., axis_name="data")` takes it."""
    loss, g = jax.lax.pmean(jax.value_and_grad(loss_fn)(w, x), "data")
    return w - 0.1 * g, {"loss": loss}


def refuses(error, text, fn, *args, **kwargs):
    """`fn` raises jzero's own error with all of `text` in it, and leaves its arguments alive."""
    with pytest.raises(error) as caught:
        fn(*args, **kwargs)
    assert isinstance(caught.value, jzero.JzeroError)
    for part in [text] if isinstance(text, str) else text:
        assert part in str(caught.value)
    assert not any(
        x.is_deleted() for x in jax.tree.leaves((args, W, X)) if isinstance(x, jax.Array)
    )


def sharded(fn=step, **options):
    return jzero.shard_train_step(fn, **grouped(**options))


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"accumulate": 0}, ["Microbatches: num=0", "an int from 1"]),
        *(
            ({"stage": stage}, [f"stage={stage!r}", "Stages are 0, 1, 2"])
            for stage in (4, "3", True)
        ),
        ({"reduce": "never"}, ["Microbatches: reduce='never'", "'once' or 'each'"]),
        (
            {"stage": 2, "reduce": "once"},
            ["stage=2 and Microbatches(reduce='once')", "or use stage=1"],
        ),
        (
            {"stage": 1, "reduce": "each"},
            ["stage=1 and Microbatches(reduce='each')", "or use stage=2"],
        ),
        ({"accumulate_dtype": jnp.float32}, ["num=1", "Microbatches(4, ...)"]),
        ({"accumulate": 2, "accumulate_dtype": jnp.int32}, ["dtype=", "floating point"]),
        ({"reduce_dtype": "fp32"}, ["reduce_dtype='fp32'", "jnp.bfloat16"]),
        ({"gather": "always"}, ["gather='always'", "'once_per_step'"]),
        ({"stage": 1, "gather": "keep"}, ["stage=1 and Comm(gather='keep')", "Drop gather"]),
        ({"prefetch_bytes": -1}, ["prefetch_bytes=-1", "an int from 0"]),
        (
            {"stage": 2, "prefetch_bytes": 0},
            ["stage=2 and Comm(prefetch_bytes=0)", "Drop prefetch_bytes"],
        ),
        ({"min_shard_bytes": -1}, ["min_shard_bytes=-1", "min_shard_bytes=0"]),
        ({"stage": 2, "full": "bias"}, ["stage=2 and Axes(replicate='bias')", "Drop replicate"]),
        ({"full": "("}, ["replicate: '('", "not a regular expression"]),
        ({"auto_specs": {"(": P()}}, ["auto_specs: '('", "not a regular expression"]),
        ({"auto_specs": {"w": "model"}}, ["auto_specs['w'] is a str", "a PartitionSpec"]),
        (
            {"auto_specs": {"w": P(None, P.UNCONSTRAINED)}},
            ["auto_specs['w'] is", "Write None instead"],
        ),
        (
            {"auto_specs": {"w": P("model", "model")}},
            ["P('model', 'model'). An axis shards one dim"],
        ),
        ({"auto_specs": P("model")}, ["auto_specs=", "maps regular expressions"]),
        ({"stage": 2, "param_axes": "data"}, ["stage=2 and Axes(params=('data',))", "use stage=3"]),
        ({"stage": 0, "optimizer_axes": "data"}, ["stage=0 and Axes(optimizer=", "use stage=1"]),
        (
            {"max_gather_bytes": -1},
            ["max_gather_bytes=-1", "an int from 0", "Drop it for 256 MiB"],
        ),
        ({"tile_bytes": 0}, ["tile_bytes=0", "an int from 1", "Use tile_bytes=2**28"]),
        ({"stage": 0, "tile_bytes": 9}, ["stage=0 and Comm(tile_bytes=9)", "use stage=3"]),
        ({"gather": "keep", "tile_bytes": 9}, ["gather='keep' and tile_bytes=9", "Drop gather"]),
        (
            {"gather": "once_per_step", "tile_bytes": 9},
            ["gather='once_per_step' and tile_bytes=9", "or tile_bytes"],
        ),
        (
            {"offload": "cpu"},
            ["optimizer='cpu'", "It is a policy", "Write optimizer=jzero.PinnedHost()"],
        ),
        ({"offload": jzero.PinnedHost}, ["optimizer=<class", "Write optimizer=jzero.PinnedHost()"]),
    ],
    ids=str,
)
def test_options_that_cannot_be_obeyed(options, text):
    refuses(ValueError, text, sharded, **options)


NUMBERS = (
    "stage",
    "accumulate",
    "prefetch_bytes",
    "min_shard_bytes",
    "max_gather_bytes",
    "tile_bytes",
)


@pytest.mark.parametrize("value", [True, np.True_, 2.0, "2", np.ones(2, int)], ids=str)
def test_numbers_are_ints(value):
    for name in NUMBERS:
        field = "num" if name == "accumulate" else name
        refuses(ValueError, f"{field}={value!r}", sharded, **{name: value})
    refuses(ValueError, f"PinnedHost: device_bytes={value!r}", jzero.PinnedHost, value)


@pytest.mark.parametrize("make", [np.int64, np.uint8, np.asarray], ids=str)
def test_numbers_may_be_numpys(make):
    def options_with(number: Any) -> Any:
        return sharded(**dict.fromkeys(NUMBERS, number(3)))._programs.options

    assert (options := options_with(make)) == options_with(int)
    numbers = [options.stage, options.microbatches.num, options.axes.min_shard_bytes]
    numbers += [options.comm.prefetch_bytes, options.comm.max_gather_bytes, options.comm.tile_bytes]
    assert {type(x) for x in numbers} == {int}


def adam_step(state, x):
    w, opt_state = state
    updates, opt_state = optax.adam(0.1).update(jax.grad(loss_fn)(w, x), opt_state)
    return w + updates, opt_state


def norm_step(state, x):
    w, mean = state
    mean = 0.9 * mean + jax.grad(loss_fn)(w, x)
    return w - mean / jnp.sqrt((mean**2).sum()), mean


def test_offload_with_too_little_room():
    state, options = (W, optax.adam(0.1).init(W)), dict(min_shard_bytes=0)
    train_step = sharded(adam_step, offload=jzero.PinnedHost(8), **options)
    text = ["state[1][0].mu, state[1][0].nu: 64 bytes on each device", "(one row of them)",
            "device_bytes=8 is the most", "Use PinnedHost(device_bytes=64) or more"]  # fmt: skip
    refuses(ValueError, text, train_step, state, X)
    train_step = sharded(norm_step, offload=jzero.PinnedHost(8), **options)
    text = ["state[1]: 32 bytes", "(reduce_sum (", "test_messages.py", "every element alike"]
    refuses(ValueError, text, train_step, (W, W), X)


@pytest.mark.parametrize(
    ("use", "how"),
    [
        (lambda step: jax.jit(step), "called under an outer jax.jit"),
        (lambda step: step.lower, "lowered"),
    ],
)
def test_offload_is_a_loop_of_programs(use, how):
    train_step = sharded(adam_step, min_shard_bytes=0, offload=jzero.PinnedHost())
    text = [f"and the step is {how}", "a loop of programs", "outside of jax.jit"]
    refuses(ValueError, text, use(train_step), (W, optax.adam(0.1).init(W)), X)


def test_memory_that_the_devices_lack():
    mesh = small.mesh(data=8)
    text = ["has the memory kinds ['device',", "and not 'tape'", "Drop memory="]
    refuses(ValueError, text, _program.check_tier, mesh, "tape")


def test_full_matches_no_parameter():
    text = ["Axes(replicate='bias') matches no parameter", "The parameters are state"]
    refuses(ValueError, text, sharded(full="bias").plan, W, X)

    def counts(state, x):
        return {"n": state["n"] + 1, "seen": state["seen"] + x.sum(0)}

    state = {"n": 0, "seen": jnp.ones(8)}
    text = ["There are none", "state['n'], state['seen']. Drop replicate."]
    refuses(ValueError, text, sharded(counts, full="seen").plan, state, X)


def test_axes_of_roles():
    mesh = small.mesh(node=2, local=4)
    text = ["Axes(params=) has ['rack']", "('node', 'local')", "Correct params"]
    refuses(ValueError, text, sharded(mesh=mesh, param_axes="rack"), W, X)
    text = ["Axes(params=('node', 'node'))", "Name each axis once"]
    refuses(ValueError, text, sharded(mesh=mesh, param_axes=("node", "node")), W, X)
    text = ["parameters over ('node', 'local')", "optimizer state over ('local',)"]
    refuses(ValueError, text, sharded(mesh=mesh, optimizer_axes="local"), W, X)


def test_microbatches_of_an_argument_that_is_split_over_some_axes():
    options: dict[str, Any] = {"mesh": small.mesh(node=2, local=4), "in_specs": {"x": P("local")}}
    options |= {"axis_name": "batch", "accumulate": 2}
    train_step = sharded(lambda w, x: jax.lax.pmean(step(w, x), "batch"), **options)
    refuses(ValueError, ["microbatches need its spec", "to name all data axes"], train_step, W, X)


def test_optimizers_that_cannot_round():
    for wrapper in (jzero.master_weights, jzero.stochastic_rounding):
        tx = wrapper(optax.sgd(0.1))
        refuses(ValueError, "update was called without params", tx.update, W, tx.init(W))
    refuses(ValueError, ["a parameter is float16", "master_weights"], tx.init, W.astype("float16"))


# Where a step is made: step_fn, options, and what is said.
MADE: dict[str, tuple[Any, dict[str, Any], Any, Any]] = {
    "a number": (3, {}, ValueError, "step_fn is an int"),
    "sharded already": (sharded(), {}, ValueError, ["already a ShardedStep", "__wrapped__"]),
    "without arguments": (lambda: None, {}, TypeError, "takes no arguments"),
    "static name": (step, {"static_argnames": "cfg"}, ValueError,
                    "static_argnames names 'cfg', and step_fn's parameters are ['w', 'x']"),
    "static position": (step, {"static_argnums": 7}, ValueError, "static_argnums names 7"),
    "static state": (step, {"static_argnums": 0, "state_argnums": 0}, ValueError,
                     "the state 'w' is declared static"),
    "spec of the state": (step, {"in_specs": {"w": P("data")}}, ValueError, "The stage decides"),
    "spec of nothing": (step, {"in_specs": {"y": P()}}, ValueError, "in_specs names 'y'"),
    "mesh": (step, {"mesh": 8}, ValueError, ["mesh is an int", "jax.make_mesh"]),
    "pmap": (jax.pmap(step, axis_name="batch"), {}, ValueError, ["jax.pmap", "axis_name="]),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_what_no_step_is_made_of(name):
    step_fn, options, error, text = MADE[name]
    refuses(error, text, sharded, step_fn, **options)


# Where it is called: step_fn, options, arguments, and what is said.
CALLED: dict[str, tuple[Any, dict[str, Any], Any, Any, Any]] = {
    "offload of nothing": (step, {"offload": jzero.PinnedHost()}, (W, X), ValueError,
                           ["memory=PinnedHost()", "is worth it", "Drop it"]),
    "microbatches": (written, {"axis_name": "data", "accumulate": 4}, (W, X), ValueError,
                     "x float32[16,8]: dim 0 of size 16 does not divide by 8 devices x 4 microbatches"),
    "compared examples": (lambda w, x: (written(w, x)[0], x @ x.T), {"axis_name": "data"}, (W, X), TypeError,
                          ["float32[16,16] has several dims that follow the batch", "compare outside"]),
    "a spec's structure": (step, {"in_specs": {"x": {"a": P(), "b": P()}}}, (W, X), ValueError,
                           "in_specs['x'] does not fit"),
    "a spec's axis": (step, {"in_specs": {"x": P("model")}}, (W, X), ValueError,
                      ["x float32[16,8]: its spec P('model',) names axis 'model'",
                       "the data axes are ('data',)", "Correct it, or drop it to split dim 0"]),
    "a spec that names an axis twice": (step, {"in_specs": {"x": P("data", "data")}}, (W, X), ValueError,
                      ["its spec P('data', 'data') names axis 'data' twice", "Correct it, or drop it"]),
    "a spec's dims": (step, {"in_specs": {"x": P(None, None, "data")}}, (W, X), ValueError,
                      ["x float32[16,8] has fewer dims than its spec",
                       "which dims of an argument are split"]),
    "an axis": (step, {"mesh": small.mesh(data=8), "axis_names": "model"}, (W, X), ValueError,
                "Axes(batch=) has ['model'], and the mesh has ('data',)"),
    "a text": (step, {}, (W, "train"), ValueError, ["x is a str: 'train'", "static_argnames"]),
    "leaves": (lambda s, x: (s, x.mean()), {}, ({"w": W, "fn": jnp.tanh, "name": "mlp"}, X), ValueError,
               ["state['fn'] is a", "state['name'] is a str", "pytree_node=False"]),
    "metrics alone": (lambda w, x: {"loss": loss_fn(w, x)}, {}, (W, X), ValueError,
                      ["returned one dict", "Return (new_state, metrics)"]),
    "None": (lambda w, x: None, {}, (W, X), ValueError, "step_fn returned None"),
    "no state": (lambda s, x: (loss_fn(s["w"], x), x.mean()), {}, ({"w": W}, X), ValueError,
                 "Return (new_state, metrics)"),
    "another structure": (
        lambda s, x: ({"w": s["w"], "ema": s["w"]}, x.mean()), {}, ({"w": W, "b": W}, X),
        ValueError,
        ["structure changes", "missing state['b']", "new state['ema']"]),
    "other leaves": (
        lambda s, x: {"a": s["a"].astype(jnp.bfloat16), "b": s["b"][:4]}, {}, ({"a": W, "b": W}, X),
        ValueError,
        ["state['a'] float32[8,8] became bfloat16[8, 8]", "state['b'] float32[8,8] became"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLED)
def test_what_no_step_is_called_with(name):
    step_fn, options, args, error, text = CALLED[name]
    refuses(error, text, sharded(step_fn, **options), *args)


def test_unhashable_static_argument():
    train_step = sharded(lambda w, x, cfg: step(w, x), static_argnames="cfg")
    refuses(ValueError, ["'cfg' is a list", "hashed"], train_step, W, X, cfg=[1])


# -- meshes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [(), ("data", "data")])
def test_no_axis_or_one_twice(names):
    train_step = sharded(mesh=small.mesh(data=8), axis_names=names)
    refuses(ValueError, [f"Axes(batch={names})", "one at least, each once"], train_step, W, X)


def test_axis_name_is_one_of_several():
    train_step = sharded(mesh=small.mesh(node=4, local=2), axis_name="local")
    refuses(ValueError, "is only one of", train_step, W, X)
    for name in (("batch",), ["node", "local"], 3, ""):
        with pytest.raises(ValueError, match="It is the one name"):
            sharded(axis_name=name)
    with pytest.raises(ValueError, match="A mesh axis is called by a text"):
        jzero.shard_train_step(lambda w, x: w, axes=3)  # type: ignore[call-overload]


def test_mesh_of_other_devices_than_the_context():
    mesh = small.mesh(data=4)
    with jax.set_mesh(small.mesh(data=8)):
        refuses(ValueError, "jax.set_mesh's has {'data': 8}", sharded(mesh=mesh), W, X)


# -- arguments -------------------------------------------------------------------------------------


def test_batch_is_not_divisible_and_every_leaf_is_named():
    def fn(w, batch):
        return written(w, batch["x"])

    batch = {"x": X[:12], "y": [X[:3, 0], X]}
    texts = [
        "2 leaves fail",
        "batch['x'] float32[12,8]: dim 0 of size 12 does not divide by 8 devices",
        "batch['y'][0] float32[3]",
        "in_specs",
    ]
    refuses(ValueError, texts, sharded(fn, axis_name="data"), W, batch)


def test_donated_state_cannot_be_placed_again():
    train_step = sharded()
    old = train_step.shard(W)
    train_step(old, X)
    for again in (train_step.shard, train_step.unshard):
        with pytest.raises(jzero.StateError, match="already donated"):
            again(old)


# -- what the step returns -------------------------------------------------------------------------


@pytest.mark.parametrize("metric", [jnp.sum, lambda x: (x > 0).sum(), lambda x: x.mean(0)])
def test_a_metric_that_nobody_reduced(metric):
    train_step = sharded(lambda w, x: (written(w, x)[0], {"metric": metric(x)}), axis_name="data")
    texts = ["output[1]['metric'] ", "differs between devices", "reduces what it returns itself",
             "jzero averages nothing", "counts by jax.lax.psum(count, 'data')"]  # fmt: skip
    refuses(TypeError, texts, train_step, W, X)


@pytest.mark.parametrize("devices", [1, 8])
def test_statistics_in_the_state_that_nobody_reduced(devices):
    def fn(s, x):
        mean = 0.9 * s["mean"] + 0.1 * x.mean(0)
        return {"w": written(s["w"], x)[0], "mean": mean, "seen": s["seen"] + (x > 0).sum()}

    texts = ["the new state['seen'] int32[] differs between devices",
             "the new state['mean'] float32[8] differs between devices",
             "jax.lax.pmean(grads, 'data')"]  # fmt: skip
    state = {"w": W, "mean": W[0], "seen": jnp.zeros((), jnp.int32)}
    train_step = sharded(fn, axis_name="data", mesh=small.mesh(data=devices))
    refuses(TypeError, texts, train_step, state, X)


# -- what a step for the whole batch may not do ----------------------------------------------------


def test_a_step_that_calls_shard_map():
    mesh = small.auto_mesh(data=8)

    def fn(w, x):
        mean = jax.shard_map(
            lambda x: jax.lax.pmean(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
        )
        return step(w, x - mean(x).mean(0, keepdims=True))

    texts = [
        "calls jax.shard_map itself",
        "test_messages.py",
        "pass axes=jzero.Axes(axis_name=...)",
    ]
    refuses(TypeError, texts, sharded(fn, mesh=mesh), W, X)
    refuses(TypeError, texts, sharded(fn, mesh=mesh, accumulate=2), W, X)


@pytest.mark.parametrize("constrains", ["nothing", "data", "model"])
def test_a_step_that_calls_shard_map_beside_an_automatic_axis(constrains):
    mesh = small.auto_mesh(data=4, model=2)

    def fn(w, x):
        if constrains != "nothing":
            x = jax.lax.with_sharding_constraint(x, P(constrains))
        total = jax.shard_map(
            lambda w: jax.lax.psum(w.sum(), "model"), mesh=mesh, in_specs=P("model"), out_specs=P()
        )
        return step(w + total(w), x)

    texts = ["the step calls jax.shard_map itself", "pass axes=jzero.Axes(axis_name=...)"]
    # Without a mesh, in which the step cannot be traced, constraints cannot be either, and give no line.
    texts += ["test_messages.py"] * (constrains == "nothing")
    refuses(TypeError, texts, sharded(fn, mesh=mesh, axis_names="data"), W, X)


def test_rows_that_are_gathered_take_too_many_bytes():
    def fn(w, x):
        new, metrics = step(w, x)
        return new, metrics | {"sizes": jnp.linalg.svd(x)[1]}

    texts = ["svd at ", "test_messages.py", "it needs the rows of all devices (512 bytes)",
             "Comm(max_gather_bytes=100) is the most", "permit it with Comm(max_gather_byte"]  # fmt: skip
    refuses(TypeError, texts, sharded(fn, max_gather_bytes=100), W, X)
    refuses(TypeError, "max_gather_bytes=512)", sharded(fn, max_gather_bytes=511), W, X)
    rows = jax.random.normal(jax.random.key(0), X.shape)
    found, expected = sharded(fn, max_gather_bytes=512)(W, rows), jax.jit(fn)(W, rows)
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"axis_name": "batch"}], ids=str)
def test_an_axis_that_nobody_has(options):
    """Also where `axis_name` says another one."""

    def fn(w, x):
        return jax.lax.pmean(step(w, x), "shards")

    texts = ["the step names an axis that the mesh has not", "unbound axis name: shards",
             "Pass axes=jzero.Axes(axis_name=...), the name that jax.pmap had"]  # fmt: skip
    refuses(TypeError, texts, sharded(fn, **options), W, X)


@pytest.mark.parametrize("arguments", [(0, 1, 2), (2, 0, 1)], ids=["state first", "a key first"])
def test_an_axis_that_nobody_has_in_a_step_whose_state_is_not_known(arguments):
    """What may be state, and does not divide, is not taken for the batch at fault."""

    def fn(*args):
        w, momentum, key = [args[i] for i in arguments]
        g = jax.lax.pmean(jax.grad(loss_fn)(w, args[3]), "batch")
        new = w - g, momentum["m"] * 0.9 + g[:3], key
        return tuple(new[arguments.index(i)] for i in range(3))

    given = W, {"m": W[:3]}, jax.random.key(0)
    texts = ["the step names an axis that the mesh has not", "unbound axis name: batch"]
    refuses(TypeError, texts, sharded(fn), *[given[arguments.index(i)] for i in range(3)], X)


def test_a_constraint_over_an_axis_that_nobody_has():
    def fn(w, x):
        return step(w, jax.lax.with_sharding_constraint(x, P("dp")))

    texts = ["a layout at ", "test_messages.py", "Resource axis: dp", "mesh: ('data',). ",
             "Pass the mesh that has them by mesh=", "axes="]  # fmt: skip
    refuses(TypeError, texts, sharded(fn), W, X)
    new, _ = sharded(fn, mesh=small.auto_mesh(dp=8, mp=1), axis_names="dp")(jnp.copy(W), X)
    np.testing.assert_allclose(new, step(W, X)[0], rtol=1e-5)


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["new", "old"])
@pytest.mark.parametrize("of_devices", [False, True])
def test_a_key_that_comes_back_is_folded(key, of_devices):
    """As `jax.pmap` has it for keys of devices; of a key for all it is jzero that folds it."""

    def fn(w, x, key):
        new, noise = jax.random.split(key[0] if of_devices else key)
        w, metrics = written(w, x + jax.random.normal(noise, x.shape))
        return w, metrics, new[None] if of_devices else new

    def folded(w, x, key):
        new, noise = jax.random.split(key)
        noise = jax.random.normal(jzero.fold_device_index(noise), x.shape)
        w, metrics = written(w, x + noise)
        return w, new, metrics

    keys = jax.random.split(key, 8) if of_devices else key
    texts = ["output[2] ", " differs between devices", "A key that comes back belongs to the state",
             "state=", "jzero.fold_device_index(key)"]  # fmt: skip
    with pytest.raises(jzero.StepError) as caught:
        sharded(fn, axis_name="data")(W, X, keys)
    assert all(text in str(caught.value) for text in texts)
    assert "pmean" not in str(caught.value)
    train_step = sharded(folded, axis_name="data", state_argnums=(0, 2))
    _, new, _ = train_step(jnp.copy(W), X, jnp.copy(key))
    assert jnp.array_equal(new, jax.random.split(key)[0])


def test_rows_of_one_device_are_named_where_a_step_fails():
    """Keys of devices with their dim, and a model that is read and was split as a batch is."""
    keys = jax.random.split(jax.random.key(0), 8)
    by_key = lambda w, x, key: written(w, x + jax.random.normal(key, x.shape))  # noqa: E731
    key_first = lambda key, w, x: (by_key(w, x, key)[0], 0.0)  # noqa: E731
    with_model = lambda w, x, model: written(w, x @ model)  # noqa: E731
    for fn, args in ((by_key, (W, X, keys)), (key_first, (keys, W, X)), (with_model, (W, X, W))):
        with pytest.raises((ValueError, TypeError)) as caught:
            sharded(fn, axis_name="data")(*args)
        assert "sees the rows of one device" in (text := "".join(caught.value.__notes__))
        assert "keys[0]" in text
        assert "in_specs={" in text
    sharded(with_model, axis_name="data", in_specs={"model": P()})(jnp.copy(W), X, W)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_axis_of_the_steps_own(accumulate):
    """`jax.vmap` has made it a dim, of which a step for one device may not speak."""

    def fn(w, x):
        def loss(w):
            centred = jax.vmap(lambda r: r - jax.lax.pmean(r, "inner"), axis_name="inner")
            return (centred(x @ w) ** 2).mean()

        return w - jax.lax.pmean(jax.grad(loss)(w), "batch")

    texts = ["a psum over a dim that jax.vmap(axis_name=) has named", "Reduce that dim"]
    refuses(TypeError, texts, sharded(fn, axis_name="batch", accumulate=accumulate), W, X)


# -- where gradients are reduced -------------------------------------------------------------------


def test_a_data_parallel_step_forgets_its_gradients():
    def fn(w, x):
        loss, g = jax.value_and_grad(loss_fn)(w, x)
        return w - 0.1 * g, jax.lax.pmean(loss, "batch")

    texts = ["the new state float32[8,8] differs between devices. A step with collectives",
             "Reduce gradients before the update", "jax.lax.pmean(grads, 'batch')"]  # fmt: skip
    refuses(TypeError, texts, sharded(fn, axis_name="batch"), W, X)


def test_a_search_whose_length_differs_between_devices():
    """Gradients inside a loop that devices leave at different times would hang."""

    def fn(w, x):
        def body(carry):
            w, _ = carry
            return written(w, x)[0], x.sum()

        w, _ = jax.lax.while_loop(lambda c: c[1] < x.sum(), body, (w, jnp.zeros(())))
        return jax.lax.pmean(w, "data")

    texts = ["a collective inside a loop or branch", "All devices must take part", "jnp.where"]
    refuses(TypeError, texts, sharded(fn, axis_name="data"), W, X)


def test_the_steps_own_error_is_its_own():
    """That a step is traced again, if it has collectives, does not hide what the user's code raises."""

    def fn(w, x):
        raise ZeroDivisionError("in the step")

    with pytest.raises(ZeroDivisionError, match="in the step"):
        sharded(fn)(W, X)


OVERLAP = "xla_gpu_experimental_parallel_collective_overlap_limit"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"target": "h300"}, f"target='h300'. There are {', '.join(TARGETS)}"),
        ({"target": "mi300x"}, "No compiler for it is here: XLA's for AMD GPUs is"),
        (
            {"target": "tpu-v5e", "topology": "3x5"},
            "topology='3x5', and target is a TPU v5 lite. It is a slice: '1x1', or 2, 4, ... to 16",
        ),
        (
            {"target": "tpu-v5e", "topology": "4x4", "search_wire": True},
            "search_wire=True, and target='tpu-v5e'. What overlaps a TPU's collectives is not read",
        ),
        ({"topology": "8"}, "topology='8'. It is 'HOSTSxDEVICES'"),
        ({"topology": 8}, "topology=8. It is 'HOSTSxDEVICES'"),
        ({"axes": {"data": 4}}, "The axes' sizes must multiply to 8"),
        *(
            (
                {"axes": axes},
                "They map the names of mesh axes to their sizes, ints from 1. Write axes",
            )
            for axes in ({"a": -2, "b": -4}, {"a": 8.0}, "a")
        ),
        ({"memory_fraction": 1.5}, "memory_fraction=1.5. It is a share"),
        ({"memory_fraction": True}, "memory_fraction=True. It is a share"),
        (
            {"compiler_options": ["a"]},
            "It maps names of XLA flags to their values. Write compiler_opt",
        ),
        *(
            (
                {"compiler_options": {name: True}},
                "The name of an XLA flag is a string, here without",
            )
            for name in ("--xla_gpu_enable_latency_hiding_scheduler", 1)
        ),
        *(
            ({"compiler_options": {OVERLAP: limit}}, "It is a number of collectives. Use 1 or more")
            for limit in (0, "many")
        ),
    ],
    ids=str,
)
def test_preflight_refuses(options, text):
    error = jzero.MeshError if "axes" in options else jzero.OptionError
    with pytest.raises(error, match="preflight: ") as caught:
        jzero.preflight(jzero.shard_train_step(step), W, X, **options)
    assert text in str(caught.value)


def test_preflight_of_a_program_for_other_devices():
    """Here the CPU's; tests/test_preflight.py has targets."""
    lowered = jax.jit(lambda x: x @ x).lower(W)
    text = "a program lowered for 1 x cpu. The target and its topology are 8 x NVIDIA H200. Pass arguments"
    refuses(ValueError, text, jzero.preflight, lowered)
    refuses(ValueError, "train_step is a function", jzero.preflight, step, W, X)


@pytest.mark.parametrize(
    ("modules", "target", "device", "extra"),
    [
        (
            ["jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"],
            "('h200')",
            "NVIDIA H200",
            "jzero[preflight]' (beside a GPU, cuda12 or cuda13",
        ),
        (["libtpu"], "('tpu-v5e', '4x4')", "TPU v5 lite", "jzero[preflight-tpu]'"),
    ],
    ids=["GPU", "TPU"],
)
def test_preflight_without_its_compiler_says_how_to_get_it(modules, target, device, extra):
    if modules == ["libtpu"] and importlib.util.find_spec("libtpu") is not None:
        pytest.skip("JAX finds libtpu by its path; environments without it run this")
    code = f"""
        import sys
        sys.modules |= dict.fromkeys({modules}, None)  # not installed
        import jzero
        jzero.target_mesh{target}
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    root = pathlib.Path(__file__).parents[1]
    result = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert result.returncode == 1
    assert f"XLA cannot compile for {device} here" in result.stderr
    assert f"pip install '{extra}" in result.stderr
    assert ", and set JAX_PLATFORMS=cpu before JAX starts" in result.stderr
