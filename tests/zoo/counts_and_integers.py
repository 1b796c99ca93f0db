"""Counts of rows, Python numbers that come from shapes, and integers that no mean may touch."""

import jax
import jax.numpy as jnp

from ._parts import (
    CLASSES,
    FEATURES,
    ROWS,
    cross_entropies,
    labelled,
    learn,
    learning,
    mlp,
    mlp_params,
    mlp_start,
    start,
    update,
)
from ._program import Program, program, relative

GLOBAL_BATCH = ROWS


@program
def counters_from_shapes():
    """Examples and tokens seen, as Python numbers of the batch's shape."""

    def init(dtype):
        zero = jnp.zeros((), jnp.int32)
        return {**mlp_start(dtype), "examples": zero, "values": jnp.zeros((), dtype)}

    def step(state, x, label):
        def loss_fn(params):
            return cross_entropies(mlp(params, x), label).mean(), {"rows": len(x)}

        examples, values = state["examples"] + x.shape[0], state["values"] + x.size
        return learn(state, loss_fn, examples=examples, values=values)

    return Program(init=init, batches=labelled, step=step, covers="A5 I4")


@program
def sum_over_global_batch():
    """The loss is a sum, divided by the number of rows that the author knows."""

    def loss(params, x, label):
        losses = cross_entropies(mlp(params, x), label)
        return losses.sum() / GLOBAL_BATCH, {"total": losses.sum()}

    return Program(init=mlp_start, batches=labelled, step=learning(loss), covers="A5")


@program
def integer_metrics():
    """Counts, a confusion matrix, extremes and places, none of which has a mean."""

    def loss(params, x, label):
        logits = mlp(params, x)
        guess = logits.argmax(-1)
        confusion = jnp.zeros((CLASSES, CLASSES), jnp.int32).at[label, guess].add(1)
        outputs = {
            "correct": (guess == label).sum(),
            "in_top_3": (jax.lax.top_k(logits, 3)[1] == label[:, None]).any(-1).sum(),
            "confusion": confusion,
            "largest_label": label.max(),
            "smallest_guess": guess.min(),
            "guesses": guess,
            "first_wrong": (guess != label).argmax(),
            "classes_seen": (jnp.bincount(label, length=CLASSES) > 0).sum(),
        }
        return cross_entropies(logits, label).mean(), outputs

    return Program(init=mlp_start, batches=labelled, step=learning(loss), covers="A5 I4")


@program
def bits_of_the_batch():
    """Reductions of integers and truth values: wrap-around sums, products, and, or, xor, bit counts."""

    def loss(params, x, label):
        logits = mlp(params, x)
        hashed = label.astype(jnp.uint32) * jnp.uint32(2654435761)
        right = logits.argmax(-1) == label
        outputs = {
            "hash": hashed.sum(dtype=jnp.uint32),
            "xor": jnp.bitwise_xor.reduce(hashed),
            "or": jnp.bitwise_or.reduce(label),
            "and": jnp.bitwise_and.reduce(label | 8),
            "all": (label < 9).all(),
            "any": right.any(),
            "bits": jax.lax.population_count(hashed).sum(),
            "small": label.astype(jnp.int8).sum(dtype=jnp.int8),
            "product": (2 * label + 1).astype(jnp.uint32).prod(dtype=jnp.uint32),
            "packed": jnp.packbits(right),
        }
        return cross_entropies(logits, label).mean(), outputs

    return Program(init=mlp_start, batches=labelled, step=learning(loss), covers="A5 I4")


@program
def reductions_of_every_kind():
    """Products, extremes, logsumexp, variances and norms of floats over the batch."""

    def loss(params, x, label):
        logits = mlp(params, x)
        losses = cross_entropies(logits, label)
        of_batch = {
            "product": jnp.prod(0.5 + 0.1 * losses),
            "largest": losses.max(),
            "smallest": losses.min(),
            "per_class_largest": logits.max(0),
            "logsumexp": jax.nn.logsumexp(losses),
            "variance": losses.var(ddof=1),
            "norm": jnp.linalg.norm(losses),
            "ptp": jnp.ptp(losses),
            "geometric": jnp.exp(jnp.log(losses).mean()),
        }
        loss = sum(jnp.mean(value) for value in of_batch.values())
        return loss + losses.mean(), of_batch

    return Program(init=mlp_start, batches=labelled, step=learning(loss), covers="A8 I2")


@relative
def measures_of_weights():
    """Of weights their sum, how many are zero and a partition function; a gain that only a penalty reads."""

    def init(dtype):
        return start({"layers": mlp_params(dtype), "gain": jnp.full((FEATURES,), 2, dtype)})

    def step(state, x, label):
        def loss_fn(params):
            loss = cross_entropies(mlp(params["layers"], x), label).mean()
            return loss + 0.1 * jnp.sum((params["gain"] - 1) ** 2), {}

        leaves = jax.tree.leaves(state["params"])
        measures = {
            "sum": sum(leaf.sum() for leaf in leaves),
            "zeros": sum((leaf == 0).sum() for leaf in leaves),
            "partition": sum(jnp.exp(leaf).sum() for leaf in leaves),
        }
        state, outputs = learn(state, loss_fn)
        return state, {**outputs, **measures}

    return Program(init=init, batches=labelled, step=step, covers="I2")


@program
def python_step_outputs():
    """Outputs that are Python numbers, None, rows of other dtypes, nested containers, empty arrays."""

    def step(state, x, label):
        def loss(params):
            return cross_entropies(mlp(params, x), label).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        rows = {"half": x.astype(jnp.float16), "is_odd": label % 2 == 1, "byte": label.astype("u1")}
        outputs = {"loss": value, "rows": rows, "one": 1, "pi": 3.0, "none": None}
        outputs["nested"] = (x.sum(), [label.sum(), (x[:0], jnp.zeros((0, 3), x.dtype))])
        return update(state, grads), outputs

    return Program(init=mlp_start, batches=labelled, step=step, covers="I4")
