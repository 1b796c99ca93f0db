"""experiments/wire/paired.py: which differences of trainings it tells apart, and how often it errs."""

import numpy as np
import pytest

from experiments.wire.paired import Difference, difference


def trainings(rng, effect, sd):
    """Losses of three seeds that lie far apart, in pairs, and of each pair the difference."""
    seeds = 100 * rng.normal(size=3)
    exact, other = seeds + rng.normal(size=3), seeds + effect + sd * rng.normal(size=3)
    return other - exact


@pytest.mark.slow
@pytest.mark.parametrize("sd", [0.1, 1, 10])
def test_the_interval_holds_the_truth_nineteen_times_of_twenty(sd):
    rng = np.random.default_rng(0)
    found = [difference(trainings(rng, 3.0, sd)) for _ in range(2000)]
    assert np.mean([abs(x.mean - 3) < x.half for x in found]) == pytest.approx(0.95, abs=0.015)


@pytest.mark.slow
def test_verdicts_err_once_in_twenty_and_see_what_is_large():
    rng = np.random.default_rng(1)
    alike = [difference(trainings(rng, 0.0, 1.0)).verdict for _ in range(2000)]
    assert alike.count("worse") / 2000 == pytest.approx(0.025, abs=0.01)
    assert alike.count("better") / 2000 == pytest.approx(0.025, abs=0.01)
    large = [difference(trainings(rng, 15.0, 1.0)).verdict for _ in range(200)]
    assert large.count("worse") > 198


def test_half_the_width_by_hand():
    mean, half = difference([1.0, 2.0, 3.0])
    assert mean == 2
    assert half == pytest.approx(4.302653 / 3**0.5)
    assert Difference(1.0, 1.1).verdict == Difference(-1.0, 1.1).verdict == "not told apart"
