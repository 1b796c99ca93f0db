"""A zoo entry's training, sharded, against one device: metrics after each step, the state after the last."""

import functools
import math

import jax

import zoo
from small import grouped

NUM_STEPS = 5


def num_devices(axes):
    return math.prod(axes.values())


def check(name, axes, shard_train_step, options=None):
    """Trains entry `name` on a mesh with `axes`; `options` tell how many microbatches there are."""
    entry, num = zoo.get(name), num_devices(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[:num])
    train_step = shard_train_step(entry.step, mesh=mesh, **grouped(**entry.options))
    batches = entry.batches(NUM_STEPS)
    state = train_step.shard(new_state(name), *batches[0])
    # Only a step with collectives of its own sees into how many parts the batch is split.
    num_shards = num * (options or {}).get("accumulate", 1) if entry.axis_name else 1
    expected = one_device(name, num_shards)
    for i, batch in enumerate(batches):
        state, metrics = separate(entry, train_step(state, *batch))
        expected_metrics = expected[i][1]
        where = f"step {i}, metrics"
        zoo.assert_trees_close(zoo.to_host(metrics), expected_metrics, entry.tolerance, where)
    actual = zoo.to_host(train_step.unshard(state))
    zoo.assert_trees_close(actual, expected[-1][0], entry.tolerance, "state")


def new_state(name):
    """A state with buffers of its own, which a donation may consume."""
    return compiled_init(zoo.get(name).init)()


compiled_init = functools.cache(jax.jit)  # several entries share one `init`


@functools.cache
def compiled_reference(name, num_shards):
    entry = zoo.get(name)
    static = {k: v for k, v in entry.options.items() if k.startswith("static_arg")}
    return jax.jit(entry.reference(num_shards), **static)


@functools.cache
def one_device(name, num_shards):
    return trajectory(name, num_shards, zoo.get(name).batches(NUM_STEPS))


def trajectory(name, num_shards, batches):
    """(state, metrics) after each step, on one device."""
    entry = zoo.get(name)
    if entry.alone is not None:
        return zoo.to_host(entry.alone(batches))
    step = compiled_reference(name, num_shards)
    state, result = new_state(name), []
    for batch in batches:
        state, metrics = separate(entry, step(state, *batch))
        result.append(zoo.to_host((state, metrics)))
    return result


def separate(entry, outputs):
    return outputs if entry.returns_metrics else (outputs, {})
