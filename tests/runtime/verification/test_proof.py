"""Verification from the reference in an artefact, without torch."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posenc_export.commands.cli import main
from posenc_export.export import Sources, export
from posenc_export.runtime import load, verify
from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.verification import grid_inputs, proof
from tests.cases import choice, combinations
from tests.tiny import block, decoder, encoder
from tests.traces import sources

WITHOUT_TORCH = """
import json, sys
for name in ("torch", "onnx", "onnx_ir", "onnxscript"):
    sys.modules[name] = None
from posenc_export.runtime import verify
print(json.dumps(verify(sys.argv[1])))
"""


def _own(config: Any) -> Sources:
    """A user's own model, without information on how to build its weights again."""
    traced = sources(config, 3)
    traced.model.source = {}
    return traced


@pytest.mark.parametrize(
    "target", choice(["onnx", "ort", "onnx-static", "ort-cuda"], ["onnx", "ort"])
)
def test_a_model_of_ones_own_is_proved_without_torch_in_another_process(
    target: str, tmp_path: Path
) -> None:
    manifest = export(_own(decoder("rope")), target, tmp_path / "artefact")
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "artefact")]
    said = subprocess.run(command, check=True, capture_output=True, text=True)
    result, read = json.loads(said.stdout), manifests.read(tmp_path / "artefact")
    assert result["passed"] and result["provider"] == "cpu" and "onnxruntime" in result["machine"]
    assert read.proofs == [result] and read.certificate == manifest.certificate
    assert read.digest == manifest.digest
    cells = manifest.certificate["cells"]  # type: ignore[index]
    assert set(result["cells"]) == {cell for cell in cells if not cell.startswith("oracle")}


FORMS = {
    "block": block("mrope"),
    "encoder": encoder("learned"),
    "bidirectional decoder": decoder("alibi", causal=False),
    "three positions": decoder("rope", max_positions=3),
}


@pytest.mark.parametrize(("target", "form"), combinations(["ort", "torchscript"], list(FORMS)))
def test_every_form_of_model_is_proved_from_its_reference(
    form: str, target: str, tmp_path: Path
) -> None:
    export(_own(FORMS[form]), target, tmp_path / "artefact")
    assert verify(tmp_path / "artefact")["passed"]
    assert len(verify(tmp_path / "artefact")["cells"]) > 5
    assert len(manifests.read(tmp_path / "artefact").proofs) == 1  # one per machine and provider


def test_a_reference_stays_small_for_a_wide_model_and_sees_every_drawn_column(
    tmp_path: Path,
) -> None:
    config = block("rope", width=3000, heads=2, kv_heads=1, head_size=16, max_positions=200)
    manifest = export(_own(config), "ort", tmp_path / "artefact")
    assert manifest.reference is not None and manifest.reference.columns < 3000
    assert manifest.files[proof.FILE_NAME].bytes <= proof.LARGEST
    assert verify(tmp_path / "artefact")["passed"]


def test_other_weights_under_the_same_reference_fail_the_proof(tmp_path: Path) -> None:
    export(_own(block("rope")), "ort", tmp_path / "artefact", verify=False)
    export(sources(block("rope"), 4), "ort", tmp_path / "other", verify=False)
    for name in ("model.onnx", "model.onnx.data"):
        (tmp_path / "artefact" / name).write_bytes((tmp_path / "other" / name).read_bytes())
    manifest = json.loads((tmp_path / "artefact" / manifests.FILE_NAME).read_text())
    assert manifest["certificate"] is None
    read = manifests.read(tmp_path / "other")
    listed = {name: files.entry(tmp_path / "artefact" / name) for name in read.files}
    manifests.write(read.replace(files=listed), tmp_path / "artefact")
    proof = verify(tmp_path / "artefact", record=False)
    assert not proof["passed"] and min(proof["cells"].values()) > 1e-3
    assert manifests.read(tmp_path / "artefact").proofs == []


def test_a_digest_that_came_another_way_is_compared(tmp_path: Path) -> None:
    manifest = export(_own(block("nope")), "ort", tmp_path / "artefact", verify=False)
    loaded = load(tmp_path / "artefact", digest=manifest.digest, provider="cpu")
    assert loaded.manifest.digest == manifest.digest
    for call in (load, verify):
        with pytest.raises(ValueError, match="expected digest 0000.*, got"):
            call(tmp_path / "artefact", digest="0" * 64)  # type: ignore[operator]


@pytest.mark.parametrize("given", [[], ["--no-record"]])
def test_verify_in_a_folder_that_cannot_be_written_says_that_the_result_is_not_recorded(
    given: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    export(_own(block("nope")), "ort", tmp_path / "artefact", verify=False)

    def refuse(path: Path, content: bytes) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(files, "replace", refuse)
    assert main(["verify", str(tmp_path / "artefact"), "--json", *given]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["passed"]
    line = "to record the proof, got Read-only file system; the proof is not recorded"
    assert (line in said.err) == (not given)


def test_a_proof_is_not_recorded_in_an_artefact_that_replaced_the_verified_one(
    tmp_path: Path,
) -> None:
    export(_own(block("nope")), "ort", tmp_path / "artefact", verify=False)
    proof = verify(tmp_path / "artefact", record=False)
    with pytest.raises(ValueError, match="expected digest 0000"):
        manifests.add_proof(tmp_path / "artefact", "0" * 64, proof)
    assert manifests.read(tmp_path / "artefact").proofs == []


def test_inputs_follow_from_names_alone(tmp_path: Path) -> None:
    manifest = export(_own(decoder("nope")), "ort", tmp_path / "artefact", verify=False)
    # The same on every machine and for every version of numpy.
    tokens = grid_inputs.inputs(manifest, (2, 3), "tokens").tolist()
    assert tokens == [[6, 3, 11], [57, 29, 6]]
    of_block = export(_own(block("nope")), "ort", tmp_path / "block", verify=False)
    wide = grid_inputs.inputs(of_block, (50, 20), "tokens")
    assert wide.dtype == np.float32
    assert abs(float(wide.std()) - 1) < 0.02 and abs(float(wide.mean())) < 0.02
