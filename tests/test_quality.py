"""experiments/wire/paired.py: which differences of trainings it tells apart, and how wide its interval is."""

import pytest

from experiments.wire.paired import Difference, difference


def test_half_the_width_by_hand():
    mean, half = difference([1.0, 2.0, 3.0])
    assert mean == 2
    assert half == pytest.approx(4.302653 / 3**0.5)
    assert Difference(1.0, 1.1).verdict == Difference(-1.0, 1.1).verdict == "not told apart"
