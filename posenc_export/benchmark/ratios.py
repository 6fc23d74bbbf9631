"""Spread and ratios of timings, and the sentences that state them."""

import math
from dataclasses import dataclass
from itertools import groupby
from typing import Sequence

import numpy as np

from posenc_export.benchmark.results import Row

WIDE = 1.25  # high / low, above which numbers have two significant digits in place of three
FEWEST = 5  # pairs of timings that a ratio needs
DRAWS, CONFIDENCE = 4000, 0.95  # of the bootstrap
WHAT = {"decode": "cached tokens", "prefill": "tokens of prompt"}


@dataclass(frozen=True)
class Spread:
    """A median with a lower and an upper bound, in the unit of the samples."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        digits = 2 if self.high > WIDE * self.low else 3
        median, low, high = (rounded(n, digits) for n in (self.median, self.low, self.high))
        return f"{median} ({low} .. {high})"


def rounded(value: float, digits: int) -> str:
    """Format a number above 0 with `digits` significant digits: 411.7 with two as 410."""
    decimals = digits - 1 - math.floor(math.log10(value))
    return f"{round(value, decimals):.{max(decimals, 0)}f}"


def spread(values: Sequence[float]) -> Spread:
    """Return median, 10th (low) and 90th (high) percentile of values."""
    low, median, high = np.quantile(values, (0.1, 0.5, 0.9))
    return Spread(float(median), float(low), float(high))


def ratio(times: Sequence[float], reference: Sequence[float]) -> Spread | None:
    """Return the median of times / reference, round by round, with its confidence interval; None
    with fewer than FEWEST rounds.

    The interval is that of a paired bootstrap (Efron and Tibshirani 1993, 13): a disturbed round is
    one of the values that are drawn, and slow drift of the machine cancels out within a round.
    """
    count = min(len(times), len(reference))
    if count < FEWEST:
        return None
    ratios = np.divide(times[:count], reference[:count])
    medians = np.median(ratios[np.random.default_rng(0).integers(0, count, (DRAWS, count))], axis=1)
    low, high = np.quantile(medians, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return Spread(float(np.median(ratios)), float(low), float(high))


def ratios(rows: Sequence[Row], baseline: str = "") -> list[Spread | None]:
    """Return the ratio of each row to that of the baseline, or without one to the fastest; None for
    that row itself, or with too few rounds.
    """
    chosen: dict[tuple[str, int], Row] = {}
    for row in sorted(rows, key=lambda row: row.median_seconds):
        if baseline in ("", row.contestant):
            chosen.setdefault((row.phase, row.tokens), row)
    pairs = [(row, chosen[row.phase, row.tokens]) for row in rows]
    times = (None if a is b else ratio(a.samples_seconds, b.samples_seconds) for a, b in pairs)
    return list(times)


def headlines(rows: Sequence[Row], baseline: str = "") -> list[str]:
    """Return a sentence for each phase: at the smallest and at the largest number of tokens, the
    time of every contestant relative to the baseline, or without one to the fastest at the largest.
    """
    lines = []
    for phase, group in groupby(rows, key=lambda row: row.phase):
        of_phase = list(group)
        ends = list(dict.fromkeys((of_phase[0].tokens, of_phase[-1].tokens)))
        at_ends = [row for row in of_phase if row.tokens in ends]
        at_ends.sort(key=lambda row: (row.tokens, row.median_seconds))
        fastest = next(row.contestant for row in at_ends if row.tokens == ends[-1])
        texts: dict[str, list[str]] = {}
        for row, times in zip(at_ends, ratios(at_ends, baseline or fastest), strict=True):
            if times is not None:
                said = str(times)
                if times.low <= 1.0 <= times.high:
                    said = f"no clear difference {said.partition(' ')[2]}"
                texts.setdefault(row.contestant, []).append(said)
        if texts:
            where, reference = " and ".join(map(str, ends)), baseline or fastest
            place = f"{phase.capitalize()} at {where} {WHAT[phase]}"
            parts = ", ".join(f"{name} {' and '.join(said)}" for name, said in texts.items())
            lines.append(f"{place}, time relative to {reference}: {parts}.")
    return lines
