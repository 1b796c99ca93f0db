"""Microbatches: how often what is reduced and gathered, ragged weights, memory, and what is counted."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

import jzero
import programs
import small

MODEL = programs.Model(remat=True)
STATE = programs.abstract_state(MODEL, optax.sgd(1e-3))
PSI = programs.num_params(STATE)
TOKENS = programs.tokens(64)
K = 4


def elements(stage, mesh=None, state=STATE, **options):
    """`{op: elements per step, in units of Psi}`, scalars aside."""
    mesh = mesh or AbstractMesh((8,), ("data",))
    train_step = small.shard_train_step(programs.train_step, stage=stage, mesh=mesh, **options)
    found = train_step.describe(state, TOKENS)
    totals: dict[Any, float] = {}
    for c in found.traffic:
        if c.elements > 1:
            key = (c.op, ",".join(c.axes)) if len(mesh.axis_names) > 1 else c.op
            totals[key] = totals.get(key, 0) + c.total_elements / PSI
    return totals


@pytest.mark.parametrize(
    ("stage", "options", "expected"),
    [
        (0, {}, {"all-reduce": 1}),
        (1, {}, {"reduce-scatter": 1, "all-gather": 1}),
        (2, {}, {"reduce-scatter": K, "all-gather": 1}),
        (3, {}, {"reduce-scatter": K, "all-gather": 2 * K}),
        (3, {"reduce": "once"}, {"reduce-scatter": 1, "all-gather": 2 * K}),
        (3, {"gather": "keep"}, {"reduce-scatter": K, "all-gather": K}),
        (3, {"gather": "once_per_step"}, {"reduce-scatter": K, "all-gather": 1}),
        (3, {"gather": "once_per_step", "reduce": "once"}, {"reduce-scatter": 1, "all-gather": 1}),
    ],
)
def test_traffic_of_every_policy(stage, options, expected):
    assert elements(stage, accumulate=K, **options) == expected


@pytest.mark.slow(but=["once_per_step-1-True-False"])
@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(
    ("gather", "expected"), [("per_pass", 2 * K), ("keep", K), ("once_per_step", 1)]
)
def test_every_policy_gathers_bf16_for_bf16_compute(gather, expected, scan, remat):
    model = programs.Model(scan=scan, remat=remat, dtype=jnp.bfloat16)
    state = programs.abstract_state(model, optax.sgd(1e-3))
    train_step = small.shard_train_step(
        programs.train_step,
        stage=3,
        comm=jzero.Comm(gather=gather),
        microbatches=K,
        mesh=AbstractMesh((8,), ("data",)),
    )
    found = train_step.describe(state, TOKENS)
    assert found.elements("all-gather", "bfloat16") == expected * PSI
    assert found.elements("all-gather", "float32") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # ZeRO-3 inside a node, ZeRO-1 over all: between nodes 1/4 of the gradients and new parameters.
        ({"param_axes": "local"},
         {("all-gather", "local"): 2, ("reduce-scatter", "local"): 1,
          ("reduce-scatter", "node"): 1 / 4, ("all-gather", "node"): 1 / 4}),
        # Hybrid sharding: nodes are replicas.
        ({"param_axes": "local", "optimizer_axes": "local"},
         {("all-gather", "local"): 2, ("reduce-scatter", "local"): 1, ("all-reduce", "node"): 1 / 4}),
        ({}, {("all-gather", "node,local"): 2, ("reduce-scatter", "node,local"): 1}),
    ],
)  # fmt: skip
def test_traffic_per_axis(options, expected):
    state = programs.abstract_state(MODEL, optax.sgd(1e-3, momentum=0.9))
    assert elements(3, AbstractMesh((2, 4), ("node", "local")), state, **options) == expected


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("stage", [2, 3])
def test_replicas_are_reduced_once_per_step(stage, scan, dtype):
    """Between nodes that are replicas (HSDP), gradients are summed after the last microbatch."""
    state = programs.abstract_state(programs.Model(scan=scan, dtype=dtype))
    axes = {"param_axes": "local"} if stage == 3 else {}
    found = elements(
        stage, AbstractMesh((2, 4), ("node", "local")), state, accumulate=K,
        optimizer_axes="local", **axes,
    )  # fmt: skip
    expected = {
        ("all-gather", "local"): 2 * K if stage == 3 else 1,
        ("reduce-scatter", "local"): K,
        ("all-reduce", "node"): 1 / 4,
    }
    assert found == pytest.approx(expected)


@pytest.mark.slow(but=["axes0-True", "axes1-True"])
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("axes", [{}, {"optimizer_axes": "local"}])
def test_microbatches_add_up_in_the_dtype_of_the_gradient(axes, scan):
    """Bfloat16 gradients of float32 parameters are cast before they are added up, as the step casts them."""
    mesh = AbstractMesh((2, 4), ("node", "local"))
    state = programs.abstract_state(programs.Model(scan=scan, dtype=jnp.bfloat16))
    train_step = small.shard_train_step(
        programs.train_step, stage=2, mesh=mesh, accumulate=K, **axes
    )
    text = str(train_step.program(state, TOKENS, after="partition"))
    sums = re.findall(r":(\w+)\[\d[\d,]*\] = psum\[axes=\('microbatch',\)", text)
    assert sums
    assert set(sums) == {"f32"}


def test_bfloat16_gradients_of_many_microbatches_add_up_in_float32():
    """256 + 1 is 256 in bfloat16: after a microbatch with a large gradient, all others would be lost."""

    def step(w, x):
        return w - jax.grad(lambda w: jnp.sum(x @ w))(w)

    w, x = jnp.zeros(8, jnp.bfloat16), jnp.ones((64, 8), jnp.bfloat16).at[0].set(256)
    train_step = small.shard_train_step(step, mesh=small.mesh(data=1), accumulate=64)
    assert jnp.array_equal(train_step(w, x), jnp.full_like(w, -(256 + 63)))


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_replicas_are_reduced_once_for_what_a_time_loop_closes_over(accumulate):
    def step(w, x):
        def loss_fn(w):
            carry, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)
            return jnp.mean(carry**2)

        loss, grads = jax.value_and_grad(loss_fn)(w)
        return w - grads, loss

    train_step = small.shard_train_step(
        step,
        mesh=small.mesh(node=2, local=4),
        microbatches=accumulate,
        axes=jzero.Axes(params="local", optimizer="local"),
    )
    w, x = jnp.eye(64), jax.random.normal(jax.random.key(0), (64, 64))
    found = train_step.describe(w, x)
    over_nodes = [c for c in found.traffic if c.axes == ("node",) and c.elements > 1]
    assert [(c.op, c.total_elements) for c in over_nodes] == [("all-reduce", 64 * 64 // 4)]
    expected = step(w, x)
    for actual, wanted in zip(train_step(w, x), expected, strict=True):
        assert jnp.allclose(actual, wanted, rtol=1e-5, atol=1e-6)


def collectives_by_loop(text):
    """`{"inside": {op: count}, "outside": ...}` of the microbatch loop in a compiled program."""
    counts: dict[str, dict[str, int]] = {"inside": {}, "outside": {}}
    pattern = r'= \\S+ (all-gather|reduce-scatter|all-reduce)(?:-start)?\\(.*op_name="([^"]*)"'
    for op, name in re.findall(pattern.replace("\\\\", "\\"), text):
        place = counts["inside" if "jzero.microbatches" in name else "outside"]
        place[op] = place.get(op, 0) + 1
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_compiled_program_reduces_where_the_stage_says(stage):
    train_step = small.shard_train_step(programs.train_step, stage=stage, microbatches=K)
    text = train_step.lower(STATE, TOKENS).compile().as_text()
    found = collectives_by_loop(text)
    reduces = [found[where].get("reduce-scatter", 0) > 0 for where in ("inside", "outside")]
    assert reduces == [stage > 1, stage == 1]
    gathers = [found[where].get("all-gather", 0) > 0 for where in ("inside", "outside")]
    assert gathers == [stage == 3, stage < 3]


@pytest.mark.slow
def test_temporary_memory_is_that_of_one_microbatch():
    """And the batch is sliced where it lies: were it copied, its bytes would come on top."""

    def step(w, x):
        def loss_fn(w):
            h = x
            for _ in range(4):
                h = jnp.tanh(h @ w)
            return jnp.mean(h**2)

        return w - 0.1 * jax.grad(loss_fn)(w)

    def temporary_bytes(k):
        train_step = small.shard_train_step(step, stage=3, microbatches=k)
        w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 64), (8 * 4096, 64)))
        return train_step.lower(w, x).compile().memory_analysis().temp_size_in_bytes

    rows = 4 * 4096 * 64  # bytes of each device's part of the batch
    assert temporary_bytes(1) > 4 * rows
    assert temporary_bytes(16) < rows / 2


def test_accumulators_are_reported():
    def report(stage, **options):
        train_step = small.shard_train_step(
            programs.train_step, stage=stage, accumulate=K, **options
        )
        return train_step.describe(STATE, TOKENS)

    loss = 4
    assert report(1).accumulator_bytes == 4 * PSI + loss
    assert report(3).accumulator_bytes == 4 * PSI // 8 + loss
    assert report(3, accumulate_dtype=jnp.bfloat16).accumulator_bytes == 2 * PSI // 8 + 2
    once, each = (" ".join(str(report(stage)).split()) for stage in (1, 3))
    assert "microbatches: 4 on each device; gradients are reduced once per step" in once
    assert "for each microbatch, and accumulated in 3.3 KiB on each device" in each


# -- losses normalised by a count ----------------------------------------------------------------


def masked_step(take_mean, reduced=lambda tree: tree, total=lambda x: x):
    def step(state, batch):
        def loss_fn(params):
            errors = jnp.square(jnp.tanh(batch["x"] @ params["w"]) @ params["v"])
            return take_mean(errors, batch["mask"])

        loss, grads = reduced(jax.value_and_grad(loss_fn)(state))
        correct = total(jnp.sum(batch["mask"] > 0))
        new_state = jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
        return new_state, {"loss": loss, "tokens": correct}

    return step


def masked_step_of_a_device(take_mean):
    """The same, as written for `jax.pmap(..., axis_name="batch")`."""
    reduce, total = (functools.partial(f, axis_name="batch") for f in (jax.lax.pmean, jax.lax.psum))
    return masked_step(take_mean, reduce, total)


def plain_mean(values, mask):
    return jnp.sum(values * mask) / jnp.sum(mask)


def mean_over_devices(values, mask):
    """A device's share: the mean of these over the devices is the weighted mean of all rows."""
    count = jax.lax.psum(jnp.sum(mask), "batch")
    return jnp.sum(values * mask) * (jax.lax.psum(1, "batch") / count)


def ragged_batches():
    rng = np.random.default_rng(0)
    for _ in range(5):
        lengths = rng.integers(1, 12, size=(64, 1))
        mask = np.arange(12) < lengths
        yield {
            "x": rng.normal(size=(64, 12, 16)).astype(np.float32),
            "mask": mask.astype(np.float32),
        }


def weights():
    keys = jax.random.split(jax.random.key(0))
    return {"w": jax.random.normal(keys[0], (16, 32)), "v": jax.random.normal(keys[1], (32,))}


def trained(step):
    state, history = weights(), []
    for batch in ragged_batches():
        state, metrics = step(state, batch)
        history.append(jax.tree.map(np.asarray, metrics))
    return jax.tree.map(np.asarray, state), history


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("num_devices", "k"), [(1, 1), (1, 8), (2, 4), (4, 1), (4, 2), (8, 8)])
@pytest.mark.parametrize("written_for", ["the whole batch", "a device"])
def test_ragged_microbatches_equal_one_big_batch(written_for, stage, num_devices, k):
    options = dict(stage=stage, mesh=small.mesh(data=num_devices), accumulate=k)
    if written_for == "a device":
        step = masked_step_of_a_device(mean_over_devices)
        sharded = small.shard_train_step(step, axis_name="batch", **options)
    else:
        sharded = small.shard_train_step(masked_step(plain_mean), **options)
    state, history = trained(sharded)
    expected_state, expected = trained(jax.jit(masked_step(plain_mean)))
    for got, want in zip(history, expected, strict=True):
        np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-5)
        assert got["tokens"] == want["tokens"]
    for name in state:
        np.testing.assert_allclose(state[name], expected_state[name], rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_a_mean_of_local_means_is_another_loss():
    """The tests above could fail: it is what a step for a device means that divides by its own count."""
    step = masked_step_of_a_device(plain_mean)
    _, history = trained(small.shard_train_step(step, stage=3, axes=jzero.Axes(axis_name="batch")))
    _, expected = trained(jax.jit(masked_step(plain_mean)))
    assert abs(history[0]["loss"] - expected[0]["loss"]) > 1e-3


def test_to_a_step_of_a_device_each_microbatch_is_one():
    """What divides by its own count means something else on another number of devices."""
    step = masked_step_of_a_device(plain_mean)
    found = []
    for num_devices, k in ((4, 1), (2, 2), (1, 4)):
        mesh = small.mesh(data=num_devices)
        sharded = small.shard_train_step(
            step, axes=jzero.Axes(axis_name="batch"), mesh=mesh, microbatches=k
        )
        found.append(trained(sharded)[1][-1]["loss"])
        told = "each microbatch is a device" in str(
            sharded.describe(weights(), next(ragged_batches()))
        )
        assert told == (k > 1)
    np.testing.assert_allclose(found[1:], found[0], rtol=1e-5)


def test_a_count_needs_a_loop_of_its_own_and_little_else():
    sharded = small.shard_train_step(masked_step(plain_mean), stage=3, microbatches=4)
    found = sharded.describe(weights(), next(ragged_batches()))
    assert found.plan.reductions == "whole batch"
    psi = 16 * 32 + 32
    assert found.elements("reduce-scatter") == 4 * psi
    assert found.elements("all-reduce") == 3  # the weights' total, the count of tokens, the loss


# -- what comes from the rows ----------------------------------------------------------------------


# Outputs with a row for each example, in which no example, or not each, is read.
ALIKE: dict[str, Any] = {
    "a carry that stays": lambda w, x: jax.lax.scan(
        lambda c, row: ((c[0] + row.sum(), c[1]), c[1]), (0.0, w[0]), x)[1],
    "the first row, from each iteration": lambda w, x: jax.lax.scan(lambda c, row: (c, c), x[0], x)[1],
    "a map of parameters": lambda w, x: jax.lax.map(lambda row: w.sum(), x),
    "a mean of all rows": lambda w, x: [jax.lax.map(lambda row, m=m: w * m, x) for m in [x.mean()]],
    "broadcast parameters": lambda w, x: jnp.broadcast_to(w.sum(), (x.shape[0],)),
    "zeros, and numbers": lambda w, x: (jnp.zeros(x.shape[0]), jnp.arange(x.shape[0])),
    "a scan's metric": lambda w, x: jax.lax.scan(lambda c, row: (c + row.sum(), 0.0), 0.0, x),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rows", [64, 61])
@pytest.mark.parametrize("stage", [0, 3])
def test_outputs_that_no_example_changes(stage, rows):
    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * grad, (loss, {name: fn(w, x) for name, fn in ALIKE.items()})

    w, x = jnp.ones((8, 8)), jax.random.normal(jax.random.key(0), (rows, 8))
    found = small.shard_train_step(step, stage=stage, microbatches=2)(w, x)
    expected = jax.jit(step)(w, x)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected
    )


@pytest.mark.slow
def test_an_ensemble_of_weighted_means():
    """`vmap(value_and_grad)` over members is no gradient of single examples, and totals reduce none."""

    def step(ws, batch):
        def loss_fn(w):
            return plain_mean(jnp.square(batch["x"][:, 0] @ w), batch["mask"][:, 0])

        losses, grads = jax.vmap(jax.value_and_grad(loss_fn))(ws)
        return ws - 0.1 * grads, {"losses": losses}

    ws, batch = jax.random.normal(jax.random.key(0), (8, 16)), next(ragged_batches())
    expected, expected_metrics = jax.jit(step)(ws, batch)
    for k in (1, 4):
        actual, metrics = small.shard_train_step(step, stage=3, microbatches=k)(ws, batch)
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
        np.testing.assert_allclose(metrics["losses"], expected_metrics["losses"], rtol=1e-5)


@pytest.mark.parametrize("k", [1, 4])
def test_what_a_second_loop_computes_again_is_printed_once(k, capfd):
    def step(ws, x):
        def loss_fn(ws):
            def layer(h, w):
                jax.debug.print("w {}", w.sum())
                return jnp.tanh(h @ w), None

            return jnp.sqrt(jnp.mean(jax.lax.scan(layer, x, ws)[0] ** 2))

        return ws - 0.1 * jax.grad(loss_fn)(ws)

    train_step = small.shard_train_step(step, stage=3, microbatches=k)
    ws, x = jnp.stack([jnp.eye(8)] * 2), jnp.ones((64, 8))
    if k > 1:
        assert train_step.describe(ws, x).loops.num == 2
    jax.block_until_ready(train_step(ws, x))
    jax.effects_barrier()
    assert capfd.readouterr().out.splitlines() == ["w 8.0"] * 2


@pytest.mark.slow
def test_under_set_mesh():
    mesh = small.mesh(node=2, local=4)
    state = programs.abstract_state(MODEL, optax.sgd(1e-3))
    with jax.set_mesh(mesh):
        found = small.shard_train_step(programs.train_step, microbatches=K).describe(state, TOKENS)
    assert found.elements("reduce-scatter") == K * PSI


@pytest.mark.parametrize(
    "read",
    [
        lambda s: s.at[jnp.array([0, 9])].get(mode="fill", fill_value=1),
        lambda s: s.at[jnp.array([0, 9])].get(mode="fill"),
        lambda s: jax.lax.div(s, jnp.full_like(s, 2)),
    ],
    ids=["filled with 1", "filled", "quotient"],
)
def test_what_is_no_sum_of_its_terms(read):
    """A loop reads a sum of the batch otherwise than linearly."""

    def step(w, x):
        def body(carry, scale):
            return carry, read(jnp.sum((x * scale > 0.3).astype(jnp.int32), 0))

        _, found = jax.lax.scan(body, 0, jnp.arange(1.0, 4.0))
        return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), found

    w, x = np.ones((4, 3), np.float32), np.linspace(-1, 1, 128, dtype=np.float32).reshape(32, 4)
    found = small.shard_train_step(step, microbatches=2)(w, x)
    for a, b in zip(found, jax.jit(step)(w, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
