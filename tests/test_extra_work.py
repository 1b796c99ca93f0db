"""Work that the devices do more than once: `describe` lists it, and a step warns of it once."""

import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import jzero
from small import grouped

DIM = 256
MESH = AbstractMesh((8,), ("data",))
PARAMS = {
    "up": jax.ShapeDtypeStruct((DIM, 4 * DIM), jnp.float32),
    "down": jax.ShapeDtypeStruct((4 * DIM, DIM), jnp.float32),
}


def mlp(between=lambda h: h):
    """A step of an MLP; `between` is what it does with all rows of the hidden layer."""

    def train_step(params, x):
        def loss(p):
            return jnp.mean((between(jnp.tanh(x @ p["up"])) @ p["down"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return train_step


def rows(num, *others):
    return jax.ShapeDtypeStruct((num, *(others or (DIM,))), jnp.float32)


def described(step_fn, *batch, state=PARAMS, mesh=MESH, **options):
    """What `describe` says is done more than once, and what was warned of on the way."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_step = jzero.shard_train_step(step_fn, mesh=mesh, **grouped(**options))
        report = train_step.describe(state, *batch)
    for each in caught:
        assert each.filename == __file__
    return report, [str(each.message) for each in caught]


UNEVEN = {
    "12 rows": (12, {}, 1 / 4, "rows are padded from 12 to 16 on 8 devices", "a multiple of 8."),
    "4 rows": (4, {}, 1 / 2, "rows are padded from 4 to 8 on 8 devices", "a multiple of 8."),
    "3 microbatches": (
        16, dict(accumulate=3), 1 / 3, "rows are padded from 16 to 24 on 8 devices with 3 microbatches each",
        "a multiple of 24, or microbatches=2.",
    ),
    "the nearest": (
        64, dict(accumulate=6), 1 / 3, "rows are padded from 64 to 96 on 8 devices with 6 microbatches each",
        "a multiple of 48, or microbatches=8.",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("num", "options", "share", "why", "fix"), UNEVEN.values(), ids=UNEVEN)
def test_rows_that_the_devices_do_not_divide(num, options, share, why, fix):
    report, (warning,) = described(mlp(), rows(num), **options)
    (found,) = report.to_dict()["extra_work"]
    assert found["what"] == f"x float32[{num},{DIM}]"
    # Updates of parameters are in all of the step's work, and are done for no row.
    assert 0.8 * share < found["share"] <= share
    words = " ".join(str(report).split())
    for text in (warning, words):
        assert f"x float32[{num},{DIM}]: {why}. " in text
        assert fix in text
    assert warning.startswith(
        f"shard_train_step: train_step repeats {found['share']:.0%} of its work"
    )


def test_a_batch_that_in_specs_does_not_split_over_an_axis():
    mesh = AbstractMesh((4, 2), ("data", "seq"))
    report, (warning,) = described(
        mlp(), rows(16, 32, DIM), mesh=mesh, in_specs={"x": P("data")}
    )  # fmt: skip
    (found,) = report.to_dict()["extra_work"]
    assert found["share"] > 0.1  # What the two devices along it do not share as they do the state.
    assert "x float32[16,32,256]: in_specs shards nothing over 'seq'" in warning
    assert "in_specs={'x': jax.P(('data', 'seq'))}, or axes=('data',)" in warning
    for options in (
        {"in_specs": {"x": P(("data", "seq"))}},
        {"in_specs": {"x": P("data", "seq")}},
        {"axis_names": ("data",)},
    ):
        report, caught = described(mlp(), rows(16, 32, DIM), mesh=mesh, **options)
        assert report.to_dict()["extra_work"] == caught == []


def over_rows(h):
    """A factor of the matrix of all pairs of rows, which no rule splits."""
    kernel = h @ h.T + len(h) * jnp.eye(len(h))
    return jnp.linalg.cholesky(kernel) @ h


def by_rank(h):
    """Scores, each over its rank in the batch."""
    scores = h.mean(1)
    ranks = jnp.argsort(jnp.argsort(scores))
    return h / (1 + ranks[:, None])


def trained_row_by_row(params, x):
    def body(params, row):
        def loss(p):
            return jnp.mean((jnp.tanh(row @ p["up"]) @ p["down"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return jax.lax.scan(body, params, x)


WHOLE = {
    "a factorization of pairs": (mlp(over_rows), rows(512), "cholesky"),
    # A model of 4 numbers, whose step does little beside.
    "ranks": (mlp(by_rank), rows(2**17, 2), "sort"),
    "iterations that depend on each other": (trained_row_by_row, rows(64, 8, DIM), "dot_general"),
}
SMALL = {"up": jax.ShapeDtypeStruct((2, 2), jnp.float32)}
SMALL["down"] = SMALL["up"]


@pytest.mark.parametrize(("step_fn", "x", "operation"), WHOLE.values(), ids=WHOLE)
def test_what_every_device_computes_whole(step_fn, x, operation):
    state = SMALL if x.shape[-1] == 2 else PARAMS
    report, (warning,) = described(step_fn, x, state=state)
    (found,) = report.to_dict()["extra_work"]
    assert found["share"] > 0.05
    line = rf"{operation} at \S*test_extra_work\.py:\d+:?\d* \(.*?\) \(\d+%\)"
    assert re.search(line, warning), warning
    assert "every device computes all rows" in warning
    # Of a loop alone: elsewhere dim 1 is no dim of rows.
    in_loop = operation == "dot_general"
    assert ("in_specs={'x': jax.P(None, 'data')}" in warning) == in_loop
    words = " ".join(str(report).split())
    assert f"Done more than once, {found['share']:.0%}" in words
    # The operations that move these rows are listed beside it, with the rows and their lines.
    moves = report.to_dict()["movements"]
    assert any("test_extra_work.py" in m["where"] for m in moves)
    assert all(f"of {m['value']} {m['operation']}" in words for m in moves)


def accumulates(num, strided=False):
    """A step with a loop of its own that adds up the gradients of `num` slices of the rows."""

    def step(params, x):
        if strided:
            slices = x.reshape(-1, num, *x.shape[1:]).swapaxes(0, 1)
        else:
            slices = x.reshape(num, -1, *x.shape[1:])

        def add(total, rows):
            _, grads = jax.value_and_grad(
                lambda p: jnp.mean((jnp.tanh(rows @ p["up"]) @ p["down"]) ** 2)
            )(params)
            return jax.tree.map(jnp.add, total, grads), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), slices)
        return jax.tree.map(lambda p, g: p - 0.1 * g / num, params, total)

    return step


def test_a_loop_over_consecutive_slices_is_told_of_strided_ones():
    """Each consecutive slice is on few devices; all have rows of each slice that is one row in four."""
    report, (warning,) = described(accumulates(4), rows(64), accumulate=2)
    advice = "one row in 4: x.reshape(-1, 4, *x.shape[1:]).swapaxes(0, 1)"
    assert advice in warning
    assert advice in " ".join(str(report).split())
    assert report.movements
    report, caught = described(accumulates(4, strided=True), rows(64), accumulate=2)
    assert (report.movements, report.extra_work, caught) == ((), (), [])
    # A slice with fewer rows than there are devices has none of some of them.
    report, _ = described(accumulates(16), rows(64), accumulate=4)
    assert "swapaxes" not in str(report)


def test_the_rest_of_an_epoch_is_no_matter():
    """After a larger batch a smaller one, which the devices do not divide, is listed alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_step = jzero.shard_train_step(mlp(), mesh=MESH)
        train_step.plan(PARAMS, rows(16))
        assert train_step.describe(PARAMS, rows(12)).to_dict()["extra_work"]
    with pytest.warns(UserWarning, match="rows are padded from 20 to 24"):
        train_step.plan(PARAMS, rows(20))


def test_an_evaluation_warns_in_its_own_name():
    eval_step = jzero.shard_eval_step(
        lambda params, x: jnp.mean((x @ params["up"]) ** 2),
        like=jzero.shard_train_step(mlp(), mesh=MESH),
    )
    with pytest.warns(
        UserWarning, match="shard_eval_step: .* rows are padded from 12 to 16"
    ) as caught:
        eval_step.describe(PARAMS, rows(12, 64, DIM))
    assert len(caught) == 1


# -- no warning where it costs nothing, or where each device does its part ----------------------------


@pytest.mark.parametrize("num", [1001, 4096 + 8])
def test_copies_of_less_than_a_percent_are_no_matter(num):
    report, caught = described(mlp(), rows(num))
    assert report.to_dict()["extra_work"] == caught == []


def test_little_work_is_listed_and_not_warned_of():
    report, caught = described(mlp(), rows(12, 2), state=SMALL)
    assert report.to_dict()["extra_work"][0]["flops"] < 1e6
    assert caught == []
