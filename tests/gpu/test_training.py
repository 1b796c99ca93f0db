"""Every stage and tier trains as `jax.jit` does, on one GPU: several steps, every leaf."""

import pytest

import jzero
from gpu import training
from test_offload import least_room

FULL, MASTERS = "transformer_scan_remat", "masters"


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", [FULL, MASTERS])
def test_stages(name: str, stage: int):
    training.check(name, stage=stage)


@pytest.mark.parametrize("name", [FULL, MASTERS])
def test_pinned_host_in_buckets_and_slices(name: str):
    entry = training.get(name)
    arguments = training.new_state(name), *entry.batches(1)[0]
    policy = least_room(entry.step, arguments, 300)
    plan = training.check(name, offload=policy).plan(*arguments)
    assert len(plan.buckets) > 2
    assert any(bucket.parts > 1 for bucket in plan.buckets)


def test_ratio_by_what_was_measured():
    pytest.importorskip("llvmlite")
    train_step = training.check("transformer", offload=jzero.HostCPU(ratio="auto"))
    batch = training.get("transformer").batches(1)[0]
    plan = train_step.plan(training.new_state("transformer"), *batch)
    host = plan.nbytes_at_rest(tier="host")
    moving = sum(leaf.nbytes for leaf in plan.leaves if leaf.role == "optimizer state")
    assert 0 < host / moving < 1
