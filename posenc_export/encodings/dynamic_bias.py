"""Dynamic position bias: a small MLP of the signed distance (Wang et al. 2021, CrossFormer,
Dynamic Position Bias; linear or logarithmic as in x-transformers).
"""

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Oracle, Table
from posenc_export.encodings.shared.prepared import Prepared
from posenc_export.encodings.shared.tables import Float32

EPSILON = 1e-5  # default of torch.nn.LayerNorm
BLOCK = 1 << 14  # distances per pass through the MLP


class ExactLinear(Float32, torch.nn.Linear):
    """A linear layer that stays float32, because it multiplies distances of any size."""


class DynamicBias(Prepared):
    """scores + f_h(s(i - j)), s(d) = d or sign(d) log(1 + |d|), f an MLP from one number to H:
    linear layers with SiLU between them.

    f is computed once per distance, in float64, and read as a table of max_positions rows if
    causal, twice as many otherwise. The table has no gradients; it is computed again when trained
    weights are loaded. In float16, large biases of linear distances are rounded to the same number
    for neighbouring distances.

    Args:
        geometry: heads H, max_positions.
        distance: "linear" or "log".
        hidden: width of the hidden layers.
        depth: number of hidden layers.
        norm: "layer" applies LayerNorm (with factor and offset) before every SiLU, "none" applies
            no norm.

    Weights:
        first.weight, first.bias: from s to the first hidden layer, [hidden,1] and [hidden].
        between.N.weight, between.N.bias: from hidden layer N to the next, [hidden,hidden] and
            [hidden], depth - 1 of them.
        norms.N.weight, norms.N.bias: factor and offset of LayerNorm N, [hidden] each, one for each
            hidden layer if norm is "layer".
        second.weight, second.bias: from the last hidden layer to heads, [H,hidden] and [H].
    """

    least = {"hidden": 1, "depth": 1}
    most = {"hidden": 4096, "depth": 64}

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """As in PositionEncoding; arbitrary after the query if causal."""
        behind = (-ops.distances(q_positions, k_positions)).squeeze(1)
        index = behind.clamp(-self.ahead, self.furthest) + self.ahead
        rows = torch.nn.functional.embedding(index.to(torch.int64), self.table.rows)
        return rows.permute(0, 3, 1, 2)

    def row_rules(self) -> list[str]:
        return [f"min(max(q - k, {-self.ahead}), {self.furthest}) + {self.ahead}"]

    def __init__(
        self,
        geometry: Geometry,
        distance: Literal["linear", "log"] = "linear",
        hidden: int = 32,
        depth: int = 2,
        norm: Literal["none", "layer"] = "none",
    ) -> None:
        super().__init__()
        self.distance, self.furthest = distance, geometry.max_positions - 1
        self.ahead = 0 if geometry.causal else self.furthest
        self.first, self.second = ExactLinear(1, hidden), ExactLinear(hidden, geometry.heads)
        if distance == "linear":
            # Untrained biases of far keys stay small enough for float16.
            torch.nn.init.uniform_(self.first.weight, -1 / 64, 1 / 64)
        self.between = torch.nn.ModuleList(ExactLinear(hidden, hidden) for _ in range(depth - 1))
        norms = depth if norm == "layer" else 0
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(hidden, EPSILON) for _ in range(norms))
        self.prepare()

    def tabulate(self) -> None:
        distances = np.arange(-self.ahead, self.furthest + 1)
        blocks = np.array_split(distances, -(-len(distances) // BLOCK))
        self.table = Table(np.concatenate([self.network(block) for block in blocks]))

    def network(self, distances: np.ndarray) -> np.ndarray:
        """Biases [n,H] float64 of distances [n] int64."""
        x = torch.from_numpy(distances).to(torch.float64).unsqueeze(1)
        if self.distance == "log":
            x = torch.sign(x) * torch.log1p(x.abs())
        for index, linear in enumerate([self.first, *self.between]):
            x = _double(linear, x)
            if len(self.norms):
                norm: Any = self.norms[index]
                weight, bias = norm.weight.detach().double(), norm.bias.detach().double()
                x = torch.nn.functional.layer_norm(x, x.shape[1:], weight, bias, EPSILON)
            x = torch.nn.functional.silu(x)
        return _double(self.second, x).numpy()


def _double(linear: Any, x: Tensor) -> Tensor:
    weight, bias = linear.weight.detach().double(), linear.bias.detach().double()
    return torch.nn.functional.linear(x, weight, bias)


class DynamicBiasOracle(Oracle, of=DynamicBias):
    def __init__(self, encoding: DynamicBias) -> None:
        super().__init__(encoding)
        self.rows: dict[int, np.ndarray] = {}

    def bias(self, head: int, query: int, key: int) -> float:
        if query - key not in self.rows:
            self.rows[query - key] = self.encoding.network(np.array([query - key]))[0]
        return float(self.rows[query - key][head])
