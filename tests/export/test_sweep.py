"""Sweeps of temporary folders while other exports create, publish and remove theirs."""

import os
import shutil
from pathlib import Path

import pytest

from posenc_export.export import publish
from posenc_export.export.publish import StagingFolder
from posenc_export.runtime import files

STAGING = f"{files.PREFIX}0123456789abcdef"


@pytest.mark.parametrize("name", [STAGING, f"{files.ASIDE}artefact"])
def test_a_folder_that_another_export_removes_during_a_sweep_is_no_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).mkdir()
    is_dir = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: is_dir(path) and (path.name != name or path.rmdir() is None))
    publish.sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_removed_is_left_and_the_others_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_sweeps_race_with_exports_into_the_same_folder(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for number in range(30):
                staging = StagingFolder([tmp_path / str(number)])
                with staging as path:
                    (path / "made").mkdir()
                    (path / "made" / "file").touch()
                    staging.publish([path / "made"])
            status = 0
        finally:
            os._exit(status)
    for _ in range(300):
        publish.sweep(tmp_path)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    publish.sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(map(str, range(30)))
