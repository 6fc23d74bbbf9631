"""A recurrent network over the tokens in place of positions (Neishi and Yoshinaga 2019, On the
Relation between Position Information and Sentence Length, 3.2).
"""

import math
from typing import List, Tuple

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
        self, x: Tensor, positions: Tensor, states: List[Tensor]
    ) -> Tuple[Tensor, List[Tensor]]:
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
        shapes: List[Tuple[int, ...]] = [matrix, matrix, vector, vector]
        self.weight, self.recurrent, self.offset, self.recurrent_offset = (
            torch.nn.Parameter(torch.empty(shape).uniform_(-bound, bound)) for shape in shapes
        )

    def embed_states(self) -> List[StateSpec]:
        return [StateSpec("hidden", (self.width,))]


class InputRNNOracle(Oracle, of=InputRNN):
    def embed_rows(self, x: np.ndarray, positions: object) -> np.ndarray:
        hidden, rows = np.zeros(x.shape[1]), []
        for token in x:
            hidden = self.following(token, hidden)
            rows.append(hidden)
        return np.stack(rows)

    def following(self, x: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        """The next hidden vector [E], computed gate by gate."""
        of_x, of_hidden, bias_x, bias_hidden = self.weights.values()
        out = np.zeros_like(hidden)
        for n in range(len(hidden)):
            reset, update, new = n, len(hidden) + n, 2 * len(hidden) + n
            from_x = [of_x[row] @ x + bias_x[row] for row in (reset, update, new)]
            gates = (reset, update, new)
            from_hidden = [of_hidden[row] @ hidden + bias_hidden[row] for row in gates]
            r, z = (1 / (1 + math.exp(-(from_x[i] + from_hidden[i]))) for i in (0, 1))
            out[n] = (1 - z) * math.tanh(from_x[2] + r * from_hidden[2]) + z * hidden[n]
        return out
