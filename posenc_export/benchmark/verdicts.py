"""Verdicts: spread and ratios of timings, and the fastest contestant compared with the others."""

import math
from dataclasses import dataclass
from itertools import groupby
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from posenc_export.benchmark.results import Row

WIDE = 1.25  # high / low, above which numbers have two significant digits in place of three
FEWEST = 5  # pairs of timings that a ratio needs
DRAWS, CONFIDENCE = 4000, 0.95  # of the bootstrap
UNDECIDED = 50  # percent; if larger differences are possible, a headline names no result
MOST_NAMED = 3  # other contestants in a headline; a verdict names all
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


class Comparison(NamedTuple):
    """The fastest contestant at one number of tokens, and the others from the nearest on: their
    names, and how many times as fast it is. An interval that includes 1 decides nothing.
    """

    fastest: Row
    others: Tuple[Tuple[str, Spread], ...]

    def __str__(self) -> str:
        first = self.fastest.contestant
        slower = [(name, times) for name, times in self.others if times.low > 1.0]
        parts = []
        if self.equal:
            names = f"{first} and {_listed(self.equal)}"
            pair = f"no difference larger than {self.most} % between {names}"
            parts = [f"undecided, the times of {names} vary too much" if self.undecided else pair]
        if slower:
            times = [f"{times} times as fast as {name}" for name, times in slower]
            parts.append(f"{first} is {_listed(times)}")
        return "; ".join(parts)

    @property
    def equal(self) -> List[str]:
        """Names of the contestants that may be as fast."""
        return [name for name, times in self.others if times.low <= 1.0]

    @property
    def most(self) -> int:
        """Largest possible difference to these in percent; 0 if there are none."""
        possible = [max(times.high, 1 / times.low) for _, times in self.others if times.low <= 1.0]
        return math.ceil(100 * (max(possible, default=1.0) - 1))

    @property
    def undecided(self) -> bool:
        """Whether larger differences than UNDECIDED are possible."""
        return self.most > UNDECIDED

    @property
    def place(self) -> str:
        """Where it was measured."""
        return f"{self.fastest.phase} at {self.fastest.tokens} {WHAT[self.fastest.phase]}"


def verdicts(rows: Sequence[Row]) -> List[str]:
    """Return a sentence for each phase and number of tokens that has a ratio."""
    return [f"{comparison.place}: {comparison}" for comparison in _comparisons(rows)]


def ratios(rows: Sequence[Row]) -> List[Optional[Spread]]:
    """Return the ratio of each row to the fastest; None for that one, or with too few rounds."""
    best: Dict[Tuple[str, int], Row] = {}
    for row in sorted(rows, key=lambda row: row.median_seconds):
        best.setdefault((row.phase, row.tokens), row)
    pairs = [(row, best[row.phase, row.tokens]) for row in rows]
    times = (None if a is b else ratio(a.samples_seconds, b.samples_seconds) for a, b in pairs)
    return list(times)


def headlines(rows: Sequence[Row]) -> List[str]:
    """Return the result of each phase in one sentence, over all numbers of tokens."""
    phases = groupby(_comparisons(rows), key=lambda comparison: comparison.fastest.phase)
    return [f"{phase.capitalize()}: {_headline(list(of_phase))}." for phase, of_phase in phases]


def _headline(comparisons: List[Comparison]) -> str:
    undecided = [comparison for comparison in comparisons if comparison.undecided]
    if undecided:
        names = " or ".join(_names(undecided))
        return f"undecided at {_tokens(undecided)} tokens, where the times of {names} vary too much"
    first, last = comparisons[0].fastest.tokens, comparisons[-1].fastest.tokens
    if len(comparisons) == 1:
        nearest = comparisons[0]._replace(others=comparisons[0].others[:MOST_NAMED])
        return f"{nearest}, at {first} tokens"
    decided = [comparison for comparison in comparisons if not comparison.equal]
    winners = list(dict.fromkeys(comparison.fastest.contestant for comparison in decided))
    everywhere = f"from {first} to {last} tokens"
    if not winners:
        most = max(comparison.most for comparison in comparisons)
        names = _listed(_names(comparisons))
        return f"no difference larger than {most} % between {names}, {everywhere}"
    if len(winners) > 1:
        places = "; ".join(f"{name} at {_tokens(decided, name)}" for name in winners)
        return f"which one is fastest depends on the number of tokens: {places}"
    where = f"at {_tokens(decided)} tokens, elsewhere there is no clear difference"
    where = everywhere if len(decided) == len(comparisons) else where
    seconds = list(dict.fromkeys(comparison.others[0][0] for comparison in comparisons))
    than = seconds[0] if len(seconds) == 1 else "the next"
    return f"{winners[0]} is {_range(decided)} times as fast as {than}, {where}"


def _names(comparisons: Sequence[Comparison]) -> List[str]:
    every = ([comparison.fastest.contestant, *comparison.equal] for comparison in comparisons)
    return list(dict.fromkeys(name for names in every for name in names))


def _range(comparisons: Sequence[Comparison]) -> str:
    medians = [comparison.others[0][1].median for comparison in comparisons]
    least, most = rounded(min(medians), 3), rounded(max(medians), 3)
    return least if least == most else f"{least} to {most}"


def _tokens(comparisons: Sequence[Comparison], fastest: Optional[str] = None) -> str:
    rows = [comparison.fastest for comparison in comparisons]
    return ", ".join(str(row.tokens) for row in rows if fastest in (None, row.contestant))


def _comparisons(rows: Sequence[Row]) -> List[Comparison]:
    comparisons = []
    for _, group in groupby(rows, key=lambda row: (row.phase, row.tokens)):
        best, *slower = by_median = sorted(group, key=lambda row: row.median_seconds)
        for row in slower:
            times = ratio(row.samples_seconds, best.samples_seconds)
            if times is not None and times.high < 1.0:
                best = row  # faster round by round, in spite of the larger median
        others = [
            (row.contestant, times)
            for row in by_median
            if row is not best and (times := ratio(row.samples_seconds, best.samples_seconds))
        ]
        if others:
            others.sort(key=lambda other: other[1].median)
            comparisons.append(Comparison(best, tuple(others)))
    return comparisons


def _listed(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
