"""Median and spread of timings, and ratios of timings with a confidence interval."""

import math
from dataclasses import dataclass
from typing import Optional, Sequence

import numpy as np

WIDE = 1.25  # high / low, above which numbers have two significant digits in place of three
FEWEST = 5  # pairs of timings that a ratio needs
DRAWS, CONFIDENCE = 4000, 0.95  # of the bootstrap


@dataclass(frozen=True)
class Spread:
    """A median with a lower and an upper bound, in the unit of the samples."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        digits = 2 if self.high > WIDE * self.low else 3
        return (
            f"{rounded(self.median, digits)} ({rounded(self.low, digits)} .. "
            f"{rounded(self.high, digits)})"
        )


def rounded(value: float, digits: int) -> str:
    """Format a number above 0 with `digits` significant digits: 411.7 with two as 410."""
    decimals = digits - 1 - math.floor(math.log10(value))
    return f"{round(value, decimals):.{max(decimals, 0)}f}"


def spread(values: Sequence[float]) -> Spread:
    """Return median, 10th (low) and 90th (high) percentile of values."""
    low, median, high = np.quantile(values, (0.1, 0.5, 0.9))
    return Spread(float(median), float(low), float(high))


def ratio(times: Sequence[float], reference: Sequence[float]) -> Optional[Spread]:
    """Return the median of times / reference, round by round, with its confidence interval; None
    with fewer than FEWEST rounds.

    The interval is that of a paired bootstrap (Efron and Tibshirani 1993, 13): a round that other
    processes disturbed is one of the values that are drawn, and slow drift of the machine cancels
    out within a round.
    """
    count = min(len(times), len(reference))
    if count < FEWEST:
        return None
    ratios = np.divide(times[:count], reference[:count])
    medians = np.median(ratios[np.random.default_rng(0).integers(0, count, (DRAWS, count))], axis=1)
    low, high = np.quantile(medians, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return Spread(float(np.median(ratios)), float(low), float(high))
