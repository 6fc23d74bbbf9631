"""OpenVINO as a provider: the parity grid for every set of operators, and errors for what it
does not support or computes differently.
"""

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from posenc_export.commands.cli import main
from posenc_export.export import export
from posenc_export.models.presets import seeded
from posenc_export.runtime import load, verify
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.graphs import providers
from posenc_export.shared.numerics import (
    BFLOAT16,
    BFLOAT16_NOISE,
    rounding_tolerance,
    tolerance,
    worst_error,
)
from tests.tiny import block, decoder, encoder, reading
from tests.traces import exported

PRESENT = importlib.util.find_spec("openvino") is not None
installed = pytest.mark.skipif(not PRESENT, reason="openvino is not installed")
pytestmark = pytest.mark.xdist_group(
    "plain runtimes"
)  # one worker, which traces the models of these files once
# One encoding of each set of operators that a target lowers, without those that are refused below.
ENCODINGS = ("rope", "alibi", "t5", "learned", "rope_longrope", "conditional_conv", "fire", "logn")
QUICK = [("rope", "ort", "positions"), ("rope", "onnx", "mask")]
REFUSED = (
    "rope_longrope",
    "ort",
    "positions",
)  # keys in two caches, one of which TensorScatter writes
SLOW = [
    case
    for case in itertools.product(ENCODINGS, ("onnx", "ort"), ("positions", "mask"))
    if case != REFUSED
]
GRID = [
    *QUICK,
    *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in SLOW if case not in QUICK),
]


def _attending(**changes: Any) -> Any:
    """Return a decoder with other options of attention."""
    whole = decoder("rope", max_positions=64)
    ((name, layer),) = whole.layers.items()
    return replace(
        whole, layers={name: replace(layer, attention=replace(layer.attention, **changes))}
    )


OTHERS = {
    "block": block("rope"),
    "block of coordinates": block("mrope"),
    "encoder": encoder("t5"),
    "decoder of an encoder": reading("rope", max_positions=64),
    "sinks": _attending(sinks=True),
    "window": _attending(sees={"name": "window", "size": 5}),
}


def _made(config: Any, target: str, folder: Path, signature: str = "positions", **how: Any) -> Path:
    return exported(folder, config, target, signature=signature, **how)


@installed
@pytest.mark.parametrize(("name", "target", "signature"), GRID)
def test_every_division_into_calls_gives_the_outputs_of_the_module(
    name: str, target: str, signature: str, tmp_path: Path
) -> None:
    proof = verify(_made(decoder(name), target, tmp_path / "a", signature), provider="openvino")
    assert proof["passed"] and proof["provider"] == "openvino" and "openvino 20" in proof["machine"]


@installed
@pytest.mark.parametrize(
    ("model", "target"),
    [
        pytest.param(*case, marks=() if case == ("block", "ort") else pytest.mark.exhaustive)
        for case in itertools.product(OTHERS, ("onnx", "ort"))
    ],
)
def test_other_models_give_the_outputs_of_the_module(
    model: str, target: str, tmp_path: Path
) -> None:
    assert verify(_made(OTHERS[model], target, tmp_path / "a"), provider="openvino")["passed"]


@installed
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("config", "target", "how", "reason"),
    [
        (decoder("shaw"), "ort", {}, "GroupQueryAttention: qk_output is not supported"),
        (_attending(softcap=5.0), "ort", {}, "GroupQueryAttention: softcap is not supported"),
        (decoder("rope"), "ort", {"dtype": "float16"}, ".*QuickGelu"),
        (decoder("rope"), "onnx", {"weights": "int8"}, ".*DequantizeLinear"),
        (decoder("rope"), "ort", {"weights": "int8"}, ".*MatMulIntegerToFloat"),
    ],
    ids=["scores", "softcap", "float16", "int8", "products of int8"],
)
def test_a_graph_that_openvino_does_not_support_is_refused_in_one_line(
    config: Any, target: str, how: Any, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(
        ValueError,
        match=f"^runtime: expected model.onnx to be a graph that OpenVINO reads, got {reason}.*; "
        "give provider cpu$",
    ):
        load(_made(config, target, tmp_path / "a", **how), provider="openvino")


@installed
@pytest.mark.exhaustive
def test_quantized_weights_give_the_outputs_of_the_rounded_module(tmp_path: Path) -> None:
    assert verify(
        _made(decoder("rope", max_positions=64), "ort", tmp_path / "a", weights="int4"),
        provider="openvino",
    )["passed"]


@installed
def test_bfloat16_has_its_own_tolerance_and_its_own_proof(tmp_path: Path) -> None:
    folder = _made(decoder("rope"), "onnx", tmp_path / "a", "mask")
    try:
        result = verify(folder, provider="openvino-bf16")
    except ValueError as error:
        pytest.skip(str(error))  # the processor has no bfloat16
    verify(folder, provider="openvino")
    tolerance = manifests.read(folder).reference.tolerance  # type: ignore[union-attr]
    assert result["passed"] and result["tolerance"] > 100 * tolerance
    assert max(result["cells"].values()) > tolerance  # the error shows that it computes in bfloat16
    assert [proof["provider"] for proof in manifests.read(folder).proofs] == [
        "openvino-bf16",
        "openvino",
    ]


@installed
@pytest.mark.parametrize(("name", "passes"), [("rope", True), ("alibi", False)])
def test_distances_that_bfloat16_does_not_hold_fail_verification(
    name: str, passes: bool, tmp_path: Path
) -> None:
    folder = _made(decoder(name, max_positions=600), "ort", tmp_path / "a")
    try:
        proof = verify(folder, provider="openvino-bf16", record=False)
    except ValueError as error:
        pytest.skip(str(error))  # the processor has no bfloat16
    assert (proof["cells"]["cache filled to its end"] <= proof["tolerance"]) == passes and proof[
        "passed"
    ] == passes


@installed
@pytest.mark.parametrize(
    "name",
    [
        "fox",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("cope", "rope_dynamic", "rope_2d")
        ),
    ],
)
def test_a_graph_with_float64_operations_is_refused(name: str, tmp_path: Path) -> None:
    folder = _made(block(name), "onnx", tmp_path / "a")
    with pytest.raises(
        ValueError,
        match="expected a graph without float64 for provider openvino, got .* in float64; give "
        "provider cpu",
    ):
        load(folder, provider="openvino")


@installed
def test_rotations_in_two_levels_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posenc_export.encodings.shared.tables.LARGE", 1)
    folder = tmp_path / "a"
    export(seeded(block("rope")), "onnx", folder, verify=False)
    x = np.random.default_rng(0).standard_normal((1, 40, 48), np.float32)
    own, wanted = (load(folder, provider=name).session().prefill(x) for name in ("openvino", "cpu"))
    assert worst_error(own, wanted) <= tolerance("float32", 1, 48)


@installed
def test_an_older_openvino_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _made(decoder("rope"), "ort", tmp_path / "a")
    monkeypatch.setattr("openvino.__version__", "2025.3.0-19807-44526285f24")
    with pytest.raises(
        ValueError,
        match="expected openvino 2026.4 or later, got 2025.3.0; pip install "
        "'posenc-export.openvino.'",
    ):
        load(folder, provider="openvino")


@pytest.mark.skipif(PRESENT, reason="openvino is installed")
def test_the_error_for_a_missing_openvino_names_the_extra_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _made(decoder("rope"), "ort", tmp_path / "a")
    assert main(["verify", str(folder), "--provider", "openvino"]) == 2
    assert "pip install 'posenc-export[openvino]'" in capsys.readouterr().err


@pytest.mark.parametrize("provider", providers.OPENVINO)
def test_unsupported_targets_and_operators_are_refused_with_their_name(
    provider: str, tmp_path: Path
) -> None:
    read = manifests.read(_made(decoder("rope"), "ort", tmp_path / "a"))
    for changed, found in (
        (replace(read, target="onnx-static"), "target onnx-static"),
        (replace(read, operators={"GRU": 1}), "operator GRU"),
    ):
        with pytest.raises(
            ValueError,
            match="expected target onnx or ort without TensorScatter and GRU for provider "
            f"{provider}, got {found}; give provider cpu",
        ):
            providers.check_name(provider, changed)
    with pytest.raises(
        ValueError,
        match=f"expected provider cpu for target pt2, got {provider}; export target onnx or ort",
    ):
        providers.check_name(provider, replace(read, target="pt2"))


def test_a_misspelled_provider_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got 'openvino-fp16'; did you mean openvino-bf16?"):
        load(_made(decoder("rope"), "ort", tmp_path / "a"), provider="openvino-fp16")


def test_errors_of_products_rounded_to_bfloat16_are_within_the_tolerance() -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((64, 48)).astype(np.float32)
    weights = [
        random.standard_normal((48, 48)).astype(np.float32) / np.sqrt(48, dtype=np.float32)
        for _ in range(8)
    ]
    exact = rounded = x
    for weight in weights:
        exact, rounded = exact @ weight, _bfloat16(rounded) @ _bfloat16(weight)
    error = worst_error(rounded, exact)
    assert BFLOAT16 / 8 < error <= rounding_tolerance(BFLOAT16_NOISE)


def _bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to the nearest float32 number whose lower 16 bits are 0."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
