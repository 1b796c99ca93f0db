"""Several dims of the batch at once: rows and tokens, against one device with all of them."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import jzero
import small
import token_steps
from jzero.segments._partitioned import Partitioned
from jzero.sharding.analysis import _residuals
from jzero.sharding.partition._movement import is_of_rows
from partitioned import worst
from test_partition_costs import flops
from token_steps import STEPS, TRANSFORMERS

# The data axes of a mesh; all but "context" split rows.
MESHES = {
    "8x1": {"data": 8, "context": 1},
    "4x2": {"data": 4, "context": 2},
    "2x4": {"data": 2, "context": 4},
    "1x8": {"data": 1, "context": 8},
    "2x2": {"data": 2, "context": 2},
    "2x2x2": {"node": 2, "data": 2, "context": 2},
}
NUM_STEPS = 3


@pytest.fixture(autouse=True)
def _partitions(monkeypatch):
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        yield


def specs_on(mesh: str, specs: Any) -> Any:
    """The specs of a step's batch, with the axes of a mesh for its rows."""
    rows = tuple(axis for axis in MESHES[mesh] if axis != "context")
    names = {"rows": rows if len(rows) > 1 else rows[0], "context": "context", None: None}
    is_spec = lambda x: isinstance(x, P)  # noqa: E731
    return jax.tree.map(lambda spec: P(*(names[x] for x in spec)), specs, is_leaf=is_spec)


def sharded(name: str, mesh: str, is_abstract: bool = False, **options: Any) -> Any:
    _, step, _, specs = STEPS[name]()
    on: Any = small.auto_mesh(**MESHES[mesh])
    if is_abstract:
        on = on.abstract_mesh
    return small.shard_train_step(step, mesh=on, in_specs={1: specs_on(mesh, specs)}, **options)


def trained(step: Any, state: Any, batch: Any) -> tuple[Any, list[Any]]:
    """The state after some steps, and what each of them returns."""
    metrics = []
    for _ in range(NUM_STEPS):
        state, more = step(state, batch)
        metrics += jax.tree.leaves(more)
    return state, metrics


@functools.cache
def on_one_device(name: str) -> list[Any]:
    init, step, batch, _ = STEPS[name]()
    state, metrics = trained(jax.jit(step), init(), batch)
    return [np.asarray(x) for x in [*jax.tree.leaves(state), *metrics]]


def check(name: str, mesh: str, **options: Any) -> Any:
    """Trains a step on a mesh as on one device; returns the sharded step."""
    init, _, batch, _ = STEPS[name]()
    train_step = sharded(name, mesh, **options)
    state, metrics = trained(train_step, train_step.init(init), batch)
    got = [np.asarray(x) for x in [*jax.tree.leaves(train_step.unshard(state)), *metrics]]
    assert worst(got, on_one_device(name)) < 1e-9
    return train_step


def program_of(train_step: Any, name: str) -> Partitioned:
    init, _, batch, _ = STEPS[name]()
    call = train_step._programs.bind((jax.eval_shape(init), batch), {})
    found = train_step._programs.of(call).step.found
    assert isinstance(found, Partitioned), found
    return found


def moved_rows(found: Partitioned) -> dict[str, set[tuple[int, ...]]]:
    """The shapes of what a program moves of activations, by the kind of collective."""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for move in filter(is_of_rows, found.program.moves):
        sizes = re.findall(r"\d+", move.value.partition("[")[2])
        if len(sizes) > 2:
            shapes.setdefault(move.kind, set()).add(tuple(map(int, sizes)))
    return shapes


# Each step on two meshes, and each mesh with some of the steps.
PAIRS = [
    (name, mesh)
    for i, name in enumerate(STEPS)
    for j, mesh in enumerate(MESHES)
    if (j - i) % 3 == 0
]


@pytest.mark.slow(but=["recurrent-2x2"])
@pytest.mark.parametrize(("name", "mesh"), PAIRS)
def test_trains_as_on_one_device(name, mesh):
    check(name, mesh)


@pytest.mark.slow(but=["gpt_that_shifts-4x2"])
@pytest.mark.parametrize("mesh", ["4x2", "2x4"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_every_device_does_its_share(name, mesh):
    init, step, batch, _ = STEPS[name]()
    found = program_of(sharded(name, mesh, is_abstract=True), name)
    whole = flops(jax.make_jaxpr(step)(jax.eval_shape(init), batch).jaxpr)
    assert flops(found.program.jaxpr) * 8 / whole < 1.2


@pytest.mark.slow(but=["gpt_that_shifts-2x2-options2", "gpt_without_the_last-2x2-options6"])
@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("gpt", "2x2", {"accumulate": 2}),
        ("mlp", "4x2", {"accumulate": 2, "reduce": "each"}),
        ("gpt_that_shifts", "2x2", {"accumulate": 4, "stage": 1}),
        ("gpt", "2x2", {"gather": "keep"}),
        ("gpt", "2x2", {"stage": 0}),
        ("mlp", "2x2", {"tile_bytes": 2000}),
        ("gpt_without_the_last", "2x2", {"param_axes": "context"}),
    ],
)
def test_options(name, mesh, options):
    check(name, mesh, **options)


@pytest.mark.slow
def test_sums_over_tokens_are_of_microbatches():
    """As many microbatches as devices have rows: a sum over tokens must not go through those of others."""

    def step(w, batch):
        def loss_fn(w):
            h = batch @ w
            return ((h + h.sum(1, keepdims=True)) ** 2).mean()

        loss, grad = jax.value_and_grad(loss_fn)(w)
        return w - 0.1 * grad, loss

    specs = {"batch": P("data", "context")}
    train_step = small.shard_train_step(
        step, mesh=small.mesh(data=4, context=2), in_specs=specs, microbatches=4
    )
    batch = np.random.default_rng(0).normal(size=(16, 16, 8))
    found, expected = train_step(jnp.eye(8), batch), jax.jit(step)(jnp.eye(8), batch)
    for have, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-12)


@pytest.mark.slow
def test_keys_and_values_are_gathered_or_heads_exchanged():
    """Whichever moves less: of two devices along the tokens, and of four."""
    each = (token_steps.B, token_steps.S, token_steps.HEADS, token_steps.EACH)
    found = program_of(sharded("gpt", "4x2", is_abstract=True), "gpt")
    assert moved_rows(found) == {"gather": {each}}
    # dK and dV come back in shards.
    scattered = [m for m in found.program.moves if m.kind == "scatter" and m.axes == ("context",)]
    assert [m.times for m in scattered if m.value.count(",") == 3] == [2, 2]  # of two layers
    exchanged = moved_rows(program_of(sharded("gpt", "2x4", is_abstract=True), "gpt"))
    assert set(exchanged) == {"exchange"}
    assert each in exchanged["exchange"]


def test_nothing_moves_of_tokens_that_stand_alone():
    assert moved_rows(program_of(sharded("mlp", "2x4", is_abstract=True), "mlp")) == {}


def test_describe_says_what_is_split_and_moved():
    init, _, batch, _ = STEPS["gpt"]()
    report = sharded("gpt", "4x2", is_abstract=True).describe(jax.eval_shape(init), batch)
    text = " ".join(str(report).split())
    assert "sharded along dims 0 and 1" in text
    assert "dot_general at" in text
    assert "it needs rows of other devices" in text
    assert report.to_dict()["extra_work"] == []
    assert report.arguments[0][1] == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(16, 13), (5, 3)])
def test_what_the_devices_do_not_divide(shape):
    x = jnp.asarray(np.random.RandomState(0).randn(*shape, 8))
    w = jnp.asarray(np.random.RandomState(1).randn(8, 8))

    def step(w, x):
        def loss(w):
            h = jnp.tanh(x @ w)
            a = jax.nn.softmax(jnp.einsum("bsd,btd->bst", h, h), -1)
            return (jnp.einsum("bst,btd->bsd", a, h) ** 2).mean()

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * grad, (value, jnp.tanh(x).sum(-1))

    expected = jax.jit(step)(w, x)
    mesh = small.auto_mesh(data=4, context=2)
    specs = {"x": P("data", "context")}
    train_step = small.shard_train_step(step, mesh=mesh, in_specs=specs)
    state, outs = train_step(train_step.shard(jnp.copy(w)), x)
    got = train_step.unshard(state), outs
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_arguments_without_a_spec_have_rows_as_the_others():
    """What `in_specs` does not name is split along dim 0, over the axes that split rows."""

    def step(w, tokens, weights, key):
        noise = jax.random.normal(key, weights.shape, weights.dtype)
        grad = jax.grad(lambda w: ((tokens @ w).sum((1, 2)) * (weights + noise)).mean())(w)
        return w - grad, tokens.sum((1, 2)) * weights

    mesh = small.auto_mesh(data=2, context=4)
    given = jnp.ones((4, 8, 2)), jnp.arange(4.0), jax.random.key(0)
    specs = {"tokens": P("data", "context")}
    train_step = small.shard_train_step(step, mesh=mesh, in_specs=specs)
    assert train_step.plan(jnp.ones((2, 8)), *given).arguments == (
        P(),
        P("data", "context"),
        P("data"),
    )  # of the key, tokens and weights
    state, outs = train_step(train_step.shard(jnp.ones((2, 8))), *given)
    expected = jax.jit(step)(jnp.ones((2, 8)), *given)
    for a, b in zip((train_step.unshard(state), outs), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)


PARAMS = {"offload_params": jzero.PinnedHost(device_bytes=2**18)}
ALL = PARAMS | {"offload": jzero.HostCPU(), "offload_activations": jzero.PinnedHost()}


@pytest.mark.parametrize(
    ("name", "mesh", "options", "moved"),
    [
        ("gpt", "2x4", PARAMS, {"parameter"}),
        ("mlp", "4x2", ALL, {"parameter"}),
        pytest.param("gpt", "2x4", ALL, {"parameter", "activation"}, marks=pytest.mark.slow),
    ],
)
def test_where_state_rests_on_hosts(name, mesh, options, moved, monkeypatch):
    monkeypatch.setattr(_residuals, "LEAST_BYTES", 1)
    train_step = check(name, mesh, **options)
    init, _, batch, _ = STEPS[name]()
    report = train_step.describe(jax.eval_shape(init), batch)
    assert not report.extra_work
    assert moved <= {x.what for x in report.transfers}


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"gather_dtype": jnp.int8}, "gather_dtype"),
        ({"reduce_dtype": jnp.int8}, "a quantized reduce_dtype"),
    ],
)
def test_refused_by_name(options, found):
    init, _, batch, _ = STEPS["mlp"]()
    rule = f"{found}, where in_specs shards several dims of b.*Several dims can be sharded.*Drop {found}, or"
    with pytest.raises(jzero.StepError, match=rule):
        sharded("mlp", "4x2", is_abstract=True, **options).plan(jax.eval_shape(init), batch)


def test_the_refusal_names_the_argument_of_which_several_dims_are_sharded():
    def step(w, a, b):
        return w - jax.grad(lambda w: jnp.mean((b @ w) ** 2) + 0 * a.sum())(w)

    train_step = jzero.shard_train_step(
        step, mesh=jax.make_mesh((2, 4), ("data", "context")), comm=jzero.Comm(gather_dtype=jnp.int8),
        in_specs={"a": P(None, "data"), "b": P("data", "context")},
    )  # fmt: skip
    leaves = [jax.ShapeDtypeStruct((n, 8), jnp.float32) for n in (8, 3, 8)]
    with pytest.raises(jzero.StepError, match=r"shards several dims of b float32\[8,8\]"):
        train_step.plan(*leaves)
