"""What steps cost whose rows meet: bytes that reach a device, and flops, at 8 and at 512 devices.

No arrays are made: a step is traced and rewritten at its shapes, and its collectives and products counted.
What a gather or an exchange moves is counted as it arrives on one device, a reduction once (an all-reduce
moves twice that).
"""

import collections
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental.ode import odeint

import jzero
import small
from jzero.ir._layout import replicated
from jzero.sharding.analysis import _traffic
from jzero.sharding.partition._partition import DeviceInput, partition
from jzero.tracing import _jaxpr, _rewrite

DEVICES = (8, 512)


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


class Costs:
    """A step on so many devices: `step(params, *batch)`, the batch's leaves with rows along dim 0."""

    def __init__(self, step: Any, params: Any, batch: tuple[Any, ...], num: int):
        traced = _jaxpr.trace_here(step, params, *batch)
        whole, consts = _rewrite.flatten_calls(traced.jaxpr, traced.consts)
        layouts = [replicated(x.aval.shape, {"data": num}) for x in whole.invars]
        ins = [DeviceInput(x) for x in layouts[: len(jax.tree.leaves(params))]]
        for leaf, layout in zip(jax.tree.leaves(batch), layouts[len(ins) :], strict=True):
            own = layout.cut(0, "data") if leaf.ndim else layout
            whole_rows = bool(leaf.ndim) and own.dims[0].pad is not None
            ins.append(DeviceInput(own, own.axes, padded_dims_gathered=whole_rows))
        self.num = num
        outs = [None] * len(whole.outvars)
        self.local = partition(whole, consts, {"data": num}, ins, outs)
        self.whole_flops = flops(whole)

    @property
    def flops_times_devices(self) -> float:
        """Flops of products on all devices, in units of those on one; 1 if none is done twice."""
        return flops(self.local.jaxpr) * self.num / self.whole_flops

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes by collective: that reach a device, or, of a reduction, that are reduced."""
        found: dict[str, int] = collections.Counter()
        for c in _traffic.collectives(self.local.jaxpr):
            found[c.op] += c.nbytes
        return dict(found)

    @property
    def largest(self) -> int:
        """Bytes of the largest value that is needed on a device."""
        return largest(self.local.jaxpr)


def equations(jaxpr: Any, times: int = 1) -> Any:
    """Every needed equation, and how often it runs."""
    jaxpr = _jaxpr.open_jaxpr(jaxpr)[0]
    kept = _rewrite.without_unread(jaxpr.eqns, jaxpr.outvars, lambda eqn: True)
    for eqn in kept:
        yield eqn, times
        iterations = _jaxpr.scan_parts(eqn).length if eqn.primitive.name == "scan" else 1
        for inner in _jaxpr.inner_jaxprs(eqn):
            yield from equations(inner, times * iterations)


def flops(jaxpr: Any) -> int:
    total = 0
    for eqn, times in equations(jaxpr):
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            lhs, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
            total += 2 * times * math.prod(out) * math.prod(lhs[d] for d in contracted)
    return total


def largest(jaxpr: Any) -> int:
    avals = [var.aval for eqn, _ in equations(jaxpr) for var in eqn.outvars]
    return max(math.prod(a.shape) * getattr(a.dtype, "itemsize", 8) for a in avals)


# -- contrastive losses: [B, B] logits of which no device has all ---------------------------------------

B, F, D = 32768, 64, 512  # rows, features, size of an embedding
TOWERS = {"image": shape(F, D), "text": shape(F, D), "scale": shape()}
# Bytes of embeddings, of logits, and of a number for each row.
EMBEDDINGS, MATRIX, LINE = B * D * 4, B * B * 4, B * 4
GRADIENTS = 2 * F * D * 4  # of the towers
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def learned(loss):
    def step(params, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def normalized(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def embedded(params, images, texts):
    return normalized(images @ params["image"]), normalized(texts @ params["text"])


def transposed_loss(params, images, texts):
    image, text = embedded(params, images, texts)
    logits = image @ text.T * jnp.exp(params["scale"])
    return (cross_entropy(logits, jnp.arange(B)) + cross_entropy(logits.T, jnp.arange(B))).mean()


def log_softmaxes(params, images, texts):
    image, text = embedded(params, images, texts)
    logits = image @ text.T * params["scale"]
    return jax.nn.log_softmax(logits, 0), jax.nn.log_softmax(logits, 1)


def along_axes(params, images, texts):
    found, own = log_softmaxes(params, images, texts), jnp.arange(B)
    taken = (
        jnp.take_along_axis(found[0], own[None], 0),
        jnp.take_along_axis(found[1], own[:, None], 1),
    )
    return -sum(x.mean() for x in taken)


def hardest_negatives(params, images, texts):
    image, text = embedded(params, images, texts)
    scores = image @ text.T
    positive, negative = jnp.diagonal(scores), jnp.where(jnp.eye(B, dtype=bool), -jnp.inf, scores)
    losses = jnp.maximum(0, 1 + negative.max(1) - positive)
    return (losses + jnp.maximum(0, 1 + negative.max(0) - positive)).mean()


def symmetric(params, images, texts):
    image, text = embedded(params, images, texts)
    logits = image @ text.T
    return cross_entropy((logits + logits.T) / 2, jnp.arange(B)).mean()


def all_pairs(params, images, texts):
    """SimCLR: both views in one batch; a row's own product is masked."""
    views = jnp.concatenate(embedded(params, images, texts))
    logits = jnp.where(jnp.eye(2 * B, dtype=bool), -1e9, views @ views.T)
    return cross_entropy(logits, jnp.roll(jnp.arange(2 * B), B)).mean()


# For each loss, how many [B, D] embeddings are gathered, and how often the matrix is exchanged.
CONTRASTIVE = {
    transposed_loss: (1, 0), along_axes: (1, 0), hardest_negatives: (1, 0), symmetric: (1, 2),
    all_pairs: (2, 0),
}  # fmt: skip


@pytest.mark.parametrize("num", DEVICES)
@pytest.mark.parametrize("loss", CONTRASTIVE, ids=lambda loss: loss.__name__)
def test_contrastive_losses_gather_embeddings_and_no_matrix(loss, num):
    """The forward pass gathers embeddings, the backward pass scatters the sum of as many gradients of them.

    Of both views in one batch the rows lie in two blocks, and the sum is whole before it is cut.
    """
    gathered, exchanged = CONTRASTIVE[loss]
    rows = shape(B, F), shape(B, F)
    found = Costs(jax.value_and_grad(loss), TOWERS, rows, num)
    assert found.flops_times_devices == 1
    assert found.nbytes.get("all-to-all", 0) == exchanged * MATRIX / num
    assert 0 <= found.nbytes["all-gather"] - gathered * EMBEDDINGS <= 3 * LINE
    scattered = found.nbytes.get("reduce-scatter", 0)
    reduced = found.nbytes["all-reduce"] + scattered
    assert 0 <= reduced - gathered * EMBEDDINGS - GRADIENTS <= 6 * LINE
    assert scattered >= gathered * EMBEDDINGS or loss is all_pairs
    assert found.largest <= max(4 * MATRIX / num, 2 * EMBEDDINGS)


def accuracy(params, images, texts):
    image, text = embedded(params, images, texts)
    scores = image @ text.T
    return [jnp.mean(scores.argmax(dim) == jnp.arange(B)) for dim in (0, 1)]


@pytest.mark.parametrize("num", DEVICES)
def test_accuracy_of_all_pairs(num):
    rows = shape(B, F), shape(B, F)
    found = Costs(accuracy, TOWERS, rows, num)
    assert found.nbytes == {"all-gather": EMBEDDINGS, "all-reduce": 2 * LINE + 4}


# -- look-ups of a row's own elements: nothing moves ------------------------------------------------------

V, S = 1000, 16
HEAD = {"head": shape(F, V)}
SMALL = 4096  # rows


def log_probabilities(params, x):
    return jax.nn.log_softmax(x @ params["head"])


def by_indices(params, x, y):
    return -log_probabilities(params, x)[jnp.arange(SMALL), y].mean()


def by_take_along_axis(params, x, y):
    return -jnp.take_along_axis(log_probabilities(params, x), y[:, None], 1).mean()


def tokens_by_time(params, x, y):
    found = log_probabilities(params, x.swapaxes(0, 1)).reshape(-1, V)
    return -found[jnp.arange(SMALL * S), y.T.reshape(-1)].mean()


@pytest.mark.parametrize("num", DEVICES)
@pytest.mark.parametrize("rows", [SMALL, SMALL - 3])
@pytest.mark.parametrize(
    ("loss", "dims"),
    [(by_indices, ()), (by_take_along_axis, ()), (tokens_by_time, (S,))],
    ids=lambda x: getattr(x, "__name__", ""),
)  # fmt: skip
def test_own_elements_are_looked_up_where_they_are(loss, dims, rows, num, monkeypatch):
    """Also if the devices do not divide the rows; but merged with the time behind their padding."""
    if rows != SMALL and loss is tokens_by_time:
        pytest.skip("rows behind time, which are padded, are gathered")
    monkeypatch.setitem(globals(), "SMALL", rows)
    batch = shape(rows, *dims, F), shape(rows, *dims, dtype=jnp.int32)
    found = Costs(jax.value_and_grad(loss), HEAD, batch, num)
    assert set(found.nbytes) == {"all-reduce"}
    assert 0 <= found.nbytes["all-reduce"] - F * V * 4 <= 8
    if rows % num == 0:
        assert found.flops_times_devices == 1


# -- tables that are looked up by time, for all rows ---------------------------------------------------------


def relative_bias(params, x):
    """As in T5: one table for the scores of all rows."""
    times = jnp.arange(x.shape[1])
    bias = params["bias"][jnp.clip(times[None] - times[:, None], -8, 7) + 8]
    return jnp.tanh(x[:, :, None] * x[:, None] + bias[None]).mean()


def some_positions(params, x):
    """Of a longer table the gradient of what is looked up is summed, which is smaller."""
    return jnp.tanh(x + params["bias"][jnp.arange(3)].sum(0)[None, None]).mean()


def positions_taken(params, x):
    return jnp.tanh(x + params["positions"][jnp.arange(x.shape[1])][None]).mean()


@pytest.mark.parametrize("num", DEVICES)
@pytest.mark.parametrize(("loss", "elements"), [(relative_bias, 16 * 4), (some_positions, 4)])
def test_a_gradient_is_summed_where_it_is_smallest(loss, elements, num):
    batch = (shape(SMALL, 64, 4),)
    found = Costs(jax.value_and_grad(loss), {"bias": shape(16, 4)}, batch, num)
    assert set(found.nbytes) == {"all-reduce"}
    assert 0 <= found.nbytes["all-reduce"] - elements * 4 <= 4


def test_a_gradient_of_all_positions_is_reduce_scattered():
    train_step = small.shard_train_step(learned(positions_taken), stage=2)
    found = train_step.describe({"positions": shape(64, 4)}, shape(16, 64, 4))
    assert found.elements("reduce-scatter") == 64 * 4
    assert found.elements("all-reduce") <= 1


# -- losses in chunks ---------------------------------------------------------------------------------------

TIME = 512
TOKENS = SMALL * TIME


def summed_in_chunks(params, hidden, labels, by):
    @jax.checkpoint
    def chunk(x, y):
        return cross_entropy(x @ params["head"], y).sum()

    if by == "map":
        return lax.map(lambda xy: chunk(*xy), (hidden, labels)).sum() / TOKENS
    total, _ = lax.scan(lambda s, xy: (s + chunk(*xy), None), 0.0, (hidden, labels))
    return total / TOKENS


def of_tokens(chunks, by):
    """Chunks of the tokens of some rows: `[B * S]` cut into `[chunks, B * S / chunks]`."""
    return lambda params, x, y: summed_in_chunks(
        params, x.reshape(chunks, -1, F), y.reshape(chunks, -1), by
    )


def of_times(chunks, by):
    """Chunks of some tokens of all rows: `[B, S]` cut into `[B, chunks, S / chunks]`, chunks in front."""
    return lambda params, x, y: summed_in_chunks(
        params, x.reshape(SMALL, chunks, -1, F).swapaxes(0, 1),
        y.reshape(SMALL, chunks, -1).swapaxes(0, 1), by,
    )  # fmt: skip


@pytest.mark.parametrize("num", DEVICES)
@pytest.mark.parametrize("by", ["scan", "map"])
@pytest.mark.parametrize("cut", [of_tokens, of_times])
@pytest.mark.parametrize("chunks", [4, 512])
def test_losses_in_chunks(chunks, cut, by, num):
    """Of fewer chunks than devices, rows are exchanged for those of some times; nothing else moves."""
    batch = shape(SMALL, TIME, F), shape(SMALL, TIME, dtype=jnp.int32)
    found = Costs(jax.value_and_grad(cut(chunks, by)), HEAD, batch, num)
    moved = found.nbytes
    reduced = moved.pop("all-reduce")
    exchanged = cut is of_tokens and chunks < num
    assert moved == ({"all-to-all": (F + 1) * TOKENS * 4 // num} if exchanged else {})
    iterations = (
        1 if cut is of_tokens and not exchanged else chunks
    )  # Only the loss and the head's gradient are.
    assert reduced <= iterations * (F * V + 2) * 4
    assert found.flops_times_devices == 1


# -- minibatches by permutation -----------------------------------------------------------------------------

EPOCHS, MINIBATCHES, MANY = 3, 4, 16384
POLICY = {"in": shape(F, D), "head": shape(D, V)}


def minibatch_step(params, minibatch):
    states, actions, gains = minibatch

    def loss_fn(params):
        found = jax.nn.log_softmax(jnp.tanh(states @ params["in"]) @ params["head"])
        own = jnp.take_along_axis(found, actions[:, None], 1)[:, 0]
        return -(own * (gains - gains.mean()) / (gains.std() + 1e-8)).mean()

    grads = jax.grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def by_scan(params, key, *rows):
    def epoch(params, key):
        order = jax.random.permutation(key, MANY)
        cut = jax.tree.map(lambda x: x[order].reshape(MINIBATCHES, -1, *x.shape[1:]), rows)
        return lax.scan(lambda p, m: (minibatch_step(p, m), None), params, cut)

    return lax.scan(epoch, params, jax.random.split(jax.random.wrap_key_data(key), EPOCHS))[0]


def by_take(params, key, *rows):
    for epoch in jax.random.split(jax.random.wrap_key_data(key), EPOCHS):
        order = jax.random.permutation(epoch, MANY)
        for part in jnp.split(order, MINIBATCHES):
            params = minibatch_step(params, [jnp.take(x, part, axis=0) for x in rows])
    return params


@pytest.mark.parametrize("step", [by_scan, by_take])
def test_minibatches_by_permutation(step):
    """States are exchanged for columns of all rows once, and each epoch's columns for its rows."""
    rows = shape(MANY, F), shape(MANY, dtype=jnp.int32), shape(MANY)
    key = shape(2, dtype=jnp.uint32)

    def with_key(params, states, actions, gains):
        return step(params, jnp.zeros(key.shape, key.dtype), states, actions, gains)

    few, many = (Costs(with_key, POLICY, rows, num) for num in DEVICES)
    assert few.flops_times_devices == many.flops_times_devices == 1
    states, line = MANY * F * 4, MANY * 4
    moved, of_many = few.nbytes, many.nbytes
    del moved["all-reduce"], of_many["all-reduce"]  # gradients, and statistics of the gains
    assert moved.pop("all-to-all") == (1 + EPOCHS) * states / 8
    # Numbers of rows cost little: they are gathered once, or summed up where they are looked up.
    assert moved == (
        {"all-gather": 2 * line} if step is by_scan else {"reduce-scatter": 2 * EPOCHS * line}
    )
    # There are fewer columns than devices: all rows are gathered, once; or those of a minibatch summed up.
    all_rows = states + 2 * line
    assert of_many == (
        {"all-gather": all_rows} if step is by_scan else {"reduce-scatter": EPOCHS * all_rows}
    )


# -- mixtures of experts, of one capacity for all tokens ------------------------------------------------

EXPERTS, CAPACITY, ROWS, WIDTH, HIDDEN = 8, 1024, 4096, 128, 512
LAYER = {
    "router": shape(WIDTH, EXPERTS),
    "up": shape(EXPERTS, WIDTH, HIDDEN),
    "down": shape(EXPERTS, HIDDEN, WIDTH),
}
QUEUES = EXPERTS * CAPACITY * WIDTH * 4


def routed(params, x):
    """Each token's two experts, its places in their queues, its gates, and the loss that balances loads."""
    gates = jax.nn.softmax(x @ params["router"])
    top, chosen = lax.top_k(gates, 2)
    hot = jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32)
    first_come = hot.transpose(1, 0, 2).reshape(-1, EXPERTS)
    places = ((jnp.cumsum(first_come, 0) - 1) * first_come).sum(1).reshape(2, -1).T
    load = hot[:, 0].mean(0, dtype=x.dtype)
    return top, chosen, places, EXPERTS * (load * gates.mean(0)).sum()


def experts(params, queues):
    h = jax.nn.silu(jnp.einsum("ecd,edf->ecf", queues, params["up"]))
    return jnp.einsum("ecf,efd->ecd", h, params["down"])


def by_scatter(params, x):
    top, chosen, places, balance = routed(params, x)
    places = jnp.where(places < CAPACITY, places, CAPACITY)
    queues = jnp.zeros((EXPERTS, CAPACITY, WIDTH)).at[chosen, places].add(x[:, None], mode="drop")
    back = experts(params, queues).at[chosen, places].get(mode="fill", fill_value=0.0)
    return x + (back * top[..., None]).sum(1), balance


def by_dummy_row(params, x):
    """Tokens without a place go to a row behind the queues, which is dropped, and read a row of zeros."""
    top, chosen, places, balance = routed(params, x)
    rows = jnp.where(places < CAPACITY, chosen * CAPACITY + places, EXPERTS * CAPACITY)
    queues = jnp.zeros((EXPERTS * CAPACITY + 1, WIDTH)).at[rows].add(x[:, None])[:-1]
    found = experts(params, queues.reshape(EXPERTS, CAPACITY, WIDTH)).reshape(-1, WIDTH)
    back = jnp.concatenate([found, jnp.zeros((1, WIDTH))])[rows]
    return x + (back * top[..., None]).sum(1), balance


def of_layers(layer, num_layers, remat):
    layer = jax.checkpoint(layer) if remat else layer

    def loss(params, x, y):
        x, balances = lax.scan(lambda x, p: layer(p, x), x, params)
        return ((x - y) ** 2).mean() + 0.01 * balances.sum()

    stacked = jax.tree.map(lambda a: shape(num_layers, *a.shape), LAYER)
    return loss, stacked


@pytest.mark.parametrize("num", DEVICES)
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("layer", [by_scatter, by_dummy_row])
def test_experts_work_is_divided(layer, remat, num):
    """A queue's rows are those of all tokens: sums are scattered to queues, and these gathered, each way."""
    loss, params = of_layers(layer, 3, remat)
    found = Costs(jax.value_and_grad(loss), params, (shape(ROWS, WIDTH), shape(ROWS, WIDTH)), num)
    assert found.flops_times_devices == pytest.approx(1, abs=1e-3)
    # Forward and backward; a checkpoint does the first again.
    assert found.nbytes["reduce-scatter"] == 3 * QUEUES * (3 if remat else 2)
    # A look-up's gradient needs not what it found. With few tokens on a device, their rows move instead.
    gathered = found.nbytes["all-gather"] + found.nbytes.get("all-to-all", 0)
    most = 3 * QUEUES * (2 if layer is by_scatter and not remat else 3)
    totals = 2 * 3 * 2 * num * EXPERTS * 4  # of the queues
    weights = 3 * (2 * EXPERTS * WIDTH * HIDDEN + WIDTH * EXPERTS) * 4
    few = 3 * QUEUES / (1 if layer is by_dummy_row else 2)
    if num != EXPERTS:
        assert most - few <= gathered <= most + totals
        assert 0 <= found.nbytes["all-reduce"] - weights <= QUEUES / 100
    # Of as many experts as devices, each has the gradients of one: parts of queues are exchanged for these.
    reduced = weights + QUEUES / 100
    assert gathered + 2 * found.nbytes["all-reduce"] <= most + totals + 2 * reduced


# -- when not, and what is said of it ------------------------------------------------------------------------


def collectives_of(costs):
    return {eqn.primitive.name for eqn, _ in equations(costs.local.jaxpr)} & {
        "all_to_all", "reduce_scatter", "psum", "all_gather", "pmax", "pmin",
    }  # fmt: skip


def test_a_sum_that_is_needed_whole_is_not_scattered_too():
    def step(params, x):
        total = x.T @ jnp.tanh(x)
        return total, (total[:, 0] * jnp.sort(x[: x.shape[1]], 0)[:, 0]).sum()

    def in_rows_only(params, x):
        return (x.T @ jnp.tanh(x) * jnp.cumsum(x, 0)[: x.shape[1]]).sum()

    found = Costs(step, {}, (shape(64, 64),), 8)
    assert "psum" in collectives_of(found)
    assert "reduce_scatter" not in collectives_of(found)
    assert "reduce_scatter" in collectives_of(Costs(in_rows_only, {}, (shape(64, 64),), 8))


def test_a_parameter_keeps_its_gradient_whole():
    """Muon multiplies gradients with each other, LoRA with parameters: none of them is scattered here."""

    def orthogonal(params, x):
        grads = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(params)
        return params - 0.1 * (grads @ grads.T @ grads)

    def low_rank(params, x):
        grads = jax.grad(lambda ab: jnp.sum(jnp.tanh(x @ (ab[0] @ ab[1]))))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    batch = (shape(512, 64),)
    assert collectives_of(Costs(orthogonal, shape(64, 64), batch, 8)) == {"psum"}
    assert collectives_of(Costs(low_rank, (shape(64, 8), shape(8, 64)), batch, 8)) == {"psum"}


def test_the_report_says_what_an_exchange_moves():
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    train_step = small.shard_train_step(
        learned(symmetric), stage=0, mesh=mesh, comm=jzero.Comm(max_gather_bytes=MATRIX)
    )
    found = train_step.describe(TOWERS, shape(B, F), shape(B, F))
    assert [m.nbytes for m in found.movements].count(MATRIX // 8) == 2
    assert "3 operations move rows of the batch, 1.1 GiB to each device:" in str(found)
    assert found.elements("all-to-all") == 2 * B * B // 8


def solved(params, y0):
    """A neural ODE whose adjoint carries rows, their cotangents and gradients in one vector."""

    def field(y, t, params):
        return jnp.tanh(y @ params["up"]) @ params["down"]

    return (odeint(field, y0, jnp.linspace(0.0, 1.0, 4), params)[-1] ** 2).mean()


def dispatched(params, x):
    found, balance = by_dummy_row(params, x)
    return (found**2).mean() + balance


def moved(step, params, *batch):
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    report = small.shard_train_step(learned(step), stage=3, mesh=mesh).describe(params, *batch)
    return report, [m for m in report.to_dict()["movements"] if "intermediate" in m["reason"]]


def test_the_report_names_the_vector_of_an_adjoint():
    """Of an ODE over a batch each evaluation makes rows and gradients whole, at the line of the solver."""
    line = inspect.getsourcelines(solved)[1] + 6
    weights = {"up": shape(64, 4096), "down": shape(4096, 64)}
    report, found = moved(solved, weights, shape(8192, 64))
    assert {m["operation"] for m in found} == {"concatenate"}
    assert {m["value"] for m in found} == {"float32[524288]", "float32[262144]"}
    assert all(f"test_partition_costs.py:{line}:" in m["where"] for m in found)
    assert "operations move rows of the batch or intermediate values" in str(report)
    # Each row by itself.
    by_row = lambda params, y0: jax.vmap(solved, (None, 0))(params, y0).mean()  # noqa: E731
    assert not moved(by_row, weights, shape(8192, 64))[1]


@pytest.mark.parametrize("num", [8, 6])
def test_the_report_names_queues_that_are_reduced_whole(num, monkeypatch):
    monkeypatch.setitem(globals(), "EXPERTS", num)
    monkeypatch.setitem(globals(), "CAPACITY", 8 * CAPACITY // num)
    params = {
        name: shape(*(num if n == 8 else n for n in leaf.shape)) for name, leaf in LAYER.items()
    }
    _, found = moved(dispatched, params, shape(ROWS, WIDTH))
    # The devices divide neither 6 experts nor their 1365 places.
    value = f"float32[6,{CAPACITY},{WIDTH}]"
    assert {m["value"] for m in found} == ({value} if num == 6 else set())
    assert all(m["operation"] == "dot_general" for m in found)


def test_large_queues_are_not_refused_as_rows():
    """`max_gather_bytes` bounds rows; of sums over the batch ZeRO itself makes large ones."""
    mesh, params = jax.sharding.AbstractMesh((8,), ("data",)), {"w": shape(96, 1000)}

    def squares(params, x):
        total = jnp.tanh(x @ params["w"])
        return (total.T @ total).max()

    train_step = small.shard_train_step(
        learned(squares), stage=3, mesh=mesh, comm=jzero.Comm(max_gather_bytes=2**20)
    )
    report = train_step.describe(params, shape(512, 96))
    assert "every device gets an intermediate value whole" in " ".join(str(report).split())


def test_a_running_loss_in_16_bits():
    """The loop's carry keeps its dtype, though the sum over the devices is of 32 bits."""

    def loss(w, x):
        chunks = x.reshape(len(x), 4, -1, x.shape[-1]).swapaxes(0, 1)
        iteration = jax.checkpoint(lambda total, part: (total + jnp.sum((part @ w) ** 2), None))
        return lax.scan(iteration, jnp.zeros((), w.dtype), chunks)[0]

    w, x = jnp.ones((4, 4), jnp.bfloat16), jnp.ones((8, 8, 4), jnp.bfloat16)
    train_step = small.shard_train_step(learned(loss), stage=3, mesh=small.mesh(data=8))
    expected, value = jax.jit(learned(loss))(w, x)
    got, found = train_step(train_step.shard(w), x)
    np.testing.assert_array_equal(np.float32(found), np.float32(value))
    np.testing.assert_array_equal(np.float32(train_step.unshard(got)), np.float32(expected))
