"""Tables of positions are compared with their formulas at every position of the range."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posenc_export.encodings import Geometry, build
from posenc_export.export import export, numbers
from posenc_export.export.quantization.formats import FORMATS
from posenc_export.export.verify import VerificationError
from posenc_export.models.presets import seeded
from posenc_export.runtime.artefact import manifest as manifests
from tests.cases import choice
from tests.tiny import VARIANTS, block, works

RANGE = 3000
# Tables of positions without a formula of rows: trained, or results of a recursion or a network.
UNSTATED = {
    "recurrent": {"table"},
    "floater": {"table"},
    "dynamic_bias": {"table"},
    "swin_v2": {"offsets"},
    "decomposed_2d": {"shares"},
    "shaw": {"waves"},
    "transformer_xl": {"ends"},
    "alibi": {"slopes", "products"},
    "sandwich": {"ratios"},
    "sinusoidal": {"frequencies"},
    "rope_dynamic": {"second"},
    "rope_normalized": {"cos", "sin"},
}


def _model(variant: str, positions: int = RANGE) -> Any:
    geometry = Geometry(48, 6, 16, positions, works(variant, "causal"), 3)
    model = torch.nn.Module()
    model.encoding = build(VARIANTS[variant], geometry)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_row_of_a_table_is_that_of_its_formula(variant: str) -> None:
    check = numbers.compare_tables(_model(variant))
    assert check.failures == {} and check.worst <= 1
    unstated = UNSTATED.get(str(VARIANTS[variant]["name"]), set())
    assert {name.rpartition(".")[2] for name in check.skipped} <= unstated


def test_a_range_of_many_positions_is_compared_whole() -> None:
    check = numbers.compare_tables(_model("rope", 1 << 18))
    assert check.failures == {} and check.compared == 2 << 18


STATED = [
    ("rope", "cos"),
    ("rope_longrope", "long_cos"),
    ("rope_dynamic", "first"),
    ("xpos", "k_cos"),
    ("pope", "sin"),
    ("logn-steps", "factors"),
    ("infused", "waves"),
    ("multiplicative-sinusoidal", "factors"),
    ("sinusoidal-fairseq", "table"),
    ("sinusoidal_2d", "of_row"),
    ("transformer_xl", "waves"),
    ("sandwich", "sums"),
    ("mrope", "cos"),
]


@pytest.mark.parametrize(("variant", "name"), STATED)
def test_rows_of_zeros_are_found(variant: str, name: str) -> None:
    model = _model(variant)
    getattr(model.encoding, name).rows[400:432] = 0
    assert list(numbers.compare_tables(model).failures) == [f"encoding.{name}"]


@pytest.mark.parametrize(("variant", "name"), STATED)
def test_a_number_that_is_off_by_four_units_in_the_last_place_is_found(
    variant: str, name: str
) -> None:
    model = _model(variant)
    rows = getattr(model.encoding, name).rows
    rows[2001, 0] += 4 * float(np.spacing(np.float32(rows[2001, 0].abs())))
    assert list(numbers.compare_tables(model).failures) == [f"encoding.{name}"]


@pytest.mark.parametrize("weights", choice([None, *FORMATS], [None, "int4"]))
def test_export_refuses_a_table_with_a_hole_in_every_format(
    weights: str | None, tmp_path: Path
) -> None:
    model = seeded(block("rope", max_positions=440))
    for name, buffer in model.named_buffers():
        if name.endswith("cos.rows"):
            buffer[400:432] = 0
    with pytest.raises(VerificationError, match="check 'tables' to pass, got .*row 4[0-3][0-9]"):
        export(model, "ort", tmp_path / "made", weights=weights, verify="quick")


def test_the_certificate_says_how_many_rows_were_compared(tmp_path: Path) -> None:
    export(seeded(block("rope", max_positions=440)), "ort", tmp_path / "made", verify="quick")
    certificate = manifests.read(tmp_path / "made").certificate
    assert certificate is not None and certificate["checks"]["tables"]["compared"] >= 880
