"""Layers that are alike are worked on once: the result is that of a module that is read whole."""

import functools
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from posenc_export.reading import parts
from posenc_export.reading.parts import Layers
from posenc_export.reading.read import CachedModule, read_module
from posenc_export.shared.numerics import tolerance
from tests.cases import choice
from tests.reading.compare import errors
from tests.reading.own_modules import (
    HEADS,
    POSITIONS,
    VOCABULARY,
    WIDTH,
    Attends,
    Rotated,
    Sloped,
    Windowed,
)
from tests.reading.recurrences import Layer, gated_delta_loop

LAYERS = 4
pytestmark = pytest.mark.xdist_group("parts")


class Sinks(Attends):
    """Scores beside those of the keys, trained in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.size(2)
        hidden = torch.full((length, length), -float("inf")).triu(1)
        sinks = self.sinks[:, None, None].expand(q.size(0), -1, length, 1)
        scores = torch.cat((q @ k.mT * k.size(3) ** -0.5 + hidden, sinks), -1)
        return scores.softmax(-1)[..., :-1] @ v


class Scored(Attends):
    """A trained factor of the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(1) + 0.5)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.full((q.size(2), q.size(2)), -float("inf")).triu(1)
        return (q @ k.mT * self.factor + hidden).softmax(-1) @ v


class Reach(Attends):
    """ALiBi with slopes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.rand(HEADS))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.size(2))
        behind = (places[:, None] - places).float()
        bias = torch.where(behind < 0, -float("inf"), -self.slopes[:, None, None] * behind)
        return (q @ k.mT * 0.3 + bias).softmax(-1) @ v


class Convolved(nn.Module):
    """A causal convolution of each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.mT)[..., : x.size(1)].mT


class Model(nn.Module):
    """Token ids to logits; norms multiply by 1 + w. first: layers read the embedding, too."""

    def __init__(self, layers: list[nn.Module], first: bool = False) -> None:
        super().__init__()
        self.tokens, self.first = nn.Embedding(VOCABULARY, WIDTH), first
        self.layers = nn.ModuleList(layers)
        self.weights = nn.ParameterList(torch.randn(WIDTH) * 0.1 for _ in layers)
        self.shares = nn.ParameterList(torch.rand(WIDTH) for _ in layers)

    def forward(self, ids: Tensor) -> Tensor:
        x = start = self.tokens(ids)
        for layer, weight, share in zip(self.layers, self.weights, self.shares, strict=True):
            x = x + share * start if self.first else x
            x = x + layer(nn.functional.rms_norm(x, (WIDTH,)) * (1 + weight))
        return x @ self.tokens.weight.mT


class Case(NamedTuple):
    """Layers, and the segment of each site; None if no layer is left out."""

    layers: list[Any]
    segments: list[int] | None
    first: bool = False


# Before and in the first layer, before and in its copies, and what follows.
ONE_KIND = [0, 1, 2, 1, 3, 1, 4, 1, 5]
TWO_KINDS = [0, 1, 2, 3, 4, 1, 5, 3, 6, 1, 7, 3, 8]
CASES: dict[str, Case] = {
    "layers of one kind": Case([Rotated] * LAYERS, ONE_KIND),
    "two kinds in turn": Case([Windowed, Sloped] * 3, TWO_KINDS),
    "a trained score beside the keys": Case([Sinks] * LAYERS, ONE_KIND),
    "a cache of tokens before keys": Case([Convolved, Attends] * 3, TWO_KINDS),
    "a state before keys": Case([partial(Layer, gated_delta_loop), Attends] * 3, TWO_KINDS),
    "the embedding in every layer": Case([Attends] * LAYERS, ONE_KIND, first=True),
    "one factor for each layer": Case([Scored] * LAYERS, None),
    "slopes of each layer": Case([Reach] * LAYERS, None),
}


def of(case: Case) -> Model:
    """Return the module of a case."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Model([layer() for layer in case.layers], case.first).eval()


def check(reading: CachedModule, model: Model) -> None:
    """Compare the calls of a reading with its module."""
    with torch.no_grad():
        found = errors(reading, model, inputs_of(model))
    assert max(found.values()) <= tolerance("float32", depth=LAYERS, reduction=64)


def inputs_of(model: Model) -> Tensor:
    return torch.randint(VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of these modules are small."""
    monkeypatch.setattr(parts, "FEWEST", 10)


@functools.cache
def reading_of(name: str) -> tuple[Model, CachedModule]:
    """Return the module of a case and its reading; tests must not modify them."""
    model = of(CASES[name])
    return model, read_module(model, inputs_of(model), POSITIONS)


@pytest.mark.parametrize("name", CASES)
def test_layers_that_are_alike_are_copies_of_the_first(name: str) -> None:
    case, (model, reading) = CASES[name], reading_of(name)
    sites = reading.repeated and Layers(reading.repeated.graph, reading.repeated.copies).sites
    assert (sites and [site.segment for site in sites]) == case.segments
    check(reading, model)


WHOLE = ["a cache of tokens before keys", "a state before keys"]


@pytest.mark.parametrize("name", choice(WHOLE, WHOLE[:1]))
def test_caches_and_weights_are_those_of_a_module_that_is_read_whole(name, monkeypatch) -> None:
    model, reading = reading_of(name)
    monkeypatch.setattr(parts, "FEWEST", 10**6)
    whole = read_module(model, inputs_of(model), POSITIONS)
    assert reading.repeated is not None and whole.repeated is None
    assert reading.caches == whole.caches
    numbers, wanted = (dict(one.named_parameters()) for one in (reading, whole))
    assert len(numbers) == len(wanted)
    for name in {name for name in wanted if "constants" not in name}:
        assert torch.equal(numbers[name], wanted[name])


def test_a_module_whose_copies_give_other_numbers_is_read_whole(monkeypatch) -> None:
    model = of(CASES["layers of one kind"])
    own = parts.Layers.weights
    monkeypatch.setattr(parts.Layers, "weights", lambda *given: [{}] * len(own(*given)))
    reading = read_module(model, inputs_of(model), POSITIONS)
    assert reading.repeated is None
    check(reading, model)
