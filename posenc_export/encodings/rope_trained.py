"""RoPE with trained frequencies or a trained base (lucidrains' rotary-embedding-torch,
learned_freq).
"""

import math
from typing import Literal

import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Exact, Geometry
from posenc_export.encodings.shared.prepared import Prepared
from posenc_export.encodings.shared.rotary import Layout, Rotary


class RoPETrained(Rotary, Prepared):
    """RoPE with trained w_k, initialised to theta^(-2k/r), or with w_k = (theta e^g)^(-2k/r) and
    one trained g, initialised to 0.

    All layers share the weights. In eval mode cos and sin are read from a table, which `prepare`
    and the return from training mode compute again after weights have changed.

    Scores depend on the difference of positions only.

    Args:
        geometry: head size D.
        trains: "frequencies" or "theta".
        theta, layout, rotary: see RoPE; theta is the initial base.
    """

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] int64 to the same shapes and dtypes."""
        if not torch.jit.is_scripting():
            if self.training:
                return self.trained(q, k, positions)
        cos, sin = self.cos.rows, self.sin.rows
        return ops.rotate_both(q, k, positions, cos, sin, self.interleaved)

    def frequency(self, k: int) -> float:
        return float(self.frequencies().detach()[k])

    def __init__(
        self,
        geometry: Geometry,
        trains: Literal["frequencies", "theta"] = "frequencies",
        theta: float = 10000.0,
        layout: Layout = "half",
        rotary: int | None = None,
    ) -> None:
        super().__init__(geometry, layout, rotary)
        self.theta, self.trains = float(theta), trains
        start = self.theta ** (-torch.arange(0, self.size, 2, dtype=torch.float64) / self.size)
        self.weight = Exact(start if trains == "frequencies" else torch.zeros(()))
        self.prepare()

    def frequencies(self) -> Tensor:
        """w_k [r/2] float64, with gradients."""
        weight = self.weight().to(torch.float64)
        if self.trains == "frequencies":
            return weight
        k = torch.arange(self.size // 2, dtype=torch.float64, device=weight.device)
        return torch.exp(-(2 * k / self.size) * (math.log(self.theta) + weight))

    def trained(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`rotate` for the current weights, with gradients."""
        angles = positions.clamp(min=0).to(torch.float64).unsqueeze(2) * self.frequencies()
        cos = angles.cos().to(torch.float32).unsqueeze(2)  # [B,S,1,r/2]
        sin = angles.sin().to(torch.float32).unsqueeze(2)
        turned_q = ops.apply_rotation(q, cos, sin, self.interleaved)
        return turned_q, ops.apply_rotation(k, cos, sin, self.interleaved)
