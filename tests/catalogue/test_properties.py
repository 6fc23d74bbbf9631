"""docs/properties.md: measured cells agree with the float64 oracles, which are independent of
the hooks.
"""

import functools
from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
import torch

from bench.encoding_pages import properties_page
from posenc_export import encodings
from posenc_export.catalogue.properties import BOUND, GEOMETRY, STARTS, TOKENS, built, measure
from posenc_export.encodings import REGISTRY

FEW = 7


@functools.lru_cache(maxsize=None)
def _cells(name: str) -> Dict[str, str]:
    return measure(name)


def _cell(name: str, column: str) -> str:
    return _cells(name)[column]


def _vectors(encoding: Any) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the measured token, query [H,D] and key [H,D], which are the same at every
    position.
    """
    random = torch.Generator().manual_seed(0)
    token, query, key = (
        torch.randn(sizes, generator=random).double().numpy()
        for sizes in ((encoding.token_width(GEOMETRY.width),), *[(GEOMETRY.heads, TOKENS)] * 2)
    )
    return token, query, key


def _exact(
    encoding: Any, places: List[int], queries: List[int], causal: bool
) -> Tuple[np.ndarray, np.ndarray, List[np.ndarray]]:
    """Return the oracle's changes of tokens [n,E], rotated queries and keys [n,2HD], and for
    each query the scores of the keys that it sees [H,seen].
    """
    oracle, (token, query, key) = encoding.oracle(), _vectors(encoding)
    rows = oracle.embed_rows(np.repeat(token[None], len(places), 0), places)
    changes = rows - token if len(token) == GEOMETRY.width else rows
    q, k = (
        np.stack([turn(x, place) for place in places])
        for turn, x in ((oracle.rotate_heads, query), (oracle.rotate_key_heads, key))
    )
    oracle.observe(rows if len(token) == GEOMETRY.width else changes, places[0])
    scores = []
    for i in queries:
        seen = range(i + 1 if causal else len(places))
        at = [places[j] for j in seen]
        of_heads = [
            oracle.scores(head, q[i, head], k[list(seen), head], places[i], at)
            for head in range(GEOMETRY.heads)
        ]
        scores.append(np.stack(of_heads))
    return (
        changes,
        np.concatenate((q.reshape(len(places), -1), k.reshape(len(places), -1)), 1),
        scores,
    )


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(
        np.abs(one - other).max() <= BOUND * max(np.abs(one).max(), np.abs(other).max(), 1e-30)
    )


@pytest.mark.parametrize("name", REGISTRY)
def test_the_number_of_distinguishable_tokens_agrees_with_the_oracle(name: str) -> None:
    encoding, places = built({"name": name}), list(range(TOKENS))
    changes, rotated, scores = _exact(encoding, places, [TOKENS - 1], True)
    parts = [part / (np.abs(part).max() or 1.0) for part in (changes, rotated, scores[0].T)]
    rows = np.concatenate(parts, 1)
    apart = sum(
        all(np.abs(row - other).max() > BOUND for other in rows[:index])
        for index, row in enumerate(rows)
    )
    assert _cell(name, "told apart") == f"{apart} of {TOKENS}"


@pytest.mark.parametrize("name", REGISTRY)
def test_dependence_on_offsets_only_agrees_with_the_oracle(name: str) -> None:
    encoding, causal = built({"name": name}), "causal" in REGISTRY[name].works_in
    (near, _, of_near), (far, _, of_far) = (
        _exact(encoding, list(range(start, start + FEW)), list(range(FEW)), causal)
        for start in STARTS
    )
    products = near @ near.T
    same = _same(products, far @ far.T) and _same(products[1:, 1:], products[:-1, :-1])
    same &= all(_same(one, other) for one, other in zip(of_near, of_far, strict=True))
    same &= not causal or all(
        _same(one[:, 1:], other) for one, other in zip(of_near[1:], of_near[:-1], strict=True)
    )
    assert (_cell(name, "offset only") != "no") == same


def _falling(head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return -(head + 1) * (query - key).abs()


def _by_key(head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return -(head + 1) * (query - key).abs() * (1 + key.remainder(5))


def _constant(head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return head + 0 * (query - key)


@pytest.mark.parametrize(
    ("function", "cell"), [(_falling, "yes"), (_by_key, "no"), (_constant, "-")]
)
def test_an_encoding_outside_the_package_is_measured(
    function: Any, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(encodings.KNOWN.registered, "mine", encodings.bias(function))
    assert measure("mine")["offset only"] == cell


def test_an_encoding_that_needs_a_parameter_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Needy(encodings.PositionEncoding):
        def __init__(self, geometry: encodings.Geometry, size: int) -> None:
            super().__init__()

    monkeypatch.setitem(encodings.KNOWN.registered, "needy", Needy)
    assert set(measure("needy").values()) == {"-"}


def test_the_page_is_up_to_date() -> None:
    assert (Path(__file__).parents[2] / "docs/properties.md").read_text() == properties_page()
