"""Learned tables extended to a longer range: values, unchanged outputs in the old range,
certified exports, refusals.
"""

import copy
from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest
import torch

from posenc_export import export_model, extend_positions, load, to_hierarchical
from posenc_export.encodings import Geometry
from posenc_export.encodings.learned import Learned
from posenc_export.export.expected import eager_session
from posenc_export.models.config import StackConfig, TokensConfig
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.shared.numerics import tolerance, worst_error

ROWS, LONGER, WIDTH = 12, 60, 32
SPEC = {"name": "learned", "offset": 2}
BLOCK = block_config(WIDTH, 4, ROWS, encoding=SPEC)
MODELS: Dict[str, Any] = {
    "decoder": decoder_config(61, 2, 40, BLOCK),
    "block": BLOCK,
    "embeddings": StackConfig(
        width=WIDTH, max_positions=ROWS, tokens=TokensConfig(vocabulary=61, encodings=(SPEC,))
    ),
    "two encodings": StackConfig(
        width=WIDTH,
        max_positions=ROWS,
        tokens=TokensConfig(vocabulary=61, encodings=({"name": "sinusoidal"}, SPEC)),
    ),
}


def _learned(offset: int = 0) -> Learned:
    torch.manual_seed(0)
    return Learned(Geometry(WIDTH, 4, 8, ROWS), offset)


def _inputs(name: str, tokens: int) -> np.ndarray:
    drawn = np.random.default_rng(0)
    return (
        drawn.standard_normal((1, tokens, WIDTH)).astype(np.float32)
        if name == "block"
        else drawn.integers(0, 61, (1, tokens))
    )


@pytest.mark.parametrize("offset", [0, 2])
def test_copied_rows_repeat(offset: int) -> None:
    learned = _learned(offset)
    table, result = (
        learned.table.weight.detach().numpy(),
        learned.extended(LONGER, "copied").table.weight.detach().numpy(),
    )
    for row in range(LONGER + offset):
        old = row if row < offset else offset + (row - offset) % ROWS
        assert np.array_equal(result[row], table[old])


@pytest.mark.parametrize("rows", [ROWS, LONGER, 1000])
def test_interpolated_rows_match_torch(rows: int) -> None:
    learned = _learned(offset=2)
    table, result = (
        learned.table.weight.detach(),
        learned.extended(rows, "interpolated").table.weight.detach(),
    )
    wanted = torch.nn.functional.interpolate(
        table[2:].double().T[None], size=rows, mode="linear", align_corners=True
    )[0].T
    assert torch.equal(result[:2], table[:2]) and worst_error(
        result[2:].numpy(), wanted.numpy()
    ) <= tolerance("float32", 1, 1)


def test_a_single_row_is_interpolated_to_itself() -> None:
    learned = Learned(Geometry(WIDTH, 4, 8, 1))
    result = learned.extended(3, "interpolated").table.weight
    assert torch.equal(result, learned.table.weight.expand(3, WIDTH))


def test_hierarchical_positions_combine_two_trained_rows() -> None:
    learned, share = _learned(offset=2), 0.3
    table, result = (
        learned.table.weight.detach().double().numpy()[2:],
        learned.hierarchical(ROWS**2, share),
    )
    rows = (
        result.embed(torch.zeros(1, ROWS**2, WIDTH), torch.arange(ROWS**2)[None])[0]
        .detach()
        .numpy()
    )
    base = (table - share * table[0]) / (1 - share)
    wanted = np.stack(
        [share * base[p // ROWS] + (1 - share) * base[p % ROWS] for p in range(ROWS**2)]
    )
    assert worst_error(rows, wanted) <= tolerance("float32", 1, 2)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["copied", "hierarchical"])
def test_positions_of_the_old_range_keep_their_outputs(way: str, name: str) -> None:
    model, inputs = seeded(MODELS[name]), _inputs(name, ROWS)
    longer = (
        to_hierarchical(model, LONGER) if way == "hierarchical" else extend_positions(model, LONGER)
    )
    assert longer.config.max_positions == LONGER and model.config.max_positions == ROWS
    assert worst_error(
        eager_session(longer).prefill(inputs), eager_session(model).prefill(inputs)
    ) <= tolerance("float32", 2, 64)


def test_copied_rows_repeat_in_the_model() -> None:
    session, inputs = (
        eager_session(extend_positions(seeded(MODELS["embeddings"]), LONGER)),
        _inputs("embeddings", ROWS),
    )
    first = session.prefill(inputs)
    session.reset()
    assert np.array_equal(first, session.prefill(inputs, start=3 * ROWS))


def test_growing_does_not_change_the_original_model() -> None:
    model = seeded(MODELS["decoder"])
    before = copy.deepcopy(model.state_dict())
    longer = extend_positions(model, LONGER, "interpolated")
    with torch.no_grad():
        for parameter in longer.parameters():
            parameter.zero_()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


CASES = [("copied", "torchscript"), ("interpolated", "ort"), ("hierarchical", "torchscript")]
MORE = [
    (way, target)
    for way in ("copied", "interpolated", "hierarchical")
    for target in ("onnx", "onnx-static", "pt2", "ort-cuda")
]


@pytest.mark.parametrize(
    ("way", "target"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE)],
)
def test_a_longer_model_is_certified_over_its_range(way: str, target: str, tmp_path: Path) -> None:
    model = seeded(MODELS["decoder"])
    longer = (
        to_hierarchical(model, LONGER)
        if way == "hierarchical"
        else extend_positions(model, LONGER, way)
    )
    manifest = export_model(longer, target, tmp_path / "model")
    assert manifest.certificate is not None and manifest.certificate["passed"]
    assert load(tmp_path / "model", provider="cpu").session().prefill(
        _inputs("decoder", LONGER)
    ).shape == (1, LONGER, 61)


REFUSED = {
    "a shorter range": (
        lambda: extend_positions(seeded(BLOCK), ROWS - 1),
        f"expected max_positions of at least {ROWS}, the number of rows, got {ROWS - 1}",
    ),
    "an unknown way": (
        lambda: extend_positions(seeded(BLOCK), LONGER, "mirrored"),
        "expected by to be one of copied, interpolated, got 'mirrored'",
    ),
    "more than the square": (
        lambda: to_hierarchical(seeded(BLOCK), ROWS**2 + 1),
        f"expected max_positions up to {ROWS**2}, the square of the rows",
    ),
    "a share of a half": (
        lambda: to_hierarchical(seeded(BLOCK), LONGER, 0.5),
        "hierarchical: expected share between 0 and 1 and not 0.5",
    ),
    "another encoding": (
        lambda: extend_positions(seeded(block_config(WIDTH, 4, ROWS)), LONGER),
        "expected one learned token encoding, got NoPE",
    ),
    "another table": (
        lambda: extend_positions(
            seeded(
                decoder_config(
                    61, 1, 40, BLOCK, layer_encodings=[{"name": "infused", "table": "trained"}]
                )
            ),
            LONGER,
        ),
        "expected only one weight whose shape depends on max_positions, got also "
        "layers.0.attention.encoding.table.weight",
    ),
    "no model": (
        lambda: extend_positions(torch.nn.Linear(2, 2), LONGER),
        "expected a Stack or an AttentionBlock, got Linear",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_cannot_be_extended_are_refused(case: str) -> None:
    call, said = REFUSED[case]
    with pytest.raises(ValueError, match=said.replace("^", r"\^")):
        call()
