"""Train steps of real scripts, written anew at tiny size, against the scripts themselves on one device."""

import functools

import pytest

import jzero
import parity
import small
import zoo

# At stage 1 too by default: pmap's, NNX's and Equinox's.
IN_BOTH = {"imagenet", "mnist", "eqx_bert"}


def settings():
    for name in zoo.SCRIPTS:
        yield pytest.param(name, 3, 8, id=f"{name}-stage3-8devices")
        marks = () if name in IN_BOTH else pytest.mark.slow
        yield pytest.param(name, 1, 4, marks=marks, id=f"{name}-stage1-4devices")


@pytest.mark.parametrize(("name", "stage", "num_devices"), list(settings()))
def test_trains_as_the_script_does(name, stage, num_devices):
    parity.check(
        name, {"data": num_devices}, functools.partial(small.shard_train_step, stage=stage)
    )


def test_metrics_that_pmap_stacks_are_refused():
    """nlp_seq's step as it is: each device's sums, one beside the other in what pmap returns."""
    entry = zoo.get("nlp_seq")
    step = small.shard_train_step(zoo.scripts_pmap.nlp_seq_step, axis_name="batch")
    with pytest.raises(jzero.StepError, match=r"output\[1\]\['accuracy'\].* differ"):
        step(entry.init(), *entry.batches(1)[0])
