"""Faults that an export must not have, planted in a model: the grid has to see them."""

from typing import Any, Dict, List, Optional, Tuple, Type

import torch
from torch import Tensor

from posenc_export.encodings.base import Carried, Oracle, PositionEncoding
from posenc_export.encodings.together import acts


class Faulty(PositionEncoding):
    """Another encoding; subclasses change what it is told.

    Args:
        inner: the encoding.
    """

    def __init__(self, inner: PositionEncoding) -> None:
        super().__init__()
        self.inner = inner
        self.shared, self.works_in, self.axes, self.chunk = inner.shared, inner.works_in, inner.axes, inner.chunk

    def of_call(self, positions: Tensor) -> Tensor:
        """Positions of queries and tokens as the encoding is told them."""
        return positions

    def of_keys(self, positions: Tensor, called: Tensor) -> Tensor:
        """Positions of keys, and of tokens where they are embedded; called: positions of the tokens of this call."""
        return positions

    def carried(self, states: List[Tensor]) -> List[Tensor]:
        """States as the encoding is told them."""
        return states

    def embed_next(self, x: Tensor, positions: Tensor, states: List[Tensor]) -> Tuple[Tensor, List[Tensor]]:
        told = self.of_call(positions)
        return self.inner.embed_next(x, self.of_keys(told, told), self.carried(states))

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        told = self.of_call(positions)
        return self.inner.rotate(q, k, told)[0], self.inner.rotate(q, k, self.of_keys(told, told))[1]

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Optional[Tensor]:
        return self.inner.bias(self.of_call(q_positions), self.of_keys(k_positions, q_positions))

    def observe(self, x: Tensor, k: Tensor, positions: Tensor, write_index: Tensor, states: List[Tensor]) -> List[Tensor]:
        return self.inner.observe(x, k, positions, write_index, self.carried(states))

    def rescore(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, positions: Tensor, key_positions: Tensor, scale: float, states: List[Tensor]
    ) -> Tensor:
        told = self.of_keys(key_positions, positions)
        return self.inner.rescore(q, keys, values, mask, self.of_call(positions), told, scale, states)

    def prepare(self) -> None:
        self.inner.prepare()

    def key_size(self, head_size: int) -> int:
        return self.inner.key_size(head_size)

    def embed_states(self) -> List[Carried]:
        return self.inner.embed_states()

    def layer_states(self) -> List[Carried]:
        return self.inner.layer_states()

    def oracle(self) -> Oracle:
        return self.inner.oracle()


class FromZero(Faulty):
    """Counts the tokens of every call from 0."""

    def of_call(self, positions: Tensor) -> Tensor:
        return torch.arange(positions.size(-1)).expand_as(positions)

    def of_keys(self, positions: Tensor, called: Tensor) -> Tensor:
        first = called[..., :1]
        return torch.where(positions >= first, positions - first, positions)


class OddAsEven(Faulty):
    """Takes keys and tokens at odd positions for those before them."""

    def of_keys(self, positions: Tensor, called: Tensor) -> Tensor:
        return torch.where(positions > 0, positions - positions % 2, positions)


class Forgetful(Faulty):
    """Starts every call from states of zeros."""

    def carried(self, states: List[Tensor]) -> List[Tensor]:
        return [torch.zeros_like(state) for state in states]


FAULTS: Dict[str, Type[Faulty]] = {"offset ignored": FromZero, "odd positions as even": OddAsEven, "states forgotten": Forgetful}


def applicable(fault: str, model: Any) -> bool:
    """Whether an encoding of the model has a place for a fault."""
    found = [model.token_encoding, *(attention.encoding for attention in model.attentions())]
    if FAULTS[fault] is Forgetful:
        return any(encoding.embed_states() or encoding.layer_states() for encoding in found)
    return any(acts(encoding, "embed", "embed_next", "rotate", "bias", "rescore") for encoding in found)


def planted(fault: str, model: Any) -> Any:
    """The model with a fault in each of its encodings, which it has from now on."""
    wrapped: Dict[int, Faulty] = {}
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, PositionEncoding):
                setattr(module, name, wrapped.setdefault(id(child), FAULTS[fault](child)))
    return model
