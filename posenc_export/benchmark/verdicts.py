"""Verdicts: the fastest contestant, and whether its advantage over the next one exceeds the spread of the samples."""

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, List, Optional, Sequence

from posenc_export.benchmark.spread import Spread, spread

if TYPE_CHECKING:
    from posenc_export.benchmark.report import Row

LEAST = 3  # fewest pairs of samples for a verdict
WHAT = {"decode": "cached tokens", "prefill": "tokens of prompt"}


@dataclass(frozen=True)
class Verdict:
    """Comparison of the fastest contestant with the next one, at one phase and number of tokens.

    Args:
        fastest: label of the fastest contestant.
        following: label of the next contestant.
        ratio: time of the next contestant divided by time of the fastest, per round; None if there are too few or disturbed samples.
        text: the verdict as a sentence.
    """

    phase: str
    tokens: int
    fastest: str
    following: str
    ratio: Optional[Spread]
    text: str


def verdicts(rows: Sequence["Row"]) -> List[Verdict]:
    """Return a verdict for each phase and number of tokens with at least two contestants, in the order of the rows."""
    groups = [list(group) for _, group in groupby(rows, key=lambda row: (row.phase, row.tokens))]
    return [_verdict(*sorted(group, key=lambda row: row.median_seconds)[:2]) for group in groups if len(group) > 1]


def _verdict(first: "Row", second: "Row") -> Verdict:
    """Compare two contestants. Ratios are formed from samples of the same round, so that slow drift of the machine cancels out."""
    pairs = list(zip(first.samples_seconds, second.samples_seconds, strict=False))
    ratio = None
    if first.samples_disturbed or second.samples_disturbed:
        disturbed = first if first.samples_disturbed else second
        finding = f"no verdict, because all repetitions of a sample of {disturbed.contestant} were disturbed"
    elif len(pairs) < LEAST:
        finding = f"no verdict between {first.contestant} and {second.contestant}, because {len(pairs)} samples are too few"
    else:
        ratio = spread([b / a for a, b in pairs])
        extent = f"the spread is {ratio.low:.2f} to {ratio.high:.2f}"
        finding = f"{first.contestant} is {ratio.median:.2f} times as fast as {second.contestant}; {extent}"
        if ratio.low <= 1.0:
            finding = f"no difference beyond the spread between {first.contestant} and {second.contestant}; {extent}"
    text = f"{first.phase} at {first.tokens} {WHAT[first.phase]}: {finding}"
    return Verdict(first.phase, first.tokens, first.contestant, second.contestant, ratio, text)
