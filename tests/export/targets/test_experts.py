"""Mixtures of experts on ONNX targets: which nodes compute them, which weights are quantized,
and that artefacts are verified with the tolerance of float32.
"""

import copy
from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from msgspec.structs import replace

from posenc_export.export import export
from posenc_export.export.quantization.formats import FORMATS
from posenc_export.export.quantization.rounding import rounded
from posenc_export.models.config_json import widest
from posenc_export.models.parts.experts import ChosenInFloat32, Experts
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.runtime.graphs import cuda_placement
from posenc_export.shared.numerics import tolerance
from tests.traces import sources

pytestmark = pytest.mark.xdist_group("experts")
MIXTURES: Dict[str, Dict[str, Any]] = {
    "plain": {"experts": 5, "chosen": 2},
    "clamped with biases": {"experts": 3, "chosen": 2, "bias": True,
        "unit": {"name": "clamped", "limit": 0.4}},
    "weights on the input": {"experts": 4, "chosen": 1, "on": "input", "weights": "sigmoid",
        "shared": 12},
    "two weights on the input": {"experts": 4, "chosen": 2, "on": "input", "weights": "sigmoid"},
    "shared": {"experts": 6, "chosen": 3, "shared": 12},
    "all": {"experts": 3, "chosen": 3},
    "relu": {"experts": 3, "chosen": 2, "unit": {"name": "gated", "activation": "relu"}},
}  # fmt: skip
SPARSE = (
    "plain",
    "all",
    "clamped with biases",
    "weights on the input",
    "shared",
)  # those that MoE can represent
TARGETS = ("ort", "onnx", "onnx-static")


def _decoder(mixture: str) -> Any:
    """Describe a decoder of one layer, whose widths are not multiples of a block."""
    plain = decoder_config(
        257, 1, 56, block_config(40, 4, 24, kv_heads=2, head_size=16, encoding={"name": "rope"})
    )
    mlp = {"name": "experts", "hidden": 24, **MIXTURES[mixture]}
    return replace(
        plain, layers={name: replace(kind, mlp=mlp) for name, kind in plain.layers.items()}
    )


def _cases(*quick: tuple) -> list:
    """Return every mixture, target and format as parameters; those not in `quick` are
    exhaustive.
    """
    cases = [
        (mixture, target, weights)
        for mixture in MIXTURES
        for target in TARGETS
        for weights in (None, *FORMATS)
    ]
    return [
        case if case in quick else pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in cases
    ]


@pytest.mark.parametrize(
    ("mixture", "target", "weights"),
    _cases(
        ("plain", "ort", None), ("clamped with biases", "ort", "int4"), ("shared", "ort", "int8-32")
    ),
)
def test_experts_are_verified_with_the_tolerance_of_float32(
    mixture: str, target: str, weights: Any, tmp_path: Path
) -> None:
    config = _decoder(mixture)
    manifest = export(sources(config), target, tmp_path / "made", weights=weights, verify="quick")
    assert manifest.certificate is not None and manifest.certificate["passed"]
    assert manifest.certificate["tolerance"] == tolerance("float32", 1, widest(config))
    node = "MoE" if weights in (None, "int8-32") else "QMoE"
    assert manifest.operators.get(node, 0) == (target == "ort" and mixture in SPARSE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("weights", [None, *FORMATS])
@pytest.mark.parametrize("target", TARGETS)
def test_signature_mask_is_verified(target: str, weights: Any, tmp_path: Path) -> None:
    manifest = export(
        sources(_decoder("plain")), target, tmp_path / "made", "mask", weights=weights
    )
    assert manifest.certificate is not None and manifest.certificate["passed"]


def test_a_choice_of_experts_in_float16_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match="expected dtype float32 for a model that chooses 2 of 5 experts, got float16",
    ):
        export(sources(_decoder("plain")), "ort", tmp_path / "made", dtype="float16")


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", TARGETS)
def test_experts_that_are_all_chosen_are_verified_in_float16(target: str, tmp_path: Path) -> None:
    manifest = export(sources(_decoder("all")), target, tmp_path / "made", dtype="float16")
    assert manifest.certificate is not None
    assert manifest.certificate["passed"]
    assert "MoE" not in manifest.operators


@pytest.mark.parametrize("mixture", ["clamped with biases", "shared"])
def test_experts_on_cuda_are_products_of_two_dimensions_and_verified(
    mixture: str, tmp_path: Path
) -> None:
    manifest = export(sources(_decoder(mixture)), "ort-cuda", tmp_path / "made", verify="quick")
    assert manifest.certificate is not None and manifest.certificate["passed"]
    placed = cuda_placement.placed(tmp_path / "made" / "model.onnx")
    assert placed.captured and not placed.addressed and "MoE" not in manifest.operators


@pytest.mark.parametrize("weights", ["int8-32", pytest.param("int4", marks=pytest.mark.exhaustive)])
def test_experts_of_few_bits_on_cuda_are_verified(weights: str, tmp_path: Path) -> None:
    manifest = export(
        sources(_decoder("plain")), "ort-cuda", tmp_path / "made", weights=weights, verify="quick"
    )
    assert manifest.certificate is not None and manifest.certificate["passed"]
    assert cuda_placement.placed(tmp_path / "made" / "model.onnx").captured


def test_logits_of_a_router_that_are_equal_in_float16_choose_as_in_float32() -> None:
    torch.manual_seed(0)
    part = Experts(8, 4, 1, 8)
    with torch.no_grad():
        part.router.weight.copy_(
            part.router.weight[:1] * torch.tensor([[1, 1.0002, 1.0001, 0.9]]).T
        )
    x = torch.randn(2, 5, 8).half()
    half = copy.deepcopy(part).half()
    ChosenInFloat32.of(half, copy.deepcopy(part.router))
    chosen = part.route(x.float()).argmax(-1)
    assert len(chosen.unique()) > 1 and torch.equal(half.route(x).argmax(-1), chosen)
    assert half.route(x).dtype == torch.float16


@pytest.mark.parametrize("weights", FORMATS)
def test_experts_are_rounded_and_routers_are_not(weights: str) -> None:
    model = seeded(_decoder("clamped with biases"))
    made, result = rounded(model, weights)
    changed = {
        name.rpartition("mlp.")[2]
        for (name, one), two in zip(model.named_parameters(), made.parameters(), strict=True)
        if not torch.equal(one, two)
    }
    experts = {"gates", "ups", "downs"}
    assert changed >= experts and not any("router" in name or "bias" in name for name in changed)
    assert (changed == experts) == weights.startswith(
        "int8"
    )  # kernels of other products with 8-bit weights round activations
    part = next(part for part in made.modules() if isinstance(part, Experts))
    for name in experts:
        codes = next(codes for full, (_, codes) in result.items() if full.endswith(f"mlp.{name}"))
        assert torch.equal(torch.from_numpy(codes.weight).transpose(1, 2), getattr(part, name))


@pytest.mark.exhaustive
def test_experts_take_no_more_than_their_bits_on_disk(tmp_path: Path) -> None:
    plain = decoder_config(64, 1, 256, block_config(64, 4, 24, encoding={"name": "rope"}))
    mlp = {"name": "experts", "hidden": 256, "experts": 16, "chosen": 2}
    config = replace(
        plain, layers={name: replace(kind, mlp=mlp) for name, kind in plain.layers.items()}
    )
    sizes = {
        weights: _size(config, weights, tmp_path / str(weights)) for weights in (None, *FORMATS)
    }
    experts = 3 * 16 * 64 * 256
    assert sizes[None] - sizes["int8"] > 2.9 * experts
    assert sizes[None] - sizes["int4"] > 3.3 * experts


def _size(config: Any, weights: Any, folder: Path) -> int:
    manifest = export(sources(config), "ort", folder, verify=False, weights=weights)
    return manifest.files["model.onnx.data"].bytes
