"""The grid must see every fault planted here, and pass what is right: a check that cannot fail proves nothing."""

import math
from typing import Any, Callable, Dict, Optional, Tuple

import numpy as np
import pytest
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.base import PositionEncoding, Table
from posenc_export.export.describe import Model, eager
from posenc_export.export.verify import certify
from posenc_export.models.presets import seeded
from posenc_export.runtime import Session
from posenc_export.runtime.torch_graph import TorchGraph
from tests.tiny import decoder

Plant = Callable[[Model], None]


class Shifted(PositionEncoding):
    """Another encoding that sees keys or tokens one position late."""

    def __init__(self, inner: PositionEncoding) -> None:
        super().__init__()
        self.inner = inner

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.inner.embed(x, positions - 1)

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        return self.inner.rotate(q, k, positions)[0], self.inner.rotate(q, k, positions - 1)[1]

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Optional[Tensor]:
        return self.inner.bias(q_positions, k_positions - 1 - k_positions.eq(q_positions[:, -1:]).long())


class FromZero(Shifted):
    """Another encoding that counts the tokens of every call from 0."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.inner.embed(x, torch.arange(x.size(1)).expand(x.size(0), -1))

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        return self.inner.rotate(q, k, torch.arange(q.size(1)).expand(q.size(0), -1))

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Optional[Tensor]:
        return self.inner.bias(torch.arange(q_positions.size(1)).expand(q_positions.size(0), -1), k_positions)


def _wrap(cls: type) -> Plant:
    def plant(model: Model) -> None:
        wrapped = cls(model.encoding)
        model.encoding = wrapped
        for layer in model.layers:  # type: ignore[union-attr]
            layer.attention.encoding = wrapped  # type: ignore[union-attr]

    return plant


def _swapped_layout(model: Any) -> None:
    model.encoding.interleaved = True


def _reversed_rotation(model: Any) -> None:
    model.encoding.sin = Table(-model.encoding.sin.exact)


def _one_frequency_off(model: Any) -> None:
    positions, size = np.arange(len(model.encoding.cos.exact)), model.encoding.size
    angle = 1.01 * positions * model.encoding.theta ** (-2 * (size // 4) / size)
    cos, sin = model.encoding.cos.exact.copy(), model.encoding.sin.exact.copy()
    cos[:, size // 4], sin[:, size // 4] = np.cos(angle), np.sin(angle)
    model.encoding.cos, model.encoding.sin = Table(cos), Table(sin)


def _slopes_of_a_power_of_two(model: Any) -> None:
    heads = len(model.encoding.slopes.exact)
    model.encoding.slopes = Table(np.array([math.exp2(-8 * (h + 1) / heads) for h in range(heads)]))


PLANTS: Dict[str, Tuple[str, Plant]] = {
    "position off by one, sinusoidal": ("sinusoidal", _wrap(Shifted)),
    "position off by one, learned": ("learned", _wrap(Shifted)),
    "position off by one, rope": ("rope", _wrap(Shifted)),
    "position off by one, alibi": ("alibi", _wrap(Shifted)),
    "offset ignored, sinusoidal": ("sinusoidal", _wrap(FromZero)),
    "offset ignored, learned": ("learned", _wrap(FromZero)),
    "offset ignored, rope": ("rope", _wrap(FromZero)),
    "offset ignored, alibi": ("alibi", _wrap(FromZero)),
    "swapped layout": ("rope", _swapped_layout),
    "reversed rotation": ("rope", _reversed_rotation),
    "one frequency 1% off": ("rope", _one_frequency_off),
    "wrong slopes for six heads": ("alibi", _slopes_of_a_power_of_two),
}


def _certificate(variant: str, plant: Optional[Plant] = None, session: type = Session) -> Dict[str, Any]:
    right, planted = seeded(decoder(variant)), seeded(decoder(variant))
    if plant:
        plant(planted)
    module, manifest = eager(planted)
    return certify(lambda: session(TorchGraph(module, manifest), manifest), manifest, right, lambda _: None)


class KeepsWhatIsRewound(Session):
    """Rewinds its count of tokens, but hides nothing."""

    def _hide(self) -> None:
        if self.manifest.layout == "columns":
            self._slots = self._slots.copy()


class ForksShareCaches(Session):
    """A fork on the same caches."""

    def fork(self) -> Session:
        other = super().fork()
        other._cache = self._cache
        return other


@pytest.mark.parametrize("session", [KeepsWhatIsRewound, ForksShareCaches])
@pytest.mark.parametrize("variant", ["sinusoidal", "rope", "alibi"])
def test_a_session_with_a_stale_cache_is_seen(variant: str, session: type) -> None:
    assert not _certificate(variant, session=session)["passed"]


@pytest.mark.parametrize("variant", ["nope", "sinusoidal", "learned", "rope", "alibi"])
def test_a_right_module_passes(variant: str) -> None:
    assert _certificate(variant)["passed"]


@pytest.mark.parametrize("fault", PLANTS)
def test_a_planted_fault_is_seen(fault: str) -> None:
    variant, plant = PLANTS[fault]
    assert not _certificate(variant, plant)["passed"]


def _mask_seeing(change: Callable[[Tensor, Tensor], Tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    right = ops.attention_mask

    def wrong(positions: Tensor, key_positions: Tensor, bias: Optional[Tensor], causal: bool, like: Tensor) -> Tensor:
        return right(*change(positions, key_positions), bias, causal, like)

    return wrong


MASKS = {
    "mask one short": lambda q, k: (q - 1, k),
    "mask one long": lambda q, k: (q + 1, k),
    "padding attended": lambda q, k: (q, k.clamp(min=0)),
}


@pytest.mark.parametrize("fault", MASKS)
def test_a_planted_fault_of_the_mask_is_seen_by_the_oracle_or_the_grid(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "attention_mask", _mask_seeing(MASKS[fault]))
    assert not _certificate("rope")["passed"]

