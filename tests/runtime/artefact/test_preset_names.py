"""Commands and `load` take the name of a preset where they take the folder of an artefact."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from posenc_export.commands.cli import main
from posenc_export.models.presets import PRESETS
from posenc_export.runtime import load
from posenc_export.shared import preset_folders
from tests.serve.models import artefact

pytestmark = pytest.mark.xdist_group("serve")  # the worker that exports the same model


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package with one preset, and enter an empty folder."""
    place = tmp_path / "package"
    shutil.copytree(artefact("ort"), place / "tiny-rope")
    monkeypatch.setattr(preset_folders, "SOURCE_TREE", place)
    monkeypatch.setattr(preset_folders, "PACKAGE", "posenc_export_presets_that_no_one_installed")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return place


def test_a_name_is_loaded_as_its_folder(package: Path) -> None:
    prompt = np.array([[100, 101, 102]])
    assert np.array_equal(
        load("tiny-rope").session().prefill(prompt),
        load(package / "tiny-rope").session().prefill(prompt),
    )


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--prompt", "a", "--max-tokens", "2"],
        ["inspect"],
        ["inspect", "--runtime", "python"],
    ],
)
def test_commands_take_a_name(command: list, package: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([*command, "tiny-rope"]) == 0 and capsys.readouterr().out


def test_verify_does_not_write_to_a_preset(package: Path) -> None:
    before = (package / "tiny-rope" / "posenc.json").read_bytes()
    assert main(["verify", "tiny-rope"]) == 0
    assert (package / "tiny-rope" / "posenc.json").read_bytes() == before


def test_a_folder_takes_precedence_over_a_preset_of_its_name(package: Path) -> None:
    Path("tiny-rope").mkdir()
    with pytest.raises(ValueError, match="tiny-rope: expected posenc.json in it, got none"):
        load("tiny-rope")


REFUSALS = {
    "tiny-rop": "did you mean tiny-rope?",
    "small-t5": "for the preset of this name, pip install 'posenc-export[presets]'",
    "model": "or a preset: tiny-rope, tiny-alibi",
    "file.txt": "expected posenc.json in it, got a file; give a folder that `posenc export` wrote",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_an_unknown_name_is_refused_with_the_remedy(
    name: str, package: Path, capsys: pytest.CaptureFixture
) -> None:
    Path("file.txt").touch()
    assert main(["generate", name, "--prompt", "a"]) == 2
    assert REFUSALS[name] in capsys.readouterr().err


def test_every_preset_has_a_description() -> None:
    assert tuple(PRESETS) == preset_folders.NAMES
