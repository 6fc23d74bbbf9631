"""Median and spread of timings, and ratios of timings of the same rounds."""

from dataclasses import dataclass
from typing import Collection, List, Sequence

import numpy as np


@dataclass(frozen=True)
class Spread:
    """Median, 10th (low) and 90th (high) percentile of samples, in their unit, and the number of samples."""

    median: float
    low: float
    high: float
    samples: int


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of values.

    Raises:
        ValueError: values is empty.
    """
    if not values:
        raise ValueError("spread: expected at least one value, got none; take more rounds")
    low, median, high = np.quantile(values, (0.1, 0.5, 0.9))
    return Spread(float(median), float(low), float(high), len(values))


def ratios(times: Sequence[float], reference: Sequence[float], omitted: Collection[int]) -> List[float]:
    """Return times divided by reference, round by round, so that slow drift of the machine cancels out. omitted: numbers of rounds without a ratio."""
    pairs = enumerate(zip(times, reference, strict=False))
    return [time / other for number, (time, other) in pairs if number not in omitted]
