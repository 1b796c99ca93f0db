"""The forms in which scripts write and call their steps, as `jax.jit` takes them: `CASES`."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

BATCH_SIZE = 16
TX = optax.adam(0.05, eps=1e-3)


def make_state(seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    params = {
        "w": jnp.asarray(rng.normal(size=(8, 16)), jnp.float32),
        "b": jnp.zeros((16,), jnp.float32),
    }
    return {"params": params, "opt": TX.init(params), "count": jnp.zeros((), jnp.int32)}


def rows(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X, Y = rows(1, BATCH_SIZE, 8), rows(2, BATCH_SIZE, 16)


def train(state: Any, x: Any, y: Any, scale: Any = 1.0) -> Any:
    """One step of linear regression; `scale` multiplies the update."""

    def loss_fn(params):
        return ((x @ params["w"] + params["b"][None] - y) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt = TX.update(grads, state["opt"])
    params = jax.tree.map(lambda p, u: p + scale * u, state["params"], updates)
    return {"params": params, "opt": opt, "count": state["count"] + 1}, {"loss": loss}


@dataclasses.dataclass(frozen=True)
class Config:
    scale: float = 0.5
    num_repeats: int = 2


class XY(NamedTuple):
    x: Any
    y: Any


def with_config(state, x, y, config):
    for _ in range(config.num_repeats):
        state, metrics = train(state, x, y, config.scale)
    return state, metrics


def config_first(config, state, x, y):
    return with_config(state, x, y, config)


def with_schedule(state, x, y, schedule):
    return train(state, x, y, schedule(state["count"]))


def with_repeats(state, x, y, num_repeats=2):
    return with_config(state, x, y, Config(num_repeats=num_repeats))


def with_scale(state, x, y, scale=0.5):
    return train(state, x, y, scale)


def with_optional(state, x, y, mask=None):
    return train(state, x if mask is None else x * mask, y)


def with_table(state, x, y, table):
    """The table has 16 rows, like the batch, but is not one."""
    return train(state, x @ table["rotation"], y + table["offset"][None])


def features_first(state, x, y):
    return train(state, x.T, y)


def keyword_only(state, *, x, y, num_repeats):
    return with_repeats(state, x, y, num_repeats)


def variadic(state, *xy):
    return train(state, *xy)


def any_keywords(state, **batch):
    return train(state, batch["x"], batch["y"])


def dict_batch(state, batch):
    return train(state, batch["x"], batch["y"])


def tuple_batch(state, batch):
    return train(state, *batch)


def nested_batch(state, batch):
    return train(state, batch["inputs"][0]["x"], batch["targets"].y)


def python_numbers(state, x, y):
    state, metrics = train(state, x, y)
    return state, {**metrics, "rate": 0.05, "epoch": 3}


def no_metrics(state, x, y):
    return train(state, x, y)[0], None


def nested_metrics(state, x, y):
    state, metrics = train(state, x, y)
    return state, (XY(metrics["loss"], [x.mean(), {"largest": (x**2).mean()}]), ())


@functools.partial(jax.jit, static_argnames="num_repeats")
def jitted_with_static(state, x, y, num_repeats):
    return with_repeats(state, x, y, num_repeats)


value_and_grad = jax.value_and_grad  # As `from jax import value_and_grad` would bind it.


def imported_by_name(state, x, y):
    def loss_fn(params):
        return ((x @ params["w"] + params["b"][None] - y) ** 2).mean()

    loss, grads = value_and_grad(loss_fn)(state["params"])
    updates, opt = TX.update(grads, state["opt"])
    return {**state, "params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


class Trainer:
    scale = 0.5

    def step(self, state, x, y):
        return train(state, x, y, self.scale)

    def __call__(self, state, x, y):
        return self.step(state, x, y)


def halve_later(count):
    return jnp.where(count < 1, 1.0, 0.5)


@dataclasses.dataclass(frozen=True)
class Case:
    """`step` called as `step(state, *args, **kwargs)`."""

    step: Callable[..., Any]
    args: tuple[Any, ...] = (X, Y)
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # jax.jit has them too
    in_specs: Mapping[str | int, Any] | None = None


TABLE = {"rotation": rows(3, 8, 8), "offset": rows(4, 16)}
WHOLE = {"rotation": P(), "offset": P()}

CASES = {
    "positional": Case(train),
    "by_keyword": Case(train, (), {"y": Y, "x": X}),
    "mixed": Case(train, (X,), {"y": Y}),
    "keyword_only": Case(
        keyword_only, (), {"x": X, "y": Y, "num_repeats": 2}, {"static_argnames": "num_repeats"}
    ),
    "variadic": Case(variadic),
    "any_keywords": Case(any_keywords, (), {"x": X, "y": Y}),
    "static_argnums": Case(with_config, (X, Y, Config()), {}, {"static_argnums": 3}),
    "static_argnums_tuple": Case(with_config, (X, Y, Config()), {}, {"static_argnums": (3,)}),
    "static_argnums_negative": Case(with_config, (X, Y, Config()), {}, {"static_argnums": -1}),
    "static_argnums_by_keyword": Case(
        with_config, (X, Y), {"config": Config()}, {"static_argnums": 3}
    ),
    "static_argnames": Case(
        with_config, (X, Y), {"config": Config()}, {"static_argnames": "config"}
    ),
    "static_argnames_positional": Case(
        with_config, (X, Y, Config()), {}, {"static_argnames": ("config",)}
    ),
    "static_function": Case(
        with_schedule, (X, Y, halve_later), {}, {"static_argnames": ["schedule"]}
    ),
    "static_int": Case(with_repeats, (X, Y, 3), {}, {"static_argnums": (3,)}),
    "static_default": Case(with_repeats, options={"static_argnames": "num_repeats"}),
    "partial_by_keyword": Case(functools.partial(with_config, config=Config())),
    "partial_by_position": Case(functools.partial(config_first, Config())),
    "python_float": Case(with_scale, (X, Y, 0.25)),
    "python_int": Case(with_scale, (X, Y), {"scale": 2}),
    "numpy_scalar": Case(with_scale, (X, Y, np.float32(0.25))),
    "default_not_given": Case(with_scale),
    "none": Case(with_optional, (X, Y, None)),
    "optional_given": Case(with_optional, (X, Y), {"mask": np.float32(X > 0)}),
    "dict": Case(dict_batch, ({"x": X, "y": Y},)),
    "tuple": Case(tuple_batch, ((X, Y),)),
    "list": Case(tuple_batch, ([X, Y],)),
    "nested": Case(nested_batch, ({"inputs": ({"x": X},), "targets": XY(x=X, y=Y)},)),
    "jax_arrays": Case(train, (jnp.asarray(X), jnp.asarray(Y))),
    "table_by_name": Case(with_table, (X, Y, TABLE), in_specs={"table": P()}),
    "table_by_position": Case(with_table, (X, Y, TABLE), in_specs={3: P()}),
    "table_by_leaf": Case(with_table, (X, Y, TABLE), in_specs={"table": WHOLE}),
    "table_by_keyword": Case(with_table, (X, Y), {"table": TABLE}, in_specs={"table": P()}),
    "rows_along_dim_1": Case(features_first, (X.T, Y), in_specs={"x": P(None, "data")}),
    "jitted": Case(jax.jit(train)),
    "jitted_donating": Case(jax.jit(train, donate_argnums=0)),
    "jitted_with_static": Case(
        jitted_with_static, (X, Y, 2), {}, {"static_argnames": "num_repeats"}
    ),
    "bound_method": Case(Trainer().step),
    "callable_object": Case(Trainer()),
    "lambda": Case(lambda state, x, y: train(state, x, y)),
    "grad_imported_by_name": Case(imported_by_name),
    "python_numbers_returned": Case(python_numbers),
    "no_metrics": Case(no_metrics),
    "nested_metrics": Case(nested_metrics),
}
