"""Steps that bring parallel programs of their own, kernels, or options that once ended the process."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._parts import (
    CLASSES,
    FEATURES,
    ROWS,
    WIDTH,
    classified,
    cross_entropies,
    dense,
    dense_params,
    labelled,
    learn,
    learning,
    mlp,
    mlp_of,
    mlp_params,
    mlp_start,
    normal,
    normals,
    start,
    update,
)
from ._program import Program, program, register, relative


def _loss(params, x, label):
    return cross_entropies(mlp(params, x), label).mean()


def _pallas(example_of_each_block):
    from jax.experimental import pallas as pl

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] * jax.nn.sigmoid(x_ref[...]) + y_ref[...]

    def whole(x, y):
        out_shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        if not example_of_each_block:
            return pl.pallas_call(kernel, out_shape, interpret=True)(x, y)
        spec = pl.BlockSpec((4, x.shape[1]), lambda i: (i, 0))
        call = pl.pallas_call(
            kernel, out_shape, grid=(x.shape[0] // 4,), in_specs=[spec, spec], out_specs=spec,
            interpret=True,
        )  # fmt: skip
        return call(x, y)

    @jax.custom_vjp
    def gated(x, y):
        return whole(x, y)

    def backward(x, g):
        share = jax.nn.sigmoid(x)
        return g * share * (1 + x * (1 - share)), g

    gated.defvjp(lambda x, y: (whole(x, y), x), backward)

    def loss(params, x, label):
        h = gated(dense(params[0], x), x)
        return classified(dense(params[1], h), label)

    return Program(
        init=mlp_of(FEATURES, FEATURES, CLASSES), batches=labelled, step=learning(loss), covers="B2"
    )


register("pallas_kernel", functools.partial(_pallas, False))
register("pallas_kernel_on_a_grid", functools.partial(_pallas, True), is_slow=True)


@relative
def pallas_kernel_in_the_update():
    """A fused update of each parameter, written by hand."""
    from jax.experimental import pallas as pl

    def kernel(p_ref, g_ref, o_ref):
        o_ref[...] = p_ref[...] - 0.3 * g_ref[...]

    def step(state, x, label):
        value, grads = jax.value_and_grad(_loss)(state["params"], x, label)

        def moved(p, g):
            return pl.pallas_call(kernel, jax.ShapeDtypeStruct(p.shape, p.dtype), interpret=True)(
                p, g
            )

        return {**state, "params": jax.tree.map(moved, state["params"], grads)}, {"loss": value}

    return Program(init=mlp_start, batches=labelled, step=step, covers="B2")


@program
def fft_in_the_update():
    """Gradients of odd shapes are smoothed in the space of frequencies."""

    def step(state, x, label):
        value, grads = jax.value_and_grad(_loss)(state["params"], x, label)

        def smoothed(g):
            if g.ndim < 2:
                return jnp.fft.irfft(jnp.fft.rfft(g), n=g.shape[0])
            spectrum = jnp.fft.fft2(g)
            weight = 1 / (1 + jnp.abs(spectrum))
            return jnp.fft.ifft2(spectrum * weight).real

        return update(state, jax.tree.map(smoothed, grads)), {"loss": value}

    return Program(init=mlp_of(FEATURES, 15, CLASSES), batches=labelled, step=step, covers="B5")


def _tokens(num_steps, dtype):
    rng = np.random.default_rng(1)
    return [(rng.integers(0, 24, (ROWS, 7)).astype(np.int32),) for _ in range(num_steps)]


@program
def lookup_in_microbatches_beside_an_automatic_axis():
    """An embedding lookup and integer cross-entropy, two microbatches, a mesh axis of XLA's."""

    def init(dtype):
        params = {
            "embed": normal(0, (24, WIDTH), dtype, 0.5),
            "up": dense_params(1, WIDTH, 24, dtype),
        }
        return start(params)

    def loss(params, tokens):
        logits = dense(params["up"], jnp.tanh(params["embed"][tokens[:, :-1]]))
        losses = cross_entropies(logits, tokens[:, 1:])
        return losses.mean(), {"losses": losses.mean(-1)}

    return Program(
        init=init,
        batches=_tokens,
        step=learning(loss),
        covers="B1",
        options={"accumulate": 2, "auto_specs": {r"up.*kernel": jax.P(None, "model")}},
        automatic=2,
    )


@program
def jitted_step():
    """The user's own jax.jit, with a part of the step jitted and donated again inside."""

    @functools.partial(jax.jit, static_argnames="scale")
    def inner(params, x, label, scale):
        return scale * _loss(params, x, label)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, x, label):
        value, grads = jax.value_and_grad(inner)(state["params"], x, label, scale=2.0)
        return update(state, grads), {"loss": value}

    return Program(init=mlp_start, batches=labelled, step=step, covers="B4")


@program
def jitted_with_shardings():
    """A step that was already laid out by hand over all devices, by in_shardings and constraints."""

    def laid_out(*names):
        mesh = jax.sharding.Mesh(np.asarray(jax.devices()), "mine")
        return jax.NamedSharding(mesh, jax.P(*names))

    def plain(state, x, label):
        def loss_fn(params):
            h = jax.lax.with_sharding_constraint(jnp.tanh(dense(params[0], x)), laid_out("mine"))
            return classified(dense(params[1], h), label)

        return learn(state, loss_fn)

    def step(state, x, label):
        rows = laid_out("mine")
        return jax.jit(plain, in_shardings=(laid_out(), rows, rows))(state, x, label)

    def reference(state, x, label):
        def loss_fn(params):
            return classified(mlp(params, x), label)

        return learn(state, loss_fn)

    return Program(
        init=mlp_start,
        batches=labelled,
        step=step,
        covers="B4",
        reference=reference,
        note="one device cannot run another mesh's layout: its reference is the step without it",
    )


@program
def own_shard_map():
    """The user's own per-device program: the one step that may be refused."""

    def step(state, x, label):
        mesh = jax.sharding.Mesh(np.asarray(jax.devices()), "mine")

        def local_gradient(params, rows, labels):
            grads = jax.grad(_loss)(params, rows, labels)
            return jax.tree.map(lambda g: jax.lax.pmean(g, "mine"), grads)

        specs = jax.P(), jax.P("mine"), jax.P("mine")
        mapped = jax.shard_map(
            local_gradient, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=False
        )
        return update(state, mapped(state["params"], x, label)), {}

    def reference(state, x, label):
        return update(state, jax.grad(_loss)(state["params"], x, label)), {}

    return Program(
        init=mlp_start,
        batches=labelled,
        step=step,
        covers="B4",
        refused="shard_map",
        reference=reference,
    )


def _pmap_style(state, x, label, mean):
    def loss_fn(params):
        losses = cross_entropies(mlp(params, x), label)
        return losses.mean(), {"correct": (losses < 2).astype(x.dtype).mean()}

    (loss, outputs), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    return update(state, mean(grads)), mean({"loss": loss, **outputs})


def _pmean(tree):
    return jax.lax.pmean(tree, "batch")


@program
def written_for_pmap():
    """pmean over an axis that the caller names: the only steps that speak of devices themselves."""
    return Program(
        init=mlp_start,
        batches=labelled,
        step=lambda state, x, label: _pmap_style(state, x, label, _pmean),
        covers="I1",
        options={"axis_name": "batch"},
        reference=lambda state, x, label: _pmap_style(state, x, label, lambda tree: tree),
    )


@program
def written_for_pmap_and_not_named():
    """The same, and the caller forgets the name."""
    return Program(
        init=mlp_start,
        batches=labelled,
        step=lambda state, x, label: _pmap_style(state, x, label, _pmean),
        covers="I1",
        note="Misleading: a pmap step without axis_name",
        refused="axis_name",
        reference=lambda state, x, label: _pmap_style(state, x, label, lambda tree: tree),
    )


def _in_microbatches(accumulate):
    """Losses that are no mean of microbatches' losses."""

    def loss(params, x, y):
        errors = (mlp(params, x)[:, 0] - y) ** 2
        weights = jax.nn.sigmoid(x[:, 0])
        loss = jnp.sqrt((weights * errors).sum() / weights.sum())
        return loss, {
            "errors": errors,
            "count": (errors > 1).sum(),
            "median": jnp.median(errors),
        }

    return Program(
        init=mlp_of(FEATURES, WIDTH, 1),
        batches=normals((ROWS, FEATURES), (ROWS,)),
        step=learning(loss),
        covers="A8 A5 A7",
        options={"accumulate": accumulate},
    )


register("coupled_loss_in_2_microbatches", functools.partial(_in_microbatches, 2))
register("coupled_loss_in_4_microbatches", functools.partial(_in_microbatches, 4), is_slow=True)


@program
def linear_transpose():
    """A hand-made adjoint of a linear map of rows."""

    def step(state, x, label):
        def blur(rows):
            return 0.5 * rows + 0.25 * jnp.roll(rows, 1, axis=-1)

        back = jax.linear_transpose(blur, jax.ShapeDtypeStruct(x.shape, x.dtype))

        def loss_fn(params):
            (spread,) = back(x)
            return classified(mlp(params, spread + blur(x)), label)

        return learn(state, loss_fn)

    note = "Misleading: linear_transpose"
    return Program(init=mlp_start, batches=labelled, step=step, covers="I2", note=note)


@program
def state_alone():
    """Nothing but the state, in other containers: a tuple with a scalar, a bfloat16 and an empty leaf."""
    tx = optax.sgd(0.1, momentum=0.9)

    def init(dtype):
        params = mlp_params(dtype)
        more = (jnp.ones((24, 8), jnp.bfloat16), jnp.zeros((0, 3), dtype), jnp.asarray(0.5, dtype))
        return params, tx.init(params), more

    def step(state, x, label):
        params, opt, (table, empty, number) = state
        grads = jax.grad(lambda p: _loss(p, x + table[label].astype(x.dtype), label))(params)
        updates, opt = tx.update(grads, opt)
        return (optax.apply_updates(params, updates), opt, (table, empty, number * 2)), {}

    return Program(init=init, batches=labelled, step=step, covers="I4")
