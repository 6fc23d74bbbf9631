"""The presets: their weights are those of their artefacts, which pass verification without
torch.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import presets as written
from posenc_export.export.expected import eager_session
from posenc_export.models import presets
from posenc_export.runtime import load, verify
from posenc_export.shared import preset_folders
from posenc_export.shared.numerics import worst_error
from tests.cases import choice

NAMES = preset_folders.NAMES
TEXT = np.array([[*b"def read_lines(path):\n    with open(path) as file:\n"]])


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_gives_the_logits_of_its_artefact(name: str) -> None:
    model, result = presets.load_preset(name), load(name, provider="cpu", threads=1)
    assert result.manifest.reference is not None and result.manifest.source == {"preset": name}
    error = worst_error(result.session().prefill(TEXT), eager_session(model).prefill(TEXT))
    assert error <= result.manifest.reference.tolerance


@pytest.mark.parametrize("name", choice(NAMES, ["small-t5"]))
def test_the_artefact_of_a_preset_passes_verification(name: str) -> None:
    assert verify(name, provider="cpu")["passed"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_writing_a_preset_again_gives_the_same_weights(name: str, tmp_path: Path) -> None:
    written.write(name, presets.load_preset(name), tmp_path)
    again = json.loads((tmp_path / name / "posenc.json").read_bytes())["files"]["model.onnx.data"]
    assert again["sha256"] == load(name, provider="cpu").manifest.files["model.onnx.data"].sha256


def test_a_preset_runs_without_torch_and_onnx() -> None:
    code = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'onnx', 'safetensors')); from "
        "posenc_export.commands.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ["generate", "tiny-rope", "--prompt", "def ", "--max-tokens", "8"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("def ") and not done.stderr


def test_the_installed_package_is_used_outside_the_source_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "posenc_export_presets"
    shutil.copytree(preset_folders.SOURCE_TREE / "tiny-rope", package / "tiny-rope")
    (package / "__init__.py").touch()
    monkeypatch.setattr(preset_folders, "SOURCE_TREE", tmp_path / "none")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert preset_folders.preset_folder("tiny-rope") == package / "tiny-rope"
    assert preset_folders.preset_folder("tiny-alibi") is None


def test_a_preset_without_installed_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preset_folders, "SOURCE_TREE", tmp_path)
    monkeypatch.setattr(preset_folders, "PACKAGE", "posenc_export_presets_that_no_one_installed")
    said = r"posenc-export-presets with its weights, got none; pip install 'posenc-export\[presets"
    with pytest.raises(ValueError, match=f"preset tiny-rope: expected the package {said}"):
        presets.load_preset("tiny-rope")
