"""A recurrent network over the tokens in place of positions (Neishi and Yoshinaga 2019, On the
Relation between Position Information and Sentence Length, 3.2).
"""

import math

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, StateSpec
from posenc_export.ops import recurrence


class InputRNN(PositionEncoding):
    """x_t is replaced by h_t = GRU(x_t, h_(t-1)), with h = 0 before the first token.

    State: the hidden vector [B,E]. Only the order of tokens matters, not their positions.

    Args:
        geometry: width E of input and hidden vector.
    """

    works_in = ("causal",)

    def embed_next(
        self, x: Tensor, positions: Tensor, states: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """x [B,S,E], positions [B,S], states [hidden [B,E]]."""
        order, count = recurrence.valid_first(positions)
        wide = order.unsqueeze(2).expand(-1, -1, self.width)
        packed = torch.zeros_like(x).scatter(1, wide, x)
        y, last = recurrence.recur(
            packed,
            states[0],
            count,
            self.weight,
            self.recurrent,
            self.offset,
            self.recurrent_offset,
        )
        return y.gather(1, wide), [last]

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.width, bound = geometry.width, 1 / math.sqrt(geometry.width)
        matrix, vector = (3 * self.width, self.width), (3 * self.width,)
        shapes: list[tuple[int, ...]] = [matrix, matrix, vector, vector]
        self.weight, self.recurrent, self.offset, self.recurrent_offset = (
            torch.nn.Parameter(torch.empty(shape).uniform_(-bound, bound)) for shape in shapes
        )

    def embed_states(self) -> list[StateSpec]:
        return [StateSpec("hidden", (self.width,))]


class InputRNNOracle(Oracle, of=InputRNN):
    """Uses torch.nn.GRU, in float64."""

    @torch.no_grad()
    def embed_rows(self, x: np.ndarray, positions: object) -> np.ndarray:
        gru = torch.nn.GRU(x.shape[1], x.shape[1], batch_first=True, device="meta")
        weights = zip(gru.state_dict(), map(torch.from_numpy, self.weights.values()), strict=True)
        gru.load_state_dict(dict(weights), assign=True)
        rows: np.ndarray = gru(torch.from_numpy(x))[0].numpy()
        return rows
