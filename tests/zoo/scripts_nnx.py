"""Train steps of Flax's NNX examples, as `jzero.from_nnx` takes them: objects wherever they stand, mutated.

The reference is the script itself: its own step, its objects, one call after the other, on one device.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jzero
from jzero._compare import to_host

from ._program import Program, relative
from .core import ROWS, adamw, labelled_batches


def of_objects(
    train_step: Callable[..., Any], make: Callable[[], Mapping[str, Any]],
    batches: Callable[[int], list[tuple[Any, ...]]],
) -> Program:  # fmt: skip
    """An entry of a step whose arguments are `make()`, by name in the step's order, and a batch's."""
    names = [name for name in inspect.signature(train_step).parameters if name not in make()]

    def alone(batches):
        objects, trained = make(), []
        for batch in batches:
            metrics = train_step(**objects, **dict(zip(names, batch, strict=False)))
            trained.append(to_host((nnx.state(tuple(objects.values())), metrics)))
        return trained

    step, _ = jzero.from_nnx(train_step, **make())
    init = lambda: jzero.from_nnx(train_step, **make())[1]  # noqa: E731
    return Program(init=init, batches=batches, step=step, alone=alone)


def optimizer_of(model, tx=None):
    return nnx.Optimizer(model, tx or adamw(), wrt=nnx.Param)


class Count(nnx.Variable):
    pass


class Linear(nnx.Module):
    def __init__(self, num_in, num_out, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (num_in, num_out)))
        self.b = nnx.Param(jnp.zeros((num_out,)))

    def __call__(self, x):
        return x @ self.w[...] + self.b[...][None]


class Counting(nnx.Module):
    def __init__(self, rngs):
        self.count = Count(jnp.array(0))
        self.first, self.last = Linear(1, 32, rngs), Linear(32, 1, rngs)

    def __call__(self, x):
        self.count[...] += 1
        return self.last(nnx.silu(self.first(x)))


def curve(num_steps):
    """((x, y),) for each step, float32 [32, 1]."""
    rng = np.random.default_rng(42)
    xs = [rng.uniform(0, 1, (ROWS, 1)) for _ in range(num_steps)]
    return [
        ((jnp.asarray(x, jnp.float32), jnp.asarray(0.8 * x**2 + 0.1, jnp.float32)),) for x in xs
    ]


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.bn = nnx.BatchNorm(8, momentum=0.8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return nnx.gelu(self.dropout(self.bn(self.linear(x))))


class ScanMLP(nnx.Module):
    def __init__(self, num_layers, rngs):
        make = nnx.vmap(Block, in_axes=0, axis_size=num_layers)
        self.layers = nnx.split_rngs(splits=num_layers)(make)(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def scan_fn(x, block):
            return block(x)

        return scan_fn(x, self.layers)


@relative
def toy_06_scan_over_layers():
    """Layers in a scan, each with its batch statistics and its keys."""

    @nnx.jit
    def train_step(model, optimizer, batch):
        def loss_fn(model):
            return jnp.mean((model(batch["x"]) - 1.0) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    def make():
        model = ScanMLP(3, nnx.Rngs(0))
        return {"model": model, "optimizer": optimizer_of(model)}

    return of_objects(train_step, make, labelled_batches)


class ArrayLinear(nnx.Module):
    def __init__(self, num_in, num_out, rngs):
        self.w = nnx.data(jax.random.normal(rngs.params(), (num_in, num_out)))
        self.b = nnx.data(jnp.zeros((num_out,)))

    def __call__(self, x):
        return x @ self.w + self.b[None]


class ArrayMLP(nnx.Module):
    def __init__(self, rngs):
        self.count = nnx.data(jnp.array(0))
        self.first, self.last = ArrayLinear(1, 32, rngs), ArrayLinear(32, 1, rngs)

    def __call__(self, x):
        self.count += 1
        return self.last(nnx.silu(self.first(x)))


@relative
def toy_07_array_leaves():
    """Parameters that are plain arrays, found by their names: DiffState, an optimizer with a filter."""

    def is_param(path, value):
        return path[-1] in ("w", "b")

    @nnx.jit
    def train_step(model, optimizer, batch):
        x, y = batch
        grad_fn = nnx.grad(
            lambda model: jnp.mean((model(x) - y) ** 2), argnums=nnx.DiffState(0, is_param)
        )
        optimizer.update(model, grad_fn(model))

    def make():
        model = ArrayMLP(nnx.Rngs(0))
        return {"model": model, "optimizer": nnx.Optimizer(model, optax.sgd(0.01), wrt=is_param)}

    return of_objects(train_step, make, curve)


class Momentum(nnx.Variable):
    pass


class SGD(nnx.Pytree):
    """An optimizer of the script's own, which has the model's variables, and mutates them."""

    def __init__(self, params, learning_rate, decay=0.9):
        self.learning_rate, self.decay = learning_rate, decay
        self.params = nnx.data(params)
        self.momentum = nnx.data(
            jax.tree.map(lambda v: Momentum(jnp.zeros_like(v[...])), params, is_leaf=is_variable)
        )

    def update(self, grads):
        def update_one(param, momentum, grad):
            momentum[...] = self.decay * momentum[...] + (1 - self.decay) * grad[...]
            param[...] -= self.learning_rate * momentum[...]

        jax.tree.map(update_one, self.params, self.momentum, grads, is_leaf=is_variable)


def is_variable(x):
    return isinstance(x, nnx.Variable)


@relative
def toy_10_fsdp_and_optimizer():
    """Variables that two objects share."""

    @nnx.jit
    def train_step(model, optimizer, batch):
        x, y = batch
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(grads)
        return loss

    def make():
        model = Counting(nnx.Rngs(0))
        return {"model": model, "optimizer": SGD(nnx.variables(model, nnx.Param), 0.01)}

    return of_objects(train_step, make, curve)
