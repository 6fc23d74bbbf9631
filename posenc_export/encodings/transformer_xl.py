"""Relative sinusoids with content and position terms (Dai et al. 2019, Transformer-XL, 3.3; XLNet the same)."""

import math
from typing import List, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.base import Geometry, Oracle, PositionEncoding, Table


class TransformerXL(PositionEncoding):
    """scores ((q_i + u_h) . k_j + (q_i + v_h) . W_h R_d) / sqrt(D), d = i - j, R_d = [sin(d w_k), cos(d w_k)], w_k = 10000^(-2k/E); u, v, W trained.

    With [s, c] = W_h^T (q_i + v_h), the second term is sum_k (s sin(i w) + c cos(i w)) cos(j w) + (c sin(i w) - s cos(i w)) sin(j w): the query is turned
    by its own position and meets the sinusoid of the key's. So nothing is shifted, any offset and gap is exact, and there is no tensor [S,T,D].
    Memory beside the scores: turned queries [B,H,S,E] and sinusoids of the keys [B,T,E].
    With a clamp, distances d beyond -clamp .. clamp count as its ends: keys there share one score of the second term, which the query forms once for each end.

    Hook: rescore. State: none. Range: 0 .. max_positions - 1.

    Args:
        geometry: width E (even) of R, heads, head size D.
        clamp: largest distance in tokens, clamp_len of Transformer-XL and XLNet; none where 0.

    Weights:
        u, v: added to queries in the first and the second term, [H,D] each; r_w_bias and r_r_bias of checkpoints.
        weight: W, [H,D,E].

    Raises:
        ValueError: odd width, a negative clamp.
    """

    shared = False

    def __init__(self, geometry: Geometry, clamp: int = 0) -> None:
        super().__init__()
        if geometry.width % 2:
            raise ValueError(f"transformer_xl: width is even, got {geometry.width}; choose an even width")
        if clamp < 0:
            raise ValueError(f"transformer_xl: clamp is 0 or more, got {clamp}; set clamp=0 for none")
        self.width, self.clamp = geometry.width, clamp
        frequencies = 10000.0 ** (-np.arange(0, geometry.width, 2) / geometry.width)
        angles = np.arange(geometry.max_positions)[:, None] * frequencies
        self.sin, self.cos = Table(np.sin(angles)), Table(np.cos(angles))
        ends = np.outer(frequencies, (clamp, -clamp))  # behind and ahead of the query
        self.ends = Table(np.concatenate((np.sin(ends), np.cos(ends))))
        self.u = torch.nn.Parameter(0.5 * torch.randn(geometry.heads, geometry.head_size))
        self.v = torch.nn.Parameter(0.5 * torch.randn(geometry.heads, geometry.head_size))
        self.weight = torch.nn.Parameter(torch.randn(geometry.heads, geometry.head_size, geometry.width) / math.sqrt(geometry.width))

    def rescore(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, positions: Tensor, key_positions: Tensor, scale: float, states: List[Tensor]
    ) -> Tensor:
        """q [B,S,H,D], keys and values [B,K,T,D], mask [B,1 or H,S,T], positions [B,S], key_positions [B,T] to [B,S,H*D]."""
        by_head = (q.to(torch.float32) + self.v.to(torch.float32)).transpose(1, 2)
        projected = by_head @ self.weight.to(torch.float32)
        s, c = projected.split(self.width // 2, dim=-1)
        sin, cos = self.sin(positions).unsqueeze(1), self.cos(positions).unsqueeze(1)
        turned = torch.cat((s * sin + c * cos, c * sin - s * cos), dim=-1).transpose(1, 2)
        of_keys = torch.cat((self.cos.of_keys(key_positions), self.sin.of_keys(key_positions)), dim=-1).unsqueeze(1)
        relative = ops.products(turned, of_keys)
        if self.clamp > 0:
            behind, ahead = (projected @ self.ends.rows).split(1, dim=-1)
            distances = ops.distances(positions, key_positions)
            relative = torch.where(distances.lt(-self.clamp), behind, torch.where(distances.gt(self.clamp), ahead, relative))
        return ops.attend((q + self.u.to(q.dtype)), keys, values, mask, scale * relative, scale)

    def oracle(self) -> Oracle:
        return TransformerXLOracle(self.clamp, *(value.detach().double().numpy() for value in (self.u, self.v, self.weight)))


class TransformerXLOracle(Oracle):
    def __init__(self, clamp: int, u: np.ndarray, v: np.ndarray, weight: np.ndarray) -> None:
        self.clamp, self.u, self.v, self.weight = clamp, u, v, weight

    def scores(self, head: int, q: np.ndarray, keys: np.ndarray, query: int, positions: Sequence[int]) -> np.ndarray:
        width, found = self.weight.shape[2], []
        for key, p in zip(keys, positions, strict=True):
            d = query - p if not self.clamp else min(max(query - p, -self.clamp), self.clamp)
            angles = [d / math.pow(10000.0, 2 * k / width) for k in range(width // 2)]
            r = np.array([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
            found.append(float((q + self.u[head]) @ key + (q + self.v[head]) @ (self.weight[head] @ r)))
        return np.array(found) / math.sqrt(len(q))
