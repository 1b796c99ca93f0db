"""Every train step of the zoo, at every stage and on 1 to 8 devices, against one device.

Five steps; every leaf of the metrics after each, every leaf of the state after the last. The
reference runs in this process, once per entry and number of devices. By default each entry runs in
two settings that are most unlike (stage 3 on 8 devices, stage 1 on 4), and four entries in all
sixteen; `-m slow` runs the rest.
"""

import functools

import jax
import pytest

import small
import zoo

NUM_STEPS = 5
STAGES = (0, 1, 2, 3)
NUM_DEVICES = (1, 2, 4, 8)
BY_DEFAULT = {(3, 8), (1, 4)}
# The three ways of design section 3, and a state whose statistics vary between devices.
IN_ALL_SETTINGS = {"mlp", "lstm", "pmap_style", "batch_norm"}
KEYS = ("dropout_typed_key", "dropout_old_style_key", "dropout_dict_of_keys")


def settings():
    for name in zoo.NAMES:
        for stage in STAGES:
            for num_devices in NUM_DEVICES:
                by_default = (stage, num_devices) in BY_DEFAULT or name in IN_ALL_SETTINGS
                marks = () if by_default else pytest.mark.slow
                setting = f"{name}-stage{stage}-{num_devices}devices"
                yield pytest.param(name, stage, num_devices, marks=marks, id=setting)


@pytest.mark.parametrize(("name", "stage", "num_devices"), list(settings()))
def test_trains_as_on_one_device(name, stage, num_devices):
    entry = zoo.get(name)
    mesh = jax.make_mesh((num_devices,), ("data",), devices=jax.devices()[:num_devices])
    train_step = small.shard_train_step(entry.step, stage=stage, mesh=mesh, **entry.options)
    batches = entry.batches(NUM_STEPS)
    state = train_step.shard(new_state(name), *batches[0])
    expected = one_device(name, num_devices)
    for i, batch in enumerate(batches):
        state, metrics = separate(entry, train_step(state, *batch))
        expected_metrics = expected[i][1]
        where = f"step {i}, metrics"
        zoo.assert_trees_close(zoo.to_host(metrics), expected_metrics, entry.tolerance, where)
    actual = zoo.to_host(train_step.unshard(state))
    zoo.assert_trees_close(actual, expected[-1][0], entry.tolerance, "state")


@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_device_left_out_is_noticed(name):
    """The comparison can fail: without one device's rows, references differ by ten tolerances."""
    entry = zoo.get(name)

    def without_last_device(leaf):
        if leaf.ndim == 0 or zoo.BATCH_SIZE not in leaf.shape:
            return leaf
        dim = leaf.shape.index(zoo.BATCH_SIZE)
        rows = zoo.BATCH_SIZE // 8
        kept = jax.lax.slice_in_dim(leaf, 0, zoo.BATCH_SIZE - rows, axis=dim)
        return jax.lax.concatenate([kept, jax.lax.slice_in_dim(leaf, 0, rows, axis=dim)], dim)

    batches = jax.tree.map(without_last_device, entry.batches(NUM_STEPS))
    (state, _) = trajectory(name, 8, batches)[-1]
    loose = zoo.Tolerance(10 * entry.tolerance.rtol, 10 * entry.tolerance.leaf_rtol)
    with pytest.raises(AssertionError, match="differ, by up to"):
        zoo.assert_trees_close(state, one_device(name, 8)[-1][0], loose, "state")


@pytest.mark.parametrize("name", [*KEYS, "batch_norm", "moe_top_k", "cond_on_batch"])
def test_references_depend_on_the_devices(name):
    """Were keys not folded, or statistics taken over the whole batch, the comparison would fail."""
    entry = zoo.get(name)
    four, eight = (one_device(name, num_devices)[-1][0] for num_devices in (4, 8))
    with pytest.raises(AssertionError, match="differ, by up to"):
        zoo.assert_trees_close(four, eight, entry.tolerance, "state")


def new_state(name):
    """A state with buffers of its own, which a donation may consume."""
    return compiled_init(zoo.get(name).init)()


compiled_init = functools.cache(jax.jit)  # several entries share one `init`


@functools.cache
def compiled_reference(name, num_shards):
    entry = zoo.get(name)
    return jax.jit(entry.reference(num_shards) if entry.reference else entry.step)


@functools.cache
def one_device(name, num_devices):
    return trajectory(name, num_devices, zoo.get(name).batches(NUM_STEPS))


def trajectory(name, num_devices, batches):
    """(state, metrics) after each step, on one device."""
    entry = zoo.get(name)
    # A step that is its own reference is compiled once for all numbers of devices.
    step = compiled_reference(name, num_devices if entry.reference else 1)
    state, result = new_state(name), []
    for batch in batches:
        state, metrics = separate(entry, step(state, *batch))
        result.append(zoo.to_host((state, metrics)))
    return result


def separate(entry, outputs):
    return outputs if entry.returns_metrics else (outputs, {})
