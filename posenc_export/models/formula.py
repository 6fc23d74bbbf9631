"""A numpy function in place of the block inside a user's own module."""

from typing import Any, Callable, List, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export.models.user_module_check import Inner

Rows = Callable[[np.ndarray], np.ndarray]


class Formula(torch.nn.Module):
    """Replacement of the block in a copy of the module: calls a numpy function of one row.

    Args:
        inner: the block or stack. It is not changed.
        rows: function of x [n] int64 or [n,E] float64 to [n,N].
        dtype: dtype of the outputs.
    """

    def __init__(self, inner: Inner, rows: Rows, dtype: torch.dtype) -> None:
        super().__init__()
        # A tuple: no submodule, so that casts of the copy leave it alone.
        self.block = (inner, rows, dtype)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the block, such as a tied table."""
        block = self.__dict__.get("block")
        if block and hasattr(block[0], name):
            return getattr(block[0], name)
        return super().__getattr__(name)

    def forward(self, x: Tensor, *where: Any) -> Tuple[Tensor, List[Tensor]]:
        """x [1,n] int64 or [1,n,E] to outputs [1,n,N] and no states."""
        _, rows, dtype = self.block
        row = x[0].detach() if x.dim() == 2 else x[0].detach().double()
        return torch.from_numpy(rows(row.numpy()))[None].to(dtype), []
