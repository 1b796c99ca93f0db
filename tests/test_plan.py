"""The plan of a step: all that is decided before it runs, as one value that checks and prints itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
import small
from test_offload import BATCH, SHAPES, TX, make_step, new_state

POLICIES = [jzero.NoOffload(), jzero.PinnedHost(2**12), jzero.HostCPU(), jzero.HostCPU(ratio=0.5)]


def sharded(num: int, step_fn=None, **options):
    return small.shard_train_step(step_fn or make_step(TX), mesh=small.mesh(data=num), **options)


def plan_of(num: int = 4, **options):
    return sharded(num, **options).plan(new_state(), BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_each_piece_runs_in_one_bucket_and_all_that_crosses_has_a_place(policy):
    plan = plan_of(offload=policy)
    assert len(plan.update.subgraphs) == sum(len(bucket.subgraphs) for bucket in plan.buckets)
    assert [bucket.on_host for bucket in plan.buckets].count(True) == isinstance(
        policy, jzero.HostCPU
    )
    assert len(plan.interface.stored) == len(plan.leaves) + len(plan.arguments)
    assert bool(plan.interface.passed) == bool(plan.buckets)
    if plan.buckets:
        with pytest.raises(AssertionError, match="each subgraph runs in one bucket"):
            dataclasses.replace(plan, buckets=plan.buckets[:-1])
        nothing = dataclasses.replace(plan.interface, passed={})
        with pytest.raises(AssertionError, match="in no interface"):
            dataclasses.replace(plan, interface=nothing)


def test_what_is_decided_is_printed_and_hashed():
    plan = plan_of(offload=jzero.PinnedHost(2**12), accumulate=2)
    text = str(plan).splitlines()
    for start in ("stage 3 over data=4", "arguments: ", "outputs: ", "2 microbatches", "bucket 0", "stored",
                  "passed "):  # fmt: skip
        assert any(line.startswith(start) for line in text), start
    assert plan == plan_of(offload=jzero.PinnedHost(2**12), accumulate=2)
    others = [
        plan_of(accumulate=2), plan_of(offload=jzero.PinnedHost(2**12)), plan_of(stage=2, accumulate=2),
        plan_of(offload=jzero.PinnedHost(2**20), accumulate=2), plan_of(reduce_dtype=jnp.bfloat16),
        plan_of(accumulate=2, gather="keep"), plan_of(prefetch_bytes=0), plan_of(num=2),
    ]  # fmt: skip
    assert len({hash(p) for p in [plan, *others]}) == 1 + len(others)


@pytest.mark.parametrize(
    ("num", "stage", "policy"),
    [(1, 3, POLICIES[0]), (4, 3, POLICIES[1]), (4, 1, jzero.HostCPU(delayed_update=True))],
)
def test_an_update_that_reads_an_argument(num, stage, policy):
    """It rests whole, and stays so: what it is combined with is in shards."""

    def step_fn(state, x, target, rate):
        w, m = state
        g = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        m = 0.9 * m + g + rate * (target - m)
        return (w - 0.1 * m, m), jnp.mean(x)

    target = np.random.default_rng(1).standard_normal(SHAPES[0]).astype(np.float32)
    arguments = BATCH, target, np.float32(0.1)
    specs = {"target": jax.P(), "rate": jax.P()}
    train_step = sharded(num, step_fn, stage=stage, offload=policy, in_specs=specs)
    state = expected = jnp.ones(SHAPES[0]), jnp.zeros(SHAPES[0])
    for _ in range(3):
        state, _ = train_step(state, *arguments)
        expected, _ = jax.jit(step_fn)(expected, *arguments)
    for x, y in zip(train_step.flush(state), expected, strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-5, atol=1e-6)
