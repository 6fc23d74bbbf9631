"""Projections converted between layouts of rotary pairs give the same outputs."""

from typing import Optional

import pytest
import torch

from posenc_export.models.block import AttentionBlock
from posenc_export.models.config import BlockConfig
from posenc_export.models.layouts import to_half, to_interleaved
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config
from posenc_export.ops import TokenPlaces


def _config(layout: str, rotary: Optional[int] = None, bias: bool = True) -> BlockConfig:
    spec = {"name": "rope", "layout": layout, **({"rotary": rotary} if rotary else {})}
    return block_config(48, 6, 64, kv_heads=3, head_size=16, encoding=spec, qkv_bias=bias)


def _output(block: AttentionBlock, x: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.size(1)).expand(len(x), -1)
    empty = [torch.zeros(len(x), 3, 0, 16) for _ in range(2)]
    first = torch.zeros(len(x), dtype=torch.int64)
    return block(x, TokenPlaces(positions, positions, positions, first), empty)[0].detach()


@pytest.mark.parametrize("rotary", [None, 8])
def test_weights_reordered_to_half_give_the_same_outputs(rotary: Optional[int]) -> None:
    interleaved, half = seeded(_config("interleaved", rotary)), seeded(_config("half", rotary))
    x = torch.randn(2, 9, 48)
    before = _output(interleaved, x)
    for name in ("weight", "bias"):
        q, k, v = getattr(interleaved.attention.projection.qkv, name).data.split([96, 48, 48])
        getattr(half.attention.projection.qkv, name).data = torch.cat(
            (to_half(q, 6, rotary), to_half(k, 3, rotary), v)
        )
    half.attention.projection.output.weight.data = (
        interleaved.attention.projection.output.weight.data
    )
    assert not torch.allclose(_output(seeded(_config("half", rotary)), x), before, atol=1e-3)
    assert torch.allclose(_output(half, x), before, atol=1e-6)


def test_to_interleaved_inverts_to_half() -> None:
    weight = torch.randn(96, 48)
    assert torch.equal(to_interleaved(to_half(weight, 6, 8), 6, 8), weight)
    assert torch.equal(to_half(to_interleaved(weight, 6), 6), weight)


def test_weights_of_meta_checkpoints_are_converted() -> None:
    torch.manual_seed(3)
    layer = {
        "wq": torch.randn(96, 48),
        "wk": torch.randn(48, 48),
        "wv": torch.randn(48, 48),
        "wo": torch.randn(48, 96),
    }
    x, length = 0.1 * torch.randn(1, 7, 48), 7
    frequencies = 1e4 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    waves = torch.polar(
        torch.ones(length, 8, dtype=torch.float64),
        torch.outer(torch.arange(length, dtype=torch.float64), frequencies),
    )

    def turned(y: torch.Tensor, heads: int) -> torch.Tensor:
        pairs = torch.view_as_complex(y.double().view(length, heads, 8, 2).contiguous())
        return torch.view_as_real(pairs * waves[:, None]).flatten(2)

    q, k = turned(x[0] @ layer["wq"].T, 6), turned(x[0] @ layer["wk"].T, 3).repeat_interleave(2, 1)
    v = (x[0] @ layer["wv"].T).double().view(length, 3, 16).repeat_interleave(2, 1)
    scores = (
        torch.einsum("ihd,jhd->hij", q, k) / 4
        + torch.full((length, length), -torch.inf).triu(1).double()
    )
    expected = (
        torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1).float() @ layer["wo"].T
    )
    block = AttentionBlock.from_state_dict(
        {f"{name}.weight": weight for name, weight in layer.items()},
        heads=6,
        kv_heads=3,
        max_positions=64,
        layout="interleaved",
    )
    assert torch.allclose(_output(block, x)[0], expected, atol=1e-5)


def test_invalid_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="expected heads .* rows"):
        to_half(torch.randn(50, 4), 6)
