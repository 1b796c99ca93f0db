"""Sampled train steps against one device: some, `-m ""` 500, and `run_zoo.py` as many as you like."""

import dataclasses
import json
import platform
from typing import Any

import jax
import optax
import pytest

import run_zoo
from zoo.sampling import (
    _draw,
    _helpers,
    check,
    couplings,
    gradients,
    losses,
    noise,
    programs,
    rowwise,
    state,
)

NUM_CASES = 500


def bundles():
    for bundle in check.bundles(range(NUM_CASES)):
        yield pytest.param(bundle, id=str(bundle[0]))


@pytest.mark.slow(but=["280"])
@pytest.mark.parametrize("bundle", list(bundles()))
def test_trains_as_on_one_device(bundle):
    results = check.check(bundle)
    wrong = [r for r in results if r.verdict == "differs"]
    assert not wrong, "\n".join(f"seed {r.seed}: {r.why}\n{r.listing}" for r in wrong)
    assert sum(r.verdict == "noisy" for r in results) <= 1


def wrong_gradients(step):
    """The step, jitted, with gradients that are too large by a hundred thousandth."""

    def wrong(make):
        def update(grads, opt_state, params):
            grads = jax.tree.map(lambda g: g * (1 + 1e-5), grads)
            return make().update(grads, opt_state, params)

        return lambda: optax.GradientTransformation(make().init, update)

    right = dict(_helpers.OPTIMIZERS)

    def mistaken(*args):
        _helpers.OPTIMIZERS.update({name: wrong(make) for name, make in right.items()})
        try:
            return step(*args)
        finally:
            _helpers.OPTIMIZERS.update(right)

    return jax.jit(mistaken)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "feature"),
    [(59, "weight: bfloat16"), (123, "layer: float32"), (57, "optimizer: lion")],
)
def test_noise_hides_no_wrong_gradient(seed, feature):
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        program = untraced(programs.draw(seed, 8))
        assert feature in program.features
        assert check.judge([program], jax.jit)[0].verdict == "equal"
        (found,) = check.judge([program], wrong_gradients)
    assert found.verdict == "differs", found.why


def untraced(program):
    """The program, not jitted: it can be traced again with other meanings of its words."""
    step = getattr(program.step, "__wrapped__", program.step)
    return dataclasses.replace(program, step=step, wide=program.wide and untraced(program.wide))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1208, 10177, 7331])
def test_rounding_is_noise(seed):
    """A gradient cast to bfloat16 before it is summed, lion's sign of zero, the deviation of equal rows."""
    (found,) = check.check([seed])
    assert found.verdict == "noisy", found.why


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag names instruction sets of x86")
@pytest.mark.parametrize("seed", [14678, 9457, 8270])
def test_what_xla_computes_twice_is_noise(seed):
    """The largest of `|h|`, none of `h - max(h)` that is positive, four zeros in `h - h[i]`."""
    (found,) = run_zoo.run_in_processes(range(seed, seed + 1))
    why = "equal without fused multiply-adds; with them ["
    # From JAX 0.11 on XLA:CPU has other fusions.
    assert (found["verdict"], found["why"][: len(why)]) in [("noisy", why), ("equal", "")]


@pytest.mark.slow(but=["1-equal-noisy", "1-differs-differs"])
@pytest.mark.parametrize(
    ("accumulate", "again", "verdict"),
    [
        ("1", "equal", "noisy"),
        ("1", "differs", "differs"),
        ("1", "noisy", "differs"),
        ("2", "equal", "differs"),
    ],
)
def test_other_differences_stay(accumulate, again, verdict, monkeypatch):
    """One without fused multiply-adds, and any with microbatches, where jzero computes twice itself."""

    def run(seeds, options, environment):
        found = again if run_zoo.NO_FMA in environment.get("XLA_FLAGS", "") else "differs"
        return [
            {"seed": str(s), "verdict": found, "why": "", "accumulate": accumulate} for s in seeds
        ]

    monkeypatch.setattr(run_zoo, "_run", run)
    assert [r["verdict"] for r in run_zoo.run_in_processes(range(3))] == [verdict] * 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 29])
def test_sums_in_parts_are_the_same_sums(seed):
    """Noise that computed something else would hide every fault."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        program = programs.draw(seed, 8)
        step = check.together([program])
        (expected,) = check.train([program], jax.jit(step))
        for num_parts in (2, 3, 12):
            (found,) = check.train([program], jax.jit(noise.summed_in_parts(step, num_parts)))
            assert check.difference(found, expected, program.narrow) is None


def test_same_seed_draws_the_same_step():
    with jax.enable_x64(True):
        first, second, other = (programs.draw(seed, 8) for seed in (11, 11, 12))
        assert first.source == second.source != other.source
        assert str(first.batches) == str(second.batches)
        assert str(first.make_state()) == str(second.make_state())


@pytest.mark.slow
def test_every_feature_is_drawn():
    """A feature that the sampler never chooses would look tested."""
    tables: dict[str, Any] = {
        "layer": rowwise.LAYERS, "coupling": couplings.COUPLINGS, "metric": losses.METRICS,
        "loss": losses.ROW_LOSSES | losses.LOSSES, "term": losses.EXTRA_TERMS, "state": state.EXTRAS,
        "gradient": gradients.GRADIENTS | gradients.HALVES | gradients.PER_EXAMPLE,
        "grads": gradients.AFTERWARDS, "container": programs.CONTAINERS,
        "optimizer": programs.OPTIMIZERS, "key": _draw.KEYS, "weight": _draw.WEIGHTS,
    }  # fmt: skip
    never = {f"{kind}: {name}" for kind, table in tables.items() for name in table}
    for seed in range(2500):
        never -= check.program_of(seed).features
        if not never:
            break
    assert not never, f"drawn never: {never}"


@pytest.mark.slow
def test_chunks_count_whichever_library_they_ran_with(tmp_path):
    results = [check.Result(seed, "equal") for seed in range(99)] + [
        check.Result(99, "noisy", "why")
    ]
    found = [{name: str(value) for name, value in vars(r).items()} for r in results]
    first, again, other = (
        run_zoo.summary(range(start, start + 100), found, 60, tree)
        for start, tree in ((0, "a/b"), (0, "c/b"), (100, "a/b"))
    )
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (other, first, again)))
    assert run_zoo.lines_of(path) == [again, other]
    table = run_zoo.table(run_zoo.lines_of(path))
    assert "| `c/b` | 100 | 99 | 0 | 1 | 0 | 0 | 1 |" in table
    assert "| **in all** | 200 | 198 | 0 | 2 | 0 | 0 | 2 |" in table
    assert again["noisy seeds"] == ["99"]
