"""Queries, keys and values of a module that is read: when they are one product, and that this
changes no number.
"""

import functools
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
from torch import nn

from posenc_export import load
from posenc_export.export import ReadAs, Sources, export
from posenc_export.export.targets import joined_products
from posenc_export.shared.numerics import tolerance, worst_error
from tests.reading.own_modules import POSITIONS, Decoder, inputs, seeded
from tests.traces import artefact

PRODUCTS = ("MatMul", "MatMulNBits", "MatMulIntegerToFloat")


@functools.cache
def _rotations() -> Sources:
    return _sources(seeded("rotations"))


def _sources(module: nn.Module) -> Sources:
    return Sources(module, how=ReadAs(inputs(module, 2, 12), POSITIONS))


def _products(manifest: Any) -> int:
    return sum(manifest.operators.get(name, 0) for name in PRODUCTS)


def _outputs(folder: Path, x: np.ndarray) -> np.ndarray:
    session = load(folder, provider="cpu", threads=1).session()
    first = session.prefill(x[:, :7])
    return np.concatenate((first, session.step(x[:, 7])[:, None]), axis=1)


@pytest.mark.parametrize(
    ("weights", "target"),
    [
        ("int4", "ort-native"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in ((None, "ort"), ("int8", "ort"), ("int8-32", "onnx"), (None, "onnx-static"))
        ),
    ],
)
def test_layers_of_one_input_are_one_product_with_the_same_numbers(
    weights: Optional[str], target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = seeded("rotations")
    sources = _rotations()
    layers = len(sources.model.layers)
    joined = export(sources, target, tmp_path / "joined", weights=weights, verify="quick")
    monkeypatch.setattr(joined_products, "join", lambda op: None)
    apart = export(sources, target, tmp_path / "apart", weights=weights, verify=False)
    assert joined.certificate is not None and joined.certificate["passed"]
    assert _products(apart) - _products(joined) == 2 * layers
    assert joined.weights == apart.weights
    x = inputs(module, 2, 8).numpy()
    ours, theirs = (_outputs(tmp_path / name, x) for name in ("joined", "apart"))
    assert np.array_equal(ours, theirs) or (
        weights is None and worst_error(ours, theirs) <= tolerance("float32", 2, 64)
    )


def _tied(module: Any) -> None:
    """Let keys and values of the first layer share a weight, so that they are one product."""
    module.layers[0].v.weight = module.layers[0].k.weight


def _without_bias(module: Any) -> None:
    """Take the bias of the keys of the first layer."""
    module.layers[0].k.bias = None


@pytest.mark.parametrize(("change", "more"), [(_tied, 1), (_without_bias, 2)])
def test_layers_that_share_a_weight_or_differ_in_form_stay_apart(
    change: Any, more: int, tmp_path: Path
) -> None:
    module = seeded("rotations")
    assert isinstance(module, Decoder)
    change(module)
    whole = load(artefact(_rotations(), "ort")).manifest
    manifest = export(_sources(module), "ort", tmp_path / "artefact", verify="quick")
    assert manifest.certificate is not None and manifest.certificate["passed"]
    assert _products(manifest) - _products(whole) == more
