"""What the optimizer program of an offloaded step reads of forward and backward, each value once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
import small
from jzero.sharding.analysis import _traffic
from test_offload import BATCH, SHAPES, make_step, new_state, on, types

ROOM = 2**20
CLIP = optax.clip_by_global_norm(1.0)
BF16, F32 = jnp.bfloat16, jnp.float32


def masters(*txs: Any) -> optax.GradientTransformationExtraArgs:
    return jzero.master_weights(optax.chain(*txs))


def clip_by_dot_products() -> optax.GradientTransformation:
    """Clipping by a norm for which each gradient is needed whole."""

    def scale(grads, params=None):
        norm = jnp.sqrt(sum((jnp.vdot(g, g) for g in jax.tree.leaves(grads)), jnp.zeros(())))
        return jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)

    return optax.stateless(scale)


WITH_MASTERS = {
    "adamw, clipped": masters(CLIP, optax.adamw(1e-2)),
    "adamw, clipped outside": optax.chain(CLIP, masters(optax.adamw(1e-2))),
    "adamw, masked decay": masters(CLIP, optax.adamw(1e-2, mask=lambda p: [x.ndim > 1 for x in p])),
    "lion, clipped": masters(CLIP, optax.lion(1e-3)),
    "momentum, decay": masters(optax.add_decayed_weights(0.01), optax.sgd(1e-2, momentum=0.9)),
    "not finite": masters(optax.apply_if_finite(optax.chain(CLIP, optax.adamw(1e-2)), 5)),
    "adamw, clipped by dot products": masters(clip_by_dot_products(), optax.adamw(1e-2)),
    "lamb, clipped": masters(CLIP, optax.lamb(1e-2)),
}


def passed(train_step, *arguments) -> tuple[list[str], list[str]]:
    """Types of what the forward-backward program returns, and of the leaves on devices that buckets read."""
    step = train_step._programs.of(train_step._programs.bind(arguments, {})).step
    leaves, update = step.plan.leaves, step.plan.update
    inputs = {v: i for i, v in enumerate(step.invars)}
    reads = {var for subgraph in update.subgraphs for var in subgraph.reads}
    here = [v for v in reads if v in inputs and leaves[inputs[v]].tier == "device"]
    assert list(step.grad.gives) == list(dict.fromkeys(step.grad.gives))
    assert set(step.grad.gives) <= reads
    return types(large(step.grad.gives)), types(large(here))


def large(variables):
    return [var for var in variables if var.aval.size > 1]


def like_parameters(dtype) -> list[str]:
    return sorted(f"{jnp.dtype(dtype)}{list(shape)}" for shape in SHAPES)


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("options", [dict(stage=3), dict(stage=2, accumulate=2)], ids=str)
@pytest.mark.parametrize("name", WITH_MASTERS)
def test_two_bytes_a_parameter_cross_with_masters(name, options):
    """And no parameter: the update makes it from the master, and does not read the old one."""
    tx = WITH_MASTERS[name]
    assert passed(on(4, ROOM, tx, **options), new_state(tx, BF16), BATCH) == (
        like_parameters(BF16), []
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(1e-2),
        optax.chain(CLIP, optax.adamw(1e-2)),
        optax.chain(CLIP, optax.adamw(1e-2, mu_dtype=F32)),
        optax.chain(optax.add_decayed_weights(0.01), CLIP, optax.sgd(1e-2, momentum=0.9)),
    ],
)
def test_gradients_and_parameters_cross_as_they_are(tx, dtype):
    """Unscaled: of two values of one size, the one nearer to its reduction; parameters are read anyhow."""
    train_step, state = on(4, ROOM, tx), new_state(tx, dtype)
    assert passed(train_step, state, BATCH) == (like_parameters(dtype), like_parameters(dtype))


def mixed_step(tx, cast=lambda w: w.astype(BF16)):
    """float32 parameters that the model casts."""

    def step_fn(state, x):
        w, opt_state = state
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((x.astype(BF16) @ cast(w)) ** 2))(w)
        updates, opt_state = tx.update(grads, opt_state, w)
        return (optax.apply_updates(w, updates), opt_state), loss

    return step_fn


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_cross_in_the_dtype_of_the_compute(accumulate):
    tx, w = optax.chain(CLIP, optax.adamw(1e-2)), jnp.ones((64, 48))
    train_step = small.shard_train_step(
        mixed_step(tx), memory=jzero.PinnedHost(ROOM), microbatches=accumulate
    )
    found = passed(train_step, (w, tx.init(w)), BATCH.astype(BF16))
    assert found == (["bfloat16[64, 48]"], ["float32[64, 48]"])


@pytest.mark.slow
def test_what_moves_elements_is_not_computed_twice():
    """The update must go on treating every element alike, or no leaf could be cut into slices."""
    tx, w = jzero.master_weights(optax.chain(CLIP, optax.adam(1e-2))), jnp.ones((64, 64), BF16)
    train_step = small.shard_train_step(
        mixed_step(tx, lambda w: w.T), memory=jzero.PinnedHost(1536)
    )
    assert passed(train_step, (w, tx.init(w)), BATCH.astype(BF16)) == (["bfloat16[64, 64]"], [])
    assert max(bucket.parts for bucket in train_step.plan((w, tx.init(w)), BATCH).buckets) > 1


@pytest.mark.slow
def test_a_small_value_crosses_before_it_is_repeated():
    """Adaptive clipping of each row: its norm crosses, not the norm for every element."""
    tx = masters(optax.adaptive_grad_clip(0.1), optax.adam(1e-2))
    gives, _ = passed(on(4, ROOM, tx), new_state(tx, BF16), BATCH)
    assert [t for t in gives if t.startswith("bfloat16")] == like_parameters(BF16)
    assert [t for t in gives if t.startswith("float32")] == [
        "float32[1, 16]", "float32[1, 48]", "float32[1, 51]"
    ]  # fmt: skip


def test_sums_cross_as_sums():
    """Of g1 + g2, which both are reduced, and of g and a parameter that nothing else reads."""

    def step_fn(state, x):
        a, b, mean, decayed = state
        ga, gb = jax.grad(lambda a, b: jnp.mean((x @ a) ** 2 + (x @ b) ** 3), (0, 1))(a, b)
        mean = 0.9 * mean + (ga / jnp.sum(gb**2) + gb)
        return (a - 0.1 * ga, b - 0.1 * gb, mean, 0.9 * decayed + (0.1 * a + ga)), None

    w = jnp.ones((64, 48))
    train_step = small.shard_train_step(step_fn, memory=jzero.PinnedHost(ROOM))
    assert passed(train_step, (w, w, w, w), BATCH) == (["float32[64, 48]"] * 2, [])


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    dict(stage=1), dict(stage=3, accumulate=2, reduce="once"), dict(stage=3, reduce_dtype=F32),
    dict(stage=3, accumulate=2, accumulate_dtype=BF16),
], ids=str)  # fmt: skip
@pytest.mark.parametrize(("tx", "dtype"), [
    (WITH_MASTERS["not finite"], BF16), (WITH_MASTERS["adamw, clipped by dot products"], BF16),
    (optax.chain(CLIP, optax.adamw(1e-2)), F32),
], ids=["not finite", "dot products", "float32"])  # fmt: skip
def test_what_is_computed_twice_is_reduced_once(tx, dtype, options):
    """In the forward-backward program; buckets gather nothing but new parameters. And the same training."""
    step_fn, mesh = make_step(tx), small.mesh(data=4)
    plain = small.shard_train_step(step_fn, mesh=mesh, **options)
    offloaded = on(4, ROOM, tx, **options)
    state, wanted = new_state(tx, dtype), new_state(tx, dtype)
    traffic = offloaded.describe(state, BATCH).traffic
    reduced = [c.elements for c in traffic if c.op == "reduce-scatter"]
    assert sorted(reduced) == [52, 51 * 16, 48 * 51, 64 * 48]
    step = offloaded._programs.of(offloaded._programs.bind((state, BATCH), {})).step
    jaxprs = [jax.make_jaxpr(bucket.run)(*bucket.avals()) for bucket in step.buckets]
    moved = [c for jaxpr in jaxprs for c in _traffic.collectives(jaxpr) if c.elements > 1]
    assert [c.op for c in moved] == ["all-gather"] * (len(SHAPES) if options["stage"] < 3 else 0)
    for _ in range(3):
        state, metrics = offloaded(state, BATCH)
        wanted, wanted_metrics = plain(wanted, BATCH)
    # Sums in float32 are rounded to the gradient's dtype before they cross. Where microbatches are added up
    # in bfloat16, a last bit of a float32 sum decides to which of two numbers it is rounded.
    is_rounded = BF16 in (dtype, options.get("accumulate_dtype"))
    rtol, atol = (0.02, 2e-3) if is_rounded else (2e-5, 1e-7)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        x, y = (np.asarray(leaf).astype(np.float32) for leaf in (x, y))
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)
    np.testing.assert_allclose(metrics["loss"], wanted_metrics["loss"], rtol=rtol)


@pytest.mark.parametrize("tx", [optax.adam(1e-2), optax.chain(CLIP, optax.adam(1e-2))])
def test_gradients_are_reduced_in_the_order_in_which_they_were_made(tx):
    """Whoever reads them: some equation of the forward-backward program, or the optimizer program alone."""
    report = on(4, ROOM, tx).describe(new_state(tx), BATCH)
    sizes = [c.elements for c in report.traffic if c.op == "reduce-scatter" and c.elements > 100]
    assert sizes == [51 * 16, 48 * 51, 64 * 48]
