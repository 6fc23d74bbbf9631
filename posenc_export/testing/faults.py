"""Faults of an export, planted in a model; the parity grid has to detect them."""

from typing import Any, Callable, Dict, List, Optional, Tuple, Type

import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Oracle, PositionEncoding, StateSpec
from posenc_export.encodings.shared.combined import overrides
from posenc_export.testing.planting import Fault


class Faulty(PositionEncoding):
    """Wrapper of an encoding; subclasses change the positions or states that the encoding receives.

    Args:
        inner: the wrapped encoding.
    """

    def __init__(self, inner: PositionEncoding) -> None:
        super().__init__()
        self.inner = inner
        self.shared, self.works_in = inner.shared, inner.works_in
        self.axes, self.chunk = inner.axes, inner.chunk

    def changed_positions(self, positions: Tensor) -> Tensor:
        """Positions of queries and tokens that the encoding receives."""
        return positions

    def changed_key_positions(self, positions: Tensor, called: Tensor) -> Tensor:
        """Positions of keys and tokens that the encoding receives."""
        return positions

    def changed_states(self, states: List[Tensor]) -> List[Tensor]:
        """States that the encoding receives."""
        return states

    def embed_next(
        self, x: Tensor, positions: Tensor, states: List[Tensor]
    ) -> Tuple[Tensor, List[Tensor]]:
        changed = self.changed_positions(positions)
        return self.inner.embed_next(
            x, self.changed_key_positions(changed, changed), self.changed_states(states)
        )

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        changed = self.changed_positions(positions)
        of_keys = self.changed_key_positions(changed, changed)
        return self.inner.rotate(q, k, changed)[0], self.inner.rotate(q, k, of_keys)[1]

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Optional[Tensor]:
        return self.inner.bias(
            self.changed_positions(q_positions),
            self.changed_key_positions(k_positions, q_positions),
        )

    def observe(
        self, x: Tensor, k: Tensor, positions: Tensor, write_index: Tensor, states: List[Tensor]
    ) -> List[Tensor]:
        return self.inner.observe(x, k, positions, write_index, self.changed_states(states))

    def rescore(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        positions: Tensor,
        key_positions: Tensor,
        scale: float,
        states: List[Tensor],
    ) -> Tensor:
        changed = self.changed_key_positions(key_positions, positions)
        return self.inner.rescore(
            q, keys, values, mask, self.changed_positions(positions), changed, scale, states
        )

    def prepare(self) -> None:
        self.inner.prepare()

    def key_size(self, head_size: int) -> int:
        return self.inner.key_size(head_size)

    def embed_states(self) -> List[StateSpec]:
        return self.inner.embed_states()

    def layer_states(self) -> List[StateSpec]:
        return self.inner.layer_states()

    def oracle(self) -> Oracle:
        return self.inner.oracle()


class FromZero(Faulty):
    """Counts the tokens of every call from 0."""

    def changed_positions(self, positions: Tensor) -> Tensor:
        return torch.arange(positions.size(-1)).expand_as(positions)

    def changed_key_positions(self, positions: Tensor, called: Tensor) -> Tensor:
        first = called[..., :1]
        return torch.where(positions >= first, positions - first, positions)


class OddAsEven(Faulty):
    """Rounds odd positions of keys and tokens down to even positions."""

    def changed_key_positions(self, positions: Tensor, called: Tensor) -> Tensor:
        return torch.where(positions > 0, positions - positions % 2, positions)


class Forgetful(Faulty):
    """Replaces the states of every call by zeros."""

    def changed_states(self, states: List[Tensor]) -> List[Tensor]:
        return [torch.zeros_like(state) for state in states]


def wrapped(cls: Type[Faulty]) -> Callable[[Any], None]:
    """Return a function that wraps each encoding of a model, in place."""

    def plant(model: Any) -> None:
        wrappers: Dict[int, Faulty] = {}
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, PositionEncoding):
                    setattr(module, name, wrappers.setdefault(id(child), cls(child)))

    return plant


FAULTS: Dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("offset ignored", "positions", "module", wrapped(FromZero)),
        Fault("odd positions as even", "positions", "module", wrapped(OddAsEven)),
        Fault("states forgotten", "states", "module", wrapped(Forgetful)),
    )
}


def applicable(fault: Fault, model: Any) -> bool:
    """Whether the encodings of a model have what the fault breaks."""
    encodings = [model.token_encoding, *(attention.encoding for attention in model.attentions())]
    if fault.breaks == "states":
        return any(encoding.embed_states() or encoding.layer_states() for encoding in encodings)
    return any(
        overrides(encoding, "embed", "embed_next", "rotate", "bias", "rescore")
        for encoding in encodings
    )
