"""Embeddings in which passes only look up rows: rows are exchanged, and the table is never whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

import jzero
import small
from jzero.testing import Tolerance, assert_same_training

VOCABULARY, WIDTH, BATCH, TOKENS = 512, 32, 16, 4


def once(p, tokens):
    return p["table"][tokens]


def twice(p, tokens):
    """From the front, and, of other tokens, with rows of NaN where there is none."""
    return p["table"][tokens] + jnp.take(p["table"], (tokens * 7) % VOCABULARY, axis=0)


def recomputed(p, tokens):
    return jax.checkpoint(lambda p: jnp.tanh(p["table"][tokens] @ p["w"]))(p)


def clipped(p, tokens):
    return jnp.take(p["table"], tokens * 3, axis=0, mode="clip")


def in_bfloat16(p, tokens):
    return p["table"].astype(jnp.bfloat16)[tokens].astype(p["table"].dtype)


def in_two_dtypes(p, tokens):
    return once(p, tokens) + in_bfloat16(p, tokens + 1)


def tied(p, tokens):
    return p["table"][tokens] + jnp.tanh(p["table"][tokens] @ p["table"].T) @ p["table"]


LOOK_UPS = {
    "once": once, "twice": twice, "recomputed": recomputed, "clipped": clipped, "in bfloat16": in_bfloat16,
    "in two dtypes": in_two_dtypes,
}  # fmt: skip


def train_step(look_up, tx, state, batch):
    params, opt_state = state

    def loss(p):
        logits = jnp.tanh(look_up(p, batch["tokens"]) @ p["w"]) @ p["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value


def params_of(vocabulary=VOCABULARY, width=WIDTH):
    table, w, head = jax.random.split(jax.random.key(0), 3)
    return {
        "table": jax.random.normal(table, (vocabulary, width)),
        "w": jax.random.normal(w, (width, width)) / 8,
        "head": jax.random.normal(head, (width, VOCABULARY)) / 8,
    }


def batches(steps=3):
    rng = np.random.default_rng(0)
    shape = BATCH, TOKENS
    return [
        {
            "tokens": rng.integers(-3, VOCABULARY, shape),
            "labels": rng.integers(0, VOCABULARY, shape),
        }
        for _ in range(steps)
    ]


def moved(look_up, vocabulary=VOCABULARY, width=WIDTH, **options):
    """Elements of the table that are gathered and reduced, and of rows that are exchanged."""
    tx = optax.adamw(1e-2)
    mesh = AbstractMesh((8,), ("data",))
    step = small.shard_train_step(functools.partial(train_step, look_up, tx), mesh=mesh, **options)
    params = jax.eval_shape(functools.partial(params_of, vocabulary, width))
    report = step.describe((params, jax.eval_shape(tx.init, params)), batches()[0])
    found = [c for c in report.traffic if "table" in c.leaf and not c.dtype.startswith("int")]
    return {op: sum(c.total_elements for c in found if c.op == op) for op in {c.op for c in found}}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOK_UPS)
def test_trains_the_same(name):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    step = functools.partial(train_step, LOOK_UPS[name], tx)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params_of())
        limit = 1e-2 if "in " in name else 1e-9
        assert_same_training(
            step, lambda: (params, tx.init(params)), batches(), stage=3,
            tolerance=Tolerance(limit, limit),
        )  # fmt: skip


def test_rows_travel_and_are_added_up_in_other_dtypes():
    tx = optax.sgd(1e-2)
    step = functools.partial(train_step, once, tx)
    with jax.enable_x64(True):
        assert_same_training(
            step,
            lambda: (params_of(), tx.init(params_of())),
            batches(),
            comm=jzero.Comm(reduce_dtype=jnp.bfloat16),
            tolerance=Tolerance(1e-2, 1e-2),
        )
    assert moved(in_two_dtypes, stage=3) == {"all-to-all": 4 * ROWS}


@pytest.mark.slow
def test_a_token_that_all_rows_have_is_added_up_in_32_bits():
    """In bfloat16, 1 more than 256 is 256."""

    def step(table, tokens):
        grads = jax.grad(lambda table: table[tokens].astype(jnp.float32).sum())(table)
        return grads, tokens.sum()

    sharded = small.shard_train_step(step, stage=3)
    table = sharded.shard(jnp.ones((4096, 8), jnp.bfloat16), jnp.zeros(1024, jnp.int32))
    assert sharded(table, jnp.zeros(1024, jnp.int32))[0][0, 0] == 1024


ROWS = BATCH // 8 * TOKENS * WIDTH


def test_what_moves_is_rows():
    assert moved(once, stage=3) == {"all-to-all": 2 * ROWS}
    # Both gradients are added to one table of zeros before they are exchanged.
    assert moved(twice, stage=3) == {"all-to-all": 3 * ROWS}
    assert moved(recomputed, stage=3) == {"all-to-all": 3 * ROWS}
    table = VOCABULARY * WIDTH
    assert moved(once, stage=2) == {"all-gather": table, "reduce-scatter": table}
    assert moved(once, stage=3, accumulate=2) == {"all-to-all": 2 * ROWS}


def test_a_table_that_a_product_reads_is_gathered():
    table = VOCABULARY * WIDTH
    assert moved(tied, stage=3) == {"all-gather": 2 * table, "reduce-scatter": table}


def test_a_small_table_is_gathered():
    """Rows of it would be as much."""
    assert moved(once, vocabulary=4, stage=3).keys() == {"all-gather", "reduce-scatter"}
    # As is one whose columns the devices do not divide.
    assert moved(once, width=36, stage=3).keys() == {"all-gather", "reduce-scatter"}
