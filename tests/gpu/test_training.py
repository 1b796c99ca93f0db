"""Every stage and tier trains as `jax.jit` does, on one GPU: several steps, every leaf."""

from typing import Any

import jax
import pytest

import jzero
import small
import zoo
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


@pytest.mark.parametrize("name", ["transformer", MASTERS])
def test_host_cpu(name: str):
    pytest.importorskip("llvmlite")
    training.check(name, offload=jzero.HostCPU())


def test_ratio_by_what_was_measured():
    pytest.importorskip("llvmlite")
    train_step = training.check("transformer", offload=jzero.HostCPU(ratio="auto"))
    batch = training.get("transformer").batches(1)[0]
    plan = train_step.plan(training.new_state("transformer"), *batch)
    host = plan.nbytes_at_rest(tier="host")
    moving = sum(leaf.nbytes for leaf in plan.leaves if leaf.role == "optimizer state")
    assert 0 < host / moving < 1


@pytest.mark.parametrize("name", [FULL, MASTERS])
def test_delayed_update(name: str):
    """After a flush, the training in which every gradient is applied one step late."""
    pytest.importorskip("llvmlite")
    entry, policy = training.get(name), jzero.HostCPU(delayed_update=True, delay_after=0)
    train_step = small.shard_train_step(entry.step, memory=policy)
    state = train_step.flush(training.trained(name, train_step))
    found = zoo.to_host(train_step.unshard(state))
    wanted = training.by_jit_delayed(name)
    zoo.assert_trees_close(found, wanted, entry.tolerance, "state")


@pytest.mark.parametrize(
    ("policy", "tier"),
    [
        (jzero.NoOffload(), "device"), (jzero.PinnedHost(), "pinned_host"), (jzero.HostCPU(), "host"),
    ],
)  # fmt: skip
def test_where_leaves_rest(policy: Any, tier: str):
    if tier == "host":
        pytest.importorskip("llvmlite")
    train_step = small.shard_train_step(training.get(FULL).step, memory=policy)
    state = training.trained(FULL, train_step, 2)
    assert training.tiers(state) == {"params": {"device"}, "opt_state": {tier}}
    whole = training.tiers(train_step.unshard(state))
    assert whole == {"params": {"device"}, "opt_state": {"device"}}
    assert {d.platform for x in jax.tree.leaves(state.params) for d in x.devices()} == {
        jax.devices()[0].platform
    }
