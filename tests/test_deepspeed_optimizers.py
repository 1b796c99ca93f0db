"""Translated optimizers and schedules against DeepSpeed's and torch's formulas, in NumPy."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.testing import assert_same_training

Array = np.ndarray[Any, np.dtype[np.float64]]
RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(4, 3)), "b": RNG.normal(size=3)}
GRADS = [{name: RNG.normal(size=p.shape) for name, p in PARAMS.items()} for _ in range(5)]


class Memory(dict[str, Any]):
    """Of one parameter, as `torch.optim.Optimizer.state` has it: 0 before it is written."""

    def __missing__(self, name: str) -> float:
        return 0.0


# Each is one parameter's update: p, g, its state, the update's number from 1, learning rate, settings.
def adam(p: Array, g: Array, s: Memory, t: int, lr: float, o: dict[str, Any]) -> Array:
    b1, b2 = o.get("betas", (0.9, 0.999))
    decay = o.get("weight_decay", 0.0)
    if not o.get("adam_w_mode", True):
        g = g + decay * p
    s["m"], s["v"] = b1 * s["m"] + (1 - b1) * g, b2 * s["v"] + (1 - b2) * g * g
    denominator = np.sqrt(s["v"]) / math.sqrt(1 - b2**t) + o.get("eps", 1e-8)
    if o.get("adam_w_mode", True):
        p = p * (1 - lr * decay)
    return p - lr / (1 - b1**t) * s["m"] / denominator


def torch_adamw(p: Array, g: Array, s: Memory, t: int, lr: float, o: dict[str, Any]) -> Array:
    return adam(p, g, s, t, lr, {"weight_decay": 0.01, **o})


def lamb(p: Array, g: Array, s: Memory, t: int, lr: float, o: dict[str, Any]) -> Array:
    b1, b2 = o.get("betas", (0.9, 0.999))
    s["m"], s["v"] = b1 * s["m"] + (1 - b1) * g, b2 * s["v"] + (1 - b2) * g * g
    u = s["m"] / (np.sqrt(s["v"]) + o.get("eps", 1e-8)) + o.get("weight_decay", 0.0) * p
    norms = np.linalg.norm(p), np.linalg.norm(u)
    bounds = o.get("min_coeff", 0.01), o.get("max_coeff", 10.0)
    coefficient = float(np.clip(norms[0] / norms[1], *bounds)) if all(norms) else 1.0
    corrected = math.sqrt(1 - b2**t) / (1 - b1**t) if o.get("bias_correction", True) else 1.0
    return p - lr * corrected * coefficient * u


def lion(p: Array, g: Array, s: Memory, t: int, lr: float, o: dict[str, Any]) -> Array:
    b1, b2 = o.get("betas", (0.9, 0.999))
    sign = np.sign(b1 * s["m"] + (1 - b1) * g)
    s["m"] = b2 * s["m"] + (1 - b2) * g
    return p * (1 - lr * o.get("weight_decay", 0.0)) - lr * sign


def adagrad(p: Array, g: Array, s: Memory, t: int, lr: float, o: dict[str, Any]) -> Array:
    g = g + o.get("weight_decay", 0.0) * p
    s["sum"] = s["sum"] + g * g + (o.get("initial_accumulator_value", 0.0) if t == 1 else 0.0)
    return p - lr * g / (np.sqrt(s["sum"]) + o.get("eps", 1e-10))


def sgd(p: Array, g: Array, s: Memory, t: int, lr: float, o: dict[str, Any]) -> Array:
    momentum = o.get("momentum", 0.0)
    g = g + o.get("weight_decay", 0.0) * p
    s["b"] = momentum * s["b"] + g
    return p - lr * (g + momentum * s["b"] if o.get("nesterov") else s["b"] if momentum else g)


Update = Callable[[Array, Array, Memory, int, float, dict[str, Any]], Array]
OPTIMIZERS: list[tuple[str, dict[str, Any], Update, float]] = [
    ("Adam", {}, adam, 1e-3),
    ("adam", {"lr": 0.1, "betas": [0.8, 0.95], "eps": 1e-3, "weight_decay": 0.1}, adam, 0.1),
    ("Adam", {"lr": 0.1, "weight_decay": 0.1, "adam_w_mode": False}, adam, 0.1),
    ("AdamW", {"lr": 0.1, "weight_decay": 0.1, "fused": True}, adam, 0.1),
    ("AdamW", {"lr": 0.1, "torch_adam": True}, torch_adamw, 0.1),
    ("Adam", {"lr": 0.1, "torch_adam": True, "adam_w_mode": False}, adam, 0.1),
    ("Lamb", {"lr": 0.1, "weight_decay": 0.01}, lamb, 0.1),
    ("Lamb", {"lr": 0.1, "min_coeff": 0.6, "max_coeff": 0.7, "bias_correction": False}, lamb, 0.1),
    ("Lion", {"lr": 0.1}, lion, 0.1),
    ("Lion", {"lr": 0.1, "betas": [0.95, 0.98], "weight_decay": 0.1}, lion, 0.1),
    ("Adagrad", {}, adagrad, 1e-2),
    ("Adagrad", {"lr": 0.1, "eps": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5}, adagrad, 0.1),
    ("SGD", {}, sgd, 1e-3),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, sgd, 0.1),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, sgd, 0.1),
]  # fmt: skip


def translated(**sections: Any) -> jzero.deepspeed.Translation:
    return jzero.from_deepspeed({"train_batch_size": 8, **sections})


def trained(tx: optax.GradientTransformation) -> Iterator[dict[str, Any]]:
    """The parameters after each of a few updates; op by op, which costs no compilation of all."""
    params, *of_steps = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), [PARAMS, *GRADS])
    state = tx.init(params)
    for grads in of_steps:
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        yield params


def expected(
    update: Update, settings: Callable[[int], dict[str, Any]], rate: Callable[[int], float],
    clip: float | None = None,
) -> Iterator[dict[str, Array]]:  # fmt: skip
    params, states = PARAMS, {name: Memory() for name in PARAMS}
    for t, grads in enumerate(GRADS, 1):
        norm = math.sqrt(sum((g**2).sum() for g in grads.values()))
        scale = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        params = {
            name: update(p, scale * grads[name], states[name], t, rate(t - 1), settings(t - 1))
            for name, p in params.items()
        }
        yield params


def assert_equal(found: Iterator[dict[str, Any]], wanted: Iterator[dict[str, Array]]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        for name in PARAMS:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "params", "update", "lr"),
    OPTIMIZERS,
    ids=[f"{n} {', '.join(p)}" for n, p, *_ in OPTIMIZERS],
)
def test_optimizer(name: str, params: dict[str, Any], update: Update, lr: float):
    found = translated(optimizer={"type": name, "params": params}).optimizer
    assert found is not None
    assert_equal(trained(found), expected(update, lambda n: params, lambda n: lr))


def test_clipping():
    found = translated(optimizer={"type": "SGD", "params": {"lr": 0.1}}, gradient_clipping=0.5)
    assert found.optimizer is not None
    wanted = expected(sgd, lambda n: {}, lambda n: 0.1, clip=0.5)
    assert_equal(trained(found.optimizer), wanted)


# DeepSpeed's schedulers as their sources have them: the rate that the constructor sets, then that of step i.
def lr_range_test(o: dict[str, Any], i: int) -> float:
    interval = (i + 1) / o["lr_range_test_step_size"]
    interval = math.floor(interval) if o.get("lr_range_test_staircase") else interval
    return o["lr_range_test_min_lr"] * (1 + o["lr_range_test_step_rate"] * interval)


def gamma(o: dict[str, Any], i: int) -> float | None:
    num = max(2, o["warmup_num_steps"])
    if i >= num:
        return None
    return math.log(i + 1) / math.log(num) if o.get("warmup_type", "log") == "log" else i / num


def warmup_lr(o: dict[str, Any], i: int) -> float:
    low, high = o.get("warmup_min_lr", 0.0), o["warmup_max_lr"]
    if i < 0:
        return low
    up, num = gamma(o, i), max(2, o["warmup_num_steps"])
    if up is None:
        total = o.get("total_num_steps")
        up = 1.0 if total is None else max(0.0, (total - i) / max(1.0, total - num))
    return low + (high - low) * up


def warmup_cosine_lr(o: dict[str, Any], i: int) -> float:
    if i < 0:
        return 0.0
    up, num = gamma(o, i), max(2, o["warmup_num_steps"])
    if up is not None:
        low = o.get("warmup_min_ratio", 0.0)
        return 0.1 * (low + (1 - low) * up)
    low = o.get("cos_min_ratio", 1e-4)
    progress = min(1.0, (i - num + 1) / max(1, o["total_num_steps"] - num))
    return 0.1 * (low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2)


def cycle(o: dict[str, Any], i: int) -> tuple[float, float, float]:
    """The size of the cycle, and how high it is and how far the decay is at step i."""
    first = o["cycle_first_step_size"]
    second = o.get("cycle_second_step_size", first)
    stairs = o.get("cycle_first_stair_count", 0)
    stairs = stairs, o.get("cycle_second_stair_count", stairs)
    total, n = first + second, i + 1
    if i >= total:
        decay = (i - total + 1) / o["decay_step_size"] if o.get("decay_step_size") else 0.0
        return total, 0.0, decay
    x = n / total - math.floor(n / total)
    up = x <= first / total
    height = x / (first / total) if up else (x - 1) / (first / total - 1)
    if count := stairs[0 if up else 1]:
        place = n % total
        stair = place * count / first if place <= first else (total - place) * count / second
        height = math.floor(stair) / count
    return total, height, 0.0


def one_cycle(o: dict[str, Any], i: int) -> float:
    if i < 0:
        return o["cycle_min_lr"]
    total, height, decay = cycle(o, i)
    if i >= total:
        return o["cycle_min_lr"] / (1 + o.get("decay_lr_rate", 0.0) * decay)
    return o["cycle_min_lr"] + (o["cycle_max_lr"] - o["cycle_min_lr"]) * height


def first_beta(o: dict[str, Any], i: int) -> float:
    low, high = o.get("cycle_min_mom", 0.8), o.get("cycle_max_mom", 0.9)
    if i < 0:
        return low
    total, height, decay = cycle(o, i)
    if i >= total:
        return high * (1 + o.get("decay_mom_rate", 0.0) * decay)
    return high - (high - low) * height


CYCLE = {
    "cycle_min_lr": 0.1,
    "cycle_max_lr": 1.0,
    "cycle_first_step_size": 10,
    "decay_lr_rate": 0.5,
}
RANGE = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 5, "lr_range_test_step_rate": 2.0}
Formula = Callable[[dict[str, Any], int], float]
SCHEDULERS: list[tuple[str, dict[str, Any], Formula]] = [
    ("LRRangeTest", RANGE, lr_range_test),
    ("LRRangeTest", {**RANGE, "lr_range_test_staircase": True}, lr_range_test),
    ("WarmupLR", {"warmup_min_lr": 0.01, "warmup_max_lr": 0.2, "warmup_num_steps": 7}, warmup_lr),
    ("WarmupLR", {"warmup_max_lr": 0.2, "warmup_num_steps": 7, "warmup_type": "linear"}, warmup_lr),
    ("WarmupLR", {"warmup_max_lr": 0.2, "warmup_num_steps": 1}, warmup_lr),
    ("WarmupDecayLR", {"warmup_min_lr": 0.01, "warmup_max_lr": 0.2, "warmup_num_steps": 7,
                       "total_num_steps": 20}, warmup_lr),
    ("WarmupDecayLR", {"warmup_max_lr": 0.2, "warmup_num_steps": 9, "total_num_steps": 5}, warmup_lr),
    ("WarmupCosineLR", {"warmup_min_ratio": 0.2, "warmup_num_steps": 7, "total_num_steps": 20},
     warmup_cosine_lr),
    ("WarmupCosineLR", {"warmup_num_steps": 4, "total_num_steps": 20, "cos_min_ratio": 0.3,
                        "warmup_type": "linear"}, warmup_cosine_lr),
    ("OneCycle", {**CYCLE, "cycle_momentum": False}, one_cycle),
    ("OneCycle", {**CYCLE, "cycle_second_step_size": 4, "decay_step_size": 3}, one_cycle),
    ("OneCycle", {**CYCLE, "cycle_first_stair_count": 5, "decay_step_size": 3}, one_cycle),
    ("OneCycle", {**CYCLE, "cycle_first_stair_count": 5, "cycle_second_step_size": 8,
                  "cycle_second_stair_count": 2}, one_cycle),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "params", "formula"), SCHEDULERS, ids=[f"{i} {s[0]}" for i, s in enumerate(SCHEDULERS)]
)
def test_schedule(name: str, params: dict[str, Any], formula: Formula):
    optimizer = {"type": "Adam", "params": {"lr": 0.1}}
    found = translated(scheduler={"type": name, "params": params}, optimizer=optimizer)
    assert found.schedule is not None
    rates = [float(found.schedule(n)) for n in range(30)]
    wanted = [formula(params, n - 1) for n in range(30)]
    np.testing.assert_allclose(rates, wanted, rtol=2e-6, atol=1e-8)
    overruled = "Without effect: the scheduler sets the learning rate."
    note = "0.1, of Adam." if name == "WarmupCosineLR" else overruled
    assert found.notes["optimizer.params.lr"] == note


MOMENTUM = {
    **CYCLE, "cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 2, "cycle_min_mom": 0.5,
    "decay_step_size": 2, "decay_mom_rate": 0.02,
}  # fmt: skip


@pytest.mark.parametrize(("name", "update"), [("Adam", adam), ("Lamb", lamb), ("Lion", lion)])
def test_one_cycle_sets_betas(name: str, update: Update):
    """The first by a schedule of its own, and the second to 0.99."""
    found = translated(
        optimizer={"type": name, "params": {"betas": [0.1, 0.2]}},
        scheduler={"type": "OneCycle", "params": MOMENTUM},
    )
    assert found.optimizer is not None
    betas = lambda n: {"betas": (first_beta(MOMENTUM, n - 1), 0.99)}  # noqa: E731
    wanted = expected(update, betas, lambda n: one_cycle(MOMENTUM, n - 1))
    assert_equal(trained(found.optimizer), wanted)
    assert "the second to 0.99" in found.notes["optimizer.type"]
    assert found.notes["optimizer.params.betas"] == "Without effect: OneCycle sets them."


def test_the_first_beta_after_the_cycle():
    schedule = jzero.deepspeed.one_cycle_momentum(0.5, 0.9, 0.02, 10, 6, 5, 3, 4)
    options = {
        "cycle_min_mom": 0.5, "decay_mom_rate": 0.02, "cycle_first_step_size": 10,
        "cycle_second_step_size": 6,
        "cycle_first_stair_count": 5, "cycle_second_stair_count": 3, "decay_step_size": 4,
    }  # fmt: skip
    found = [float(schedule(n)) for n in range(30)]
    np.testing.assert_allclose(found, [first_beta(options, n - 1) for n in range(30)], rtol=2e-6)


def test_sgd_has_no_betas_to_set():
    found = translated(
        optimizer={"type": "SGD", "params": {"momentum": 0.9}},
        scheduler={"type": "OneCycle", "params": MOMENTUM},
    )
    note = found.notes["scheduler.params.cycle_min_mom"]
    assert note == "Without effect: the optimizer has no betas."
    assert found.notes["optimizer.type"].endswith("It has no betas for OneCycle to set.")
    assert "inject_hyperparams" not in found.python()


def test_masters_check_gradients():
    found = translated(
        optimizer={"type": "SGD", "params": {"lr": 0.1}},
        bf16={"enabled": True, "check_grad_overflow": True},
    )
    tx, w = found.optimizer, jnp.ones(3, jnp.bfloat16)
    assert tx is not None
    updates, state = tx.update(jnp.array([1, jnp.inf, 1], jnp.bfloat16), tx.init(w), w)
    assert updates.tolist() == [0, 0, 0]
    assert state.masters.tolist() == [1, 1, 1]
    updates, state = tx.update(jnp.ones(3, jnp.bfloat16), state, w)
    np.testing.assert_allclose(state.masters, 0.9, rtol=1e-6)


def test_lamb_needs_parameters():
    tx = jzero.deepspeed.lamb(0.1)
    w = jnp.ones(3)
    said = "lamb: update was called without params. Its coefficient is"
    with pytest.raises(jzero.StateError, match=said):
        tx.update(w, tx.init(w))


@pytest.mark.parametrize("name", ["Lamb", "Adagrad", "Adam"])
def test_sharded_training_is_that_of_one_device(name: str):
    """Norms of LAMB are of whole parameters, which are in shards; of Adam the betas change."""
    optimizer = {"type": name, "params": {"lr": 0.1, "weight_decay": 0.1}}
    tx = translated(optimizer=optimizer, scheduler={"type": "OneCycle", "params": CYCLE}).optimizer
    assert tx is not None

    def step(state: Any, batch: jax.Array) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    def make() -> Any:
        w = jnp.linspace(-1, 1, 64 * 16).reshape(64, 16)
        return w, tx.init(w)

    batches = [np.float32(RNG.normal(size=(16, 64))) for _ in range(2)]
    assert_same_training(step, make, batches, stage=3, axes=jzero.Axes(min_shard_bytes=0))


def test_lamb_moves_parameters_that_are_zero_by_the_whole_learning_rate():
    """Where a norm is 0 the coefficient is 1, and not the least one: biases begin so."""
    tx = jzero.deepspeed.lamb(0.1, min_coeff=0.01, max_coeff=10.0)
    zeros = jnp.zeros(4)
    updates, _ = tx.update(jnp.ones(4), tx.init(zeros), zeros)
    assert [round(x, 4) for x in updates.tolist()] == [-0.1] * 4
