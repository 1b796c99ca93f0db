"""Optimizers that look at losses, search, solve and decide: with the whole batch's numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._parts import (
    FEATURES,
    ROWS,
    SGD,
    WIDTH,
    cross_entropies,
    kernel,
    labelled,
    learn,
    learning,
    mlp,
    mlp_params,
    mlp_start,
    normals,
    start,
    update,
    with_arguments,
)
from ._program import Program, program, relative


def _loss(params, x, label):
    return cross_entropies(mlp(params, x), label).mean()


def _moved(params, direction, length):
    return jax.tree.map(lambda p, d: p + length * d, params, direction)


def _with_keys(i, _):
    return (jax.random.key(i),)


def _accept_or_reject(state, x, label, key):
    leaves, structure = jax.tree.flatten(state["params"])
    keys = jax.random.split(key, len(leaves))
    noise = [
        jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)
    ]
    value, grads = jax.value_and_grad(_loss)(state["params"], x, label)
    proposal = update(state, jax.tree.map(lambda g: 3 * g, grads))
    moved = _moved(proposal["params"], jax.tree.unflatten(structure, noise), 0.2)
    after = _loss(moved, x, label)
    is_better = after < value
    state = jax.lax.cond(
        is_better, lambda: {**proposal, "params": moved}, lambda: {**state, "opt": proposal["opt"]}
    )
    return state, {"loss": value, "after": after, "accepted": is_better}


@program
def accept_or_reject():
    """A second loss decides whether the proposal becomes the parameters."""
    batches = with_arguments(labelled, _with_keys)
    return Program(init=mlp_start, batches=batches, step=_accept_or_reject, covers="A3 A2")


@program
def accept_or_reject_in_microbatches():
    """The same with two microbatches, which must see each other's losses."""
    return Program(
        init=mlp_start,
        batches=with_arguments(labelled, _with_keys),
        step=_accept_or_reject,
        covers="B6 A3",
        options={"accumulate": 2},
    )


@program
def armijo():
    """Backtracking by a while loop, until the whole batch's loss has fallen enough."""

    def step(state, x, label):
        value, grads = jax.value_and_grad(_loss)(state["params"], x, label)
        slope = optax.tree.norm(grads) ** 2

        def too_long(carry):
            length, after, turns = carry
            return (after > value - 0.1 * length * slope) & (turns < 12)

        def halve(carry):
            length, _, turns = carry
            moved = _moved(state["params"], grads, -length / 2)
            return length / 2, _loss(moved, x, label), turns + 1

        first = jnp.asarray(64.0, x.dtype), jnp.asarray(jnp.inf, x.dtype), 0
        length, after, turns = jax.lax.while_loop(too_long, halve, first)
        state = {**state, "params": _moved(state["params"], grads, -length)}
        return state, {"loss": value, "after": after, "turns": turns, "length": length}

    return Program(init=mlp_start, batches=labelled, step=step, covers="A3 A2")


@program
def sam():
    """The gradient is taken where the whole batch's first gradient leads."""

    def step(state, x, label):
        value, grads = jax.value_and_grad(_loss)(state["params"], x, label)
        moved = _moved(state["params"], grads, 0.1 / (optax.tree.norm(grads) + 1e-6))
        return update(state, jax.grad(_loss)(moved, x, label)), {"loss": value}

    return Program(init=mlp_start, batches=labelled, step=step, covers="A1 A3")


@program
def loss_scaling():
    """Half precision with a scale that halves when any gradient of any row is not finite."""

    def init(dtype):
        scale = {"scale": jnp.asarray(2.0**10, dtype), "good": jnp.zeros((), jnp.int32)}
        return {**mlp_start(dtype), **scale}

    def batches(num_steps, dtype):
        found = labelled(num_steps, dtype)
        if num_steps > 1:
            found[1][0][5] *= 1e7
        return found

    def step(state, x, label):
        def scaled(params):
            return (
                _loss(
                    jax.tree.map(lambda p: p.astype(jnp.float16), params),
                    x.astype(jnp.float16),
                    label,
                ).astype(x.dtype)
                * state["scale"]
            )

        value, grads = jax.value_and_grad(scaled)(state["params"])
        grads = jax.tree.map(lambda g: g / state["scale"], grads)
        finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
        new = update(state, grads)
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        good = jnp.where(finite, state["good"] + 1, 0)
        scale = jnp.where(finite, jnp.where(good >= 2, 2.0, 1.0), 0.5) * state["scale"]
        outputs = {"finite": finite, "scale": scale}
        return {**new, "scale": scale, "good": good}, outputs

    return Program(
        init=init,
        batches=batches,
        step=step,
        covers="A3 I2",
        exact_dtypes=("float32",),
        rounded_to="float16",
        note="gradients are summed over rows in float16",
    )


@relative
def elements_that_overflow():
    """Of each step's gradient elements are inf, -inf and NaN; so the weights become."""

    def init(dtype):
        return start({"kernel": kernel(0, (FEATURES, WIDTH), dtype)})

    def batches(num_steps, dtype):
        found = normals((ROWS, FEATURES), (ROWS, WIDTH))(num_steps, dtype)
        large = np.finfo(dtype).max ** 0.75  # Its square is inf.
        for i, (x, wanted) in enumerate(found):
            for row, column, sign in ((5, 1, 1), (11, 8, -1)):
                x[row], wanted[row] = 0, 0
                x[row, column // 2 + i], wanted[row, column + i] = large, sign * large
            # A column of the gradient, of which each device keeps a part; then a row, which one keeps.
            (x if i % 2 else wanted)[3, 6] = np.nan
        return found

    def loss(params, x, wanted):
        scores = x @ params["kernel"]
        is_usual = jnp.abs(x).max(axis=1, keepdims=True) < 10
        usual = jnp.where(is_usual, jnp.abs(scores), 0)
        return -(scores * wanted).sum(axis=1).mean(), {"scores": usual.mean(axis=0)}

    return Program(init=init, batches=batches, step=learning(loss), covers="A3 A2")


@program
def conjugate_gradients():
    """Newton's step by jax.scipy.sparse.linalg.cg on products with a damped Gauss-Newton matrix."""

    def step(state, x, label):
        def logits_fn(params):
            return mlp(params, x)

        def of_logits(logits):
            return cross_entropies(logits, label).mean()

        value, grads = jax.value_and_grad(_loss)(state["params"], x, label)
        logits, pushed = jax.linearize(logits_fn, state["params"])
        pulled = jax.linear_transpose(pushed, state["params"])

        def product(direction):
            curved = jax.jvp(jax.grad(of_logits), (logits,), (pushed(direction),))[1]
            (back,) = pulled(curved)
            return jax.tree.map(lambda b, d: b + 0.1 * d, back, direction)

        newton, _ = jax.scipy.sparse.linalg.cg(product, grads, maxiter=4)
        return {**state, "params": _moved(state["params"], newton, -0.5)}, {"loss": value}

    return Program(init=mlp_start, batches=labelled, step=step, covers="B2 I2")


@program
def td3_in_microbatches():
    """Twin critics, a delayed actor, clipped noise from a key, two microbatches."""

    def init(dtype):
        actor = mlp_params(dtype, (FEATURES, WIDTH, 2))
        critics = [mlp_params(dtype, (FEATURES + 2, WIDTH, 1), seed=s) for s in (50, 60)]
        params = {"actor": actor, "critics": critics}
        return {
            "params": params,
            "target": params,
            "actor_opt": SGD.init(actor),
            "critic_opt": SGD.init(critics),
            "step": jnp.zeros((), jnp.int32),
        }

    def values(critics, x, action):
        rows = jnp.concatenate([x, action], axis=-1)
        return [mlp(critic, rows)[:, 0] for critic in critics]

    def step(state, x, action, reward, x_next, key):
        params, target = state["params"], state["target"]
        noise = jnp.clip(0.2 * jax.random.normal(key, action.shape, x.dtype), -0.5, 0.5)
        next_action = jnp.tanh(mlp(target["actor"], x_next)) + noise
        wanted = reward + 0.9 * jnp.minimum(*values(target["critics"], x_next, next_action))

        def critic_loss(critics):
            return sum(((v - wanted) ** 2).mean() for v in values(critics, x, action))

        loss, grads = jax.value_and_grad(critic_loss)(params["critics"])
        updates, critic_opt = SGD.update(grads, state["critic_opt"])
        critics = optax.apply_updates(params["critics"], updates)

        def actor_loss(actor):
            return -values(critics, x, jnp.tanh(mlp(actor, x)))[0].mean()

        def train_actor():
            updates, opt = SGD.update(jax.grad(actor_loss)(params["actor"]), state["actor_opt"])
            return optax.apply_updates(params["actor"], updates), opt

        def wait():
            return params["actor"], state["actor_opt"]

        actor, actor_opt = jax.lax.cond(state["step"] % 2 == 0, train_actor, wait)
        params = {"actor": actor, "critics": critics}
        new = {
            "params": params,
            "target": optax.incremental_update(params, target, 0.1),
            "actor_opt": actor_opt,
            "critic_opt": critic_opt,
            "step": state["step"] + 1,
        }
        return new, {"loss": loss, "wanted": wanted}

    return Program(
        init=init,
        batches=with_arguments(
            normals((ROWS, FEATURES), (ROWS, 2), (ROWS,), (ROWS, FEATURES)), _with_keys
        ),
        step=step,
        covers="I2",
        note="Misleading: TD3 with accumulate; its actor learns in a branch",
        options={"accumulate": 2},
    )


@program
def bf16_moments_on_the_host():
    """The host's kernels round after every operation; XLA may round less often."""
    import jzero

    tx = jzero.master_weights(optax.adam(1e-2, eps=1e-3, mu_dtype=jnp.bfloat16))

    def init(dtype):
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), mlp_params(dtype))
        return start(params, tx)

    def loss(params, x, label):
        wide = jax.tree.map(lambda p: p.astype(x.dtype), params)
        return _loss(wide, x, label), {}

    return Program(
        init=init,
        batches=labelled,
        step=learning(loss, tx),
        covers="A10",
        options={"offload": jzero.HostCPU()},
        exact_dtypes=("float32",),
        rounded_to="bfloat16",
        note="bf16 parameters and moments, float32 masters: equal to one rounding",
    )


@relative
def factors_of_a_matrix_for_each_row():
    """Decompositions and solves, each of the row's own matrix; what they find is a feature of the row."""

    def found(x):
        size = x.shape[-1]
        near = x[:, :, None] * x[:, None, :] + jnp.eye(size, dtype=x.dtype)[None]
        own = near + jnp.triu(x[:, :, None] + jnp.zeros_like(near))
        lower = jnp.linalg.cholesky(near)
        below, above = (0.1 * jnp.roll(x, by, axis=1) for by in (1, -1))
        parts = [
            jnp.diagonal(lower, axis1=1, axis2=2),
            jnp.abs(jnp.diagonal(jnp.linalg.qr(own)[1], axis1=1, axis2=2)),
            jnp.linalg.eigvalsh(near),
            jnp.linalg.svd(own, compute_uv=False),
            jnp.linalg.solve(own, x[:, :, None])[:, :, 0],
            jax.lax.linalg.tridiagonal_solve(
                below.at[:, 0].set(0), 2 + x**2, above.at[:, -1].set(0), x[:, :, None]
            )[:, :, 0],
        ]
        return jnp.tanh(0.2 * sum(parts))

    def step(state, x, label):
        features = jax.lax.stop_gradient(found(x))
        return learn(state, lambda params: (_loss(params, features, label), {"features": features}))

    return Program(init=mlp_start, batches=labelled, step=step, covers="A7 I2")
