"""Relative sinusoids with content and position terms (Dai et al. 2019, Transformer-XL, 3.3; XLNet the same)."""

import math
from typing import List, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.base import Geometry, Oracle, PositionEncoding, Table


class TransformerXL(PositionEncoding):
    """scores ((q_i + u_h) . k_j + (q_i + v_h) . W_h R_(i-j)) / sqrt(D), R_d = [sin(d w_k), cos(d w_k)], w_k = 10000^(-2k/E); u, v, W trained.

    With [s, c] = W_h^T (q_i + v_h), the second term is sum_k (s sin(i w) + c cos(i w)) cos(j w) + (c sin(i w) - s cos(i w)) sin(j w): the query is turned
    by its own position and meets the sinusoid of the key's. So nothing is shifted, any offset and gap is exact, and there is no tensor [S,T,D].
    Memory beside the scores: turned queries [B,H,S,E] and sinusoids of the keys [B,T,E].

    Hook: rescore. State: none. Range: 0 .. max_positions - 1.

    Args:
        geometry: width E (even) of R, heads, head size D.

    Raises:
        ValueError: odd width.
    """

    shared = False

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        if geometry.width % 2:
            raise ValueError(f"transformer_xl: width is even, got {geometry.width}; choose an even width")
        self.width = geometry.width
        angles = np.arange(geometry.max_positions)[:, None] * 10000.0 ** (-np.arange(0, geometry.width, 2) / geometry.width)
        self.sin, self.cos = Table(np.sin(angles)), Table(np.cos(angles))
        self.u = torch.nn.Parameter(0.5 * torch.randn(geometry.heads, geometry.head_size))
        self.v = torch.nn.Parameter(0.5 * torch.randn(geometry.heads, geometry.head_size))
        self.weight = torch.nn.Parameter(torch.randn(geometry.heads, geometry.head_size, geometry.width) / math.sqrt(geometry.width))

    def rescore(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, positions: Tensor, key_positions: Tensor, scale: float, states: List[Tensor]
    ) -> Tensor:
        """q [B,S,H,D], keys and values [B,K,T,D], mask [B,1 or H,S,T], positions [B,S], key_positions [B,T] to [B,S,H*D]."""
        by_head = (q.to(torch.float32) + self.v.to(torch.float32)).transpose(1, 2)
        s, c = (by_head @ self.weight.to(torch.float32)).split(self.width // 2, dim=-1)
        sin, cos = self.sin(positions).unsqueeze(1), self.cos(positions).unsqueeze(1)
        turned = torch.cat((s * sin + c * cos, c * sin - s * cos), dim=-1).transpose(1, 2)
        of_keys = torch.cat((self.cos.of_keys(key_positions), self.sin.of_keys(key_positions)), dim=-1).unsqueeze(1)
        return ops.attend((q + self.u.to(q.dtype)), keys, values, mask, scale * ops.products(turned, of_keys), scale)

    def oracle(self) -> Oracle:
        return TransformerXLOracle(*(value.detach().double().numpy() for value in (self.u, self.v, self.weight)))


class TransformerXLOracle(Oracle):
    def __init__(self, u: np.ndarray, v: np.ndarray, weight: np.ndarray) -> None:
        self.u, self.v, self.weight = u, v, weight

    def scores(self, head: int, q: np.ndarray, keys: np.ndarray, query: int, positions: Sequence[int]) -> np.ndarray:
        width, found = self.weight.shape[2], []
        for key, p in zip(keys, positions, strict=True):
            angles = [(query - p) / math.pow(10000.0, 2 * k / width) for k in range(width // 2)]
            r = np.array([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
            found.append(float((q + self.u[head]) @ key + (q + self.v[head]) @ (self.weight[head] @ r)))
        return np.array(found) / math.sqrt(len(q))
