"""What leaves the device: once for each step, with whole values, whatever the number of devices."""

import jax
import jax.numpy as jnp
import numpy as np

from ._parts import (
    FEATURES,
    ROWS,
    classified,
    cross_entropies,
    labelled,
    learn,
    mlp,
    mlp_start,
    normals,
    update,
)
from ._program import Program, program, relative


def _recorder():
    """Where calls leave what they were given, and the function that does it."""
    calls = []

    def record(*values):
        calls.append([np.array(value) for value in values])

    return calls, record


@program
def debug_print():
    """A loss and some rows, printed once."""

    def step(state, x, label):
        def loss_fn(params):
            return classified(mlp(params, x), label)

        state, outputs = learn(state, loss_fn)
        jax.debug.print("{} rows of {}, labels {}", x.shape[0], label.max(), label[:9])
        return state, outputs

    return Program(init=mlp_start, batches=labelled, step=step, covers="I5", calls=[])


@relative
def debug_callback():
    """Whole rows and scalars go to the host."""
    calls, record = _recorder()

    def step(state, x, label):
        def loss_fn(params):
            return classified(mlp(params, x), label)

        state, outputs = learn(state, loss_fn)
        jax.debug.callback(record, outputs["loss"], outputs["losses"], label)
        return state, outputs

    return Program(init=mlp_start, batches=labelled, step=step, covers="I5 A2", calls=calls)


@program
def io_callback_in_order():
    """Two ordered calls in a step, the second with the parameters' norm after it."""
    from jax.experimental import io_callback

    calls, record = _recorder()

    def step(state, x, label):
        def loss_fn(params):
            return cross_entropies(mlp(params, x), label).mean(), {}

        state, outputs = learn(state, loss_fn)
        io_callback(record, None, label, ordered=True)
        size = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(state["params"]))
        io_callback(record, None, size, outputs["loss"], ordered=True)
        return state, outputs

    return Program(init=mlp_start, batches=labelled, step=step, covers="I5 A2", calls=calls)


@program
def io_callback_with_a_result():
    """The host counts its calls, and the count sets the next step's length."""
    from jax.experimental import io_callback

    calls, record = _recorder()

    def ask(labels):
        record(labels)
        return np.float32(1 + labels.sum() % 4)

    def step(state, x, label):
        def loss(params):
            return cross_entropies(mlp(params, x), label).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        answer = io_callback(ask, jax.ShapeDtypeStruct((), jnp.float32), label)
        grads = jax.tree.map(lambda g: g * (answer / 3).astype(g.dtype), grads)
        return update(state, grads), {"loss": value, "answer": answer}

    return Program(init=mlp_start, batches=labelled, step=step, covers="I5 A2", calls=calls)


@relative
def callback_in_a_scan():
    """One call for each layer or chunk of a loop, in order."""
    from jax.experimental import io_callback

    calls, record = _recorder()

    def step(state, x, label):
        def loss_fn(params):
            def body(total, chunk):
                losses = cross_entropies(mlp(params, chunk[0]), chunk[1])
                return total + losses.sum(), losses

            chunks = x.reshape(4, -1, FEATURES), label.reshape(4, -1)
            total, losses = jax.lax.scan(body, jnp.zeros((), x.dtype), chunks)
            return total / x.shape[0], {"losses": losses.reshape(-1)}

        state, outputs = learn(state, loss_fn)

        def tell(i, carry):
            io_callback(record, None, i, label[i], ordered=True)
            return carry + i

        return state, {**outputs, "turns": jax.lax.fori_loop(0, 3, tell, 0)}

    return Program(init=mlp_start, batches=labelled, step=step, covers="I5", calls=calls)


@program
def pure_callback_on_the_batch():
    """The host centres the rows: one call sees all of them, or the answer is another one."""

    def centre(rows):
        rows = np.asarray(rows)
        return rows - rows.mean(0, keepdims=True)

    def step(state, x, label):
        centred = jax.pure_callback(centre, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        def loss_fn(params):
            return classified(mlp(params, centred), label)

        return learn(state, loss_fn)

    return Program(init=mlp_start, batches=labelled, step=step, covers="A2 I2")


@program
def pure_callback_on_a_scalar():
    """The host turns the batch's loss into a step's length."""

    def length(loss):
        return np.asarray(np.tanh(loss), np.asarray(loss).dtype)

    def step(state, x, label):
        def loss(params):
            return cross_entropies(mlp(params, x), label).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        scale = jax.pure_callback(length, jax.ShapeDtypeStruct((), x.dtype), value)
        grads = jax.tree.map(lambda g: scale * g, grads)
        return update(state, grads), {"loss": value, "scale": scale}

    return Program(init=mlp_start, batches=labelled, step=step, covers="A2")


@relative
def pure_callback_for_each_row():
    """vmap_method='expand_dims': the host sees all rows; 'sequential': one after the other."""

    def sizes(row):
        return np.sqrt((np.asarray(row) ** 2).sum(-1))

    def step(state, x):
        def size(row, method):
            result = jax.ShapeDtypeStruct((), row.dtype)
            return jax.pure_callback(sizes, result, row, vmap_method=method)

        together = jax.vmap(lambda row: size(row, "expand_dims"))(x)
        in_turn = jax.vmap(lambda row: size(row, "sequential"))(x)

        def loss_fn(params):
            scale = (together + in_turn)[:, None]
            return ((mlp(params, x) / scale) ** 2).mean(), {"sizes": together}

        return learn(state, loss_fn)

    batches = normals((ROWS, FEATURES))
    return Program(init=mlp_start, batches=batches, step=step, covers="A2 I2")
