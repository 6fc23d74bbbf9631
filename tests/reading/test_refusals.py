"""Modules that cannot be read are refused in one line, which names the reason and the place."""

import pytest
import torch

from posenc_export.reading.capture import capture
from posenc_export.reading.causality import findings
from posenc_export.reading.refused import Refused
from tests.reading.refused_modules import BY_NUMBERS, BY_TRACE, MOST, WORDS, Case, Words


def ids(length: int = 11) -> torch.Tensor:
    return torch.randint(0, WORDS, (3, length))


@pytest.mark.parametrize("case", BY_TRACE, ids=lambda case: case.module.__name__)
def test_a_module_that_no_trace_follows_is_refused_with_its_line(case: Case) -> None:
    with pytest.raises(Refused) as refused:
        capture(case.module(), ids(case.length), MOST)
    said = str(refused.value)
    assert said.startswith(f"module {case.module.__name__}: ") and "\n" not in said
    assert [words for words in case.words if words not in said] == []


@pytest.mark.parametrize("case", BY_NUMBERS, ids=lambda case: case.module.__name__)
def test_a_module_that_is_no_function_of_earlier_tokens_is_found_by_numbers(case: Case) -> None:
    found = findings(capture(case.module(), ids(), MOST))
    assert [words for words in case.words if words not in " ".join(found)] == []


def test_nothing_is_found_in_a_causal_module() -> None:
    assert findings(capture(Words(), ids(), MOST)) == []
