"""Which contestant is the fastest, and whether the difference is larger than the spread."""

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, List, Optional, Sequence

from posenc_export.benchmark.spread import Spread, spread

if TYPE_CHECKING:
    from posenc_export.benchmark.report import Row

LEAST = 3  # pairs of samples: fewer have no spread
WHAT = {"decode": "cached tokens", "prefill": "tokens of prompt"}


@dataclass(frozen=True)
class Verdict:
    """The fastest contestant of a phase and number of tokens against the next.

    Args:
        ratio: time of the next over that of the fastest, round by round; None where it cannot be told.
    """

    phase: str
    tokens: int
    fastest: str
    following: str
    ratio: Optional[Spread]
    text: str


def verdicts(rows: Sequence["Row"]) -> List[Verdict]:
    """One for each phase and number of tokens that has two contestants or more, in the order of the rows."""
    groups = [list(group) for _, group in groupby(rows, key=lambda row: (row.phase, row.tokens))]
    return [_verdict(*sorted(group, key=lambda row: row.median_seconds)[:2]) for group in groups if len(group) > 1]


def _verdict(first: "Row", second: "Row") -> Verdict:
    """Samples of one round are compared with each other, so that slow drift of the machine cancels."""
    pairs = list(zip(first.samples_seconds, second.samples_seconds, strict=False))
    ratio = None
    if first.samples_disturbed or second.samples_disturbed:
        said = f"no verdict, since samples of {first.contestant if first.samples_disturbed else second.contestant} stayed disturbed"
    elif len(pairs) < LEAST:
        said = f"no verdict between {first.contestant} and {second.contestant}, since {len(pairs)} samples have no spread"
    else:
        ratio = spread([b / a for a, b in pairs])
        extent = f"the spread is {ratio.low:.2f} to {ratio.high:.2f}"
        said = f"{first.contestant} is {ratio.median:.2f} times as fast as {second.contestant}; {extent}"
        if ratio.low <= 1.0:
            said = f"no difference beyond the spread between {first.contestant} and {second.contestant}; {extent}"
    text = f"{first.phase} at {first.tokens} {WHAT[first.phase]}: {said}"
    return Verdict(first.phase, first.tokens, first.contestant, second.contestant, ratio, text)
