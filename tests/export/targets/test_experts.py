"""Experts on ONNX targets: which nodes compute them, which weights are quantized, and that
artefacts are verified with the tolerance of float32.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from posenc_export.export import ReadAs, Sources, export
from posenc_export.export.quantization.formats import FORMATS
from posenc_export.export.quantization.rounding import rounded
from posenc_export.runtime.graphs import cuda_placement
from posenc_export.shared.numerics import tolerance
from tests.reading.own_modules import Decoder, Experts, Rotated, inputs

pytestmark = pytest.mark.xdist_group("experts")
MIXTURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clamped with biases": {"count": 3, "biased": True, "unit": (1.702, 1.0, 0.4)},
}
TARGETS = ("ort", "onnx", "onnx-static")
PROGRAMS = ("torchscript", "pt2")  # without formats of weights


@functools.cache
def _sources(mixture: str, **changes: Any) -> Sources:
    """Return a decoder of an attention and a layer of experts, which is read once."""
    torch.manual_seed(0)
    module = Decoder((Rotated(), Experts(**MIXTURES[mixture], **changes))).eval()
    return Sources(module, how=ReadAs(inputs(module, 2, 12), 24))


def _cases(*quick: tuple) -> list:
    """Return every mixture, target and format as parameters; those not in `quick` are
    exhaustive.
    """
    cases = [
        (mixture, target, weights)
        for mixture in MIXTURES
        for target in (*TARGETS, *PROGRAMS)
        for weights in (None, *(() if target in PROGRAMS else FORMATS))
    ]
    return [
        case if case in quick else pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in cases
    ]


@pytest.mark.parametrize(
    ("mixture", "target", "weights"),
    _cases(
        ("plain", "ort", None),
        ("clamped with biases", "ort", "int4"),
        ("plain", "ort", "int8-32"),
        ("clamped with biases", "pt2", None),
    ),
)
def test_experts_are_verified_with_the_tolerance_of_float32(
    mixture: str, target: str, weights: Any, tmp_path: Path
) -> None:
    source = _sources(mixture)
    manifest = export(source, target, tmp_path / "made", weights=weights, verify="quick")
    assert manifest.certificate is not None and manifest.certificate["passed"]
    assert manifest.certificate["tolerance"] == tolerance("float32", *source.model.extent())
    node = "MoE" if weights in (None, "int8-32") else "QMoE"
    assert manifest.operators.get(node, 0) == (target == "ort")


@pytest.mark.exhaustive
@pytest.mark.parametrize("weights", [None, *FORMATS])
@pytest.mark.parametrize("target", TARGETS)
def test_signature_mask_is_verified(target: str, weights: Any, tmp_path: Path) -> None:
    manifest = export(_sources("plain"), target, tmp_path / "made", "mask", weights=weights)
    assert manifest.certificate is not None and manifest.certificate["passed"]


@pytest.mark.parametrize("mixture", MIXTURES)
def test_experts_on_cuda_are_products_of_two_dimensions_and_verified(
    mixture: str, tmp_path: Path
) -> None:
    manifest = export(_sources(mixture), "ort-cuda", tmp_path / "made", verify="quick")
    assert manifest.certificate is not None and manifest.certificate["passed"]
    placed = cuda_placement.placed(tmp_path / "made" / "model.onnx")
    assert placed.captured and not placed.addressed and "MoE" not in manifest.operators


@pytest.mark.parametrize("weights", ["int8-32", pytest.param("int4", marks=pytest.mark.exhaustive)])
def test_experts_of_few_bits_on_cuda_are_verified(weights: str, tmp_path: Path) -> None:
    manifest = export(
        _sources("plain"), "ort-cuda", tmp_path / "made", weights=weights, verify="quick"
    )
    assert manifest.certificate is not None and manifest.certificate["passed"]
    assert cuda_placement.placed(tmp_path / "made" / "model.onnx").captured


@pytest.mark.parametrize("weights", FORMATS)
def test_experts_are_rounded_and_routers_are_not(weights: str) -> None:
    model = _sources("clamped with biases").model
    made, result = rounded(model, weights)
    changed = {
        name.rpartition("layers.1.")[2]
        for (name, one), two in zip(model.named_parameters(), made.parameters(), strict=True)
        if not torch.equal(one, two)
    }
    experts = {"gates", "ups", "downs"}
    assert changed >= experts and not any("router" in name or "bias" in name for name in changed)
    # Kernels of other products with 8-bit weights round activations.
    assert (changed == experts) == weights.startswith("int8")
    for name in experts:
        (full,) = (full for full in result if full.endswith(f"layers.1.{name}"))
        weight = torch.from_numpy(result[full][1].weight).transpose(1, 2)
        assert torch.equal(weight, made.get_parameter(full))


@pytest.mark.exhaustive
def test_experts_take_no_more_than_their_bits_on_disk(tmp_path: Path) -> None:
    source = _sources("plain", count=16, sizes=(64, 256))
    sizes = {}
    for weights in (None, "int8", "int4"):
        folder = tmp_path / str(weights)
        manifest = export(source, "ort", folder, verify=False, weights=weights)
        sizes[weights] = manifest.files["model.onnx.data"].bytes
    experts = 3 * 16 * 64 * 256
    assert sizes[None] - sizes["int8"] > 2.9 * experts
    assert sizes[None] - sizes["int4"] > 3.3 * experts
