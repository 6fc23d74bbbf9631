"""Polar coordinate positional embedding: content in magnitudes, position in phases (Gopalakrishnan et al. 2025, PoPE, 3)."""

import math
from typing import List, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.base import Geometry, Oracle, PositionEncoding, Table


class PoPE(PositionEncoding):
    """scores sum_c softplus(q_c) softplus(k_c) cos((i - j) w_c - d_c) / sqrt(D), w_c = theta^(-c/D), d_c in 0 .. 2 pi, trained per head.

    Every entry of a head has a frequency of its own, so that vectors in the plane are 2D wide: keys are cached as they come and turned when read.
    Memory beside the scores: turned keys [B,H,T,2D].

    Hook: rescore. State: none. Range: 0 .. max_positions - 1.

    Args:
        geometry: head size D, heads.
        theta: ratio of the longest wavelength to 2 pi.

    Raises:
        ValueError: theta not above 0.
    """

    shared = False

    def __init__(self, geometry: Geometry, theta: float = 10000.0) -> None:
        super().__init__()
        if not theta > 0:
            raise ValueError(f"pope: theta is above 0, got {theta}")
        self.theta = float(theta)
        self.of_head: Tensor
        self.register_buffer("of_head", torch.arange(geometry.heads) // (geometry.heads // (geometry.kv_heads or geometry.heads)), persistent=False)
        angles = np.arange(geometry.max_positions)[:, None] * self.theta ** (-np.arange(geometry.head_size) / geometry.head_size)
        self.cos, self.sin = Table(np.cos(angles)), Table(np.sin(angles))
        self.phase = torch.nn.Parameter(2 * math.pi * torch.rand(geometry.heads, 1, geometry.head_size))

    def rescore(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, positions: Tensor, key_positions: Tensor, scale: float, states: List[Tensor]
    ) -> Tensor:
        """q [B,S,H,D], keys and values [B,K,T,D], mask [B,1 or H,S,T], positions [B,S], key_positions [B,T] to [B,S,H*D]."""
        of_q = torch.nn.functional.softplus(q.to(torch.float32))
        cos, sin = self.cos(positions).unsqueeze(2), self.sin(positions).unsqueeze(2)
        of_keys = torch.nn.functional.softplus(keys.index_select(1, self.of_head).to(torch.float32))
        phase = self.phase.to(torch.float32).clamp(0.0, 2 * math.pi)
        key_cos, key_sin = self.cos.of_keys(key_positions).unsqueeze(1), self.sin.of_keys(key_positions).unsqueeze(1)
        turned = torch.cat((of_keys * (key_cos * phase.cos() - key_sin * phase.sin()), of_keys * (key_sin * phase.cos() + key_cos * phase.sin())), dim=-1)
        return ops.mix(ops.shares(scale * ops.products(torch.cat((of_q * cos, of_q * sin), dim=-1), turned), mask), values)

    def oracle(self) -> Oracle:
        return PoPEOracle(self.theta, self.phase.detach().double().numpy()[:, 0])


class PoPEOracle(Oracle):
    def __init__(self, theta: float, phase: np.ndarray) -> None:
        self.theta, self.phase = theta, phase

    def scores(self, head: int, q: np.ndarray, keys: np.ndarray, query: int, positions: Sequence[int]) -> np.ndarray:
        size, found = len(q), []
        for key, p in zip(keys, positions, strict=True):
            total = 0.0
            for c in range(size):
                angle = (query - p) / math.pow(self.theta, c / size) - min(max(self.phase[head, c], 0.0), 2 * math.pi)
                total += math.log1p(math.exp(q[c])) * math.log1p(math.exp(key[c])) * math.cos(angle)
            found.append(total / math.sqrt(size))
        return np.array(found)
