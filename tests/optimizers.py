"""Every optimizer and wrapper that optax exports, and the small problem they all train on.

`ENTRIES` maps a name to a factory and to the way a step must call it. Names that are only parts of
others (`scale_by_adam` inside `adam`) need no entry: `covered_names` finds, through the closures of
each entry's transformation, every factory that the table really runs. `NOT_TRANSFORMATIONS` lists
what only looks like a factory.

The problem is chosen so that no gradient element is a cancelling sum. Optimizers that divide by the
size of a gradient (Adam) or keep only its sign (Lion) otherwise amplify the rounding noise of
elements near zero, and a comparison would need tolerances that hide real errors. Every unit has a
fixed sign, weights carry the product of the signs at their two ends, and targets lie beyond the
outputs: gradients have mixed signs across elements, but each one is a sum of terms of one sign.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib
from optax.experimental import aggregating

BATCH = 16
NUM_STEPS = 5
# The step at which entries with `poisoned=True` see one row of NaN, on one device only.
POISONED_STEP = 2

Params = Any
State = dict[str, Any]


# ---------------------------------------------------------------- the problem


def make_params(complex_leaf: bool = False) -> dict[str, np.ndarray]:
    """Square, non-square and 3-D matrices, a bias, and a leaf whose dim 8 does not divide."""
    rng = np.random.default_rng(0)
    x_sign, h_sign, g_sign, y_sign = _signs()

    def magnitude(scale: float, *shape: int) -> np.ndarray:
        return (scale * rng.uniform(0.5, 1.5, shape)).astype(np.float32)

    params = {
        "wide": magnitude(0.04, 16, 32) * np.outer(x_sign, h_sign),
        "heads": magnitude(0.03, 32, 2, 8) * np.multiply.outer(h_sign, g_sign.reshape(2, 8)),
        "bias": magnitude(0.05, 16) * g_sign,
        "square": magnitude(0.06, 16, 16) * np.outer(g_sign, y_sign),
        "odd": magnitude(0.2, 10),
    }
    if complex_leaf:
        params["square"] = params["square"].astype(np.complex64) * np.complex64(0.6 + 0.8j)
    return params


def make_batches(poisoned: bool = False) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    x_sign, _, _, y_sign = _signs()
    # Targets grow from step to step: some optimizers keep differences of gradients.
    batches = [
        {
            "x": rng.uniform(0.5, 1.5, (BATCH, 16)).astype(np.float32) * x_sign,
            "y": rng.uniform(0.8 * size, 1.2 * size, (BATCH, 16)).astype(np.float32) * y_sign,
        }
        for size in (2, 3, 4, 6, 8)
    ]
    if poisoned:
        batches[POISONED_STEP]["x"][3] = np.nan
    return batches


def _signs() -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.choice([-1.0, 1.0], size).astype(np.float32) for size in (16, 32, 16, 16)]


def mse(params: Params, batch: Any) -> jax.Array:
    """The mean over the batch of a small network's squared error."""
    square = params["square"]
    if jnp.iscomplexobj(square):
        square = jnp.real(square) + jnp.imag(square)
    rows = batch["x"].shape[0]
    hidden = jnp.tanh(batch["x"] @ params["wide"])
    heads = jnp.einsum("bi,ihd->bhd", hidden, params["heads"]).reshape(rows, 16)
    hidden = jnp.tanh(heads + params["bias"])
    out = jnp.tanh(hidden @ square)
    out = jnp.concatenate([out[:, :10] * params["odd"], out[:, 10:]], axis=1)
    return jnp.mean(jnp.square(out - batch["y"]))


# ---------------------------------------------------------------- how a step calls its optimizer


def plain(tx, grads, opt_state, params, loss, loss_of):
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def with_value(tx, grads, opt_state, params, loss, loss_of):
    """For step sizes that follow the loss (Polyak, MoMo, plateaus)."""
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state


def with_value_fn(tx, grads, opt_state, params, loss, loss_of):
    """For line searches, which evaluate the loss again inside the update."""
    updates, opt_state = tx.update(
        grads, opt_state, params, value=loss, grad=grads, value_fn=loss_of
    )
    return optax.apply_updates(params, updates), opt_state


def with_obj_fn(tx, grads, opt_state, params, loss, loss_of):
    """For Sophia's estimate of the Hessian's diagonal."""
    updates, opt_state = tx.update(grads, opt_state, params, obj_fn=loss_of)
    return optax.apply_updates(params, updates), opt_state


def with_grad_fn(tx, grads, opt_state, params, loss, loss_of):
    """For SAM's second gradient pass inside the update."""
    updates, opt_state = tx.update(
        grads, opt_state, params, grad_fn=lambda p, _: jax.grad(loss_of)(p)
    )
    return optax.apply_updates(params, updates), opt_state


@dataclasses.dataclass(frozen=True)
class Entry:
    """One optimizer and what its step needs beyond `tx.update(grads, opt_state, params)`."""

    make: Callable[[], Any]
    call: Callable[..., tuple[Params, Any]] = plain
    # Parameters that this optimizer leaves where they are, so that only the others must move.
    still: tuple[str, ...] = ()
    # Batch 2 has a row of NaN, which the optimizer must survive, on every device alike.
    poisoned: bool = False
    # Parameters are a (fast, slow) pair; gradients are taken at the fast ones.
    lookahead: bool = False
    # `init` returns a smaller structure than `update`: start from the state after one update.
    warm: bool = False
    # One parameter is complex64.
    complex_leaf: bool = False
    # Gradients keep a leading dim of examples.
    per_example: bool = False


def make_step(entry: Entry) -> Callable[[State, Any], tuple[State, dict[str, jax.Array]]]:
    """An untouched single-device train step, as a user would write it."""
    tx = entry.make()

    def step(state: State, batch):
        params = state["params"]
        fast = params.fast if entry.lookahead else params

        def loss_of(p, batch=batch):
            return mse(p, batch)

        if entry.per_example:
            rows = jax.tree.map(lambda a: a[:, None], batch)
            losses, grads = jax.vmap(jax.value_and_grad(mse), (None, 0))(fast, rows)
            loss = jnp.mean(losses)
        else:
            loss, grads = jax.value_and_grad(loss_of)(fast)
        if entry.complex_leaf:
            grads = jax.tree.map(jnp.conj, grads)
        params, opt_state = entry.call(tx, grads, state["opt"], params, loss, loss_of)
        return {"params": params, "opt": opt_state, "step": state["step"] + 1}, {"loss": loss}

    return step


def make_state(entry: Entry) -> State:
    """A fresh state whose leaves share no buffers, so that it may be donated."""
    tx = entry.make()
    params: Any = jax.tree.map(jnp.asarray, make_params(entry.complex_leaf))
    if entry.lookahead:
        params = optax.LookaheadParams.init_synced(params)
    opt_state = tx.init(params)
    if entry.warm:
        _, opt_state = tx.update(jax.tree.map(jnp.zeros_like, params), opt_state, params)
    state = {"params": params, "opt": opt_state, "step": jnp.zeros((), jnp.int32)}
    return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state)


# ---------------------------------------------------------------- the table


def _decay_mask(params: Params) -> Params:
    return jax.tree.map(lambda p: p.ndim > 1, params)


def _muon_dims(param: jax.Array) -> contrib.MuonDimensionNumbers | None:
    if param.ndim < 2:
        return None
    return contrib.MuonDimensionNumbers(0, tuple(range(1, param.ndim)))


def _labels(params: Params) -> Params:
    return {name: "matrix" if leaf.ndim > 1 else "vector" for name, leaf in params.items()}


def _every_other(step: jax.Array, **_: Any) -> jax.Array:
    return step % 2 == 0


FROZEN = {name: name in ("wide", "bias") for name in make_params()}
SCHEDULE = optax.linear_schedule(3e-3, 1e-3, NUM_STEPS)


def _then_sgd(*txs: Any, learning_rate: float = 0.02) -> Any:
    """A gradient transformation that is no optimizer alone, in front of SGD."""
    return optax.chain(*txs, optax.sgd(learning_rate, momentum=0.9))


ENTRIES: dict[str, Entry] = {
    # Optimizers of `optax`.
    "adabelief": Entry(lambda: optax.adabelief(3e-3)),
    "adadelta": Entry(lambda: optax.adadelta(1.0, eps=1e-4)),
    "adafactor": Entry(lambda: optax.adafactor(3e-3, min_dim_size_to_factor=4)),
    "adafactor(momentum, decay)": Entry(
        lambda: optax.adafactor(
            1e-2, min_dim_size_to_factor=16, momentum=0.9, weight_decay_rate=1e-3
        )
    ),
    "adagrad": Entry(lambda: optax.adagrad(3e-3)),
    "adam": Entry(lambda: optax.adam(3e-3)),
    "adam(bfloat16 moment)": Entry(lambda: optax.adam(3e-3, mu_dtype=jnp.bfloat16)),
    "adamax": Entry(lambda: optax.adamax(3e-3)),
    "adamaxw": Entry(lambda: optax.adamaxw(3e-3, mask=_decay_mask)),
    "adamw": Entry(lambda: optax.adamw(SCHEDULE, weight_decay=1e-2, mask=_decay_mask)),
    "adan": Entry(lambda: optax.adan(3e-3, weight_decay=1e-3)),
    "amsgrad": Entry(lambda: optax.amsgrad(3e-3)),
    "fromage": Entry(lambda: optax.fromage(1e-2)),
    "lamb": Entry(lambda: optax.lamb(1e-2, weight_decay=1e-2)),
    "lars": Entry(lambda: optax.lars(1.0, weight_decay=1e-3, trust_coefficient=0.01)),
    # It keeps differences of parameters: large steps, for digits to be left in them.
    "lbfgs": Entry(lambda: optax.lbfgs(0.3, memory_size=3, linesearch=None)),
    "lion": Entry(lambda: optax.lion(1e-3)),
    "nadam": Entry(lambda: optax.nadam(3e-3)),
    "nadamw": Entry(lambda: optax.nadamw(3e-3)),
    "noisy_sgd": Entry(lambda: optax.noisy_sgd(0.02, key=3)),
    "novograd": Entry(lambda: optax.novograd(1e-2, weight_decay=1e-3)),
    "optimistic_adam": Entry(lambda: optax.optimistic_adam(3e-3)),
    "optimistic_adam_v2": Entry(lambda: optax.optimistic_adam_v2(3e-3)),
    "optimistic_gradient_descent": Entry(lambda: optax.optimistic_gradient_descent(0.02)),
    "polyak_sgd": Entry(lambda: optax.polyak_sgd(0.02), with_value),
    "polyak_sgd(large)": Entry(lambda: optax.polyak_sgd(10.0, scaling=0.1), with_value),
    "radam": Entry(lambda: optax.radam(1e-2, threshold=4.0)),
    "rmsprop": Entry(lambda: optax.rmsprop(1e-3, centered=True, momentum=0.9, nesterov=True)),
    "rprop": Entry(lambda: optax.rprop(1e-3)),
    "sgd": Entry(lambda: optax.sgd(0.02)),
    "sgd(momentum)": Entry(lambda: optax.sgd(0.02, momentum=0.9)),
    "sgd(nesterov)": Entry(lambda: optax.sgd(0.02, momentum=0.9, nesterov=True)),
    "sign_sgd": Entry(lambda: optax.sign_sgd(1e-3)),
    "signum": Entry(lambda: optax.signum(1e-3)),
    "sm3": Entry(lambda: optax.sm3(3e-3)),
    "yogi": Entry(lambda: optax.yogi(3e-3)),
    # Optimizers of `optax.contrib`.
    "acprop": Entry(lambda: contrib.acprop(1e-3, eps=1e-3, weight_decay=1e-3)),
    "ademamix": Entry(lambda: contrib.ademamix(3e-3, weight_decay=1e-3)),
    "adopt": Entry(lambda: contrib.adopt(3e-3)),
    "cocob": Entry(lambda: contrib.cocob(weight_decay=1e-3)),
    "dadapt_adamw": Entry(lambda: contrib.dadapt_adamw(1.0, estim_lr0=1e-2, weight_decay=1e-3)),
    "dog": Entry(lambda: contrib.dog(init_step=("heuristic", 1e-2), weight_decay=1e-3)),
    "dog(learning_rate)": Entry(lambda: contrib.dog(init_step=("learning_rate", 0.02))),
    "dowg": Entry(lambda: contrib.dowg(init_estim_sq_dist=1e-2)),
    "galore": Entry(
        # Rank 1: these gradients have one large singular value, and the vectors of the small ones
        # are rounding noise.
        lambda: contrib.galore(3e-3, rank=1, update_proj_gap=3, weight_decay=1e-3)
    ),
    "madgrad": Entry(lambda: contrib.madgrad(3e-3)),
    "momo": Entry(lambda: contrib.momo(0.02, adapt_lower_bound=True), with_value),
    "momo(large)": Entry(lambda: contrib.momo(10.0, lower_bound=3.0), with_value),
    "momo_adam": Entry(lambda: contrib.momo_adam(3e-3, weight_decay=1e-3), with_value),
    "muon": Entry(lambda: contrib.muon(3e-3, weight_decay=1e-3)),
    "muon(adaptive, 3-D)": Entry(
        lambda: contrib.muon(
            3e-3,
            adaptive=True,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=lambda params: jax.tree.map(_muon_dims, params),
        )
    ),
    "prodigy": Entry(lambda: contrib.prodigy(1.0, estim_lr0=1e-2, weight_decay=1e-3)),
    "schedule_free": Entry(
        lambda: contrib.schedule_free(optax.adam(3e-3, b1=0.0), learning_rate=3e-3)
    ),
    "schedule_free_adamw": Entry(
        lambda: contrib.schedule_free_adamw(5e-3, warmup_steps=3, weight_decay=1e-3)
    ),
    "schedule_free_sgd": Entry(lambda: contrib.schedule_free_sgd(0.05, weight_decay=1e-3)),
    "simplified_ademamix": Entry(lambda: contrib.simplified_ademamix(3e-4, alpha=1.0)),
    "sophia": Entry(lambda: contrib.sophia(1e-3, update_interval=2), with_obj_fn),
    # Transformations that are no part of the optimizers above.
    "adaptive_grad_clip": Entry(lambda: _then_sgd(optax.adaptive_grad_clip(0.05))),
    "add_decayed_weights": Entry(lambda: _then_sgd(optax.add_decayed_weights(0.1, _decay_mask))),
    "add_noise": Entry(lambda: _then_sgd(optax.add_noise(0.01, 0.55, key=4))),
    "apply_every": Entry(lambda: _then_sgd(optax.apply_every(2))),
    "centralize": Entry(lambda: _then_sgd(optax.centralize(), learning_rate=0.2)),
    "clip": Entry(lambda: _then_sgd(optax.clip(0.02), learning_rate=0.1)),
    "clip_by_block_rms": Entry(lambda: _then_sgd(optax.clip_by_block_rms(0.01), learning_rate=0.1)),
    "clip_by_global_norm": Entry(
        lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(3e-3, eps=1e-2))
    ),
    "ema": Entry(lambda: _then_sgd(optax.ema(0.5))),
    "freeze": Entry(lambda: _then_sgd(optax.freeze(FROZEN)), still=("wide", "bias")),
    "identity": Entry(lambda: _then_sgd(optax.identity())),
    "keep_params_nonnegative": Entry(
        lambda: optax.chain(optax.sgd(0.02), optax.keep_params_nonnegative())
    ),
    "normalize": Entry(lambda: _then_sgd(contrib.normalize())),
    "normalize_by_update_norm": Entry(lambda: _then_sgd(optax.normalize_by_update_norm(0.5))),
    "scale": Entry(lambda: _then_sgd(optax.scale(0.5))),
    "scale_by_adan": Entry(lambda: _then_sgd(optax.scale_by_adan(), learning_rate=1e-3)),
    "scale_by_distance_over_gradients": Entry(
        lambda: optax.chain(optax.scale_by_distance_over_gradients(1e-1), optax.scale(-1.0))
    ),
    "scale_by_lion(smooth)": Entry(
        lambda: _then_sgd(optax.scale_by_lion(mode="smooth", smooth_beta=2.0), learning_rate=1e-2)
    ),
    "scale_by_param_block_norm": Entry(lambda: _then_sgd(optax.scale_by_param_block_norm())),
    "scale_by_param_block_rms": Entry(
        lambda: _then_sgd(optax.scale_by_param_block_rms(), learning_rate=0.2)
    ),
    "scale_by_schedule": Entry(lambda: _then_sgd(optax.scale_by_schedule(lambda n: 1 / (1 + n)))),
    "scale_by_stddev": Entry(
        lambda: _then_sgd(optax.scale_by_stddev(initial_scale=1.0), learning_rate=1e-2)
    ),
    "scale_by_backtracking_linesearch": Entry(
        lambda: optax.chain(optax.sgd(0.5), optax.scale_by_backtracking_linesearch(5)),
        with_value_fn,
    ),
    "scale_by_zoom_linesearch": Entry(
        lambda: optax.chain(optax.sgd(0.5), optax.scale_by_zoom_linesearch(5)), with_value_fn
    ),
    "scale_by_trust_ratio": Entry(lambda: _then_sgd(optax.scale_by_trust_ratio())),
    "stateless": Entry(
        lambda: _then_sgd(
            optax.stateless(lambda grads, _: jax.tree.map(lambda g: g / (1 + jnp.abs(g)), grads))
        )
    ),
    "stateless_with_tree_map": Entry(
        lambda: _then_sgd(optax.stateless_with_tree_map(lambda g, p: g + 0.1 * p))
    ),
    "trace": Entry(lambda: optax.chain(optax.trace(0.5, nesterov=True), optax.scale(-0.02))),
    "zero_nans": Entry(lambda: _then_sgd(optax.zero_nans()), poisoned=True),
    # What treats gradients example by example before they are summed.
    "differentially_private_aggregate": Entry(
        lambda: _then_sgd(contrib.differentially_private_aggregate(1.0, 0.1, key=5)),
        per_example=True,
    ),
    "dpsgd": Entry(lambda: contrib.dpsgd(0.02, 1.0, 0.1, seed=5, momentum=0.9), per_example=True),
    "average_incrementally_updates": Entry(
        lambda: aggregating.process(
            optax.stateless_with_tree_map(lambda g, _: jnp.clip(g, -0.05, 0.05)),
            aggregating.average_incrementally_updates(0, accumulation_steps=2),
            optax.sgd(0.02),
        ),
        per_example=True,
    ),
    "add_mean_variance_to_opt": Entry(
        lambda: aggregating.add_mean_variance_to_opt(optax.sgd(0.02)), per_example=True
    ),
    # Wrappers.
    "MultiSteps": Entry(lambda: optax.MultiSteps(optax.adam(3e-3), 2)),
    "MultiSteps(gradient_transformation)": Entry(
        lambda: optax.MultiSteps(
            optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
            every_k_schedule=lambda n: jnp.where(n < 1, 1, 2),
        ).gradient_transformation()
    ),
    "MultiSteps(skip_not_finite)": Entry(
        lambda: optax.MultiSteps(optax.adam(3e-3), 2, should_skip_update_fn=optax.skip_not_finite),
        poisoned=True,
    ),
    "MultiSteps(skip_large_updates)": Entry(
        lambda: optax.MultiSteps(
            optax.adam(3e-3),
            1,
            should_skip_update_fn=functools.partial(
                optax.skip_large_updates, max_squared_norm=10.0
            ),
        )
    ),
    "apply_if_finite": Entry(lambda: optax.apply_if_finite(optax.adam(3e-3), 3), poisoned=True),
    "chain": Entry(lambda: optax.chain(optax.clip(0.05), optax.trace(0.9), optax.scale(-0.02))),
    "conditionally_mask": Entry(lambda: optax.conditionally_mask(optax.adam(3e-3), _every_other)),
    "conditionally_transform": Entry(
        lambda: _then_sgd(optax.conditionally_transform(optax.scale_by_adam(), _every_other))
    ),
    "flatten": Entry(lambda: optax.flatten(optax.adam(3e-3))),
    "inject_hyperparams": Entry(
        lambda: optax.inject_hyperparams(optax.adamw)(SCHEDULE, weight_decay=1e-2)
    ),
    "inject_stateful_hyperparams": Entry(
        lambda: optax.inject_stateful_hyperparams(optax.adamw)(
            optax.schedules.WrappedSchedule(SCHEDULE), weight_decay=1e-2
        )
    ),
    "lookahead": Entry(
        lambda: optax.lookahead(optax.adam(3e-3), sync_period=2, slow_step_size=0.5),
        lookahead=True,
    ),
    "lookahead(reset_state)": Entry(
        lambda: optax.lookahead(optax.adam(3e-3), 3, 0.5, reset_state=True), lookahead=True
    ),
    "masked": Entry(
        lambda: optax.chain(optax.masked(optax.trace(0.9), _decay_mask), optax.scale(-0.02))
    ),
    "measure_with_ema": Entry(
        lambda: _then_sgd(
            optax.measure_with_ema(optax.tree.norm, decay=0.9),
            optax.stateless(lambda norm, params: jax.tree.map(lambda p: p * norm, params)),
            learning_rate=-0.01,
        )
    ),
    "mechanize": Entry(lambda: contrib.mechanize(optax.sgd(0.1, momentum=0.9), s_init=1e-1)),
    "monitor": Entry(
        lambda: _then_sgd(
            optax.monitor(
                {
                    "norm": optax.tree.norm,
                    "ema": optax.measure_with_ema(optax.tree.norm, decay=0.9),
                    "updates": lambda updates: updates,
                }
            )
        ),
        warm=True,
    ),
    "multi_transform": Entry(
        lambda: optax.multi_transform(
            {"matrix": contrib.muon(3e-3), "vector": optax.adam(3e-3)}, _labels
        )
    ),
    "named_chain": Entry(
        lambda: optax.named_chain(("clip", optax.clip(0.05)), ("sgd", optax.sgd(0.02, 0.9)))
    ),
    "partition": Entry(
        lambda: optax.partition(
            {"matrix": optax.lamb(1e-2), "vector": optax.set_to_zero()}, _labels
        ),
        still=("bias", "odd"),
    ),
    "process": Entry(
        lambda: aggregating.process(
            optax.identity(), aggregating.accumulate_avg_updates(2), optax.adam(3e-3)
        )
    ),
    "reduce_on_plateau": Entry(
        lambda: optax.chain(
            optax.sgd(0.02), contrib.reduce_on_plateau(factor=0.5, patience=2, rtol=0.5)
        ),
        with_value,
    ),
    "sam": Entry(
        lambda: contrib.sam(
            optax.sgd(0.05, momentum=0.9),
            optax.chain(contrib.normalize(), optax.sgd(0.05)),
            sync_period=2,
        )
    ),
    "sam(opaque)": Entry(
        lambda: contrib.sam(
            optax.adam(3e-3),
            optax.chain(contrib.normalize(), optax.sgd(0.05)),
            sync_period=3,
            opaque_mode=True,
        ),
        with_grad_fn,
    ),
    "selective_transform": Entry(
        lambda: optax.selective_transform(optax.adam(3e-3), freeze_mask=FROZEN),
        still=("wide", "bias"),
    ),
    "snapshot": Entry(
        lambda: _then_sgd(
            optax.snapshot("norm", optax.tree.norm), optax.snapshot("grads", lambda grads: grads)
        )
    ),
    "split_real_and_imaginary": Entry(
        lambda: contrib.split_real_and_imaginary(optax.adam(3e-3)), complex_leaf=True
    ),
    "with_extra_args_support": Entry(
        lambda: optax.with_extra_args_support(optax.adam(3e-3)), with_value
    ),
}

# Public functions whose source names a GradientTransformation, but that are none themselves.
NOT_TRANSFORMATIONS: dict[str, str] = {
    "apply_updates": "adds updates to parameters; called by every entry",
    "init_empty_state": "an init function",
}


# ---------------------------------------------------------------- what optax exports


def exported_factories(modules: tuple[Any, ...] = (optax, contrib, aggregating)) -> set[str]:
    """Public callables that make a gradient transformation, as their text tells.

    Annotations alone miss some (`dog`, `monitor`), so any function or wrapper class whose source
    speaks of a GradientTransformation counts.
    """
    names = set()
    for module in modules:
        for name, value in vars(module).items():
            if not name.startswith("_") and _looks_like_factory(value):
                names.add(name)
    return names


def _looks_like_factory(value: Any) -> bool:
    if isinstance(value, functools.partial):
        value = value.func
    if inspect.isclass(value):
        return hasattr(value, "gradient_transformation")
    return inspect.isfunction(value) and "GradientTransformation" in inspect.getsource(value)


def covered_names(entries: dict[str, Entry]) -> set[str]:
    """The entries' own names and every factory whose functions their transformations hold.

    `optax.adam` is a chain; `scale_by_adam.<locals>.update_fn` is in its closures.
    """
    names = {name.split("(")[0] for name in entries}
    for entry in entries.values():
        names |= {qualname.split(".")[0] for qualname in _reachable(entry.make(), set())}
    return names


def _reachable(value: Any, seen: set[int]) -> Iterator[str]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if inspect.isfunction(value) or inspect.ismethod(value):
        yield value.__qualname__
        function = inspect.unwrap(getattr(value, "__func__", value))
        inner: list[Any] = [cell.cell_contents for cell in function.__closure__ or ()]
        inner += [function, *([value.__self__] if inspect.ismethod(value) else [])]
    elif isinstance(value, functools.partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, (tuple, list)):
        inner = list(value)
    elif isinstance(value, dict):
        inner = list(value.values())
    else:
        inner = list(getattr(value, "__dict__", {}).values()) if _is_optax(value) else []
    for item in inner:
        yield from _reachable(item, seen)


def _is_optax(value: Any) -> bool:
    return type(value).__module__.startswith("optax")
