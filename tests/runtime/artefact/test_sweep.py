"""Sweeps of temporary folders while other exports create, publish and remove theirs."""

import os
import shutil
from pathlib import Path

import pytest

from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact.publish import StagingFolder

STAGING = f"{files.PREFIX}0123456789abcdef"


@pytest.mark.parametrize("name", [STAGING, f"{files.ASIDE}artefact"])
def test_a_folder_that_another_export_removes_during_a_sweep_is_no_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    is_dir = Path.is_dir
    monkeypatch.setattr(
        Path, "is_dir", lambda path: is_dir(path) and (path.name != name or path.rmdir() is None)
    )
    with StagingFolder([tmp_path / "new"]):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_removed_is_left_and_the_others_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = f"{files.PREFIX}fedcba9876543210"
    for name in (STAGING, other):
        (tmp_path / name).mkdir()
    rmtree = shutil.rmtree

    def refuse(path: Path, **named: bool) -> None:
        if path.name == STAGING:
            raise PermissionError(path)
        rmtree(path, **named)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with StagingFolder([tmp_path / "new"]):
        pass
    assert os.listdir(tmp_path) == [STAGING]


def test_an_export_leaves_the_staging_folder_of_another_running_export(tmp_path: Path) -> None:
    with StagingFolder([tmp_path / "slow"]) as path:
        with StagingFolder([tmp_path / "quick"]):
            assert path.is_dir()
        assert os.listdir(tmp_path) == [path.name]
