"""Spread and ratios of timings, and the sentences that state them."""

import math
from dataclasses import dataclass
from itertools import groupby
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np

from posenc_export.benchmark.results import Row

WIDE = 1.25  # high / low, above which numbers have two significant digits in place of three
FEWEST = 5  # pairs of timings that a ratio needs
DRAWS, CONFIDENCE = 4000, 0.95  # of the bootstrap
UNDECIDED = 50  # percent; if larger differences are possible, no result is stated
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


def ratio(times: Sequence[float], reference: Sequence[float]) -> Optional[Spread]:
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


def ratios(rows: Sequence[Row], baseline: str = "") -> List[Optional[Spread]]:
    """Return the ratio of each row to that of the baseline, or without one to the fastest; None for
    that row itself, or with too few rounds.
    """
    chosen: Dict[Tuple[str, int], Row] = {}
    for row in sorted(rows, key=lambda row: row.median_seconds):
        if baseline in ("", row.contestant):
            chosen.setdefault((row.phase, row.tokens), row)
    pairs = [(row, chosen[row.phase, row.tokens]) for row in rows]
    times = (None if a is b else ratio(a.samples_seconds, b.samples_seconds) for a, b in pairs)
    return list(times)


def headlines(rows: Sequence[Row], baseline: str = "") -> List[str]:
    """Return a sentence for each phase with the time of every contestant, relative to the baseline,
    or without one to the contestant that is the fastest by the geometric mean of its medians.
    """
    lines = []
    for phase, group in groupby(rows, key=lambda row: row.phase):
        of_phase = list(group)
        tokens = list(dict.fromkeys(row.tokens for row in of_phase))
        medians: Dict[str, List[float]] = {}
        for row in of_phase:
            medians.setdefault(row.contestant, []).append(math.log(row.median_seconds))
        reference = baseline or min(medians, key=lambda name: sum(medians[name]))
        spreads: Dict[str, List[Spread]] = {}
        for row, times in zip(of_phase, ratios(of_phase, reference), strict=True):
            if times is not None:
                spreads.setdefault(row.contestant, []).append(times)
        if not spreads:
            continue
        order = sorted(spreads, key=lambda name: spreads[name][0].median)
        texts = {name: _range(spreads[name]) for name in order}
        parts = [f"{name} {text}" for name, text in texts.items() if text]
        if undecided := [name for name, text in texts.items() if not text]:
            parts += [f"{' and '.join(undecided)} undecided (the times vary too much)"]
        where = " to ".join(map(str, dict.fromkeys((tokens[0], tokens[-1]))))
        place = f"{phase.capitalize()} at {where} {WHAT[phase]}"
        lines.append(f"{place}, time relative to {reference}: {', '.join(parts)}.")
    return lines


def _range(spreads: Sequence[Spread]) -> str:
    """Return a ratio with its interval, or the range of several ratios; "" if one is undecided."""
    unclear = [times for times in spreads if times.low <= 1.0 <= times.high]
    if any(max(times.high, 1 / times.low) > 1 + UNDECIDED / 100 for times in unclear):
        return ""
    medians = [times.median for times in spreads]
    least, most = rounded(min(medians), 3), rounded(max(medians), 3)
    equal = len(unclear) == len(spreads)
    text = (
        str(spreads[0]) if len(spreads) == 1 else least if least == most else f"{least} to {most}"
    )
    return f"{text} (no clear difference)" if equal and len(spreads) > 1 else text
