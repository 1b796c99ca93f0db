"""Every train step of the zoo, at every stage and on 1 to 8 devices, against one device.

Five steps; every leaf of the metrics after each, every leaf of the state after the last. The
reference runs in this process, once per entry and number of devices. By default each entry runs in
two settings that are most unlike (stage 3 on 8 devices, stage 1 on 4), and four entries in all
sixteen; `-m slow` runs the rest.
"""

import functools

import jax
import pytest

import parity
import small
import zoo

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
    parity.check(
        name, {"data": num_devices}, functools.partial(small.shard_train_step, stage=stage)
    )


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

    batches = jax.tree.map(without_last_device, entry.batches(parity.NUM_STEPS))
    (state, _) = parity.trajectory(name, 8, batches)[-1]
    loose = zoo.Tolerance(10 * entry.tolerance.rtol, 10 * entry.tolerance.leaf_rtol)
    with pytest.raises(AssertionError, match="elements differ"):
        zoo.assert_trees_close(state, parity.one_device(name, 8)[-1][0], loose, "state")


@pytest.mark.parametrize("name", [*KEYS, "batch_norm", "moe_top_k", "cond_on_batch"])
def test_references_depend_on_the_devices(name):
    """Were keys not folded, or statistics taken over the whole batch, the comparison would fail."""
    entry = zoo.get(name)
    four, eight = (parity.one_device(name, num_devices)[-1][0] for num_devices in (4, 8))
    with pytest.raises(AssertionError, match="elements differ"):
        zoo.assert_trees_close(four, eight, entry.tolerance, "state")
