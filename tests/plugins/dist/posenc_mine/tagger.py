"""A module around a block (made for these tests)."""

from typing import List, Tuple

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

    def forward(
        self, x: Tensor, positions: Tensor, coordinates: Tensor, key_positions: Tensor,
        write_index: Tensor, states: List[Tensor]
    ) -> Tuple[Tensor, List[Tensor]]:
        y, present = self.block(self.norm(x), positions, coordinates, key_positions, write_index, states)
        return self.head(torch.nn.functional.gelu(x + y)), present


def trained() -> Tagger:
    """A tagger with weights of its own, as `posenc export posenc_mine.tagger:trained` takes it."""
    block = seeded(block_config(48, 6, 64, kv_heads=3, head_size=16, encoding={"name": "slow"}))
    torch.manual_seed(1)
    return Tagger(block, 5).eval()
