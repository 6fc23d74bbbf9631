"""Relative sinusoids with content and position terms (Dai et al. 2019, Transformer-XL, 3.3;
XLNet the same).
"""

import math
from typing import Mapping

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared import sinusoids
from posenc_export.encodings.shared.base import (
    Geometry,
    Oracle,
    PositionEncoding,
    Rows,
    Seen,
    Table,
)


class TransformerXL(PositionEncoding):
    """scores ((q_i + u_h) . k_j + (q_i + v_h) . W_h R_d) / sqrt(D), d = i - j, R_d = [sin(d w_k),
    cos(d w_k)], w_k = 10000^(-2k/E); u, v, W trained.

    The second term is ops.wave_products of W_h^T (q_i + v_h), exact for any offset and gap. Memory
    besides the scores: rotated queries [B,H,S,E] and sinusoids of keys [B,T,E]. With a clamp,
    distances d are clipped to -clamp .. clamp.

    Args:
        geometry: width E (even) of R, heads, head size D.
        clamp: largest distance in tokens, clamp_len of Transformer-XL and XLNet; 0 for no limit.

    Weights:
        u, v: added to queries in the first and the second term, [H,D] each; r_w_bias and r_r_bias
            of checkpoints.
        weight: W, [H,D,E]: columns of sines, then of cosines, which alternate in Conformers
            (linear_pos of Wav2Vec2-Conformer, relative_k_proj of Parakeet).
    """

    shared = False
    least = {"clamp": 0}

    def rescore(self, q: Tensor, seen: Seen, scale: float, states: list[Tensor]) -> Tensor:
        """As in PositionEncoding, without states."""
        # Scaled here, since ONNX Runtime's product of a scaled operand packs no weight.
        queries = scale * (q.to(torch.float32) + self.v.to(torch.float32))
        projected = queries.transpose(1, 2) @ self.weight.to(torch.float32)
        relative = ops.wave_products(projected, seen.positions, seen.key_positions, self.waves.rows)
        if self.clamp > 0:
            behind, ahead = (projected @ self.ends.rows).split(1, dim=-1)
            distances = ops.distances(seen.positions, seen.key_positions)
            relative = torch.where(
                distances.lt(-self.clamp),
                behind,
                torch.where(distances.gt(self.clamp), ahead, relative),
            )
        moved = q + self.u.to(q.dtype)
        return ops.attend(moved, seen.keys, seen.values, seen.mask, relative, scale)

    def formulas(self) -> Mapping[str, Rows]:
        def waves(positions: np.ndarray) -> np.ndarray:
            angles = positions * sinusoids.frequencies(self.width)
            # Cosines first, in the order of the rotated queries.
            return np.concatenate((np.cos(angles), np.sin(angles)), axis=1)

        return {"waves": waves}

    def edges(self) -> dict[str, int]:
        return {f"clamp {self.clamp}": self.clamp + 1} if self.clamp else {}

    def __init__(self, geometry: Geometry, clamp: int = 0) -> None:
        super().__init__()
        self.check_multiple("width", geometry.width)
        self.width, self.clamp = geometry.width, clamp
        frequencies = sinusoids.frequencies(geometry.width)
        self.waves = self.filled("waves", geometry.max_positions)
        ends = np.outer(frequencies, (clamp, -clamp))  # before and after the query
        self.ends = Table(np.concatenate((np.sin(ends), np.cos(ends))))
        size = (geometry.heads, geometry.head_size)
        self.u = torch.nn.Parameter(0.5 * torch.randn(size))
        self.v = torch.nn.Parameter(0.5 * torch.randn(size))
        width = geometry.width
        self.weight = torch.nn.Parameter(torch.randn(*size, width) / math.sqrt(width))


class TransformerXLOracle(Oracle, of=TransformerXL):
    def content(self, head: int, q: np.ndarray, k: np.ndarray, query: int, key: int) -> float:
        u, v, weight = (self.weights[name][head] for name in ("u", "v", "weight"))
        clamp, d = self.encoding.clamp, query - key
        waves = sinusoids.row(min(max(d, -clamp), clamp) if clamp else d, weight.shape[1])
        r = np.concatenate((waves[::2], waves[1::2]))
        return float(u @ k + (q + v) @ (weight @ r)) / math.sqrt(len(q))
