"""A step moves what the stage table says, to the element: in its jaxpr, and in the compiled program."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh

import jzero
import programs
import small


def report(model, stage, tx=None, num_devices=8, step=programs.train_step):
    mesh = AbstractMesh((num_devices,), ("data",))
    train_step = small.shard_train_step(step, stage=stage, mesh=mesh)
    batch = programs.tokens(max(programs.BATCH, num_devices))
    return train_step.describe(programs.abstract_state(model, tx), batch)


def traffic(report):
    ops = sorted({c.op for c in report.traffic})
    return {op: report.elements(op) for op in ops}


MODELS = {
    "scanned": programs.Model(),
    "scanned, remat": programs.Model(remat=True),
    "unrolled": programs.Model(scan=False),
    "unrolled, remat": programs.Model(scan=False, remat=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_devices", [2, 8])
def test_elements_of_every_stage(name, num_devices):
    model = MODELS[name]
    psi = programs.num_params(programs.abstract_state(model))
    loss = 1
    expected = {
        0: {"all-reduce": psi + loss},
        1: {"all-gather": psi, "all-reduce": loss, "reduce-scatter": psi},
        2: {"all-gather": psi, "all-reduce": loss, "reduce-scatter": psi},
        # Each parameter once for the forward and once for the backward pass.
        3: {"all-gather": 2 * psi, "all-reduce": loss, "reduce-scatter": psi},
    }
    for stage, elements in expected.items():
        assert traffic(report(model, stage, num_devices=num_devices)) == elements, stage


@pytest.mark.slow
def test_one_device_moves_nothing():
    for stage in range(4):
        assert traffic(report(MODELS["scanned"], stage, num_devices=1)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scanned", "unrolled, remat"])
def test_bf16_compute_moves_bf16(name):
    model = MODELS[name].copy(dtype=jnp.bfloat16)
    psi = programs.num_params(programs.abstract_state(model))
    found = report(model, 3)
    assert found.elements("all-gather", "bfloat16") == 2 * psi
    assert found.elements("all-gather", "float32") == 0
    assert found.elements("reduce-scatter", "bfloat16") == psi
    assert found.elements("reduce-scatter", "float32") == 0


@pytest.mark.slow
def test_clipping_costs_scalars_only():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    model = MODELS["scanned"]
    psi = programs.num_params(programs.abstract_state(model))
    assert traffic(report(model, 3, tx)) == {
        "all-gather": 2 * psi,
        "all-reduce": 2,  # the loss and the norm
        "reduce-scatter": psi,
    }


@pytest.mark.slow
def test_finiteness_costs_scalars_only():
    """Whether all elements of a gradient are finite is asked of shards: nothing is gathered for it."""
    model = MODELS["unrolled"]
    plain, found = report(model, 1), report(model, 1, optax.apply_if_finite(optax.adamw(1e-3), 5))
    for op in ("all-gather", "reduce-scatter"):
        assert found.elements(op) == plain.elements(op)
    assert {c.elements for c in found.traffic if c.op == "all-reduce"} == {1}


@pytest.mark.slow
def test_every_gather_and_reduction_names_its_leaf():
    state = programs.abstract_state(MODELS["scanned"])
    paths = {
        f"state.params{jax.tree_util.keystr(path)}"
        for path, _ in jax.tree_util.tree_leaves_with_path(state.params)
    }
    moved = [c for c in report(MODELS["scanned"], 3).traffic if c.op != "all-reduce"]
    assert {c.leaf for c in moved} == paths


def test_a_leaf_left_full_is_accounted_for_by_name():
    def step(state, x):
        def loss_fn(params):
            return jnp.mean((x @ params["w"] + params["odd"][None]) ** 2)

        grads = jax.grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)

    state = {
        "w": jax.ShapeDtypeStruct((16, 10), jnp.float32),
        "odd": jax.ShapeDtypeStruct((10,), jnp.float32),
    }
    mesh = AbstractMesh((8,), ("data",))
    train_step = jzero.shard_train_step(
        step, stage=3, mesh=mesh, axes=jzero.Axes(min_shard_bytes=41)
    )
    found = train_step.describe(state, jax.ShapeDtypeStruct((16, 16), jnp.float32))
    assert traffic(found) == {"all-gather": 160, "all-reduce": 10, "reduce-scatter": 160}
    assert str(found).endswith("""
1 of 2 leaves stays replicated: 40 B on each device.
  smaller than Axes(min_shard_bytes=41):
       40 B  state['odd'] float32[10]""")


def recurrent_step(state, x):
    """A time loop that closes over its weights."""

    def loss_fn(w):
        def cell(h, x_t):
            return jnp.tanh(x_t + h @ w), None

        h, _ = jax.lax.scan(cell, x[:, 0], x.swapaxes(0, 1))
        return jnp.mean(h**2)

    return state - 0.1 * jax.grad(loss_fn)(state)


@pytest.mark.parametrize(
    ("stage", "gathered", "op"), [(1, 1, "reduce-scatter"), (3, 2, "reduce-scatter")]
)
def test_a_time_loop_gathers_and_reduces_its_weights_once(stage, gathered, op):
    train_step = small.shard_train_step(
        recurrent_step, stage=stage, mesh=AbstractMesh((8,), ("data",))
    )
    found = train_step.describe(
        jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.ShapeDtypeStruct((8, 100, 16), jnp.float32)
    )
    assert found.plan.reductions == "whole batch"
    assert traffic(found) == {"all-gather": gathered * 256, op: 256}


def microbatch_step(state, batches):
    """A step's own loop over microbatches."""

    def body(total, x):
        return total + jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state), None

    total, _ = jax.lax.scan(body, jnp.zeros_like(state), batches)
    return state - 0.1 * total


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, {"all-reduce": 128}),
        (1, {"all-gather": 128, "reduce-scatter": 128}),  # reduced once
        (2, {"all-gather": 128, "reduce-scatter": 5 * 128}),  # every microbatch
        (3, {"all-gather": 5 * 128, "reduce-scatter": 5 * 128}),
    ],
)
def test_a_steps_own_microbatches_follow_the_stage(stage, expected):
    train_step = small.shard_train_step(
        microbatch_step,
        stage=stage,
        mesh=AbstractMesh((8,), ("data",)),
        in_specs={"batches": jax.P(None, "data")},
    )
    found = train_step.describe(
        jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((5, 16, 8), jnp.float32)
    )
    assert traffic(found) == expected


def adversarial_step(state, x):
    """Updates a critic, with which it then judges a generator."""
    critic, generator = state

    def judged(critic, generator):
        return jnp.mean(jnp.tanh(jnp.sin(x @ generator) @ critic) ** 2)

    critic = critic - 0.1 * jax.grad(judged)(critic, generator)
    generator = generator - 0.1 * jax.grad(judged, argnums=1)(critic, generator)
    return critic, generator


def test_below_stage_3_what_a_step_has_updated_is_gathered_once():
    """For both passes of the second gradient, and for what is returned."""
    train_step = small.shard_train_step(
        adversarial_step, stage=1, mesh=AbstractMesh((8,), ("data",))
    )
    state = (jax.ShapeDtypeStruct((16, 16), jnp.float32),) * 2
    found = train_step.describe(state, jax.ShapeDtypeStruct((8, 16), jnp.float32))
    assert traffic(found) == {"all-gather": 2 * 256, "reduce-scatter": 2 * 256}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_compiled_program_has_the_same_collectives(stage):
    """Of a scanned model; XLA:CPU merges the two gathers of an unrolled one
    (docs/facts.md#xlacpu-merges-the-gathers-of-two-passes).

    Small gradients of all layers may be reduced together.
    """
    model, tx = MODELS["scanned, remat"], optax.sgd(1e-3)
    train_step = small.shard_train_step(programs.train_step, stage=stage)
    compiled = train_step.lower(programs.abstract_state(model, tx), programs.tokens()).compile()
    text = compiled.as_text()
    embedding, kernel = programs.VOCAB * programs.WIDTH, programs.WIDTH * programs.HIDDEN
    found = {
        op: [size for size in programs.compiled_elements(text, op) if size > 1]
        for op in ("all-gather", "reduce-scatter", "all-reduce")
    }
    num_layers, layers = 3, 3 * kernel
    psi, gathered = embedding + 2 * layers, {0: [], 1: [embedding, layers, layers]}
    # The embedding for both passes, and two kernels of each layer for both, each layer alone.
    both = [embedding] * found["all-gather"].count(embedding) + [kernel] * 4 * num_layers
    assert sorted(found["all-gather"]) == sorted(gathered.get(stage, both))
    assert stage < 3 or found["all-gather"].count(embedding) in (1, 2)
    assert sum(found["all-reduce"]) == (psi if stage == 0 else 0)
    assert sum(found["reduce-scatter"]) == (0 if stage == 0 else psi // 8)
    assert set(programs.compiled_collectives(text)) <= {
        "all-gather",
        "reduce-scatter",
        "all-reduce",
    }


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layer"), [
    (programs.Model(depth=2), "ScanBlock_0"), (programs.Model(depth=1, scan=False), "Block_0"),
])  # fmt: skip
def test_collectives_of_a_leaf_have_its_path_in_a_profile(model, layer):
    """In the compiled program's `op_name`s, which profiles show; a loop over layers has the stack's path."""
    train_step: Any = jzero.shard_train_step(
        programs.train_step, axes=jzero.Axes(min_shard_bytes=4096)
    )  # the embedding has half
    state = programs.abstract_state(model, optax.sgd(0.1))
    text = train_step.lower(state, programs.tokens()).compile().as_text().replace("\\'", "'")
    embedding, kernel = "['Embed_0']['embedding']", f"['{layer}']['Dense_0']['kernel']"
    for op, scope in (
        ("all-gather", f"jzero.gather[state.params{kernel}]"),
        ("reduce-scatter", f"jzero.reduce_scatter[state.params{kernel}]"),
        ("all-reduce", f"jzero.all_reduce[state.params{embedding}]"),
    ):
        lines = [line for line in text.splitlines() if f" {op}(" in line or f" {op}-start(" in line]
        assert any(scope in line.partition("op_name=")[2] for line in lines), (op, lines)


@pytest.mark.slow
def test_moments_that_are_stacked_stay_shards():
    """`jnp.stack` in an update runs on shards, as its concatenation would."""

    def step(state, x):
        w, moments = state
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        moments = jnp.stack([0.9 * moments[0] + grad, 0.99 * moments[1] + grad**2])
        return (w - moments[0] / (1 + jnp.sqrt(moments[1])), moments), loss

    state = (jnp.ones((64, 128)), jnp.zeros((2, 64, 128)))
    found = small.shard_train_step(step, stage=1).describe(state, jnp.ones((16, 64)))
    assert found.elements("all-gather") == found.elements("reduce-scatter") == 64 * 128
    assert "gathers and updates" not in str(found)
