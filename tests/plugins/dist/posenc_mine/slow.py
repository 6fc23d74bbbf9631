"""A slow decay, as one function (made for these tests)."""

import torch
from torch import Tensor

from posenc_export import encodings


@encodings.bias
def slow(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """scores - log(1 + |i - j| / 2) (h + 1) / 4."""
    return -torch.log1p((query - key).abs() * 0.5) * (head + 1) / 4
