"""Encodings against those of x-transformers, where it is installed."""

from typing import Any

import pytest
import torch

from posenc_export import encodings

peers = pytest.importorskip("x_transformers.x_transformers", reason="x-transformers is not installed")
PLACES = torch.arange(30)[None]


def _build(name: str, causal: bool = True, **parameters: Any) -> Any:
    torch.manual_seed(0)
    return encodings.build({"name": name, **parameters}, encodings.Geometry(64, 6, 16, 64, causal, 6))


@pytest.mark.parametrize("heads", [2, 3, 6])
def test_alibi_of_the_first_heads_is_theirs(heads: int) -> None:
    expected = peers.AlibiPositionalBias(heads, 6)(30, 30)
    assert torch.allclose(_build("alibi", causal=False, heads=heads).bias(PLACES, PLACES)[0], expected, rtol=1e-5)
