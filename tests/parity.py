"""A program's training by any step, against one device: outputs after each step, the state after the last."""

import functools
import math

import jax

import small
import zoo
from small import grouped

NUM_STEPS = 5


def num_devices(axes):
    return math.prod(axes.values())


def check(name, axes, shard_train_step, options=None):
    """Trains `name` in float32 on a mesh with `axes`; `options` tell how many microbatches there are."""
    program, num = zoo.get(name), num_devices(axes)
    mesh = small.mesh(**axes)
    options_of_step = {"in_specs": program.in_specs((*axes,)), **program.options}
    train_step = shard_train_step(program.step, mesh=mesh, **grouped(**options_of_step))
    batches = program.batches(NUM_STEPS)
    state = train_step.shard(new_state(name), *batches[0])
    outputs = []
    for batch in batches:
        found = train_step(state, *batch)
        state, output = found if program.returns_metrics else (found, {})
        outputs.append(zoo.to_host(output))
    actual = zoo.Training(outputs, zoo.to_host(train_step.unshard(state)), [])
    # Only a step with collectives of its own sees into how many parts the batch is split.
    num_shards = num * (options or {}).get("accumulate", 1) if program.axis_name else 1
    problems = zoo.differences(one_device(name, num_shards), actual, program)
    assert not problems, "\n".join(problems)


def new_state(name):
    """A state with buffers of its own, which a donation may consume."""
    return compiled_init(zoo.get(name).init)()


compiled_init = functools.cache(jax.jit)


@functools.cache
def one_device(name, num_shards):
    program = zoo.get(name)
    return zoo.train_alone(program, program.batches(NUM_STEPS), "float32", num_shards)
