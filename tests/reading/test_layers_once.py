"""Layers that are alike are traced once, and the trace is that of all layers."""

import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posenc_export.reading.axes import same
from posenc_export.reading.capture import capture
from posenc_export.reading.full_length import _without_numbers
from posenc_export.reading.layers_once import LayersOnce
from posenc_export.reading.values import depending
from posenc_export.reading.whole import OneTensor
from tests.reading.own_modules import (
    POSITIONS,
    VOCABULARY,
    WIDTH,
    Attends,
    Decoder,
    Rotated,
    Sloped,
)

LAYERS, LATE = 4, 600
IDS = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


class Numbered(Attends):
    """A layer whose output depends on its index."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (1 + self.index)


class NumberedLate(Numbered):
    """A layer whose output depends on its index at tokens that short probes do not have."""

    def forward(self, x: Tensor) -> Tensor:
        late = torch.arange(x.size(1)) // LATE
        return Attends.forward(self, x) + self.index * late[:, None]


class Nested(Attends):
    """A layer with layers that are alike and have names, and a list of none."""

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Sequential(OrderedDict((name, nn.Linear(WIDTH, WIDTH)) for name in "abc"))
        self.gates = nn.ModuleList([None, None])  # type: ignore[list-item]


def _seeded(*layers: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(tuple(layer() for layer in layers)).eval()


def _templates(module: nn.Module) -> dict[str, str]:
    return LayersOnce(module, numbered=True).templates


@pytest.mark.parametrize(
    "layers", [[Rotated] * LAYERS, [Rotated, Sloped] * 2, [Nested] * 3], ids=["1", "2", "nested"]
)
def test_a_trace_of_one_layer_of_each_kind_is_that_of_all(
    layers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = _seeded(*layers)
    assert _templates(module).keys() >= {f"layers.{len(layers) - 1}", f"norms.{len(layers) - 1}"}
    once = capture(module, IDS, POSITIONS)
    monkeypatch.setattr(LayersOnce, "_add", lambda *_: None)
    each = capture(module, IDS, POSITIONS)
    assert len(once.copies) and not len(each.copies)
    calls = ([n for n in one.graph.nodes if n.op == "call_function"] for one in (once, each))
    # What depends on the length alone is computed once for all layers.
    data = depending(once.graph, [once.input]) | depending(each.graph, [each.input])
    targets = [[n.target for n in own if n in data] for own in calls]
    assert targets[0] == targets[1]
    assert set(once.names.values()) == set(each.names.values())
    assert torch.equal(once.traced(IDS), each.traced(IDS))


def test_a_module_that_is_a_list_of_layers_itself_has_their_names() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Rotated(), Rotated()).eval()
    assert _templates(module) == {"2": "1"}
    torch.testing.assert_close(capture(module, IDS, POSITIONS).traced(IDS), module(IDS))


def test_the_properties_of_a_module_are_those_of_one_layer_of_each_kind() -> None:
    module = _seeded(*[Rotated, Sloped] * 3)
    captured = capture(module, IDS, POSITIONS)
    for weight in module.layers[2:4].parameters():  # which copies share
        nn.init.constant_(weight, math.nan)
    assert captured.short and captured.short.own(IDS).isfinite().all()
    assert captured.own(IDS).isnan().all()


@pytest.mark.parametrize("layer", [Numbered, NumberedLate])
def test_layers_that_depend_on_their_index_are_traced_each(layer: Any) -> None:
    torch.manual_seed(0)
    module = Decoder(tuple(layer(index) for index in range(LAYERS))).eval()
    assert {"layers.2": "layers.0"}.items() <= _templates(module).items()
    captured, x = capture(module, IDS, 2 * LATE), IDS.repeat(1, LATE // 8)
    assert same(captured.traced(x), captured.own(x)) and not captured.short


class Kept(nn.Module):
    """A table that grows with the length, beside what `step` does with the tokens."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.step, self.table, self.last = step, torch.zeros(0), torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1]).cos()
        if self.step == "reads numbers" and float(x.sum()) > 0:
            return x
        if self.step == "keeps its input":
            self.last = x
        return x * self.table[: x.shape[1], None]


@pytest.mark.parametrize("step", ["", "reads numbers", "keeps its input"])
def test_a_call_without_numbers_fills_tables_or_is_not_used(step: str) -> None:
    module = Kept(step)
    called = _without_numbers(OneTensor(module, None, 2, ()), torch.ones(1, 12, 3))
    assert (called is None) == bool(step) and not len(module.table)
    if called is not None:
        assert torch.equal(called.module.table, torch.arange(12).cos())
