"""Median and spread of timings."""

from dataclasses import dataclass
from typing import Sequence

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
