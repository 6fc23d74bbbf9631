"""The convolution of a Conformer beside its attention (Gulati et al. 2020, 2.2), in causal form."""

from typing import Any, List, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import PositionEncoding, StateSpec
from posenc_export.models.config import AttentionConfig
from posenc_export.models.linear_attention import check_plain
from posenc_export.models.parts import build, float64
from posenc_export.ops import recurrence


class Convolution(torch.nn.Module):
    """O act(norm(sum_m w_m u_(t-m))), u = a sigmoid(b), [a, b] = W x, m = 0 .. kernel - 1; zeros
    before the first token (parts.convolved.Convolved).

    Only the order of tokens matters. State: none, since every call is a whole sequence.

    Args:
        width: model width E.
        config: projection, and sizes that are not used; scores have no settings.
        encoding: one without rotations, biases and scores.
    """

    filters = True  # reads a token together with its neighbours

    def __init__(self, width: int, config: AttentionConfig, encoding: PositionEncoding) -> None:
        super().__init__()
        check_plain("convolution", config, encoding, ("both",), ("rotate",))
        self.heads, self.head_size, self.encoding = config.heads, config.head_size, encoding
        sizes = config.heads, config.kv_heads, config.head_size
        self.projection = build("projection", config.projection, width, *sizes)

    @torch.jit.unused
    def states(self) -> List[StateSpec]:
        """Return no states: nothing is kept between calls."""
        return []

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        coordinates: Tensor,
        key_positions: Tensor,
        mask: Tensor,
        write_index: Tensor,
        states: List[Tensor],
    ) -> Tuple[Tensor, List[Tensor]]:
        """Shapes as Attention.forward. Only whether positions are -1 is used."""
        order, _ = recurrence.valid_first(positions)
        wide = order.unsqueeze(2).expand(-1, -1, x.size(2))
        # With padding last, it follows the tokens of a row.
        y = self.projection(torch.zeros_like(x).scatter(1, wide, x))
        return self.projection.output(y.gather(1, wide)), states[:0]

    def exact(
        self,
        x: np.ndarray,
        positions: range,
        places: Sequence[Any],
        types: Optional[np.ndarray] = None,
    ) -> np.ndarray:
        """One row x [n,E] to [n,E], float64."""
        return float64.linear(self.projection.output, self.projection.exact(x))
