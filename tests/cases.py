"""Combinations of parameters, of which `make test` takes a covering choice."""

import itertools
from collections import Counter
from typing import Any, Collection, Iterable, Sequence

import pytest


def combinations(
    *axes: Sequence[Any], together: int = 1, besides: Sequence[tuple[Any, ...]] = ()
) -> list[Any]:
    """Return all combinations of a value of each axis. Those that are neither in `covering` nor in
    `besides` are exhaustive.
    """
    taken = [*covering(*axes, together=together), *besides]
    return [
        pytest.param(*case, marks=[] if case in taken else [pytest.mark.exhaustive])
        for case in itertools.product(*axes)
    ]


def choice(cases: Iterable[Any], quick: Collection[Any], grouped: bool = False) -> list[Any]:
    """Return cases, each a value or a tuple of values, as parameters. Those that are not in `quick`
    are exhaustive. grouped: those of one first value run in one process, which traces their model
    once.
    """
    made = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marks = [] if case in quick else [pytest.mark.exhaustive]
        marks += [pytest.mark.xdist_group(str(values[0]))] if grouped else []
        made.append(pytest.param(*values, marks=marks))
    return made


def covering(*axes: Sequence[Any], together: int = 1) -> list[tuple[Any, ...]]:
    """Return few combinations in which every value of every axis occurs; with `together` 2, every
    pair of values of two axes. Each value occurs about as often as the others of its axis.
    """

    def contents(case: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(map(repr, case)), together))

    cases = list(itertools.product(*axes))
    missing = set().union(*map(contents, cases))
    taken: list[tuple[Any, ...]] = []
    uses: Counter[Any] = Counter()
    while missing:
        taken.append(
            max(
                cases,
                key=lambda case: (
                    len(contents(case) & missing),
                    -sum(uses[value] for value in enumerate(map(repr, case))),
                ),
            )
        )
        missing -= contents(taken[-1])
        uses.update(enumerate(map(repr, taken[-1])))
    return taken
