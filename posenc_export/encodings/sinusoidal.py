"""Sinusoidal absolute encoding (Vaswani et al. 2017, Attention Is All You Need, 3.5)."""

import math

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Table
from posenc_export.encodings.shared.rotary import check_choice
from posenc_export.ops.angles import reduced_angle

DIVISORS = ("paper", "fairseq")
LAYOUTS = ("interleaved", "halves")
ANGLES = ("table", "computed")
ODD = ("refuse", "zero")


class Sinusoidal(PositionEncoding):
    """x * scale + factor [sin((p + offset) w_k), cos((p + offset) w_k)], w_k = base^(-2k/d).

    Hook: embed. State: none. Range: 0 .. max_positions - 1.

    Args:
        geometry: width d, even unless odd="zero".
        base: ratio of the longest wavelength to 2 pi.
        layout: "interleaved" alternates sin and cos of w_k (the paper), "halves" puts all sines before all cosines.
        scale: factor on the token embedding; the paper's models use sqrt(d).
        divisor: "paper" divides exponents by d/2; "fairseq" divides by d/2 - 1, so that the last wavelength is exactly 2 pi base.
        offset: number added to positions: 0 in the authors' code (the paper does not say), 1 for sources that count from 1, 2 in XGLM and M2M100.
        angles: "table" reads rows; "computed" computes angles in float64 inside the graph, so that max_positions costs no memory.
        factor: factor on the sinusoids; alpha in SpeechT5.
        odd: for odd widths; "zero" encodes d - 1 entries and leaves the last entry unchanged, as M2M100; "refuse" raises an error.

    Raises:
        ValueError: odd width where odd="refuse", unknown layout, divisor, angles or odd, base not above 1, negative offset.
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
        factor: float = 1.0,
        odd: str = "refuse",
    ) -> None:
        super().__init__()
        for parameter, value, choices in (("layout", layout, LAYOUTS), ("divisor", divisor, DIVISORS), ("angles", angles, ANGLES), ("odd", odd, ODD)):
            check_choice("sinusoidal", parameter, value, choices)
        if geometry.width % 2 and odd == "refuse":
            raise ValueError(f"sinusoidal: expected an even width, got {geometry.width}; choose another width or odd=zero")
        if not base > 1:
            raise ValueError(f"sinusoidal: expected base above 1, got {base}")
        if offset < 0:
            raise ValueError(f"sinusoidal: expected offset of 0 or more, got {offset}")
        self.offset = offset
        half = geometry.width // 2
        self.base, self.layout, self.scale, self.steps = float(base), layout, float(scale), half - (divisor == "fairseq")
        frequencies = self.base ** (-np.arange(half) / max(self.steps, 1))
        self.computed, high = angles == "computed", frequencies.astype(np.float32)
        self.frequencies = Table(np.stack((high, frequencies - high)))  # two float32 parts, which together have 48 significant bits
        # Computed rows leave one unused row in the table, because torch.export writes no empty table.
        turned = (np.arange(1 if self.computed else geometry.max_positions, dtype=np.float64) + offset)[:, None] * frequencies
        waves, self.factor, self.unencoded = (np.sin(turned), np.cos(turned)), float(factor), geometry.width % 2
        side_by_side = np.stack(waves, axis=-1).reshape(-1, 2 * half) if layout == "interleaved" else np.concatenate(waves, axis=-1)
        self.table = Table(self.factor * (np.pad(side_by_side, ((0, 0), (0, 1))) if self.unencoded else side_by_side))

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], positions [B,S] int64 to [B,S,E] in x's dtype."""
        rows = self.waves(positions) if self.computed else self.table(positions)
        return x * self.scale + rows.to(x.dtype)

    def waves(self, positions: Tensor) -> Tensor:
        """Compute the rows [B,S,E] float32 at positions [B,S] int64."""
        frequencies = self.frequencies.rows.to(torch.float64)
        angles = reduced_angle((positions.clamp(min=0) + self.offset).unsqueeze(2).to(torch.float64) * (frequencies[0] + frequencies[1]))
        sines, cosines = angles.sin(), angles.cos()
        rows = torch.stack((sines, cosines), dim=-1).flatten(-2) if self.layout == "interleaved" else torch.cat((sines, cosines), dim=-1)
        if self.factor != 1.0:
            rows = rows * self.factor
        return torch.nn.functional.pad(rows, [0, self.unencoded]) if self.unencoded else rows

    def initialise_tokens(self, table: Tensor) -> None:
        torch.nn.init.normal_(table, std=table.size(1) ** -0.5)  # as in the paper: with scale sqrt(d), tokens are as large as the sinusoids

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
            out[at_sine] += self.encoding.factor * math.sin(angle)
            out[at_cosine] += self.encoding.factor * math.cos(angle)
        return out
