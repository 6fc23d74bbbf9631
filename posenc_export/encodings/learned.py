"""Learned absolute positions (Gehring et al. 2017; Devlin et al. 2018, BERT; Radford et al.
2018, GPT).
"""

from typing import List, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.hierarchical import Hierarchical
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding
from posenc_export.shared.refusal import refusal


def copied(rows: Tensor, count: int) -> Tensor:
    """Extend rows [M,E] to [count,E]: p gets row p mod M (Beltagy et al. 2020, Longformer, 5)."""
    return rows[torch.arange(count) % len(rows)]


def interpolated(rows: Tensor, count: int) -> Tensor:
    """Extend rows [M,E] to [count,E] by linear interpolation: p gets row p (M - 1) / (count - 1)
    (Dosovitskiy et al. 2020, ViT, 3.2, in one dimension).
    """
    places = torch.arange(count, dtype=torch.float64) * (len(rows) - 1) / max(count - 1, 1)
    below = places.floor().to(torch.int64)
    above, part = (below + 1).clamp(max=len(rows) - 1), (places - below).unsqueeze(1)
    return ((1 - part) * rows[below].double() + part * rows[above].double()).to(rows.dtype)


WAYS = {"copied": copied, "interpolated": interpolated}


class Learned(PositionEncoding):
    """x + P[p + offset], P trained.

    A session refuses later positions, which have no row.

    `posenc_export.extend_positions` (rows copied or interpolated) and
    `posenc_export.to_hierarchical` extend a trained table to a longer range.

    Args:
        geometry: max_positions rows of width E.
        offset: number of unused rows at the front; 2 in OPT, padding_idx + 1 in RoBERTa.
    """

    least = {"offset": 0}
    most = {"offset": 1 << 20}

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], positions [B,S] int64 to [B,S,E] in x's dtype."""
        return x + self.table(positions.clamp(min=0) + self.offset)

    def row_rules(self) -> List[str]:
        return [f"max(q, 0) + {self.offset}"]

    def __init__(self, geometry: Geometry, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset
        self.table = torch.nn.Embedding(geometry.max_positions + offset, geometry.width)
        torch.nn.init.normal_(self.table.weight, std=0.02)  # as BERT and GPT-2

    def extended(self, max_positions: int, by: str) -> "Learned":
        """Make an encoding with a range of max_positions from these rows; the unused rows at the
        front are kept.

        Args:
            by: "copied" repeats the rows; "interpolated" interpolates linearly between them and
                keeps the first and the last row.

        Raises:
            ValueError: unknown by, max_positions below the number of rows.
        """
        if by not in WAYS:
            raise refusal("learned", f"by to be one of {', '.join(WAYS)}", repr(by), "choose one")
        front, rows = self._rows(max_positions)
        longer = Learned(Geometry(rows.size(1), 1, rows.size(1), max_positions), self.offset)
        longer.table.weight = torch.nn.Parameter(torch.cat((front, WAYS[by](rows, max_positions))))
        return longer

    def hierarchical(self, max_positions: int, share: float = 0.4) -> Hierarchical:
        """Make a Hierarchical encoding from these M rows, for up to M^2 positions (Su 2020).

        Args:
            share: see Hierarchical.

        Raises:
            ValueError: more than M^2 positions or fewer than M, a share that Hierarchical refuses.
        """
        _, rows = self._rows(max_positions)
        if max_positions > len(rows) ** 2:
            rule = f"max_positions up to {len(rows) ** 2}, the square of the rows"
            raise refusal("learned", rule, max_positions, "give a shorter range")
        geometry = Geometry(rows.size(1), 1, rows.size(1), max_positions)
        longer = Hierarchical(geometry, len(rows), share)
        longer.table = torch.nn.Parameter(rows.clone())
        return longer

    def _rows(self, max_positions: int) -> Tuple[Tensor, Tensor]:
        """Unused rows at the front, and rows of at most max_positions positions."""
        table = self.table.weight.detach()
        front, rows = table[: self.offset], table[self.offset :]
        if max_positions < len(rows):
            rule = f"max_positions of at least {len(rows)}, the number of rows"
            raise refusal("learned", rule, max_positions, "give a longer range")
        return front, rows


class LearnedOracle(Oracle, of=Learned):
    def embed(self, x: np.ndarray, position: int) -> np.ndarray:
        return x + self.weights["table.weight"][position + self.encoding.offset]
