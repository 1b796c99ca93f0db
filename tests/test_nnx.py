"""`jzero.from_nnx`: whatever objects a step mutates, as `nnx.jit` mutates them; or a refusal by name."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jzero
import small
import zoo
from jzero._compare import TOLERANCES

pytestmark = pytest.mark.usefixtures("float64")

X = np.random.default_rng(0).normal(size=(16, 8))
FLOAT64 = {"param_dtype": jnp.float64, "dtype": jnp.float64}


def doubled(node):
    """Statistics and metrics, which Flax makes in float32."""
    nnx.update(node, jax.tree.map(
        lambda x: x.astype(float) if x.dtype == jnp.float32 else x, nnx.state(node)
    ))  # fmt: skip
    return node


class Net(nnx.Module):
    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(8, 16, use_bias=False, rngs=rngs, **FLOAT64)
        self.norm = doubled(nnx.BatchNorm(16, momentum=0.8, rngs=rngs, **FLOAT64))
        self.dropout = nnx.Dropout(0.5)
        self.last = nnx.Linear(16, 8, rngs=rngs, **FLOAT64)

    def __call__(self, x, rngs=None):
        return self.last(self.dropout(nnx.silu(self.norm(self.first(x))), rngs=rngs))


def adam_of(model):
    return nnx.Optimizer(model, optax.adam(0.1, eps=1e-3), wrt=nnx.Param)


def check(train_step, args, kwargs, batches):
    """The script's own loop against the sharded ones; args and kwargs make the objects."""
    own_args, own_kwargs = args(), kwargs()
    given = args(), kwargs()  # to the step as it is
    direct = small.shard_train_step(train_step)
    step_fn, state = jzero.from_nnx(train_step, *args(), **kwargs())
    sharded = small.shard_train_step(step_fn)
    parameters = inspect.signature(train_step).parameters
    for batch in batches:
        expected = train_step(*own_args, batch=batch, **own_kwargs)
        state, result = sharded(state, batch=batch)
        for found in (result, direct(*given[0], batch=batch, **given[1])):
            if expected is None:
                assert found is None
            else:
                zoo.assert_trees_close(
                    zoo.to_host(found), zoo.to_host(expected), TOLERANCES["float64"], "result"
                )
    changed = nnx.state((*given[0], *given[1].values()))
    expected = zoo.to_host(nnx.state((*own_args, *own_kwargs.values())))
    zoo.assert_trees_close(zoo.to_host(changed), expected, TOLERANCES["float64"], "objects")
    named = dict(zip(parameters, own_args, strict=False)) | own_kwargs
    objects = tuple(named[name] for name in parameters if name in named)
    expected = zoo.to_host(nnx.state(objects))
    actual = zoo.to_host(sharded.unshard(state))
    zoo.assert_trees_close(actual, expected, TOLERANCES["float64"], "state")
    return objects


def mutating_step(model, optimizer, metrics, batch, rngs):
    def loss_fn(model, rngs):
        return jnp.mean((model(batch, rngs) - batch) ** 2)

    model.train()
    loss, grads = nnx.value_and_grad(loss_fn)(model, rngs)
    metrics.update(loss=loss)
    optimizer.update(model, grads)


train_step = nnx.jit(mutating_step)


@pytest.mark.slow
def test_keys_after_the_batch_draw_what_one_device_draws():
    def args():
        model = Net(0)
        return model, adam_of(model), doubled(nnx.MultiMetric(loss=nnx.metrics.Average("loss")))

    batches = [X, X + 0.1, X]
    objects = check(train_step, args, lambda: {"rngs": nnx.Rngs(dropout=1)}, batches)
    assert objects[3].dropout.count.get_value() == 3  # Another mask in each step.


@pytest.mark.slow
def test_an_optimizer_that_has_its_model():
    def own_step(optimizer, batch):
        grads = nnx.grad(lambda model: jnp.mean((model(batch) - batch) ** 2))(optimizer.model)
        optimizer.update(grads)

    def args():
        model = Net(0)
        model.dropout = nnx.Dropout(0.0)
        return (nnx.ModelAndOptimizer(model, optax.sgd(0.1, momentum=0.9)),)

    check(own_step, args, dict, [X, X + 0.1])


def test_parameters_keep_their_names_defaults_and_kinds():
    def step(model, batch, /, *more, train=True, **others):
        scale = 2.0 if train == "twice" else 1.0
        return model(batch).sum() * scale + sum(more) + others["shift"]

    model: Any = nnx.Linear(8, 8, rngs=nnx.Rngs(0), **FLOAT64)
    step_fn, state = jzero.from_nnx(step, model)
    assert str(inspect.signature(step_fn)) == "(state, batch, /, *more, train=True, **others)"
    sharded = jzero.shard_train_step(step_fn, static_argnames="train")
    expected = step(model, X, 1.0, 2.0, train="twice", shift=3.0)
    _, result = sharded(state, X, 1.0, 2.0, train="twice", shift=3.0)
    np.testing.assert_allclose(result, expected)

    def variadic(*objects_and_batch, **named):
        first, second, batch = objects_and_batch
        return (first(batch) + second(batch) + named["third"](batch)).sum() + named["shift"]

    step_fn, state = jzero.from_nnx(variadic, model, model, third=model)
    _, result = jzero.shard_train_step(step_fn)(state, X, shift=1.0)
    np.testing.assert_allclose(result, 3 * model(X).sum() + 1.0)


@pytest.mark.slow
def test_objects_and_the_given_state_stay_what_they_were():
    model = Net(0)
    optimizer = adam_of(model)
    kernel = model.first.kernel.get_value()
    metrics = doubled(nnx.MultiMetric(loss=nnx.metrics.Average("loss")))
    step_fn, state = jzero.from_nnx(mutating_step, model, optimizer, metrics, rngs=nnx.Rngs(0))
    first, again = step_fn(state, jnp.asarray(X)), step_fn(state, jnp.asarray(X))
    zoo.assert_trees_close(zoo.to_host(first), zoo.to_host(again), zoo.FP32, "step")
    assert model.first.kernel.get_value() is kernel


@pytest.mark.parametrize("folded", [False, True])
def test_keys_in_a_step_with_collectives_are_those_of_each_device(folded):
    def step(rngs, batch):
        key = rngs.noise()
        key = jzero.fold_device_index(key) if folded else key
        return jax.lax.all_gather(jax.random.normal(key), "batch")

    step_fn, state = jzero.from_nnx(step, nnx.Rngs(noise=0))
    sharded = jzero.shard_train_step(step_fn, axes=jzero.Axes(axis_name="batch"))
    _, drawn = sharded(state, X)
    assert len(set(np.asarray(drawn).tolist())) == (8 if folded else 1)


# -- what is refused -------------------------------------------------------------------------------


def refuses(pattern, step, *args, call=(X,), **kwargs):
    def run():
        step_fn, state = jzero.from_nnx(step, *args, **kwargs)
        jzero.shard_train_step(step_fn)(state, *call)

    with pytest.raises(jzero.StepError, match=pattern) as error:
        run()
    assert str(error.value).startswith("from_nnx: ")


def test_objects_that_a_call_brings():
    refuses(
        r"rngs is a Rngs\. .* would be lost\. Pass it to from_nnx: .*, rngs=rngs\)",
        lambda model, batch, rngs: None, Net(0), call=(X, nnx.Rngs(0)),
    )  # fmt: skip
    refuses(
        r"(?s)2 arguments fail:\n.*batch\['m'\] is an Average\n.*batch\['v'\] is a Param\n",
        lambda model, batch: None, Net(0),
        call=({"v": nnx.Param(X), "m": nnx.metrics.Average(), "x": X},),
    )  # fmt: skip


def test_a_state_of_variables_is_a_value():
    def step(model, batch, other):
        return nnx.state(model, nnx.BatchStat), batch @ other["first"]["kernel"]

    step_fn, state = jzero.from_nnx(step, Net(0))
    _, (stats, product) = jzero.shard_train_step(step_fn)(state, X, nnx.state(Net(1), nnx.Param))
    assert isinstance(stats, nnx.State)
    np.testing.assert_allclose(product, X @ Net(1).first.kernel.get_value())


def test_objects_that_are_no_arguments():
    rngs = nnx.Rngs(0)
    refuses(
        r"changes an object that was not passed to it \(.*RngCount.*\)\. .* Make the object a parameter",
        lambda model, batch: model(batch, rngs).sum(), Net(0),
    )  # fmt: skip
    refuses(
        r"partial\[0\]\[0\] is a Net\. .* with the function inside",
        functools.partial(train_step, Net(0)), adam_of(Net(0)),
    )  # fmt: skip


def test_an_object_is_returned():
    refuses(
        r"result\[0\] is a Net\. .* Return .* nnx\.state\(model\)", lambda m, x: (m, 1.0), Net(0)
    )


def test_what_is_given_is_no_object():
    refuses(
        r"scale is a float without NNX objects\. .* and the rest", lambda m, scale: 1, Net(0), 2.0
    )
    refuses("no argument of train_step was passed", lambda batch: 1.0)
    refuses(
        r"train_step\(m, x\) does not accept these arguments \(.*'rng'\)\. .* by their names",
        lambda m, x: 1.0, Net(0), rng=nnx.Rngs(0),
    )  # fmt: skip


def test_a_step_that_leaves_its_objects_in_another_mode():
    def evaluates(model, batch):
        model.eval()
        return model(batch).sum()

    refuses(
        r"(?s)2 things fail:\n.*model\.dropout\.deterministic was False and becomes True\n.*"
        r"model\.norm\.use_running_average was False and becomes True\n.* call model\.train\(\)",
        evaluates, Net(0),
    )  # fmt: skip
    model = Net(0)
    model.eval()  # As the step leaves it.
    step_fn, state = jzero.from_nnx(evaluates, model)
    _, result = jzero.shard_train_step(step_fn)(state, X)
    np.testing.assert_allclose(result, model(X).sum())


def test_a_step_that_changes_variables():
    def adds(model, batch):
        model.extra = nnx.Param(jnp.ones(8))
        del model.last.bias

    refuses(
        r"(?s)adds model\.extra \(a Param\)\n.*removes model\.last\.bias \(a Param\), or shares it\n.*"
        r"Create variables when the model is built",
        adds, Net(0),
    )  # fmt: skip

    def ties(model, other, batch):
        other.last.bias = model.last.bias

    refuses(r"removes other\.last\.bias \(a Param\), or shares it\.", ties, Net(0), Net(1))

    def tags(model, batch):
        model.last.bias.set_metadata("tag", "head")

    refuses("changes its variables' metadata", tags, Net(0))
