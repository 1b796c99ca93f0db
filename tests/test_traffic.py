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


@pytest.mark.parametrize("model", [programs.Model(), programs.Model(scan=False, remat=True)])
def test_elements_of_every_stage(model):
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
        assert traffic(report(model, stage)) == elements, stage
        assert traffic(report(model, stage, num_devices=1)) == {}


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


@pytest.mark.parametrize(("stage", "gathered"), [(1, 1), (3, 2)])
def test_a_time_loop_gathers_and_reduces_its_weights_once(stage, gathered):
    train_step = small.shard_train_step(
        recurrent_step, stage=stage, mesh=AbstractMesh((8,), ("data",))
    )
    found = train_step.describe(
        jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.ShapeDtypeStruct((8, 100, 16), jnp.float32)
    )
    assert found.plan.reductions == "whole batch"
    assert traffic(found) == {"all-gather": gathered * 256, "reduce-scatter": 256}


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
@pytest.mark.parametrize("stage", [1, 3])
def test_the_compiled_program_has_the_same_collectives(stage):
    """Of a scanned model; XLA:CPU merges the two gathers of an unrolled one
    (docs/facts.md#xlacpu-merges-the-gathers-of-two-passes).

    Small gradients of all layers may be reduced together.
    """
    model, tx = programs.Model(remat=True), optax.sgd(1e-3)
    train_step = small.shard_train_step(programs.train_step, stage=stage)
    compiled = train_step.lower(programs.abstract_state(model, tx), programs.tokens()).compile()
    text = compiled.as_text()
    embedding, kernel = programs.VOCAB * programs.WIDTH, programs.WIDTH * programs.HIDDEN
    found = {
        op: [size for size in programs.compiled_elements(text, op) if size > 1]
        for op in ("all-gather", "reduce-scatter", "all-reduce")
    }
    num_layers, layers = 3, 3 * kernel
    psi, gathered = embedding + 2 * layers, {1: [embedding, layers, layers]}
    # The embedding for both passes, and two kernels of each layer for both, each layer alone.
    both = [embedding] * found["all-gather"].count(embedding) + [kernel] * 4 * num_layers
    assert sorted(found["all-gather"]) == sorted(gathered.get(stage, both))
    assert stage < 3 or found["all-gather"].count(embedding) in (1, 2)
    assert found["all-reduce"] == []
    assert sum(found["reduce-scatter"]) == psi // 8
    assert set(programs.compiled_collectives(text)) <= {*found}


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
