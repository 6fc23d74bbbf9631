"""Verdicts: the fastest contestant compared with the next one."""

import math
from itertools import groupby
from typing import List, Sequence

from posenc_export.benchmark.results import Row
from posenc_export.benchmark.spread import ratio

WHAT = {"decode": "cached tokens", "prefill": "tokens of prompt"}


def verdicts(rows: Sequence[Row]) -> List[str]:
    """Return a sentence for each phase and number of tokens with at least two contestants and enough rounds for a ratio, in the order of the rows."""
    groups = [sorted(group, key=lambda row: row.median_seconds) for _, group in groupby(rows, key=lambda row: (row.phase, row.tokens))]
    comparisons = [(group[0], _comparison(*group[:2])) for group in groups if len(group) > 1]
    return [f"{row.phase} at {row.tokens} {WHAT[row.phase]}: {comparison}" for row, comparison in comparisons if comparison]


def _comparison(first: Row, second: Row) -> str:
    slower = ratio(second.samples_seconds, first.samples_seconds)
    if slower is None:
        return ""
    if slower.low > 1.0:
        return f"{first.contestant} is {slower.median:.3g} ({slower.low:.3g} .. {slower.high:.3g}) times as fast as {second.contestant}"
    if slower.high < 1.0:  # slower round by round, in spite of the smaller median
        return _comparison(second, first)
    most = math.ceil(100 * (max(slower.high, 1 / slower.low) - 1))
    return f"no difference larger than {most} % between {first.contestant} and {second.contestant}"
