"""Where the weights of presets are looked for."""

from pathlib import Path

import pytest

from posenc_export.models import presets


def test_weights_of_the_installed_package_are_read_where_there_is_no_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "posenc_export_presets"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "tiny-rope.safetensors").symlink_to(presets.IN_THE_TREE / "tiny-rope.safetensors")
    monkeypatch.setattr(presets, "IN_THE_TREE", tmp_path / "none")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert presets.weights_of("tiny-rope") == package / "tiny-rope.safetensors" and presets.weights_of("tiny-alibi") is None


def test_a_preset_without_its_weights_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "IN_THE_TREE", tmp_path)
    monkeypatch.setattr(presets, "PACKAGE", "posenc_export_presets_that_no_one_installed")
    with pytest.raises(ValueError, match=r"preset tiny-rope: expected its weights, package posenc-export-presets, to be installed, got none; pip install"):
        presets.load_preset("tiny-rope")
