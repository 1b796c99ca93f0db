"""Every train step of the zoo, at every stage and on 1 to 8 devices, against one device.

Five steps; every leaf of the metrics after each, every leaf of the state after the last. What one
device trains is computed once per entry. By default each entry that is no near relative of another runs at
stage 3 on 8 devices, one in all sixteen settings, and one with collectives of its own at every stage and on
every number of devices; `-m slow` runs the rest.
"""

import functools

import jax
import pytest

import parity
import small
import zoo

STAGES = (0, 1, 2, 3)
NUM_DEVICES = (1, 2, 4, 8)


def settings():
    for name in zoo.NAMES:
        for stage in STAGES:
            for num_devices in NUM_DEVICES:
                setting = f"{name}-stage{stage}-{num_devices}devices"
                yield pytest.param(name, stage, num_devices, id=setting)


@pytest.mark.slow(
    but=["mlp-stage1-4devices", "pmap_style-stage2-4devices", "tied_embeddings-stage3-8devices"]
)
@pytest.mark.parametrize(("name", "stage", "num_devices"), list(settings()))
def test_trains_as_on_one_device(name, stage, num_devices):
    parity.check(
        name, {"data": num_devices}, functools.partial(small.shard_train_step, stage=stage)
    )


@pytest.mark.slow(but=["cond_on_gradients", "per_example_outputs"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if i % 3 == 0 else pytest.mark.slow)
        for i, name in enumerate(zoo.NAMES)
    ],
)
def test_a_device_left_out_is_noticed(name):
    """The comparison can fail: without one device's rows, the training differs by ten tolerances."""
    entry = zoo.get(name)

    def without_last_device(leaf):
        if leaf.ndim == 0 or zoo.BATCH_SIZE not in leaf.shape:
            return leaf
        dim = leaf.shape.index(zoo.BATCH_SIZE)
        rows = zoo.BATCH_SIZE // 8
        kept = jax.lax.slice_in_dim(leaf, 0, zoo.BATCH_SIZE - rows, axis=dim)
        return jax.lax.concatenate([kept, jax.lax.slice_in_dim(leaf, 0, rows, axis=dim)], dim)

    batches = jax.tree.map(without_last_device, entry.batches(parity.NUM_STEPS))
    (state, _) = parity.trajectory(name, 1, batches)[-1]
    loose = zoo.Tolerance(10 * entry.tolerance.rtol, 10 * entry.tolerance.leaf_rtol)
    with pytest.raises(AssertionError, match="elements differ"):
        zoo.assert_trees_close(state, parity.one_device(name, 1)[-1][0], loose, "state")


@pytest.mark.slow
def test_a_mutating_step_trains_as_the_functional_one():
    """A step by `from_nnx` is its own reference: here it is held against one that does without."""
    actual = parity.one_device("nnx_mutating", 1)
    zoo.assert_trees_close(actual, parity.one_device("nnx_functional", 1), zoo.FP32, "one device")
