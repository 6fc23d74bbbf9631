"""Sinusoidal absolute encoding (Vaswani et al. 2017, Attention Is All You Need, 3.5)."""

import math

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.base import Geometry, Oracle, PositionEncoding, Table

LAYOUTS = ("interleaved", "halves")
ANGLES = ("table", "computed")


class Sinusoidal(PositionEncoding):
    """x * scale + [sin((p + offset) w_k), cos((p + offset) w_k)], w_k = base^(-2k/d).

    Hook: embed. State: none. Range: 0 .. max_positions - 1.

    Args:
        geometry: width d must be even.
        base: ratio of the longest wavelength to 2 pi.
        layout: "interleaved" puts sin and cos of w_k side by side (the paper), "halves" all sines before all cosines.
        scale: factor on the token embedding; the paper's models use sqrt(d).
        divisor: "paper" divides exponents by d/2, "fairseq" by d/2 - 1, so that the last wavelength is exactly 2 pi base.
        offset: of the first position; 0 in the paper, 2 in XGLM.
        angles: "table" reads rows, "computed" forms angles in float64 inside the graph: no table, so max_positions costs no memory.

    Raises:
        ValueError: odd width, unknown layout, divisor or angles, base not above 1, negative offset.
    """

    def __init__(
        self,
        geometry: Geometry,
        base: float = 10000.0,
        layout: str = "interleaved",
        scale: float = 1.0,
        divisor: str = "paper",
        angles: str = "table",
        offset: int = 0,
    ) -> None:
        super().__init__()
        if geometry.width % 2:
            raise ValueError(f"sinusoidal: width is even, got {geometry.width}; choose an even width")
        if layout not in LAYOUTS:
            raise ValueError(f"sinusoidal: layout is one of {', '.join(LAYOUTS)}, got {layout!r}")
        if divisor not in ("paper", "fairseq"):
            raise ValueError(f"sinusoidal: divisor is one of paper, fairseq, got {divisor!r}")
        if angles not in ANGLES:
            raise ValueError(f"sinusoidal: angles is one of {', '.join(ANGLES)}, got {angles!r}")
        if not base > 1:
            raise ValueError(f"sinusoidal: base is above 1, got {base}")
        if offset < 0:
            raise ValueError(f"sinusoidal: offset is 0 or more, got {offset}")
        self.offset = offset
        half = geometry.width // 2
        self.base, self.layout, self.scale, self.steps = float(base), layout, float(scale), half - (divisor == "fairseq")
        frequencies = self.base ** (-np.arange(half) / max(self.steps, 1))
        self.computed, high = angles == "computed", frequencies.astype(np.float32)
        self.frequencies = Table(np.stack((high, frequencies - high)))  # in two parts: together they have the digits of float64
        # Where rows are computed one stands there unread: torch.export writes no table without numbers.
        turned = (np.arange(1 if self.computed else geometry.max_positions, dtype=np.float64) + offset)[:, None] * frequencies
        waves = (np.sin(turned), np.cos(turned))
        self.table = Table(np.stack(waves, axis=-1).reshape(-1, geometry.width) if layout == "interleaved" else np.concatenate(waves, axis=-1))

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], positions [B,S] int64 to [B,S,E] in x's dtype."""
        rows = self.waves(positions) if self.computed else self.table(positions)
        return x * self.scale + rows.to(x.dtype)

    def waves(self, positions: Tensor) -> Tensor:
        """The rows [B,S,E] float32 at positions [B,S] int64, computed."""
        frequencies = self.frequencies.rows.to(torch.float64)
        angles = ops.reduced_angle((positions.clamp(min=0) + self.offset).unsqueeze(2).to(torch.float64) * (frequencies[0] + frequencies[1]))
        if self.layout == "interleaved":
            return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
        return torch.cat((angles.sin(), angles.cos()), dim=-1)

    def initialise_tokens(self, table: Tensor) -> None:
        torch.nn.init.normal_(table, std=table.size(1) ** -0.5)  # the paper's: with scale sqrt(d), tokens are as large as positions

    def oracle(self) -> Oracle:
        return SinusoidalOracle(self)


class SinusoidalOracle(Oracle):
    def __init__(self, encoding: Sinusoidal) -> None:
        self.encoding = encoding

    def embed(self, x: np.ndarray, position: int) -> np.ndarray:
        half = len(x) // 2
        out = x * self.encoding.scale
        for k in range(half):
            angle = (position + self.encoding.offset) / math.pow(self.encoding.base, k / max(self.encoding.steps, 1))
            at_sine, at_cosine = (2 * k, 2 * k + 1) if self.encoding.layout == "interleaved" else (k, half + k)
            out[at_sine] += math.sin(angle)
            out[at_cosine] += math.cos(angle)
        return out
