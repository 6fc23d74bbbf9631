"""The float32 form of an artefact: it computes in float32, and no honest artefact is refused for
its rounded activations.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from posenc_export.commands.cli import main
from posenc_export.export import export
from posenc_export.export.expected import extent
from posenc_export.models.presets import seeded
from posenc_export.runtime import verify
from posenc_export.runtime.artefact.certificate import (
    EXPORTED,
    FAILED,
    FINITE,
    FORM,
    bound_of,
    exported_error,
    passes,
)
from posenc_export.runtime.verification import proof
from posenc_export.runtime.verification.conformance import suite
from posenc_export.runtime.verification.conformance.trial import worst
from posenc_export.runtime.verification.float32_form import load_form
from posenc_export.runtime.verification.measuring import measure
from posenc_export.runtime.verification.scenarios import Level
from posenc_export.shared.numerics import tolerance
from tests.faults.artefacts import described
from tests.tiny import block, decoder
from tests.traces import exported, sources

pytestmark = pytest.mark.xdist_group("rope")
OUTLIER, CHANNELS = 100.0, [3, 17]


@pytest.mark.parametrize("bits", [4, 8])
def test_products_of_accuracy_level_1_are_float32(bits: int) -> None:
    listed = [kernel for kernel in suite.listed() if kernel.operator == "MatMulNBits"]
    kernel = next(kernel for kernel in listed if ("bits", bits) in kernel.nodes[0].attributes)
    (step,) = kernel.nodes
    changed = {**dict(step.attributes), "accuracy_level": 1}
    kernel = dataclasses.replace(kernel, nodes=(step._replace(attributes=tuple(changed.items())),))
    assert worst(suite.trial(kernel))[1] == ""


def _with_outliers() -> Any:
    """Return a decoder with two channels of activations that are 100 times as large as the
    others.
    """
    model = seeded(described("rope", 2))
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data[CHANNELS] *= OUTLIER
        elif name.endswith(("qkv.weight", "gate.weight", "up.weight")):
            weight.data[:, CHANNELS] /= OUTLIER
    return model


def test_a_large_error_of_rounding_is_reported_and_refuses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made"
    given = {"weights": "int8-32", "max_loss": 1000.0, "verify": "quick"}
    found = export(_with_outliers(), "ort", folder, **given).certificate
    assert found is not None and found["passed"] and (exported_error(found) or 0) > 0.1
    assert found["tolerance"] < 1e-4
    assert main(["verify", str(folder), "--quick"]) == 0
    said = "as exported, which rounds activations or caches, errors are within"
    assert f"{said} {exported_error(found):.1e}" in capsys.readouterr().out
    assert main(["inspect", str(folder)]) == 0
    assert f"({exported_error(found):.1e} as exported)" in " ".join(capsys.readouterr().out.split())


def test_an_output_as_exported_that_is_not_finite_fails() -> None:
    cells = {f"{FORM}steps": 1e-7, f"{EXPORTED}steps": 0.9}
    results = {"cells": cells, "tolerance": 1e-5, "bounds": {f"{EXPORTED}steps": FINITE}}
    assert passes(results)
    assert not passes({**results, "cells": {**cells, f"{EXPORTED}steps": FAILED}})


HALF = [
    ("rope", "ort", "float16"),
    ("rope", "onnx", "float16"),
    ("rope", "ort-cuda", "bfloat16"),
    ("rope_longrope", "ort", "float16"),  # branches of If, whose nodes are rewritten too
    ("t5", "ort", "float16"),
    ("factors", "ort", "float16"),
]


def _described(variant: str) -> Any:
    """Return a block, or a decoder with a factor on tokens that half precision rounds."""
    if variant != "factors":
        return block(variant)
    return decoder("sinusoidal", encoding={"name": "sinusoidal", "scale": 20 / 3})


@pytest.mark.parametrize(("variant", "target", "dtype"), HALF)
def test_a_file_of_half_precision_has_a_form_within_the_tolerance_of_float32(
    variant: str, target: str, dtype: str, tmp_path: Path
) -> None:
    model = sources(_described(variant))
    manifest = export(model, target, tmp_path / "made", dtype=dtype, verify=False)
    expected = proof.read(manifest, tmp_path / "made")
    session = load_form(tmp_path / "made", manifest, 1).session()
    accuracy = proof.Accuracy(tolerance("float32", *extent(model.model)))
    result = measure(session, expected, accuracy, lambda _: None, level=Level.QUICK)
    assert result.cells and not result.exceeds(accuracy.tolerance)


def test_the_tolerance_that_a_user_gives_is_that_of_the_float32_form_on_the_cpu(
    tmp_path: Path,
) -> None:
    exported(tmp_path / "made", block("rope"), "ort", dtype="float16")
    result = verify(tmp_path / "made", "cpu", tolerance=1e-9, quick=True)
    assert result["tolerance"] == 1e-9 and not result["passed"]
    failed = [name for name, error in result["cells"].items() if error > bound_of(result, name)]
    assert failed and all(name.startswith(FORM) for name in failed)
