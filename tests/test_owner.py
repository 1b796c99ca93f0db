"""Updates that need matrices whole: each matrix is updated by one device, and every leaf is as on one."""

import collections
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import jzero
import small
from jzero.testing import Tolerance, assert_same_training
from small import grouped

pytestmark = pytest.mark.usefixtures("optax_promotions")

Params = dict[str, Any]
Optimizer = Callable[[Params], optax.GradientTransformation]
# Newton-Schulz and inverse roots amplify what sums in another order change.
ROUNDED = Tolerance(rtol=2e-4, leaf_rtol=2e-4)
COARSE = Tolerance(rtol=5e-2, leaf_rtol=3e-2)  # bfloat16


def mesh_of(*sizes: int, names: tuple[str, ...] = ("data",)) -> jax.sharding.Mesh:
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, names, devices=devices)


def separate(num: int, *shape: int, dtype: Any = jnp.float32) -> Params:
    """`num` matrices, each a leaf."""
    keys = jax.random.split(jax.random.key(0), num)
    return {f"w{i:02}": jax.random.normal(key, shape, dtype) for i, key in enumerate(keys)}


def stacked(num: int, *shape: int, dtype: Any = jnp.float32) -> Params:
    """`num` matrices in one leaf."""
    return {"w": jax.random.normal(jax.random.key(0), (num, *shape), dtype)}


BATCHES = [jax.random.normal(jax.random.key(i), (16, 8)) for i in range(1, 4)]


def make_step(optimizer: Optimizer, num_frozen: int = 0) -> Callable[..., Any]:
    """A step whose gradients depend on every row of the batch, and cost little."""

    def step(state: Any, batch: jax.Array) -> Any:
        params, opt_state = state

        def loss_fn(params: Params) -> jax.Array:
            scale = jnp.tanh(batch).sum(axis=1)  # one number for each row
            leaves = list(params.values())
            fits = [jnp.sum(jnp.sin(w.astype(jnp.float32) + i)) for i, w in enumerate(leaves)]
            return jnp.mean(scale * scale) * sum(fits) / 8

        loss, grads = jax.value_and_grad(loss_fn)(params)
        tx = optimizer(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    return step


def state_of(params: Params, optimizer: Optimizer) -> Any:
    return params, optimizer(params).init(params)


def muon(params: Params) -> optax.GradientTransformation:
    """optax's, with weight decay; the last two dims of a leaf are its matrices."""
    numbers = jax.tree.map(
        lambda w: (
            optax.contrib.MuonDimensionNumbers(w.ndim - 2, w.ndim - 1) if w.ndim > 1 else None
        ),
        params,
    )
    return optax.contrib.muon(1e-2, weight_decay=1e-2, muon_weight_dimension_numbers=numbers)


def by_matrix(
    init: Callable[[jax.Array], Any], update: Callable[..., tuple[jax.Array, Any]]
) -> optax.GradientTransformation:
    """An optimizer of one matrix, mapped over the dims before the last two; the step counts itself."""

    def mapped(fn: Callable[..., Any], w: jax.Array) -> Callable[..., Any]:
        for _ in range(w.ndim - 2):
            fn = jax.vmap(fn, in_axes=(0, 0, None))
        return fn

    def init_fn(params: Params) -> Any:
        states = {k: mapped(lambda w, _, __: init(w), w)(w, w, 0) for k, w in params.items()}
        return {"count": jnp.zeros((), jnp.int32), "of": states}

    def update_fn(grads: Params, state: Any, params: Any = None) -> Any:
        done = {k: mapped(update, g)(g, state["of"][k], state["count"]) for k, g in grads.items()}
        states = {k: new for k, (_, new) in done.items()}
        steps = {k: -0.01 * u for k, (u, _) in done.items()}
        return steps, {"count": state["count"] + 1, "of": states}

    return optax.GradientTransformation(init_fn, update_fn)


def shampoo(params: Params) -> optax.GradientTransformation:
    """Gradients between inverse fourth roots of sums of their squares, by eigh (Gupta et al., 2018)."""

    def root(x: jax.Array) -> jax.Array:
        values, vectors = jnp.linalg.eigh(x + 1e-2 * jnp.trace(x) * jnp.eye(x.shape[0]))
        return (vectors * jnp.maximum(values, 1e-6) ** -0.25) @ vectors.T

    def init(w: jax.Array) -> Any:
        return {"left": jnp.eye(w.shape[0]), "right": jnp.eye(w.shape[1])}

    def update(g: jax.Array, state: Any, count: jax.Array) -> Any:
        left, right = state["left"] + g @ g.T, state["right"] + g.T @ g
        return root(left) @ g @ root(right), {"left": left, "right": right}

    return by_matrix(init, update)


def soap(params: Params) -> optax.GradientTransformation:
    """Adam in a basis that a QR step turns towards the eigenvectors, every other time (Vyas et al., 2024)."""

    def init(w: jax.Array) -> Any:
        n, m = w.shape
        zeros = {"mu": jnp.zeros_like(w), "nu": jnp.zeros_like(w)}
        return {"l": jnp.eye(n), "r": jnp.eye(m), "ql": jnp.eye(n), "qr": jnp.eye(m), **zeros}

    def update(g: jax.Array, s: Any, count: jax.Array) -> Any:
        left, right = 0.9 * s["l"] + 0.1 * g @ g.T, 0.9 * s["r"] + 0.1 * g.T @ g
        ql, qr = jax.lax.cond(
            count % 2 == 0,
            lambda: (jnp.linalg.qr(left @ s["ql"])[0], jnp.linalg.qr(right @ s["qr"])[0]),
            lambda: (s["ql"], s["qr"]),
        )
        turned = ql.T @ g @ qr
        mu, nu = 0.9 * s["mu"] + 0.1 * g, 0.99 * s["nu"] + 0.01 * turned**2
        step = ql @ ((ql.T @ mu @ qr) / (jnp.sqrt(nu) + 1e-3)) @ qr.T
        return step, {"l": left, "r": right, "ql": ql, "qr": qr, "mu": mu, "nu": nu}

    return by_matrix(init, update)


def mixed(params: Params) -> optax.GradientTransformation:
    """Muon for some, Adam for vectors, and nothing for what is frozen."""

    def label(name: str, w: jax.Array) -> str:
        return "adam" if w.ndim < 2 else "frozen" if name == "w01" else "muon"

    txs = {
        "adam": optax.adam(1e-2),
        "muon": optax.contrib.muon(1e-2),
        "frozen": optax.set_to_zero(),
    }
    return optax.partition(txs, {name: label(name, w) for name, w in params.items()})


def trains(optimizer: Optimizer, params: Params, num: int = 4, **options: Any) -> None:
    """Every leaf, three steps, against one device."""
    options = {"mesh": mesh_of(num), "tolerance": ROUNDED, **options}
    step = make_step(optimizer)
    assert_same_training(step, lambda: state_of(params, optimizer), BATCHES, **grouped(**options))


def planned(optimizer: Optimizer, params: Params, num: int = 4, **options: Any) -> Any:
    """What is said of who updates what: `{leaves: (each, num, why)}`."""
    step = small.shard_train_step(make_step(optimizer), mesh=mesh_of(num), **options)
    plan = step.plan(state_of(params, optimizer), BATCHES[0])
    return {tuple(map(short, o.leaves)): (o.each, o.num, o.why) for o in plan.owned}


def short(path: str) -> str:
    return path.removeprefix("state[0]['").removesuffix("']")


# -- the same training -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("make", [separate, stacked], ids=lambda make: make.__name__)
@pytest.mark.parametrize("optimizer", [muon, shampoo, soap], ids=lambda make: make.__name__)
@pytest.mark.parametrize(("num", "matrices"), [(2, 5), (4, 4), (8, 6)])
def test_trains_as_on_one_device(optimizer: Optimizer, make: Any, num: int, matrices: int):
    """Of 5 on 2, 6 on 8: what fills up the last device's part is a matrix again, and dropped."""
    params = make(matrices, 8, 16)
    ((each, total, why),) = planned(optimizer, params, num).values()
    assert (each, total, why) == (-(-matrices // num), matrices, "")
    trains(optimizer, params, num)


@pytest.mark.slow(but=[1])
@pytest.mark.parametrize(
    "options",
    [
        {"stage": 1}, {"stage": 2}, {"stage": 3, "accumulate": 2},
        {"stage": 3, "accumulate": 2, "reduce": "once"}, {"stage": 1, "accumulate": 4},
    ],
    ids=str,
)  # fmt: skip
def test_at_each_stage(options: dict[str, Any]):
    params = {**separate(4, 8, 16), **stacked(6, 16, 8)}
    train_step = small.shard_train_step(make_step(muon), mesh=mesh_of(4), **options)
    report = train_step.describe(state_of(params, muon), BATCHES[0])
    # There and back, and once for all microbatches.
    assert [c.times for c in report.traffic if c.op == "all-to-all"] == [1] * 4
    trains(muon, params, **options)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer_axes", [("outer", "inner"), "inner"], ids=str)
def test_among_the_devices_of_a_shard(optimizer_axes: Any):
    """Hybrid sharding: over both axes, or in each of the replicas."""
    options = {"param_axes": "inner", "optimizer_axes": optimizer_axes}
    params = {**separate(4, 8, 8), **stacked(2, 8, 8)}
    trains(muon, params, mesh=mesh_of(2, 2, names=("outer", "inner")), **options)


@pytest.mark.slow
def test_what_is_tall_wide_frozen_or_a_vector():
    """Tall and wide ones are turned the same way, but lie along another dim then."""
    params = {
        **separate(3, 16, 8),
        "u": jnp.ones((8, 16)),
        "v": jnp.ones((8, 16)),
        "b": jnp.ones(8),
    }
    assert planned(mixed, params) == {("w00", "w02"): (1, 2, ""), ("u", "v"): (1, 2, "")}
    trains(mixed, params)


# -- what moves, and who computes ------------------------------------------------------------------


def flops(lowered: Any) -> float:
    return float(lowered.compile().cost_analysis()["flops"])


@pytest.mark.slow
@pytest.mark.parametrize("make", [separate, stacked], ids=lambda make: make.__name__)
@pytest.mark.parametrize(("num", "matrices", "sent"), [(4, 6, 2), (8, 12, 2)])
def test_work_and_traffic(make: Any, num: int, matrices: int, sent: int):
    """One all-to-all there and one back; ceil(M/N) of M matrices' operations, in the compiled program."""
    params, step = make(matrices, 64, 64), make_step(muon)
    state = state_of(params, muon)
    train_step = small.shard_train_step(step, mesh=mesh_of(num), stage=1)
    lowered = train_step.lower(state, BATCHES[0])
    one = flops(jax.jit(step).lower(state, BATCHES[0]))
    assert flops(lowered) / one <= -(-matrices // num) / matrices * 1.05
    # As each device sends them: its part of every matrix, and of what fills up the last one's.
    report = train_step.describe(state, BATCHES[0])
    filled = -(-matrices // num) * num
    assert report.elements("all-to-all") == sent * filled * 64 * 64 // num
    text = lowered.compile().as_text()
    assert len(re.findall(r" all-to-all(?:-start)?\(", text)) == sent
    moved = collections.Counter(c.op for c in report.traffic if c.dtype == "float32")
    assert moved["all-to-all"] == sent
    # Of the matrices, new parameters are gathered at stage 1, and nothing for the update.
    coefficients = 4 if num == 4 else 0  # padded, or whole
    assert report.elements("all-gather") == matrices * 64 * 64 + coefficients


def test_a_stack_along_which_it_rests_stays_where_it_is():
    train_step = small.shard_train_step(make_step(soap), mesh=mesh_of(4))
    state = state_of(stacked(8, 8, 8), soap)
    report = train_step.describe(state, BATCHES[0])
    assert not [c for c in report.traffic if c.elements > 8]
    assert planned(soap, stacked(8, 8, 8)) == {("w",): (2, 8, "")}


@pytest.mark.slow
def test_statistics_go_with_their_matrix():
    """Shampoo's: gradient and both factors go; both factors and the step come back."""
    train_step = small.shard_train_step(make_step(shampoo), mesh=mesh_of(4))
    report = train_step.describe(state_of(separate(4, 8, 16), shampoo), BATCHES[0])
    sent = [c.elements for c in report.traffic if c.op == "all-to-all"]
    assert sorted(sent) == sorted(2 * [8 * 16, 8 * 8, 16 * 16])


@pytest.mark.slow
def test_a_group_of_stacks():
    """Stacks of 2 on 4 devices leave two idle; four stacks are a group of four."""
    params = {f"s{i}": stacked(2, 8, 8)["w"] for i in range(4)}
    assert planned(muon, params) == {tuple(params): (1, 4, "")}
    trains(muon, params)


@pytest.mark.slow
def test_moments_in_16_bits_are_sent_and_not_gathered_before_they_grow():
    def optimizer(params: Params) -> optax.GradientTransformation:
        return optax.contrib.muon(1e-2, mu_dtype=jnp.bfloat16)

    params = separate(4, 8, 16)
    train_step = small.shard_train_step(make_step(optimizer), mesh=mesh_of(4))
    report = train_step.describe(state_of(params, optimizer), BATCHES[0])
    assert report.elements("all-gather") == 4  # coefficients, padded
    trains(optimizer, params, tolerance=COARSE)


@pytest.mark.slow
def test_what_rests_whole_is_cut_and_not_stacked_whole():
    """At stage 1 parameters are whole: each device sends its part of them, as of gradients."""

    def optimizer(params: Params) -> optax.GradientTransformation:
        def update_fn(grads: Params, state: Any, params: Params) -> Any:
            steps = {k: -0.01 * jnp.tanh(params[k] @ params[k].T) @ g for k, g in grads.items()}
            return steps, state

        return optax.GradientTransformation(lambda params: optax.EmptyState(), update_fn)

    params = separate(4, 8, 16)
    train_step = small.shard_train_step(make_step(optimizer), mesh=mesh_of(4), stage=1)
    report = train_step.describe(state_of(params, optimizer), BATCHES[0])
    assert [c.elements for c in report.traffic if c.op == "all-to-all"] == [8 * 16] * 3
    trains(optimizer, params, stage=1)


# -- of a model: what runs it, and what moves ------------------------------------------------------


def one_after_the_other(params: Params, x: jax.Array) -> jax.Array:
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def model_step(optimizer: Optimizer, loss_of: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(state: Any, batch: jax.Array) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = optimizer(params).update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


@pytest.mark.parametrize(("optimizer", "stays"), [(muon, 6), (soap, 6), (shampoo, 1)])
def test_a_gradient_is_reduced_once(optimizer: Optimizer, stays: int):
    """Shampoo's are read by products alone: all of them are reduced to their owners, by one collective."""
    step, params = model_step(optimizer, one_after_the_other), separate(6, 8, 8)
    train_step = small.shard_train_step(step, mesh=mesh_of(4), stage=1)
    report = train_step.describe(state_of(params, optimizer), BATCHES[0])
    assert sum(c.op == "reduce-scatter" for c in report.traffic) == stays
    assert not [c for c in report.traffic if c.op == "all-reduce" and c.elements > 1]


# -- what stays as it is, and the report -----------------------------------------------------------


def test_report():
    params = {**separate(4, 8, 8), **stacked(6, 8, 16), "alone": jnp.ones((16, 12))}
    train_step = small.shard_train_step(make_step(muon), mesh=mesh_of(4))
    report = train_step.describe(state_of(params, muon), BATCHES[0])
    text = " ".join(str(report).split())
    for line in (
        "The update of 4 x float32[8,8] of state[0]['w{00..03}'] is distributed: 1 on each device.",
        "The update of 6 x float32[8,16] of state[0]['w'] is distributed: 2 on each device.",
        "Every device gathers and updates 1 x float32[12,16] of state[0]['alone']: no other update is",
    ):
        assert line in text
    rows = report.to_dict()["owners"]
    assert [(row["num"], row["each"], bool(row["why"])) for row in rows] == [
        (1, 1, True), (6, 2, False), (4, 1, False),
    ]  # fmt: skip


def coupled_with(update: Callable[[Params, Params], Params]) -> Optimizer:
    """Muon, and what becomes of all its steps at once."""

    def make(params: Params) -> optax.GradientTransformation:
        first = muon(params)

        def update_fn(grads: Params, state: Any, params: Params) -> Any:
            steps, state = first.update(grads, state, params)
            return update(steps, params), state

        return optax.GradientTransformation(first.init, update_fn)

    return make


def orthogonal_to_the_first(steps: Params, params: Params) -> Params:
    first, second = steps["w00"], steps["w01"]
    return {**steps, "w01": second - first * jnp.vdot(first, second)}


def each_of_the_other(steps: Params, params: Params) -> Params:
    return {"w00": steps["w00"] + steps["w01"], "w01": steps["w01"] - steps["w00"]}


@pytest.mark.parametrize(("update", "num"), [(orthogonal_to_the_first, 3), (each_of_the_other, 2)])
def test_names_of_updates_that_are_coupled(update: Any, num: int):
    """Each is called after the leaf that it makes, and not after one whose dims are linked with its own."""
    params = separate(num, 8, 8)
    assert planned(coupled_with(update), params) == {tuple(params): (1, num, "")}


def noisy(g: jax.Array, state: Any, count: jax.Array) -> Any:
    square = g @ g.T
    key = jax.random.fold_in(jax.random.key(0), jnp.int32(square[0, 0]))
    return (square + jax.random.normal(key, square.shape)) @ g, state


def on_the_host(g: jax.Array, state: Any, count: jax.Array) -> Any:
    square = g @ g.T
    kind = jax.ShapeDtypeStruct(square.shape, square.dtype)
    found = jax.pure_callback(lambda x: np.asarray(x) / 2, kind, square, vmap_method="sequential")
    return found @ g, state


def orthogonal_to_all(g: jax.Array, state: Any, count: jax.Array) -> Any:
    return g @ (g.mT @ g).sum(axis=0), state  # of a stack


def test_a_raw_gradient_that_only_products_read():
    """In the loss, too: nothing says in which shards it is wanted."""

    def step(params: Params, batch: jax.Array) -> Any:
        def loss_fn(params: Params) -> jax.Array:
            return jnp.mean(sum(jnp.tanh(batch @ w) for w in params.values()) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return {k: params[k] - g @ g.T @ g for k, g in grads.items()}, loss

    params = separate(3, 8, 8)
    plan = small.shard_train_step(step, mesh=mesh_of(4)).plan(params, BATCHES[0])
    ((num, each, why),) = [(o.num, o.each, o.why) for o in plan.owned]
    assert (num, each) == (3, 3)
    assert why == "what it reads is whole on every device"
    assert plan.owned[0].leaves == ("state['w00']", "state['w01']", "state['w02']")
    assert_same_training(step, lambda: params, BATCHES, mesh=mesh_of(4), tolerance=ROUNDED)


def until_small(g: jax.Array, state: Any, count: jax.Array) -> Any:
    """Halves until a norm is small: another number of turns for each matrix."""
    x = jax.lax.while_loop(
        lambda x: jnp.linalg.norm(x @ x.T) > 1e-3, lambda x: x @ (0.5 * jnp.eye(x.shape[1])), g
    )
    return x / jnp.linalg.norm(x), state


def all_until_small(g: jax.Array, state: Any, count: jax.Array) -> Any:
    return jax.vmap(until_small, (0, None, None))(g, state, count)


def by_leaf(update: Callable[..., Any]) -> Optimizer:
    """Not mapped: the update of a stack sees all of it."""

    def make(params: Params) -> optax.GradientTransformation:
        def update_fn(grads: Params, count: Any, params: Any = None) -> Any:
            steps = {k: -0.01 * update(g, None, count)[0] for k, g in grads.items()}
            return steps, count + 1

        return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update_fn)

    return make


without_vmap = Primitive("without_vmap")
without_vmap.def_abstract_eval(lambda x: x)
mlir.register_lowering(without_vmap, mlir.lower_fun(jnp.tanh, multiple_results=False))


def unmapped(g: jax.Array, state: Any, count: jax.Array) -> Any:
    return without_vmap.bind(g @ g.T) @ g, state


@pytest.mark.slow(but=[0, 1, 2, 3])
@pytest.mark.parametrize(
    ("update", "params", "why"),
    [
        (noisy, separate(4, 8, 8), "it draws random numbers"),
        (on_the_host, separate(4, 8, 8), "nobody knows what its pure_callback does"),
        (orthogonal_to_all, stacked(4, 8, 16), "it reduces dim 0"),
        (all_until_small, stacked(4, 8, 16), "its loop ends when all slices are done"),
        (orthogonal_to_all, stacked(1, 8, 16), "no other update is like it"),
    ],
)  # fmt: skip
def test_what_is_gathered(update: Any, params: Params, why: str):
    found = planned(by_leaf(update), params)
    assert all(each == num and found_why.startswith(why) for each, num, found_why in found.values())
    assert found
    trains(by_leaf(update), params)


@pytest.mark.parametrize("update", [until_small, unmapped])
def test_loops_of_other_lengths_and_primitives_that_no_vmap_knows(update: Any):
    params = {k: 10.0**i * w for i, (k, w) in enumerate(separate(5, 8, 8).items())}
    assert planned(by_leaf(update), params) == {tuple(params): (2, 5, "")}
    trains(by_leaf(update), params)


def test_an_update_that_follows_from_another_one():
    """The second matrix's update reads the first one's, though both compute the same."""

    def make(params: Params) -> optax.GradientTransformation:
        def update_fn(grads: Params, state: Any, params: Any = None) -> Any:
            first, second = grads.values()
            scaled = jnp.tanh(first @ first)
            total = jnp.cumsum(scaled, axis=0)
            new = [-scaled, -jnp.tanh((second + total) @ (second + total))]
            return dict(zip(grads, new, strict=True)), state

        return optax.GradientTransformation(lambda params: optax.EmptyState(), update_fn)

    found = planned(make, separate(2, 8, 8), num=2)
    assert found == {
        ("w00", "w01"): (2, 2, "one branch, loop or product updates them together"),
    }  # fmt: skip
    trains(make, separate(2, 8, 8), num=2)


def test_an_update_in_a_branch():
    """One branch has the updates of all leaves: only a stack's slices are told apart."""

    def optimizer(params: Params) -> optax.GradientTransformation:
        return optax.apply_if_finite(muon(params), 3)

    together = "one branch, loop or product updates them together"
    assert planned(optimizer, separate(2, 8, 8), num=2) == {("w00", "w01"): (2, 2, together)}
    found = planned(optimizer, {**separate(2, 8, 16), **stacked(6, 8, 16)})
    assert found == {("w",): (2, 6, ""), ("w00", "w01"): (2, 2, together)}
    trains(optimizer, separate(2, 8, 8), num=2)


@pytest.mark.slow
def test_state_on_the_hosts_and_tensor_axes_have_no_owners():
    params = separate(4, 8, 8)
    assert planned(muon, params, offload=jzero.PinnedHost(device_bytes=2**20)) == {}
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), auto, devices=jax.devices()[:4])
    step = small.shard_train_step(make_step(muon), mesh=mesh, axes="data")
    assert step.plan(state_of(params, muon), BATCHES[0]).owned == ()


def test_matrices_that_rest_whole():
    """Below `min_shard_bytes` nothing is sent anywhere, and every device computes."""
    assert planned(muon, separate(4, 8, 8), min_shard_bytes=2**20) == {}
