"""Encodings that get other positions than those of a call."""

from typing import Any

import torch
from torch import Tensor

from posenc_export.encodings.shared.base import PositionEncoding, Seen


class Faulty(PositionEncoding):
    """First base of a faulty encoding, before its correct class: changes positions."""

    def changed_positions(self, positions: Tensor) -> Tensor:
        """Positions of queries and tokens that the encoding receives."""
        return positions

    def changed_key_positions(self, positions: Tensor, called: Tensor) -> Tensor:
        """Positions of keys and tokens that the encoding receives."""
        return positions

    def embed_next(
        self, x: Tensor, positions: Tensor, states: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        changed = self.changed_positions(positions)
        of_keys = self.changed_key_positions(changed, changed)
        return super().embed_next(x, of_keys, states)

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        changed = self.changed_positions(positions)
        of_keys = self.changed_key_positions(changed, changed)
        return super().rotate(q, k, changed)[0], super().rotate(q, k, of_keys)[1]

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        of_keys = self.changed_key_positions(k_positions, q_positions)
        return super().bias(self.changed_positions(q_positions), of_keys)

    def rescore(self, q: Tensor, seen: Seen, scale: float, states: list[Tensor]) -> Tensor:
        of_keys = self.changed_key_positions(seen.key_positions, seen.positions)
        called = self.changed_positions(seen.positions)
        shifted = Seen(seen.keys, seen.values, seen.mask, called, of_keys)
        return super().rescore(q, shifted, scale, states)


class FromZero(Faulty):
    """Counts the tokens of every call from 0."""

    def changed_positions(self, positions: Tensor) -> Tensor:
        return torch.arange(positions.size(-1)).expand_as(positions)

    def changed_key_positions(self, positions: Tensor, called: Tensor) -> Tensor:
        first = called[..., :1]
        return torch.where(positions >= first, positions - first, positions)


def plant(fault: type[Faulty], model: Any) -> None:
    """Make each encoding of a model faulty, in place."""
    for module in list(model.modules()):
        if isinstance(module, PositionEncoding):
            module.__class__ = type(fault.__name__, (fault, type(module)), {})
