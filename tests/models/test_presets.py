"""Locations of the weights of presets."""

from pathlib import Path

import pytest

from posenc_export.models import presets


def test_weights_of_the_installed_package_are_used_outside_the_source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "posenc_export_presets"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "tiny-rope.safetensors").symlink_to(presets.SOURCE_TREE / "tiny-rope.safetensors")
    monkeypatch.setattr(presets, "SOURCE_TREE", tmp_path / "none")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert presets.weights_of("tiny-rope") == package / "tiny-rope.safetensors" and presets.weights_of("tiny-alibi") is None


def test_a_preset_without_installed_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "SOURCE_TREE", tmp_path)
    monkeypatch.setattr(presets, "PACKAGE", "posenc_export_presets_that_no_one_installed")
    with pytest.raises(ValueError, match=r"preset tiny-rope: expected the package posenc-export-presets with its weights, got none; run pip install"):
        presets.load_preset("tiny-rope")
