"""Train steps of real scripts, written anew at tiny size, against the scripts themselves on one device."""

import functools

import pytest

import jzero
import parity
import small
import zoo

# By default, of each library some that differ in what they do, and what compiles soon.
BY_DEFAULT = {
    "mnist": (3, 1), "ppo": (3,), "run_clm_flax": (3,), "nlp_seq": (3,), "eqx_mnist": (3,),
    "toy_02_lifted_transforms": (3,), "toy_07_array_leaves": (3,), "toy_10_fsdp_and_optimizer": (3,),
}  # fmt: skip


def settings():
    for name in zoo.SCRIPTS:
        for stage, num in ((3, 8), (1, 4)):
            marks = () if stage in BY_DEFAULT.get(name, ()) else pytest.mark.slow
            yield pytest.param(
                name, stage, num, marks=marks, id=f"{name}-stage{stage}-{num}devices"
            )


@pytest.mark.slow(but=["nlp_seq-stage3-8devices"])
@pytest.mark.parametrize(("name", "stage", "num_devices"), list(settings()))
def test_trains_as_the_script_does(name, stage, num_devices):
    parity.check(
        name, {"data": num_devices}, functools.partial(small.shard_train_step, stage=stage)
    )


@pytest.mark.slow
def test_metrics_that_pmap_stacks_are_refused():
    """nlp_seq's step as it is: each device's sums, one beside the other in what pmap returns."""
    entry = zoo.get("nlp_seq")
    step = small.shard_train_step(zoo.scripts_pmap.nlp_seq_step, axes=jzero.Axes(axis_name="batch"))
    with pytest.raises(jzero.StepError, match=r"output\[1\]\['accuracy'\].* differ"):
        step(entry.init(), *entry.batches(1)[0])
