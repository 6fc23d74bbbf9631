"""Median and spread of timings."""

from dataclasses import dataclass
from typing import Sequence


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile of a number of samples, in the samples' unit."""

    median: float
    low: float
    high: float
    samples: int


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, linear between neighbours.

    Raises:
        ValueError: no values, a share outside [0, 1].
    """
    if not values:
        raise ValueError("quantile: expected at least one value, got none; take more rounds")
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"quantile: expected a share between 0 and 1, got {share}; give 0.5 for the median")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def spread(values: Sequence[float]) -> Spread:
    return Spread(quantile(values, 0.5), quantile(values, 0.1), quantile(values, 0.9), len(values))
