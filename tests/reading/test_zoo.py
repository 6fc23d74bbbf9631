"""Plain modules read as they are: calls with caches give what the module gives on sequences."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posenc_export.ops import TokenPlaces
from posenc_export.reading import causality
from posenc_export.reading.read import read_module
from posenc_export.reading.refused import Refused
from posenc_export.shared.numerics import tolerance
from tests.reading.compare import errors, outputs
from tests.reading.zoo import OPTIONS, ZOO

pytestmark = [
    pytest.mark.xdist_group("zoo"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]
TOLERANCE = tolerance("float32", depth=2, reduction=64)
QUICK = """
    kinds-of-positions nanogpt-flash nanochat window-branch rope-grown linear-cumsum convolution-cut
    ids-of-pictures weights-that-are-cast gated-recurrence
""".split()


def by_name(quick: list[str]) -> list[Any]:
    """Names of the zoo, with marks for `make test` leaving one out."""
    every = pytest.mark.exhaustive
    return [pytest.param(name, marks=[] if name in quick else [every]) for name in ZOO]


def sequence(example: Tensor, length: int = 20, rows: int = 2) -> Tensor:
    """Return other random tokens of the kind of an example."""
    generator = torch.Generator().manual_seed(7)
    if example.is_floating_point():
        return torch.randn(rows, length, example.shape[2], generator=generator)
    return torch.randint(50, (rows, length), generator=generator)


@functools.cache
def read_of_zoo(name: str) -> tuple[Any, nn.Module, Tensor, Tensor]:
    """Return the reading of a module, the module, tokens, and its outputs before it was read."""
    module, example, positions = ZOO[name]()
    x = sequence(example)
    before = outputs(copy.deepcopy(module), x)
    return read_module(module, example, positions, **OPTIONS[name]), module, x, before


@pytest.mark.parametrize("name", by_name(QUICK))
@torch.no_grad()
def test_a_module_of_the_zoo_is_causal_and_gives_the_same_at_every_length(name: str) -> None:
    module, example, _ = ZOO[name]()
    x = sequence(example)
    whole = outputs(module, x)
    for length in range(1, 20):
        changed = torch.cat((x[:, :length], x[:, length:].roll(1, 0)), dim=1)
        for other in (x[:, :length], changed):
            difference = (outputs(module, other)[:, :length] - whole[:, :length]).abs().max()
            assert difference <= TOLERANCE * whole.abs().max(), length
    assert torch.allclose(outputs(module, x[1:]), whole[1:], atol=TOLERANCE * whole.abs().max())


@pytest.mark.parametrize("name", by_name(QUICK))
@torch.no_grad()
def test_every_division_into_calls_gives_what_the_module_gives(name: str) -> None:
    reading, module, x, _ = read_of_zoo(name)
    found = errors(reading, module, x)
    assert max(found.values()) <= TOLERANCE, found


@torch.no_grad()
def test_windows_that_reach_beyond_the_example_give_what_the_module_gives() -> None:
    reading, module, _, _ = read_of_zoo("convolution-dilated")
    x = torch.randint(50, (1, 64))
    y, states = [], [cache.empty(1, 64) for cache in reading.caches]
    for own in torch.arange(64)[None].split((20, 1, 43), 1):
        now, states = reading(
            x[:, own[0]], TokenPlaces(own, own, torch.arange(64)[None], own), states
        )
        y.append(now)
    wanted = outputs(module, x)
    assert (torch.cat(y, 1) - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


@pytest.mark.parametrize("name", by_name(QUICK))
@torch.no_grad()
def test_a_module_that_was_read_gives_the_same_bits_as_before(name: str) -> None:
    _, module, x, before = read_of_zoo(name)
    assert torch.equal(outputs(module, x), before)


@pytest.mark.parametrize("name", by_name(QUICK))
@torch.no_grad()
def test_the_oracle_of_a_reading_is_the_module_on_all_tokens(name: str) -> None:
    reading, _, x, before = read_of_zoo(name)
    assert (reading.captured.whole(x) - before).abs().max() <= TOLERANCE * before.abs().max()


@pytest.mark.parametrize("name", by_name(QUICK))
def test_a_reading_states_the_sizes_of_its_inputs_and_outputs(name: str) -> None:
    reading, _, x, before = read_of_zoo(name)
    width = x.shape[2] if x.is_floating_point() else 0
    assert (reading.width, reading.outputs) == (width, before.shape[2])
    assert (reading.vocabulary, reading.max_positions) == (0 if width else 50, 64)


def test_weights_that_are_cast_keep_their_names() -> None:
    reading, module, _, _ = read_of_zoo("weights-that-are-cast")
    names = dict(reading.calls.named_parameters())
    assert {"scale", "shift", "lm_head.weight", "attentions.1.c_proj.weight"} <= names.keys()
    assert torch.equal(names["lm_head.weight"], module.lm_head.weight)


def test_tables_by_length_are_refused_where_a_sequence_of_full_length_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(causality, "LONGEST_EDGE", 32)
    module, example, positions = ZOO["xpos-centred"]()
    with pytest.raises(Refused, match="depends on the length, not on positions alone"):
        read_module(module, example, positions)
