"""Modules that cannot be read are refused in one line, which names the reason and the place."""

import functools
import re

import pytest
import torch

from posenc_export.reading.capture import capture
from posenc_export.reading.causality import findings, probes
from posenc_export.reading.properties import MIXES
from posenc_export.reading.read import read_module
from posenc_export.reading.refused import Refused
from tests.reading.refused_modules import (
    ALL,
    BY_TRACE,
    LATER,
    MOST,
    SELDOM,
    WHOLE_NUMBERS,
    WIDTH,
    WORDS,
    Case,
    Counted,
    LateLeak,
    OtherTableWhenLong,
    Placed,
    RowsCentred,
    ScaledByLength,
    Seldom,
    SelfMasked,
    Unmasked,
    Words,
)
from tests.test_refusals_page import BEHIND, PAGE, rows

pytestmark = pytest.mark.xdist_group("refusals")


def ids(length: int = 11) -> torch.Tensor:
    return torch.randint(0, WORDS, (3, length))


@functools.cache
def message(name: str) -> str:
    """Return why a module is refused, or what is found in it."""
    case = ALL[name]
    try:
        return " ".join(findings(capture(case.module(), ids(case.length), MOST)))
    except Refused as refused:
        return str(refused)


@pytest.mark.parametrize("name", ALL)
def test_a_module_that_cannot_be_read_is_refused_with_its_line(name: str) -> None:
    case, said = ALL[name], message(name)
    refused = said.startswith(f"module {name}: ")  # before anything is compared
    assert refused == (case in BY_TRACE) and "\n" not in said
    assert [words for words in case.words if words not in said] == []


def test_the_page_of_refusals_has_these_messages_and_no_others() -> None:
    later = ("mixes", "whole\\ numbers", "later\\ keys")  # tests/test_refusals_page, and below
    known = [row for row in rows(PAGE[:BEHIND]) if not any(words in row for words in later)]
    found = {name: [row for row in known if re.search(row, message(name))] for name in ALL}
    assert [name for name, of_page in found.items() if not of_page] == []
    assert {row for of_page in found.values() for row in of_page} == set(known)


def test_angles_of_a_base_that_grows_with_the_length_are_refused_with_their_line() -> None:
    with pytest.raises(Refused, match=r"depends on the length.*angle.cos\(\)"):
        read_module(ScaledByLength(), ids(), MOST)


@pytest.mark.parametrize("case", LATER, ids=lambda case: case.module.__name__)
def test_numbers_of_later_keys_that_no_mask_hides_are_refused_with_their_line(case: Case) -> None:
    (words,) = (row for row in rows(PAGE) if "later\\ keys" in row)
    with pytest.raises(Refused, match=f"{words} .*refused_modules.py:") as refused:
        read_module(case.module(), ids(case.length), MOST)
    assert [words for words in case.words if words not in str(refused.value)] == []


@pytest.mark.parametrize("operator", SELDOM)
def test_what_mixes_tokens_that_the_example_lacks_is_refused(operator: str) -> None:
    with pytest.raises(Refused, match=f"{operator} {MIXES} .*refused_modules.py:.*large"):
        read_module(Seldom(SELDOM[operator]), ids(), MOST)


@pytest.mark.parametrize("name", WHOLE_NUMBERS)
def test_whole_numbers_that_no_state_holds_are_refused_in_the_words_of_the_page(name: str) -> None:
    (words,) = (row for row in rows(PAGE) if "whole\\ numbers" in row)
    with pytest.raises(Refused, match=f"{words} .*refused_modules.py:.*99_991"):
        read_module(Counted(WHOLE_NUMBERS[name]), ids(), MOST)


def test_counts_of_tokens_that_are_kept_may_be_as_large_as_the_positions() -> None:
    def before(ids: torch.Tensor) -> torch.Tensor:
        seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        counts = ((ids < 9)[:, None] & seen).sum(-1)
        return torch.nn.functional.pad(counts, (1, 0))[:, :-1]

    assert read_module(Counted(before), ids(), MOST).whole > MOST
    assert read_module(Words(), ids(), MOST).whole == 0


class HiddenByVmap(SelfMasked):
    def hidden(self, ids: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        n = torch.arange(ids.shape[1])
        of_keys = torch.vmap(lambda query, key: query < key, (None, 0))
        return torch.where(torch.vmap(of_keys, (0, None))(n, n), -torch.inf, 0.0)


def test_a_mask_that_vmap_makes_is_read() -> None:
    assert len(read_module(HiddenByVmap(), ids(), MOST).caches) > 0


def test_nothing_is_found_in_a_causal_module() -> None:
    assert findings(capture(Words(), ids(), MOST)) == []


def test_a_bidirectional_module_is_none_that_must_be_causal() -> None:
    assert findings(capture(Unmasked(), ids(), MOST, causal=False)) == []


def test_rows_of_a_bidirectional_module_are_apart() -> None:
    found = findings(capture(RowsCentred(), ids(), MOST, causal=False))
    assert ["rows act on each other" in words for words in found] == [True]


def test_a_leak_beyond_the_lengths_of_the_examples_is_found() -> None:
    captured = capture(LateLeak(), ids(), MOST)
    x = captured.example[:, :20]
    later = x.clone()
    later[:, 10:] = x[:, 10:].flip(0)
    assert torch.equal(captured.own(x)[:, :10], captured.own(later)[:, :10])
    assert "is not causal" in findings(captured)[0]


def test_both_sides_of_a_number_that_a_length_is_compared_with_are_probed() -> None:
    captured = capture(OtherTableWhenLong(), ids(), MOST)
    assert captured.lengths == [34] and captured.least == 35
    assert {33, 34, 35, 36} <= set(probes(captured))


def test_a_table_that_no_call_of_full_length_tries_is_read_at_every_position() -> None:
    module = Placed(3000)
    with pytest.raises(Refused, match="places: embedding cannot be computed for 5000 positions"):
        read_module(module, ids(), 5000)
    assert read_module(Placed(3000), ids(), 3000).max_positions == 3000


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    module = Words()
    module.lock = (n for n in range(WIDTH))
    with pytest.raises(Refused, match="module Words: cannot be copied"):
        capture(module, ids(), MOST)
