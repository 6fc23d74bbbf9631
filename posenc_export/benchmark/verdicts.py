"""Verdicts: the fastest contestant compared with the others."""

import math
from itertools import groupby
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from posenc_export.benchmark.results import Row
from posenc_export.benchmark.spread import Spread, ratio, rounded

UNDECIDED = 50  # percent; if larger differences are possible, a headline names no result
WHAT = {"decode": "cached tokens", "prefill": "tokens of prompt"}


class Comparison(NamedTuple):
    """The fastest contestant and the others at one number of tokens.

    Args:
        fastest, next: rows of both.
        ratio: how many times as fast the first is; None if the interval of the ratio includes 1.
        most: largest difference in percent, if there is no ratio.
        further: names of the other contestants, and how many times as fast the first is.
    """

    fastest: Row
    next: Row
    ratio: Optional[Spread]
    most: int
    further: Tuple[Tuple[str, Spread], ...] = ()

    def __str__(self) -> str:
        if self.ratio is None:
            equal = (
                f"no difference larger than {self.most} % between {self.fastest.contestant} and "
                f"{self.next.contestant}"
            )
            return (
                f"{equal}; {self.fastest.contestant} is {_times(self.further)}"
                if self.further
                else equal
            )
        return (
            f"{self.fastest.contestant} is "
            f"{_times([(self.next.contestant, self.ratio), *self.further])}"
        )

    @property
    def place(self) -> str:
        """Where it was measured."""
        return f"{self.fastest.phase} at {self.fastest.tokens} {WHAT[self.fastest.phase]}"


def verdicts(rows: Sequence[Row]) -> List[str]:
    """Return a sentence for each phase and number of tokens with at least two contestants and
    enough rounds for a ratio, in the order of the rows.
    """
    return [f"{each.place}: {each}" for each in _comparisons(rows)]


def ratios(rows: Sequence[Row]) -> List[Optional[Spread]]:
    """Return for each row the ratio of its times to those of the fastest contestant; None for
    that contestant itself, and with too few rounds.
    """
    fastest: Dict[Tuple[str, int], Row] = {}
    for row in sorted(rows, key=lambda row: row.median_seconds):
        fastest.setdefault((row.phase, row.tokens), row)
    pairs = [(row, fastest[row.phase, row.tokens]) for row in rows]
    return [
        None if row is first else ratio(row.samples_seconds, first.samples_seconds)
        for row, first in pairs
    ]


def headlines(rows: Sequence[Row]) -> List[str]:
    """Return the result of each phase in one sentence, over all numbers of tokens."""
    return [
        _headline(list(of_phase))
        for _, of_phase in groupby(_comparisons(rows), key=lambda each: each.fastest.phase)
    ]


def _headline(found: List[Comparison]) -> str:
    phase, first = found[0].fastest.phase.capitalize(), found[0]
    if max(each.most for each in found) > UNDECIDED:
        undecided = [each for each in found if each.most > UNDECIDED]
        names = " or ".join(
            dict.fromkeys(
                name
                for each in undecided
                for name in (each.fastest.contestant, each.next.contestant)
            )
        )
        return (
            f"{phase}: undecided at {', '.join(str(each.fastest.tokens) for each in undecided)} "
            f"tokens, where the times of {names} vary too much."
        )
    if len(found) == 1:
        return f"{phase}: {first}, at {first.fastest.tokens} tokens."
    ratios = [each.ratio.median for each in found if each.ratio is not None]
    winners = list(
        dict.fromkeys(each.fastest.contestant for each in found if each.ratio is not None)
    )
    where = f"from {first.fastest.tokens} to {found[-1].fastest.tokens} tokens"
    if not winners:
        names = " and ".join(
            dict.fromkeys(
                name for each in found for name in (each.fastest.contestant, each.next.contestant)
            )
        )
        return (
            f"{phase}: no difference larger than {max(each.most for each in found)} % between "
            f"{names}, {where}."
        )
    if len(winners) > 1:
        each_one = "; ".join(f"{name} at {_numbers(found, name)}" for name in winners)
        return f"{phase}: which one is fastest depends on the number of tokens: {each_one}."
    followers = list(dict.fromkeys(each.next.contestant for each in found))
    least, most = (rounded(function(ratios), 3) for function in (min, max))
    than = followers[0] if len(followers) == 1 else "the next"
    everywhere = (
        where
        if len(ratios) == len(found)
        else f"at {_numbers(found, winners[0])} tokens, elsewhere there is no clear difference"
    )
    return (
        f"{phase}: {winners[0]} is {least if least == most else f'{least} to {most}'} times as "
        f"fast as {than}, {everywhere}."
    )


def _numbers(found: Sequence[Comparison], name: str) -> str:
    return ", ".join(
        str(each.fastest.tokens)
        for each in found
        if each.ratio is not None and each.fastest.contestant == name
    )


def _comparisons(rows: Sequence[Row]) -> List[Comparison]:
    groups = [
        sorted(group, key=lambda row: row.median_seconds)
        for _, group in groupby(rows, key=lambda row: (row.phase, row.tokens))
    ]
    found = [(_comparison(*group[:2]), group[2:]) for group in groups if len(group) > 1]
    return [
        each._replace(further=_further(each.fastest, others))
        for each, others in found
        if each is not None
    ]


def _further(fastest: Row, others: Sequence[Row]) -> Tuple[Tuple[str, Spread], ...]:
    slower = [
        (row.contestant, ratio(row.samples_seconds, fastest.samples_seconds)) for row in others
    ]
    return tuple((name, times) for name, times in slower if times is not None)


def _times(slower: Sequence[Tuple[str, Spread]]) -> str:
    """Say how many times as fast one contestant is as each of the others."""
    *first, last = (f"{times} times as fast as {name}" for name, times in slower)
    return f"{', '.join(first)} and {last}" if first else last


def _comparison(first: Row, second: Row) -> Optional[Comparison]:
    slower = ratio(second.samples_seconds, first.samples_seconds)
    if slower is None:
        return None
    if slower.low > 1.0:
        return Comparison(first, second, slower, 0)
    if slower.high < 1.0:  # slower round by round, in spite of the smaller median
        return _comparison(second, first)
    return Comparison(first, second, None, math.ceil(100 * (max(slower.high, 1 / slower.low) - 1)))
