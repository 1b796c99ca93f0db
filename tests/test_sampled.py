"""300 sampled train steps against one device; `run_sampled.py` runs as many as you like."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import sampled

NUM_CASES = 300


@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_trains_as_on_one_device(seed):
    sampled.check(seed)


class FakeTrainStep:
    """Plain `jax.jit` in the place of jzero, with a mistake put in."""

    def __init__(self, step, mistake):
        self.step, self.mistake = jax.jit(step), mistake

    def shard(self, state, batch):
        return state

    def __call__(self, state, batch):
        if self.mistake == "rows of one device":
            batch = jax.tree.map(lambda leaf: leaf[: len(leaf) // 2] if leaf.ndim else leaf, batch)
        new_state, metrics = self.step(state, batch)
        if self.mistake == "an update too large":
            new_state = jax.tree.map(overshoot, state, new_state)
        return new_state, metrics

    def unshard(self, state):
        return state


def overshoot(old, new):
    return new + 1e-2 * (new - old) if jnp.issubdtype(new.dtype, jnp.floating) else new


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mistake", [None, "rows of one device", "an update too large"])
def test_check_notices_a_mistake(mistake, seed):
    def shard_train_step(step, **options):
        return FakeTrainStep(step, mistake)

    if mistake is None:
        sampled.check(seed, shard_train_step)
    else:
        with pytest.raises(AssertionError, match="tolerances off"):
            sampled.check(seed, shard_train_step)


def test_probe_rejects_rounding_noise():
    case, _ = sampled.draw_well_conditioned(0)
    assert sampled.well_conditioned(case) is not None

    def step_with_noise(state, batch):
        new_state, metrics = case.step(state, batch)
        rows = jax.tree.leaves(batch)[0].astype(jnp.float32)
        zero_but_for_rounding = jnp.sum(rows / 3) - jnp.sum(rows[::-1]) / 3 + 1e-30
        return new_state, {"noise": jnp.sign(zero_but_for_rounding), **metrics}

    assert sampled.well_conditioned(dataclasses.replace(case, step=step_with_noise)) is None


def test_same_seed_draws_the_same_step():
    first, second, other = (sampled.draw(seed) for seed in (11, 11, 12))
    assert str(first) == str(second)
    assert str(first) != str(other)
    assert sampled.worst_error(first.batches, second.batches)[0] == 0
    assert sampled.worst_error(first.make_state(), second.make_state())[0] == 0


def test_every_feature_is_drawn():
    """A feature that the sampler never chooses would look tested."""
    expected = {
        *sampled.OPERATIONS,
        *(f"weight:{kind}" for kind in sampled.WEIGHT_KINDS),
        *(f"gradient:{kind}" for kind in sampled.GRADIENTS),
        *(f"optimizer:{name}" for name in sampled.OPTIMIZERS),
        *(f"extra:{name}" for name in sampled.EXTRAS),
        *(f"container:{name}" for name in sampled.CONTAINERS),
        *(f"branches:{kind}" for kind in ("cond", "flag", "switch", "constant")),
        *(f"wrapped:{kind}" for kind in ("jit", "checkpoint", "vmap", "custom_jvp", "custom_vjp")),
        *("branch_per_row:map", "branch_per_row:vmap", "loss:decay", "tied"),
    }
    counts = sampled.feature_counts(range(NUM_CASES))
    rare = {feature for feature in expected if counts.get(feature, 0) < 2}
    assert not rare, f"drawn less than twice in {NUM_CASES} seeds: {rare}"
