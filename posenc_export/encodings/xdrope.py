"""Multimodal RoPE with four axes in sections of entries (XDRoPE of HunyuanOCR, Tencent 2025; no
paper, as in transformers).
"""

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry
from posenc_export.encodings.shared.rotary import Place, Rotation, RotationOracle
from posenc_export.shared.refusal import refusal


class XDRoPE(Rotation):
    """x_n cos(a_n) - x_{n+D/2} sin(a_n) for entries n < D/2, x_n cos(a_n) + x_{n-D/2} sin(a_n) for
    the others, a_n = c w_{n mod D/2}, w_k = (theta alpha^(D/(D-2)))^(-2k/D); c the text, width,
    height or image coordinate, by section of entries.

    As in the published code, sections cover all D entries, two for each pair of an axis. So the
    entries n and n + D/2 can get different coordinates: where these differ, this is no rotation,
    and scores depend on more than differences of coordinates. vLLM gives both entries of a pair the
    same coordinate, as `mrope` does with three axes. Both are RoPE if all coordinates are equal, as
    in text.

    Args:
        geometry: head size D, even and at least 8.
        text, width, height: numbers of pairs; the image coordinate gets the rest of all D/2 pairs.
            0 means a quarter of all pairs, as in HunyuanOCR (16 of 64).
        theta: base of the frequencies.
        alpha: factor of NTK by which the base is stretched.
    """

    axes = 4
    above = {"theta": 0, "alpha": 0}
    least = {"text": 0, "width": 0, "height": 0}

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], coordinates [4,B,S] int64 to the same shapes and dtypes."""
        cos, sin = self.by_entry(self.cos(positions)), self.by_entry(self.sin(positions))
        return self.turned(q, cos, sin), self.turned(k, cos, sin)

    def frequency(self, k: int) -> float:
        return float(self.base ** (-2 * k / self.size))

    def by_entry(self, rows: Tensor) -> Tensor:
        """Select the axis of each entry from rows [4,B,S,D/2]: [B,S,1,D]."""
        both = torch.cat((rows, rows), dim=-1)
        selected = both[0]
        for axis in range(1, 4):
            selected = torch.where(self.of_axis[axis], both[axis], selected)
        return selected.unsqueeze(2)

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B,S,N,D] with cos and sin [B,S,1,D] of its entries, in x's dtype."""
        first, second = x.to(torch.float32).split(x.size(3) // 2, dim=-1)
        partner = torch.cat((-second, first), dim=-1)
        return (x.to(torch.float32) * cos + partner * sin).to(x.dtype)

    def __init__(
        self,
        geometry: Geometry,
        text: int = 0,
        width: int = 0,
        height: int = 0,
        theta: float = 10000.0,
        alpha: float = 1.0,
    ) -> None:
        super().__init__(geometry, "half", least=8)
        size = self.size
        sections = [count or size // 8 for count in (text, width, height)]
        sections.append(size // 2 - sum(sections))
        if sections[3] < 1:
            got = f"text={sections[0]}, width={sections[1]}, height={sections[2]}"
            rule = f"sections below {size // 2} pairs together"
            raise refusal("xdrope", rule, got, "choose fewer")
        self.base, self.sections = theta * alpha ** (size / (size - 2)), sections
        self.tabulate()
        of_entry = torch.repeat_interleave(torch.arange(4), 2 * torch.tensor(sections))
        self.of_axis: Tensor
        of_axis = of_entry == torch.arange(4)[:, None]  # [4,D]
        self.register_buffer("of_axis", of_axis, persistent=False)


class XDRoPEOracle(RotationOracle, of=XDRoPE):
    def rotate(self, x: np.ndarray, position: Place) -> np.ndarray:
        e, half, out = self.encoding, len(x) // 2, np.zeros(len(x))
        ends = np.cumsum([2 * count for count in e.sections])
        for n in range(len(x)):
            axis = int(np.searchsorted(ends, n, side="right"))
            place = position if isinstance(position, int) else position[axis]
            angle = place * self.frequencies[n % half]
            partner = -x[n + half] if n < half else x[n - half]
            out[n] = x[n] * np.cos(angle) + partner * np.sin(angle)
        return out
