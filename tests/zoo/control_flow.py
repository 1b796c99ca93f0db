"""Branches and loops that the batch decides: one decision, of all rows together."""

import jax
import jax.numpy as jnp
import optax

from ._parts import (
    CLASSES,
    FEATURES,
    ROWS,
    WIDTH,
    cross_entropies,
    dense,
    dense_params,
    kernel,
    labelled,
    learn,
    learning,
    mlp,
    mlp_start,
    normals,
    start,
    update,
)
from ._program import Program, program, relative


def _loss(params, x, label):
    return cross_entropies(mlp(params, x), label).mean()


@program
def cond_on_the_loss():
    """The predicate depends on the batch, the branches on parameters only."""

    def init(dtype):
        return {**mlp_start(dtype), "average": jnp.asarray(2.3, dtype)}

    def step(state, x, label):
        loss, grads = jax.value_and_grad(_loss)(state["params"], x, label)
        is_worse = loss > state["average"]
        shrunk = jax.lax.cond(
            is_worse,
            lambda p: jax.tree.map(lambda leaf: 0.9 * leaf, p),
            lambda p: jax.tree.map(lambda leaf: leaf + 0.01, p),
            state["params"],
        )
        state = update({**state, "params": shrunk}, grads)
        average = 0.9 * state["average"] + 0.1 * loss
        return {**state, "average": average}, {"loss": loss, "worse": is_worse}

    return Program(init=init, batches=labelled, step=step, covers="A2 I2")


@program
def switch_on_a_count():
    """The number of correct rows chooses among three updates."""

    def step(state, x, label):
        loss, grads = jax.value_and_grad(_loss)(state["params"], x, label)
        num_correct = (mlp(state["params"], x).argmax(-1) == label).sum()

        def scaled(factor):
            return lambda g: jax.tree.map(lambda leaf: factor * leaf, g)

        branches = [scaled(2.0), scaled(-1.0), scaled(0.5)]
        grads = jax.lax.switch(num_correct % 3, branches, grads)
        return update(state, grads), {"loss": loss, "correct": num_correct}

    return Program(init=mlp_start, batches=labelled, step=step, covers="A2 I2")


@program
def while_over_parameters():
    """The batch decides how often the parameters are shrunk; the body does not see it."""

    def step(state, x, label):
        loss, grads = jax.value_and_grad(_loss)(state["params"], x, label)
        target = 0.7 * optax.tree.norm(state["params"]) + 0.1 * loss

        def too_long(carry):
            return optax.tree.norm(carry[0]) > target

        def shrink(carry):
            params, count = carry
            return jax.tree.map(lambda p: 0.93 * p, params), count + 1

        params, count = jax.lax.while_loop(too_long, shrink, (state["params"], 0))
        return update({**state, "params": params}, grads), {"loss": loss, "turns": count}

    return Program(init=mlp_start, batches=labelled, step=step, covers="A2 I2")


@program
def while_until_all_rows_converge():
    """A deep equilibrium: the loop ends when the slowest row has settled."""

    def init(dtype):
        params = {
            "inner": 0.4 * kernel(0, (WIDTH, WIDTH), dtype),
            "read": dense_params(1, FEATURES, WIDTH, dtype),
            "head": dense_params(3, WIDTH, CLASSES, dtype),
        }
        return start(params)

    def loss(params, x, label):
        def settled(params, injected):
            def moving(carry):
                _, change, turns = carry
                return (change > 1e-3) & (turns < 50)

            def turn(carry):
                z, _, turns = carry
                new = jnp.tanh(z @ params["inner"] + injected)
                return new, jnp.abs(new - z).max(), turns + 1

            first = jnp.zeros_like(injected), jnp.asarray(jnp.inf, injected.dtype), 0
            z, _, turns = jax.lax.while_loop(moving, turn, first)
            return z, turns

        injected = dense(params["read"], x)
        z, turns = settled(*jax.lax.stop_gradient((params, injected)))
        z = jnp.tanh(z @ params["inner"] + injected)
        return cross_entropies(dense(params["head"], z), label).mean(), {"turns": turns}

    return Program(init=init, batches=labelled, step=learning(loss), covers="A2 I2")


@relative
def cond_with_rows():
    """A scalar of the batch chooses what happens to the rows, inside the gradient."""

    def step(state, x, label):
        is_wide = x.std() > 1.0

        def loss_fn(params):
            rows = jax.lax.cond(is_wide, lambda r: jnp.tanh(r), lambda r: 2.0 * r, x)
            logits = jax.lax.cond(is_wide, mlp, lambda p, r: 0.5 * mlp(p, r), params, rows)
            return cross_entropies(logits, label).mean(), {"wide": is_wide}

        return learn(state, loss_fn)

    return Program(init=mlp_start, batches=labelled, step=step, covers="A2 I2")


@program
def cond_for_each_row():
    """A vmapped cond is a select; a vmapped while runs until its last row is done."""

    def halvings(row):
        def body(carry):
            value, count = carry
            return value / 2, count + 1

        return jax.lax.while_loop(lambda c: c[0] > 0.5, body, (jnp.abs(row).max(), 0))

    def step(state, x, label):
        sizes, counts = jax.vmap(halvings)(x)

        def row_loss(params, row, target, count):
            logits = mlp(params, row)
            return jax.lax.cond(
                count > 1,
                lambda: cross_entropies(logits, target),
                lambda: 0.1 * jnp.sum(logits**2),
            )

        def loss_fn(params):
            losses = jax.vmap(row_loss, in_axes=(None, 0, 0, 0))(params, x, label, counts)
            return losses.mean(), {"losses": losses, "counts": counts, "sizes": sizes}

        return learn(state, loss_fn)

    return Program(init=mlp_start, batches=labelled, step=step, covers="A2 I2")


@program
def nested_scans():
    """Layers in a scan, and within each a scan over time."""
    length, num_layers = 5, 3

    def init(dtype):
        params = {
            "inner": 0.5 * kernel(0, (num_layers, FEATURES, FEATURES), dtype),
            "outer": kernel(1, (num_layers, FEATURES, FEATURES), dtype),
        }
        return start(params)

    def loss(params, x):
        def layer(sequence, weights):
            def turn(hidden, token):
                hidden = jnp.tanh(hidden @ weights["inner"] + token @ weights["outer"])
                return hidden, hidden

            first = jnp.zeros_like(sequence[:, 0])
            _, out = jax.lax.scan(turn, first, sequence.swapaxes(0, 1))
            return sequence + out.swapaxes(0, 1), out[-1].mean()

        out, means = jax.lax.scan(layer, x[:, :-1], params)
        errors = jnp.mean((out - x[:, 1:]) ** 2, axis=(1, 2))
        return errors.mean(), {"errors": errors, "layer_means": means}

    batches = normals((ROWS, length + 1, FEATURES))
    return Program(init=init, batches=batches, step=learning(loss), covers="I2")


@program
def loss_in_chunks():
    """The rows in four chunks, one after the other, under remat: a reshape that splits the batch."""

    def loss(params, x, label):
        @jax.checkpoint
        def body(total, chunk):
            losses = cross_entropies(mlp(params, chunk[0]), chunk[1])
            return total + losses.sum(), losses

        chunks = x.reshape(4, -1, x.shape[-1]), label.reshape(4, -1)
        total, losses = jax.lax.scan(body, jnp.zeros((), x.dtype), chunks)
        return total / x.shape[0], {"losses": losses.reshape(-1)}

    return Program(init=mlp_start, batches=labelled, step=learning(loss), covers="I2")


@program
def own_microbatches():
    """Gradients summed over a fori_loop of dynamic slices, then one update."""
    rows = 8

    def step(state, x, label):
        def body(i, carry):
            total, loss_sum = carry
            part = [jax.lax.dynamic_slice_in_dim(a, i * rows, rows) for a in (x, label)]
            loss, grads = jax.value_and_grad(_loss)(state["params"], *part)
            return jax.tree.map(jnp.add, total, grads), loss_sum + loss

        num = x.shape[0] // rows
        zeros = jax.tree.map(jnp.zeros_like, state["params"]), jnp.zeros((), x.dtype)
        grads, loss = jax.lax.fori_loop(0, num, body, zeros)
        grads = jax.tree.map(lambda g: g / num, grads)
        return update(state, grads), {"loss": loss / num}

    return Program(init=mlp_start, batches=labelled, step=step, covers="I2")


@relative
def several_updates_in_one_step():
    """Optimizer steps on one batch, until its loss has fallen enough or three are done."""

    def step(state, x, label):
        first = _loss(state["params"], x, label)

        def unfinished(carry):
            _, loss, turns = carry
            return (turns < 3) & (loss > 0.97 * first)

        def turn(carry):
            state, _, turns = carry
            state = update(state, jax.grad(_loss)(state["params"], x, label))
            return state, _loss(state["params"], x, label), turns + 1

        state, loss, turns = jax.lax.while_loop(unfinished, turn, (state, first, 0))
        return state, {"first": first, "loss": loss, "turns": turns}

    return Program(init=mlp_start, batches=labelled, step=step, covers="A2 I2")
