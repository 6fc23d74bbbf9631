"""Artefacts of ort-cuda in bfloat16: numbers are passed in float32, and the same rounded weights
are verified in float32, since no provider of the CPU has bfloat16.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posenc_export.clients import program
from posenc_export.export import VerificationError, export
from posenc_export.export.targets import cached_attention, ort
from posenc_export.ops.graph import Attend
from posenc_export.runtime import load
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.manifest import State
from posenc_export.runtime.graphs.cuda_placement import placed
from posenc_export.runtime.session.buffers import Buffer
from posenc_export.shared.numerics import NOISE, rounding_tolerance
from tests import traces
from tests.tiny import block
from tests.traces import sources

pytestmark = pytest.mark.xdist_group("rope")


@pytest.fixture(scope="module")
def artefact() -> Path:
    return traces.artefact(block("rope"), "ort-cuda", dtype="bfloat16")


def test_caches_have_bfloat16_and_hidden_states_float32(artefact: Path) -> None:
    manifest = manifests.read(artefact)
    assert (manifest.dtype, manifest.inputs[0].dtype, manifest.outputs[0].dtype) == (
        "bfloat16",
        "float32",
        "float32",
    )
    assert {state.dtype for state in manifest.states} == {"bfloat16"}
    assert placed(artefact / "model.onnx").captured
    assert manifest.reference is not None
    assert manifest.reference.tolerance == rounding_tolerance(NOISE["bfloat16"])


def test_memory_of_a_bfloat16_cache_has_two_bytes_for_each_number() -> None:
    state = State("past", "present", "bfloat16", ("batch_size", 3), "replace", 0)
    buffer = Buffer([2, 3], state, "cpu")
    assert (buffer.dtype, buffer.element, buffer.row_bytes) == (np.uint16, 16, 6)


@pytest.mark.parametrize("provider", ["cpu", "auto"])
def test_bfloat16_is_refused_on_the_cpu(provider: str, artefact: Path) -> None:
    with pytest.raises(
        ValueError,
        match="expected (provider cuda for an artefact in bfloat16, got cpu|a machine that can run "
        "provider cuda)",
    ):
        load(artefact, provider=provider)


def test_programs_without_this_package_refuse_bfloat16(artefact: Path) -> None:
    with pytest.raises(
        ValueError, match="expected an artefact in float32 or float16 for --runtime, got bfloat16"
    ):
        program(manifests.read(artefact), "python")


def test_other_targets_refuse_bfloat16(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="expected dtype float32 or float16 for target ort, got bfloat16"
    ):
        export(sources(block("rope")), "ort", tmp_path / "artefact", dtype="bfloat16")


def test_the_rounded_weights_are_verified_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    manifest = export(
        sources(block("rope")),
        "ort-cuda",
        tmp_path / "artefact",
        dtype="bfloat16",
        progress=said.append,
    )
    assert manifest.certificate is None and "ort-cuda: verifying the float32 form" in said
    assert [path.name for path in tmp_path.iterdir()] == ["artefact"]

    def wrong(op: Any, node: Any) -> Any:
        return op.Mul(cached_attention.attend(op, node), op.constant(1.5, op.dtype))

    first, *others = ort.CUDA_LOWERINGS.tables
    lowerings = ort.CUDA_LOWERINGS._replace(tables=({**first, Attend: wrong}, *others))
    monkeypatch.setattr(ort, "CUDA_LOWERINGS", lowerings)
    with pytest.raises(VerificationError):
        export(sources(block("rope")), "ort-cuda", tmp_path / "wrong", dtype="bfloat16")


def test_weights_are_rounded_to_bfloat16() -> None:
    model = sources(block("rope")).of("bfloat16").model
    assert {parameter.dtype for parameter in model.parameters()} <= {torch.bfloat16, torch.float32}
