"""Trainings in pairs of one seed: their mean difference, and what is known of it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats  # type: ignore[import-untyped]  # JAX needs SciPy anyway

CONFIDENCE = 0.95


class Difference(NamedTuple):
    """A mean over pairs, and half the width of its interval."""

    mean: float
    half: float

    @property
    def verdict(self) -> str:
        """By where the interval of losses lies; of twenty ways that are alike it errs in one."""
        if self.mean > self.half:
            return "worse"
        return "better" if self.mean < -self.half else "not told apart"


def difference(pairs: Sequence[float] | np.ndarray) -> Difference:
    """Of independent differences, one for each seed: Student's interval of 95 %.

    Each way has its own spread, so none can be taken from the others: what is far from exact is also far from
    itself. Of three pairs the interval has 2.5 standard deviations on each side.
    """
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, len(pairs) - 1)
    return Difference(
        float(np.mean(pairs)), float(quantile * np.std(pairs, ddof=1) / len(pairs) ** 0.5)
    )
