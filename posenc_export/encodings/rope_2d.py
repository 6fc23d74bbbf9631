"""Mixed RoPE of grids: trained frequencies along rows and columns for every head and pair (Heo
et al. 2024, Rotary Position Embedding for Vision Transformer, 3.3).
"""

import math

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Exact, Geometry, Oracle
from posenc_export.encodings.shared.rotary import Layout, Place, Rotation, multiply_pairs


class RoPE2D(Rotation):
    """Pair k of head h is rotated by row a_hk + column b_hk; a, b trained.

    Diagonals thus have frequencies of their own. The vectors (a_hk, b_hk) are initialised with
    random directions and the lengths of axial RoPE. The last D - r entries are unchanged. Angles
    are computed in float64 and reduced to one turn, which keeps them exact at any coordinate.

    Grouped heads share the frequencies of their key head.

    Scores depend on the differences of coordinates only.

    Args:
        geometry: head size D, even; kv heads K.
        theta: base of the initial lengths theta^(-2k/r).
        layout, rotary: see RoPE.
    """

    axes = 2
    shared = False

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], coordinates [2,B,S] int64 to the same shapes and dtypes."""
        places = positions.to(torch.float64).unsqueeze(3).unsqueeze(4)  # [2,B,S,1,1]
        along = self.along().to(torch.float64)  # [2,K,r/2]
        angles = ops.reduced_angle(places[0] * along[0] + places[1] * along[1])
        cos, sin = angles.cos(), angles.sin()  # [B,S,K,r/2]
        group = q.size(2) // k.size(2)
        q_cos, q_sin = cos.repeat_interleave(group, 2), sin.repeat_interleave(group, 2)
        turned_q = ops.apply_rotation(q, q_cos, q_sin, self.interleaved)
        return turned_q, ops.apply_rotation(k, cos, sin, self.interleaved)

    def __init__(
        self,
        geometry: Geometry,
        theta: float = 10.0,
        layout: Layout = "half",
        rotary: int | None = None,
    ) -> None:
        super().__init__(geometry, layout, rotary)
        angles = 2 * math.pi * torch.rand(geometry.kv_heads or geometry.heads, 1)
        lengths = theta ** (-torch.arange(0, self.size, 2) / self.size)
        self.along = Exact(lengths * torch.stack((angles.cos(), angles.sin())))


class RoPE2DOracle(Oracle, of=RoPE2D):
    def rotate_heads(self, x: np.ndarray, position: Place) -> np.ndarray:
        along = self.weights["along.value"]
        of_key = [head * along.shape[1] // len(x) for head in range(len(x))]
        return np.stack([self.rotated(x[h], position, along[:, n]) for h, n in enumerate(of_key)])

    def rotate_key_heads(self, x: np.ndarray, position: Place) -> np.ndarray:
        return self.rotate_heads(x, position)

    def rotated(self, x: np.ndarray, place: Place, frequencies: np.ndarray) -> np.ndarray:
        """x [D] rotated with the frequencies [2,r/2] of its head."""
        places = [place] * len(frequencies) if isinstance(place, int) else place
        angles = np.array(places, np.float64) @ frequencies
        return multiply_pairs(x, np.exp(1j * angles), self.encoding.interleaved)
