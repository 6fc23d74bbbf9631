"""A module around a block (made for these tests)."""

from typing import Tuple

import torch
from torch import Tensor

from posenc_export import AttentionBlock, block_config
from posenc_export.models.presets import seeded


class Tagger(torch.nn.Module):
    """Hidden states to numbers of tags, a norm and a sum around the block."""

    def __init__(self, block: AttentionBlock, tags: int) -> None:
        super().__init__()
        width = block.config.width
        self.norm, self.block, self.head = torch.nn.LayerNorm(width), block, torch.nn.Linear(width, tags)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.nn.functional.gelu(x + self.block(self.norm(x))))
        return y


def trained() -> Tuple[Tagger, Tensor]:
    """A tagger with weights of its own, and an input, as `posenc export posenc_mine.tagger:trained
    --max-positions 64` takes them.
    """
    block = seeded(block_config(48, 6, 64, kv_heads=3, head_size=16, encoding={"name": "slow"}))
    torch.manual_seed(1)
    return Tagger(block, 5).eval(), torch.randn(2, 12, 48)
