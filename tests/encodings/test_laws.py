"""Properties of encodings that hold for all positions, checked on random positions."""

import inspect
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posenc_export import encodings
from posenc_export.encodings.shared.rotary import Rotary
from posenc_export.ops import TokenPlaces
from posenc_export.shared.numerics import tolerance

REACH = 1 << 14
LAWS = settings(derandomize=True, deadline=None, max_examples=25)
ROTARY = [name for name, cls in encodings.REGISTRY.items() if issubclass(cls, Rotary)]
BY_DIFFERENCE = [*ROTARY, "xpos"]
SHIFT_INVARIANT = ["alibi", "t5", "kerple", "sandwich", "dynamic_bias"]
positions = st.integers(0, REACH - 1)


def _build(name: str, **options: Any) -> encodings.PositionEncoding:
    torch.manual_seed(0)
    geometry = encodings.Geometry(32, 4, 16, REACH, kv_heads=4)
    return encodings.build({"name": name, **options}, geometry).eval()


def _score(encoding: encodings.PositionEncoding, query: int, key: int) -> float:
    vectors = torch.ones(1, 1, 4, 16)
    q, _ = encoding.rotate(vectors, vectors, torch.tensor([[query]]))
    _, k = encoding.rotate(vectors, vectors, torch.tensor([[key]]))
    return float((q.double() * k.double()).sum().detach())


@pytest.mark.parametrize("name", BY_DIFFERENCE)
def test_rotated_scores_depend_on_the_difference_of_positions_only(name: str) -> None:
    encoding = _build(name)

    @LAWS
    @given(positions, st.integers(0, 200), st.integers(0, REACH // 2))
    def law(query: int, distance: int, shift: int) -> None:
        query, key = query // 4 + 200, query // 4 + 200 - distance
        here, there = (_score(encoding, query + s, key + s) for s in (0, shift))
        assert abs(here - there) <= 64 * 1.5 * tolerance("float32", 1, 64)

    law()


@pytest.mark.parametrize("name", ROTARY)
def test_rotation_keeps_norms_up_to_its_magnitude(name: str) -> None:
    encoding: Any = _build(name)

    @LAWS
    @given(positions)
    def law(position: int) -> None:
        x = torch.randn(1, 1, 4, 16)
        turned = encoding.rotate(x, x, torch.tensor([[position]]))[0]
        norms, before = (one[..., : encoding.size].norm(dim=-1) for one in (turned, x))
        assert torch.allclose(norms, encoding.magnitude * before, rtol=1e-5)

    law()


@pytest.mark.parametrize("name", SHIFT_INVARIANT)
def test_biases_do_not_change_with_a_shift_of_positions(name: str) -> None:
    encoding = _build(name)

    @LAWS
    @given(st.integers(0, REACH // 2 - 1), st.integers(0, 500), st.integers(0, REACH // 2))
    def law(key: int, distance: int, shift: int) -> None:
        query = min(key + distance, REACH // 2 - 1)
        places = [[torch.tensor([[at + s]]) for at in (query, key)] for s in (0, shift)]
        here, there = (encoding.bias(*pair) for pair in places)
        assert here is not None and there is not None and torch.equal(here, there)

    law()


UNLIKE = (
    "integer normalized binary sinusoidal learned hierarchical recurrent floater multiplicative"
)


@pytest.mark.parametrize("name", UNLIKE.split())
def test_different_positions_in_range_are_encoded_differently(name: str) -> None:
    encoding = _build(name)

    @LAWS
    @given(positions, positions)
    def law(one: int, other: int) -> None:
        rows = encoding.embed(torch.ones(1, 2, 32), torch.tensor([[one, other]]))[0]
        assert torch.equal(rows[0], rows[1]) == (one == other)

    law()


def test_a_sinusoid_shifted_by_k_is_a_linear_map_of_the_sinusoid() -> None:
    encoding = _build("sinusoidal")

    @LAWS
    @given(st.integers(0, REACH // 2), st.integers(1, 2000))
    def law(position: int, k: int) -> None:
        frequencies = 10000.0 ** (-np.arange(16) / 16)
        turns = [
            [[np.cos(k * w), np.sin(k * w)], [-np.sin(k * w), np.cos(k * w)]] for w in frequencies
        ]
        shift = torch.block_diag(*map(torch.tensor, turns)).numpy()
        places = torch.tensor([[position, position + k]])
        rows = encoding.embed(torch.zeros(1, 2, 32), places)[0].double().numpy()
        assert np.abs(shift @ rows[0] - rows[1]).max() <= 4 * 2.0**-24 * 2

    law()


def test_a_floater_whose_field_rotates_pairs_is_the_sinusoid() -> None:
    geometry, near = encodings.Geometry(8, 2, 4, 200), 1e-4
    spec = {"name": "floater", "hidden": 8, "step": 1.0, "substeps": 32}
    floater: Any = encodings.build(spec, geometry)
    turns = (torch.tensor([[0.0, w], [-w, 0.0]]) for w in (10000.0 ** (-k / 4) for k in range(4)))
    turning = torch.block_diag(*turns)
    with torch.no_grad():
        for part in floater.parameters():
            part.zero_()
        floater.first[1::2] = 1.0
        # tanh(x) is x for small x.
        floater.inner.weight[:, :-1], floater.outer.weight[:] = near * torch.eye(8), turning / near
    floater.prepare()
    x, places = torch.zeros(1, 200, 8), torch.arange(200)[None]
    expected = encodings.build({"name": "sinusoidal"}, geometry).embed(x, places)
    assert torch.allclose(floater.embed(x, places), expected, atol=1e-4)


def test_a_floater_whose_field_depends_on_time_alone_is_its_integral() -> None:
    geometry, step, times = encodings.Geometry(8, 2, 4, 50), 0.3, torch.arange(50.0).double()
    spec = {"name": "floater", "hidden": 8, "step": step, "substeps": 64}
    floater: Any = encodings.build(spec, geometry)
    with torch.no_grad():
        floater.inner.weight[:, :-1] = 0
        floater.outer.weight.copy_(torch.eye(8))
    floater.prepare()
    factor, offset = floater.inner.weight[:, -1].double(), floater.inner.bias.double()
    sums = torch.log(torch.cosh(factor * step * times[:, None] + offset)) / factor
    expected = floater.first + sums - sums[0] + floater.outer.bias * step * times[:, None]
    rows = floater.embed(torch.zeros(1, 50, 8), torch.arange(50)[None])[0]
    assert torch.allclose(rows.double(), expected, atol=1e-5)


def test_positions_from_a_cell_without_input_are_those_of_a_gru_of_torch() -> None:
    ours: Any = encodings.build({"name": "recurrent"}, encodings.Geometry(8, 2, 4, 50)).eval()
    cell, hidden = torch.nn.GRUCell(1, 8), ours.first[None]
    cell.load_state_dict(
        {
            "weight_ih": torch.zeros(24, 1),
            "weight_hh": ours.weight,
            "bias_ih": torch.zeros(24),
            "bias_hh": ours.offset,
        }
    )
    for row in ours.embed(torch.zeros(1, 50, 8), torch.arange(50)[None])[0]:
        assert torch.allclose(row, hidden[0], atol=1e-5)
        hidden = cell(torch.zeros(1, 1), hidden)


def _mixed(variant: str, order: torch.Tensor) -> torch.Tensor:
    """Output [E] of the last token when the tokens are fed in `order` and all of them are
    visible.
    """
    from posenc_export.models.presets import seeded
    from tests.tiny import block, works

    causal = not works(variant, "bidirectional")
    model: Any = seeded(block(variant, max_positions=64, causal=causal))
    x = torch.randn(1, 9, 48, generator=torch.Generator().manual_seed(1))[:, order]
    places = torch.arange(9)[None]
    coordinates = places.expand(model.axes, 1, -1) if model.axes else places
    carried = [*model.token_encoding.embed_states(), *model.attention.states()]
    states = [
        torch.zeros((1, s.sizes[0], 0, s.sizes[1]) if s.grows else (1, *s.sizes)) for s in carried
    ]
    with torch.no_grad():
        first = torch.zeros(1, dtype=torch.int64)
        y, _ = model(x, TokenPlaces(places, coordinates, places, first), states)
    return y[0, -1]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", [name for name in encodings.REGISTRY if name != "complex_order"])
def test_the_order_of_tokens_matters_for_every_encoding_but_nope(name: str) -> None:
    same, other = torch.arange(9), torch.tensor([3, 0, 6, 1, 7, 2, 5, 4, 8])
    difference = float((_mixed(name, same) - _mixed(name, other)).abs().max())
    if name in ("nope", "logn"):  # a temperature depends on the position of the query, not of keys
        assert difference <= tolerance("float32", 1, 48)
    else:
        assert difference > 100 * tolerance("float32", 1, 48)


FORMULAS = {"embed", "embed_next", "rotate", "frequency", "bias", "rescore"}


@pytest.mark.parametrize("name", [name for name in encodings.REGISTRY if name != "nope"])
def test_the_first_method_of_an_encoding_is_its_formula(name: str) -> None:
    members = vars(encodings.REGISTRY[name]).items()
    methods = [key for key, value in members if inspect.isfunction(value)]
    assert methods[0] in FORMULAS or not FORMULAS & set(methods)


ON_SCORES = [
    name
    for name, cls in encodings.REGISTRY.items()
    if any(hook in vars(cls) for hook in ("bias", "rescore")) and cls.__module__.count("rope_") == 0
]


@pytest.mark.parametrize("name", ON_SCORES)
def test_every_weight_of_an_encoding_of_scores_is_described_by_its_name(name: str) -> None:
    encoding = _build(name)
    _, _, described = (inspect.getdoc(type(encoding)) or "").partition("\nWeights:\n")
    lines = described.partition("\nRaises:")[0].splitlines()
    listed = ",".join(line.partition(":")[0] for line in lines if ":" in line)
    names = {one.strip() for one in listed.split(",")}
    trained = {re.sub(r"\.\d+\.", ".N.", key) for key, _ in encoding.named_parameters()}
    assert trained <= names
