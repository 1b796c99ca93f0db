"""Optimizers that look at losses, search, solve and decide: with the whole batch's numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._parts import (
    FEATURES,
    ROWS,
    SGD,
    WIDTH,
    adamw,
    cross_entropies,
    dense,
    kernel,
    labelled,
    learn,
    learning,
    mlp,
    mlp_of,
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


def _line_search(tx):

    def step(state, x, label):
        def value_fn(params):
            return _loss(params, x, label)

        value, grads = optax.value_and_grad_from_state(value_fn)(
            state["params"], state=state["opt"]
        )
        updates, opt = tx.update(
            grads, state["opt"], state["params"], value=value, grad=grads, value_fn=value_fn
        )
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": value}

    return Program(init=mlp_of(tx=tx), batches=labelled, step=step, covers="A3")


@program
def optax_backtracking_linesearch():
    """optax's Armijo search, which calls the loss from inside the optimizer."""
    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=8, store_grad=True)
    found = _line_search(optax.chain(optax.sgd(8.0), search))
    return found


@relative
def optax_lbfgs():
    """Memory of past steps and a zoom line search."""
    search = optax.scale_by_zoom_linesearch(max_linesearch_steps=6)
    return _line_search(optax.lbfgs(memory_size=3, linesearch=search))


@program
def mezo_with_adam():
    """Two losses and no gradient: their difference times noise from a key, into Adam."""
    tx = adamw()

    def step(state, x, label, key):
        leaves, structure = jax.tree.flatten(state["params"])
        keys = jax.random.split(key, len(leaves))
        noise = jax.tree.unflatten(
            structure,
            [
                jax.random.normal(k, leaf.shape, leaf.dtype)
                for k, leaf in zip(keys, leaves, strict=True)
            ],
        )
        length = 0.1
        above = _loss(_moved(state["params"], noise, length), x, label)
        below = _loss(_moved(state["params"], noise, -length), x, label)
        slope = (above - below) / (2 * length)
        grads = jax.tree.map(lambda z: slope * z, noise)
        return update(state, grads, tx), {"above": above, "below": below}

    batches = with_arguments(labelled, _with_keys)
    return Program(init=mlp_of(tx=tx), batches=batches, step=step, covers="A3 I3")


@program
def sam():
    """The gradient is taken where the whole batch's first gradient leads."""

    def step(state, x, label):
        value, grads = jax.value_and_grad(_loss)(state["params"], x, label)
        moved = _moved(state["params"], grads, 0.1 / (optax.tree.norm(grads) + 1e-6))
        return update(state, jax.grad(_loss)(moved, x, label)), {"loss": value}

    return Program(init=mlp_start, batches=labelled, step=step, covers="A1 A3")


@program
def sophia_g():
    """A Hessian diagonal from gradients of sampled labels, squared and times the number of rows."""

    def init(dtype):
        zeros = jax.tree.map(jnp.zeros_like, mlp_params(dtype))
        return {**mlp_start(dtype), "momentum": zeros, "hessian": zeros}

    def step(state, x, label, key):
        params = state["params"]
        value, grads = jax.value_and_grad(_loss)(params, x, label)
        sampled = jax.random.categorical(key, mlp(params, x))
        guess = jax.grad(_loss)(params, x, sampled)
        hessian = jax.tree.map(
            lambda h, g: 0.5 * h + 0.5 * g**2 * x.shape[0], state["hessian"], guess
        )
        momentum = jax.tree.map(lambda m, g: 0.8 * m + 0.2 * g, state["momentum"], grads)
        ratio = jax.tree.map(lambda m, h: jnp.clip(m / (h + 1e-2), -1, 1), momentum, hessian)
        clipped = sum(jnp.sum(jnp.abs(r) == 1) for r in jax.tree.leaves(ratio))
        params = _moved(params, ratio, -0.05)
        state = {**state, "params": params, "momentum": momentum, "hessian": hessian}
        return state, {"loss": value, "sampled": sampled, "clipped": clipped}

    batches = with_arguments(labelled, _with_keys)
    return Program(init=init, batches=batches, step=step, covers="A5 I3")


@program
def polyak_step_size():
    """The loss over the squared norm of its gradient."""

    def step(state, x, label):
        value, grads = jax.value_and_grad(_loss)(state["params"], x, label)
        length = jnp.minimum(0.1 * value / (optax.tree.norm(grads) ** 2 + 1e-3), 1.0)
        params = _moved(state["params"], grads, -length)
        return {**state, "params": params}, {"loss": value, "length": length}

    return Program(init=mlp_start, batches=labelled, step=step, covers="A3 A8")


@program
def reduce_on_plateau():
    """optax's: a counter in the state follows whether the loss still falls."""
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, atol=10.0)
    tx = optax.chain(optax.sgd(0.1, momentum=0.9), plateau)

    def step(state, x, label):
        value, grads = jax.value_and_grad(_loss)(state["params"], x, label)
        updates, opt = tx.update(grads, state["opt"], state["params"], value=value)
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": value}

    return Program(init=mlp_of(tx=tx), batches=labelled, step=step, covers="A3")


@program
def schedules_and_clipping():
    """A chain: global norm, adaptive clipping, a warmup and cosine schedule, decay of kernels only."""
    schedule = optax.warmup_cosine_decay_schedule(1e-3, 3e-2, 2, 10)
    tx = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adaptive_grad_clip(0.2),
        adamw(schedule, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda a: a.ndim > 1, p)),
    )

    def step(state, x, label):
        def loss_fn(params):
            return _loss(params, x, label), {}

        state, outputs = learn(state, loss_fn, tx)
        count = optax.tree.get(
            state["opt"], "count", filtering=lambda path, _: "Schedule" in str(path[-1])
        )
        return state, {**outputs, "rate": schedule(count)}

    return Program(init=mlp_of(tx=tx), batches=labelled, step=step, covers="A3")


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
def custom_linear_solve():
    """Ridge regression on learned features, solved inside the loss and differentiated through."""

    def loss(params, x, y, x_new, y_new):
        features = jnp.tanh(mlp(params, x))
        gram = features.T @ features / x.shape[0] + 0.1 * jnp.eye(6, dtype=x.dtype)

        def matvec(w):
            return gram @ w

        def solve(_, right):
            return jnp.linalg.solve(gram, right)

        right = features.T @ y / x.shape[0]
        head = jax.lax.custom_linear_solve(matvec, right, solve, symmetric=True)
        errors = (jnp.tanh(mlp(params, x_new)) @ head - y_new) ** 2
        return errors.mean(), {"head": head, "errors": errors}

    batches = normals((ROWS, FEATURES), (ROWS,), (16, FEATURES), (16,))
    return Program(
        init=mlp_of(FEATURES, WIDTH, 6), batches=batches, step=learning(loss), covers="B2 A8"
    )


@relative
def fixed_point_of_the_batch():
    """Responsibilities of a mixture (EM): a fixed number of turns over all rows, then a gradient."""

    def init(dtype):
        params = mlp_params(dtype, (FEATURES, WIDTH, 4))
        return start(params, centres=mlp_params(dtype, (3, 4))[0]["kernel"])

    def step(state, x):
        z = mlp(state["params"], x)

        def turn(_, centres):
            distances = ((z[:, None] - centres[None]) ** 2).sum(-1)
            shares = jax.nn.softmax(-distances)
            return shares.T @ z / (shares.sum(0)[:, None] + 1e-3)

        centres = jax.lax.fori_loop(0, 4, turn, state["centres"])

        def loss_fn(params):
            distances = ((mlp(params, x)[:, None] - centres[None]) ** 2).sum(-1)
            loss = -jax.nn.logsumexp(-distances, axis=-1).mean()
            return loss + jnp.exp(-((mlp(params, x)) ** 2).mean()), {"centres": centres}

        return learn(state, loss_fn, centres=centres)

    return Program(init=init, batches=normals((ROWS, FEATURES)), step=step, covers="A6 A8")


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


@relative
def matrix_preconditioners():
    """Muon and Shampoo-like factors read whole gradients: they must be those of all rows."""
    tx = optax.contrib.muon(0.02)

    def loss(params, x, label):
        logits = dense(params[1], jnp.tanh(dense(params[0], x)))
        return cross_entropies(logits, label).mean(), {"guesses": logits.argmax(-1)}

    return Program(init=mlp_of(tx=tx), batches=labelled, step=learning(loss, tx), covers="A1")


def _bf16_moments(options, covers):
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
        covers=covers,
        options=options,
        exact_dtypes=("float32",),
        note="bf16 parameters and moments, float32 masters",
    )


@relative
def bf16_moments():
    """Parameters, and so gradients and their sums over the batch, in bfloat16 too."""
    return dataclasses.replace(_bf16_moments({}, "A10"), rounded_to="bfloat16")


@program
def bf16_moments_on_the_host():
    """The host's kernels round after every operation; XLA may round less often."""
    import jzero

    family = _bf16_moments({"offload": jzero.HostCPU()}, "A10")
    return dataclasses.replace(family, rounded_to="bfloat16", note="equal to one rounding")


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
