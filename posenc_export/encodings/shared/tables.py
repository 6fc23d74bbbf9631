"""Numbers that keep float32 in a cast: tables computed in float64, and trained factors."""

import numpy as np
import torch
from torch import Tensor

from posenc_export.shared.refusal import refusal


class Table(torch.nn.Module):
    """Rows [M,n] computed in float64, kept in float32 when the model is cast, and read with Gather.

    Raises:
        ValueError: rows that are not finite.
    """

    rows: Tensor

    def __init__(self, rows: np.ndarray) -> None:
        super().__init__()
        with np.errstate(over="ignore"):  # reported below
            self.exact = np.ascontiguousarray(rows, dtype=np.float32)
        if not np.isfinite(self.exact).all():
            remedy = "choose parameters closer to their defaults"
            raise refusal("encoding", "tables of finite numbers", "infinity or NaN", remedy)
        self.register_buffer("rows", torch.from_numpy(self.exact), persistent=False)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        super()._apply(fn, recurse)
        if self.rows.device.type != "meta":  # a cast to float16 loses digits: restore them
            self.rows = torch.from_numpy(self.exact).to(self.rows.device)
        return self

    def forward(self, positions: Tensor) -> Tensor:
        """positions [B,S] int64 (-1 is read as 0) to [B,S,n] float32."""
        return torch.nn.functional.embedding(positions.clamp(min=0), self.rows)


class Exact(torch.nn.Module):
    """A trained tensor that stays float32, because it multiplies positions."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(value.to(torch.float32))

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        self.value.data = self.value.data.to(fn(torch.empty(0, device=self.value.device)).device)
        return self

    def forward(self) -> Tensor:
        """Return the tensor, float32."""
        return self.value
