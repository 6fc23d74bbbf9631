"""Sinusoidal absolute encoding (Vaswani et al. 2017, Attention Is All You Need, 3.5)."""

from typing import Literal, Mapping

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared import sinusoids
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Rows, Table


class Sinusoidal(PositionEncoding):
    """x * scale + factor [sin((p + offset) w_k), cos((p + offset) w_k)], w_k = base^(-2k/d).

    Args:
        geometry: width d, even.
        base: base of the frequencies.
        layout: "interleaved" alternates sin and cos of w_k (the paper), "halves" puts all sines
            before all cosines.
        scale: factor on the token embedding; the paper's models use sqrt(d).
        divisor: "paper" divides exponents by d/2; "fairseq" divides by d/2 - 1, so that the last
            wavelength is exactly 2 pi base.
        offset: number added to positions: 0 in the authors' code (the paper does not say), 1 for
            sources that count from 1, 2 in XGLM and M2M100.
        angles: "table" reads rows; "computed" computes angles in float64 inside the graph, so that
            max_positions costs no memory.
        factor: factor on the sinusoids; alpha in SpeechT5.
    """

    above = {"base": 1}
    least = {"offset": 0}

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], positions [B,S] int64 to [B,S,E] in x's dtype."""
        rows = self.waves(positions) if self.computed else self.table(positions)
        return ops.scale(x, self.scale) + rows.to(x.dtype)

    def __init__(
        self,
        geometry: Geometry,
        base: float = 10000.0,
        layout: Literal["interleaved", "halves"] = "interleaved",
        scale: float = 1.0,
        divisor: Literal["paper", "fairseq"] = "paper",
        angles: Literal["table", "computed"] = "table",
        offset: int = 0,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.check_multiple("width", geometry.width)
        self.base, self.interleaved = float(base), layout == "interleaved"
        self.pairs = geometry.width // 2
        self.steps = self.pairs - (divisor == "fairseq")
        self.offset, self.scale, self.factor = offset, float(scale), float(factor)
        self.computed = angles == "computed"
        frequencies = self.angular()
        # Two float32 parts, which together have 48 significant bits.
        high = frequencies.astype(np.float32)
        self.frequencies = Table(np.stack((high, frequencies - high)))
        # Computed rows leave one unused row in the table, because torch.export writes no empty
        # table.
        count = 1 if self.computed else geometry.max_positions
        self.table = self.filled("table", count)

    def formulas(self) -> Mapping[str, Rows]:
        def table(positions: np.ndarray) -> np.ndarray:
            angles = (positions + self.offset) * self.angular()
            return self.factor * sinusoids.rows(angles, self.interleaved)

        return {"table": table}

    def angular(self) -> np.ndarray:
        """w_k [d/2] float64."""
        return np.asarray(self.base ** (-np.arange(self.pairs) / max(self.steps, 1)))

    def waves(self, positions: Tensor) -> Tensor:
        """Compute the rows [B,S,E] float32 at positions [B,S] int64."""
        frequencies = self.frequencies.rows.to(torch.float64)
        places = (positions.clamp(min=0) + self.offset).unsqueeze(2).to(torch.float64)
        angles = ops.reduced_angle(places * (frequencies[0] + frequencies[1]))
        waves = (angles.sin(), angles.cos())
        if self.interleaved:
            rows = torch.stack(waves, dim=-1).flatten(-2)
        else:
            rows = torch.cat(waves, dim=-1)
        return rows * self.factor if self.factor != 1.0 else rows

    def initialise_tokens(self, table: Tensor) -> None:
        # As in the paper: with scale sqrt(d), tokens are as large as the sinusoids.
        torch.nn.init.normal_(table, std=table.size(1) ** -0.5)


class SinusoidalOracle(Oracle, of=Sinusoidal):
    def embed(self, x: np.ndarray, position: int) -> np.ndarray:
        row = self.tables()["table"](np.array([[float(position)]]))[0]
        return x * self.encoding.scale + row
