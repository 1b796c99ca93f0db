"""A large matrix is gone before its gradient is made: its product with the cotangent comes first."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

import gpu_compiler
import jzero
import small
import zoo
from experiments.rivals.models.llama import Llama
from jzero._compare import differences
from jzero.segments import _partitioned, _programs
from jzero.tracing import _jaxpr

VOCAB, WIDTH, TX = 48, 16, optax.adam(1e-2)


@jax.custom_vjp
def project(x, head):
    return x @ head


def _backward(kept, ct):
    x, head = kept
    grad = jnp.einsum("bsd,bsv->dv", x, ct)
    call_back("gradient", grad)
    call_back("cotangent", ct)
    inputs = ct @ head.T
    call_back("inputs", inputs)
    return inputs, grad


def call_back(name, x):
    jax.debug.callback(lambda x: SEEN.append((name, x)), jnp.sum(x**2), ordered=True)


SEEN: list[tuple[str, Any]] = []
project.defvjp(lambda x, head: (project(x, head), (x, head)), _backward)


def halved_if_large(x, head):
    return jax.lax.cond(jnp.sum(head) > 1, lambda: x @ head / 2, lambda: x @ head)


def scaled_by_a_loop(x, head):
    top = jax.lax.stop_gradient(jnp.max(jnp.abs(x)))
    scale, _ = jax.lax.while_loop(lambda c: c[1] > 0.1, lambda c: (c[0] * 2, c[1] / 2), (1.0, top))
    return x @ head / scale


HEADS: dict[str, Any] = {
    "plain": jnp.matmul,
    "custom_vjp": project,
    "cond": halved_if_large,
    "while": scaled_by_a_loop,
}


def loss_of(params, tokens, chunks=1, tied=False, unrolled=False, by="plain"):
    """A language model of two layers; its head is the largest matrix."""
    x = params["embed"][tokens[:, :-1]]
    layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None), prevent_cse=False)
    if unrolled:
        for w in params["layers"]:
            x += jnp.tanh(x @ w)
    else:
        x, _ = jax.lax.scan(layer, x, params["layers"])
    head = params["embed"].T if tied else params["head"]

    def of(x, targets):
        logits = HEADS[by](x, head)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    if chunks == 1:
        return of(x, tokens[:, 1:])
    parts = [y.reshape(len(y), chunks, -1, *y.shape[2:]).swapaxes(0, 1) for y in (x, tokens[:, 1:])]
    return jax.lax.map(jax.checkpoint(lambda part: of(*part)), tuple(parts)).mean()


def step(state, tokens, **options):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_of)(params, tokens, **options)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def make_state(vocab=VOCAB, width=WIDTH):
    def make(key, *shape):
        return jax.random.normal(jax.random.key(key), shape) / 4

    params = {
        "embed": make(0, VOCAB, width), "layers": make(1, 2, width, width),
        "head": make(2, width, vocab),
    }  # fmt: skip
    return params, TX.init(params)


def tokens_of(rows, context=8):
    return jax.random.randint(jax.random.key(3), (rows, context + 1), 0, VOCAB)


def program(train_step, state, tokens):
    call = train_step._programs.bind((state, tokens), {})
    found = train_step._programs.of(call)
    return jax.make_jaxpr(found.step.run)(*_programs.placed_inputs(call, found))


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in _jaxpr.inner_jaxprs(eqn):
            yield from equations(_jaxpr.open_jaxpr(inner)[0])


HEAD = 4 * VOCAB * WIDTH


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("limit", "first"), [(HEAD - 1, True), (HEAD, False)])
def test_a_gathered_matrix_is_read_before_its_gradient_is_made(limit, first, tied):
    train_step = small.shard_train_step(
        functools.partial(step, tied=tied),
        mesh=AbstractMesh((8,), ("data",)),
        comm=jzero.Comm(prefetch_bytes=limit),
    )
    state = jax.eval_shape(make_state)
    eqns = [*equations(program(train_step, state, tokens_of(16)).jaxpr)]
    products = [
        (i, e) for i, e in enumerate(eqns)
        if e.primitive.name == "dot_general" and _jaxpr.autodiff_pass(e) == "backward"
    ]  # fmt: skip
    (made,) = [i for i, e in products if e.outvars[0].aval.size == VOCAB * WIDTH]
    (read,) = [
        i for i, e in products if any(x.aval.shape in {(WIDTH, VOCAB), (VOCAB, WIDTH)} for x in e.invars)
    ]  # fmt: skip
    assert (read < made) == first
    # The gradient's operand comes out of a barrier with the product.
    (out,) = eqns[read].outvars
    barriers = [e for e in eqns if e.primitive.name == "optimization_barrier" and out in e.invars]
    assert len(barriers) == first
    assert all(not set(e.outvars).isdisjoint(eqns[made].invars) for e in barriers)


@pytest.mark.slow
def test_a_gradient_does_not_wait_for_another_pass():
    """The product that follows it reads what it reads, and the matrix, and is one of an evaluation."""

    def step_fn(w, x):
        def loss_of(w):
            return jnp.mean(jnp.square(x @ w))

        loss, grad = jax.value_and_grad(loss_of)(w)
        return w - grad, (loss, jnp.mean((x @ w) ** 4))

    train_step = small.shard_train_step(
        step_fn, mesh=AbstractMesh((8,), ("data",)), comm=jzero.Comm(prefetch_bytes=1)
    )
    shapes = (
        jax.ShapeDtypeStruct((WIDTH, VOCAB), "float32"),
        jax.ShapeDtypeStruct((16, WIDTH), "float32"),
    )
    eqns = equations(program(train_step, *shapes).jaxpr)
    made = [e.outvars[0].aval.size for e in eqns if e.primitive.name == "dot_general"]
    assert made == [2 * VOCAB, WIDTH * VOCAB, 2 * VOCAB]


@pytest.mark.slow(but=[6])
@pytest.mark.parametrize(
    ("options", "how"),
    [
        *[({"by": by}, {}) for by in HEADS],
        ({"tied": True}, {}),
        ({"unrolled": True}, {}),
        ({"by": "custom_vjp"}, {"accumulate": 2}),
        ({"chunks": 4}, {"accumulate": 2, "gather": "once_per_step"}),
        ({}, {"tile_bytes": HEAD // 4}),
        ({}, {"offload": jzero.HostCPU()}),
    ],
    ids=str,
)
def test_trains_the_same(options, how):
    """In float64 as on one device, and with the same effects."""
    step_fn = functools.partial(step, **options)
    with jax.enable_x64(True):
        train_step = small.shard_train_step(
            step_fn, mesh=small.mesh(data=4), prefetch_bytes=1, **how
        )
        mine, effects = two_steps(train_step, train_step.init(make_state))
        theirs, expected = two_steps(jax.jit(step_fn), make_state())
    assert [*differences(mine, theirs, "step")] == []
    names = [name for name, _ in effects]
    assert names == ["gradient", "cotangent", "inputs"] * (len(names) // 3)
    if "accumulate" not in how:
        # The thread that calls back makes them float32.
        np.testing.assert_allclose([x for _, x in effects], [x for _, x in expected], rtol=1e-6)


def two_steps(train_step, state):
    """The state and losses, and what was called back."""
    SEEN.clear()
    losses = []
    for _ in range(2):
        state, loss = train_step(state, tokens_of(16))
        losses.append(loss)
    found = zoo.to_host((state, losses))
    jax.effects_barrier()
    return found, [*SEEN]


@pytest.mark.slow
def test_the_head_and_its_gradient_are_not_there_together(monkeypatch):
    gpu_compiler.skip_without_it()
    model = Llama(layers=2, dim=1024, heads=8, kv_heads=2, hidden=2048, context=256)
    state = jax.eval_shape(model.init, jax.random.key(0))

    def peak():
        train_step = jzero.shard_train_step(model.step, comm=jzero.Comm(prefetch_bytes=2**26))
        return jzero.preflight(train_step, state, model.batch(64), topology="8x8").peak_bytes

    ordered = peak()
    monkeypatch.setattr(_partitioned, "inputs_first", lambda jaxpr, nbytes: jaxpr)
    # The table, as large, is the peak then.
    assert peak() - ordered > 2 * model.dim * model.vocab / 4
