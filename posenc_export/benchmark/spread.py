"""Median and spread of timings."""

from dataclasses import dataclass
from typing import Sequence

import numpy as np


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile of a number of samples, in the samples' unit."""

    median: float
    low: float
    high: float
    samples: int


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("spread: expected at least one value, got none; take more rounds")
    low, median, high = np.quantile(values, (0.1, 0.5, 0.9))
    return Spread(float(median), float(low), float(high), len(values))
