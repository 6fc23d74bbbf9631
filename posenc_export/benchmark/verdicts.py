"""Verdicts: the fastest contestant, and whether its advantage over the next one exceeds the spread of the samples."""

from dataclasses import dataclass
from itertools import groupby
from typing import List, Optional, Sequence

from posenc_export.benchmark.results import Row
from posenc_export.benchmark.spread import Spread, ratios, spread

LEAST = 3  # fewest rounds for a ratio
WHAT = {"decode": "cached tokens", "prefill": "tokens of prompt"}


@dataclass(frozen=True)
class Verdict:
    """Comparison of the fastest contestant with the next one, at one phase and number of tokens.

    Args:
        fastest: label of the fastest contestant.
        following: label of the next contestant.
        ratio: time of the next contestant divided by time of the fastest, over the rounds in which both were undisturbed; None with fewer than LEAST of them.
        text: the verdict as a sentence.
    """

    phase: str
    tokens: int
    fastest: str
    following: str
    ratio: Optional[Spread]
    text: str


def verdicts(rows: Sequence[Row]) -> List[Verdict]:
    """Return a verdict for each phase and number of tokens with at least two contestants, in the order of the rows."""
    groups = [list(group) for _, group in groupby(rows, key=lambda row: (row.phase, row.tokens))]
    return [_verdict(*sorted(group, key=lambda row: row.median_seconds)[:2]) for group in groups if len(group) > 1]


def compared(first: Row, second: Row) -> Optional[Spread]:
    """Return the spread of the time of the second contestant divided by that of the first; None with fewer than LEAST rounds in which both were undisturbed."""
    found = ratios(second.samples_seconds, first.samples_seconds, {*first.rounds_disturbed, *second.rounds_disturbed})
    return spread(found) if len(found) >= LEAST else None


def _verdict(first: Row, second: Row) -> Verdict:
    ratio = compared(first, second)
    if ratio is None:
        finding = f"no verdict between {first.contestant} and {second.contestant}, because fewer than {LEAST} rounds were undisturbed"
    else:
        extent = f"the spread is {ratio.low:.2f} to {ratio.high:.2f}"
        finding = f"{first.contestant} is {ratio.median:.2f} times as fast as {second.contestant}; {extent}"
        if ratio.low <= 1.0:
            finding = f"no difference beyond the spread between {first.contestant} and {second.contestant}; {extent}"
    text = f"{first.phase} at {first.tokens} {WHAT[first.phase]}: {finding}"
    return Verdict(first.phase, first.tokens, first.contestant, second.contestant, ratio, text)
