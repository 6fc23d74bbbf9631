"""Median and spread of timings, and the ratio of two contestants' timings with a confidence interval."""

from dataclasses import dataclass
from typing import Optional, Sequence

import numpy as np

FEWEST = 5  # pairs of timings that a ratio needs
DRAWS, CONFIDENCE = 4000, 0.95  # of the bootstrap


@dataclass(frozen=True)
class Spread:
    """A median with a lower and an upper bound, in the unit of the samples."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Return median, 10th (low) and 90th (high) percentile of values."""
    low, median, high = np.quantile(values, (0.1, 0.5, 0.9))
    return Spread(float(median), float(low), float(high))


def ratio(times: Sequence[float], reference: Sequence[float]) -> Optional[Spread]:
    """Return the median of times / reference, round by round, with its confidence interval; None with fewer than FEWEST rounds.

    The interval is that of a paired bootstrap (Efron and Tibshirani 1993, 13): a round that other processes disturbed is one of the values that are drawn, and slow
    drift of the machine cancels out within a round.
    """
    count = min(len(times), len(reference))
    if count < FEWEST:
        return None
    ratios = np.divide(times[:count], reference[:count])
    medians = np.median(ratios[np.random.default_rng(0).integers(0, count, (DRAWS, count))], axis=1)
    low, high = np.quantile(medians, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return Spread(float(np.median(ratios)), float(low), float(high))
