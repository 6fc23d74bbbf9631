"""Publishing of folders in one step: kills between any two file operations, full disks,
destinations that cannot be replaced.
"""

import errno
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import pytest

from posenc_export.export import ExportOptions, export, export_all
from posenc_export.runtime.artefact import files, publish
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.publish import StagingFolder
from tests.tiny import block
from tests.traces import artefact, sources

KILLED = 9
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")
# Whether there is an artefact to replace, and whether the system exchanges two folders.
PLACES = pytest.mark.parametrize(
    ("replaces", "exchanges"),
    [(False, True), (True, True), (True, False)],
    ids=["fresh", "replacement-exchange", "replacement-renames"],
)
# The largest groups run first, while processes are small and quickly forked.
pytestmark = pytest.mark.xdist_group("publish")


@pytest.fixture(scope="module")
def artefacts() -> tuple[Path, Path]:
    """Two complete, different artefacts."""
    return artefact(block("nope"), "torchscript"), artefact(block("rope"), "torchscript")


def _publish(source: Path, place: Path) -> None:
    """Publish a copy of an existing artefact, like an export."""
    staging = StagingFolder([place])
    with staging as path:
        result = path / "made" / "one"
        result.mkdir(parents=True)
        for file in sorted(source.iterdir()):
            if file.name != manifests.FILE_NAME:
                files.write(result / file.name, file.read_bytes())
        manifests.write(manifests.read(source), result)
        staging.publish([result])


def _same(folder: Path, artefact: Path) -> bool:
    return manifests.read(folder) == manifests.read(artefact)


def _left(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir() if path.name.startswith(files.PREFIX))


class Countdown:
    """Calls `end` instead of this process's file operation number `count`, counted from 0."""

    def __init__(self, count: int, end: Callable[[], None]) -> None:
        self.left, self.end = count, end

    def tick(self) -> None:
        self.left -= 1
        if self.left < 0:
            self.end()

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS or (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
        ):
            self.tick()

    def seam(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call that raises no audit event."""

        def counted(*arguments: Any, **named: Any) -> Any:
            self.tick()
            return call(*arguments, **named)

        return counted


def _killed_at(count: int, work: Callable[[], None]) -> bool:
    """Return whether a child process was killed before its file operation number `count`; False
    if it finished.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            countdown = Countdown(count, lambda: os._exit(KILLED))
            os.fsync, publish.exchange = countdown.seam(os.fsync), countdown.seam(publish.exchange)
            sys.addaudithook(countdown.hear)
            work()
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, KILLED), status
    return status == KILLED


@PLACES
def test_a_kill_between_any_two_file_operations_leaves_a_complete_artefact_or_none(
    replaces: bool,
    exchanges: bool,
    artefacts: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not exchanges:
        monkeypatch.setattr(publish, "exchange", lambda one, other: False)
    (old, new), place, count, killed = artefacts, tmp_path / "some" / "artefact", 0, True
    while killed:
        shutil.rmtree(tmp_path / "some", ignore_errors=True)
        if replaces:
            _publish(old, place)
        killed = _killed_at(count, lambda: _publish(new, place))
        result = files.locate(place)
        whole = [artefact for artefact in (old, new) if result.exists() and _same(result, artefact)]
        assert whole in ([old], [new]) if replaces else whole == [new] or not result.exists(), count
        assert killed or whole == [new]
        _publish(old, place)
        assert _same(place, old)
        assert _left(place.parent) == []
        count += 1
    print(f"{count - 1} places to be killed at")
    assert count > 15


def test_a_kill_while_a_certificate_is_written_leaves_the_old_or_the_new_one(
    artefacts: tuple[Path, Path], tmp_path: Path
) -> None:
    place, count, killed = tmp_path / "artefact", 0, True
    shutil.copytree(artefacts[0], place)
    before = manifests.read(place)
    certificate = {"passed": True, "tolerance": 1e-5, "provider": "cpu", "machine": "some"}
    after = before.replace(certificate={**certificate, "cells": {"a": 0.0}})
    while killed:
        manifests.write(before, place)
        killed = _killed_at(count, lambda: manifests.write(after, place))
        assert manifests.read(place) in ([before, after] if killed else [after])
        count += 1
    assert count > 4
    # Temporary files of killed processes do not count as foreign files.
    _publish(artefacts[1], place)
    assert sorted(os.listdir(place)) == ["model.pt", manifests.FILE_NAME, "reference.bin"]


@PLACES
def test_a_disk_that_is_full_at_any_file_operation_leaves_the_old_artefact(
    replaces: bool,
    exchanges: bool,
    artefacts: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (old, new), place = artefacts, tmp_path / "some" / "artefact"
    if not exchanges:
        monkeypatch.setattr(publish, "exchange", lambda one, other: False)
    if replaces:
        _publish(old, place)
    count, full = 0, True
    while full:
        full = False
        with monkeypatch.context() as patch:
            countdown = Countdown(count, lambda: None)
            countdown.end = lambda counted=countdown: _refuse_once(counted)  # type: ignore[misc]
            of_system = [(os, name) for name in ("fsync", "rename", "replace")]
            ours: Any = [(publish, "exchange"), (Path, "mkdir"), (files, "write")]
            for module, name in of_system + ours:
                patch.setattr(module, name, countdown.seam(getattr(module, name)))
            try:
                _publish(new, place)
            except OSError as error:
                assert error.errno == errno.ENOSPC
                full = True
        if full:
            assert _same(place, old) if replaces else not place.exists(), count
            assert not tmp_path.joinpath("some").exists() or _left(tmp_path / "some") == []
        count += 1
    assert _same(place, new) and count > 15


def _refuse_once(countdown: Countdown) -> None:
    """Simulate a full disk for one operation; the clean-up afterwards succeeds."""
    if countdown.left == -1:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_mount_point_is_refused(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path / "disk")]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        with pytest.raises(ValueError, match="got the mount point"):
            export(sources(block("rope")), "ort", tmp_path / "disk")
    finally:
        subprocess.run(["umount", str(tmp_path / "disk")], check=True)


@pytest.mark.parametrize("target", ["onnx", "ort", "torchscript", "pt2"])
def test_a_limit_on_file_sizes_is_an_error_and_keeps_the_old_artefact(
    target: str, artefacts: tuple[Path, Path], tmp_path: Path
) -> None:
    _publish(artefacts[0], tmp_path / "artefact")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            export(sources(block("rope")), target, tmp_path / "artefact", verify=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert _same(tmp_path / "artefact", artefacts[0])
    assert os.listdir(tmp_path) == ["artefact"]


def test_a_link_is_refused(artefacts: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(artefacts[0])
    with pytest.raises(ValueError, match="got the symbolic link .*link"):
        export(sources(block("rope")), "ort", tmp_path / "link")


@pytest.mark.parametrize("folder", [".", "..", "../../here/inner/..", "../inner"])
def test_the_working_folder_and_its_parents_are_refused(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "inner")
    with pytest.raises(ValueError, match="neither the working folder nor one of its parents"):
        export(sources(block("rope")), "ort", folder)


def test_a_file_that_is_created_during_an_export_is_kept(
    artefacts: tuple[Path, Path], tmp_path: Path
) -> None:
    _publish(artefacts[0], tmp_path / "artefact")
    staging = StagingFolder([tmp_path / "artefact"])
    with pytest.raises(ValueError, match="which contains notes.txt; move that"), staging as path:
        shutil.copytree(artefacts[1], path / "made")
        (tmp_path / "artefact" / "notes.txt").write_text("mine")
        staging.publish([path / "made"])
    assert (tmp_path / "artefact" / "notes.txt").read_text() == "mine"


def test_an_artefact_is_not_published_in_the_folder_of_another(
    artefacts: tuple[Path, Path], tmp_path: Path
) -> None:
    _publish(artefacts[0], tmp_path / "outer")
    said = "outside any artefact, got .*inner in the artefact .*outer; choose another folder"
    with pytest.raises(ValueError, match=said):
        _publish(artefacts[1], tmp_path / "outer" / "some" / "inner")
    assert _same(tmp_path / "outer", artefacts[0])


def test_either_all_of_several_folders_are_published_or_none(
    artefacts: tuple[Path, Path], tmp_path: Path
) -> None:
    places = [tmp_path / name for name in ("one", "two", "three")]
    _publish(artefacts[0], places[0])
    staging = StagingFolder(places)
    with pytest.raises(ValueError, match="three, which contains notes.txt"), staging as path:
        for place in places:
            shutil.copytree(artefacts[1], path / place.name)
        places[2].mkdir()
        (places[2] / "notes.txt").write_text("mine")
        staging.publish([path / place.name for place in places])
    assert sorted(os.listdir(tmp_path)) == ["one", "three"] and _same(places[0], artefacts[0])


def test_a_new_folder_of_several_targets_is_published_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []
    rename, targets = os.rename, ["ort", "torchscript"]
    noted = lambda one, other: (seen.append(Path(other)), rename(one, other))[1]  # noqa: E731
    monkeypatch.setattr(os, "rename", noted)
    export_all(sources(block("nope")), targets, tmp_path / "all", ExportOptions(verify=False))
    assert seen == [tmp_path / "all"]
    assert [manifests.read(tmp_path / "all" / target).target for target in targets] == targets


def test_an_artefact_that_was_set_aside_is_loaded_by_its_name(
    artefacts: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(artefacts[0], tmp_path / f"{files.ASIDE}artefact")
    assert _same(tmp_path / "artefact", artefacts[0])
    _publish(artefacts[1], tmp_path / "other")
    assert sorted(os.listdir(tmp_path)) == ["artefact", "other"]


def test_a_full_disk_leaves_the_old_certificate(
    artefacts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(artefacts[0], tmp_path / "artefact")
    manifest = manifests.read(artefacts[0])

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        manifests.write(manifest.replace(source={"seed": 7}), tmp_path / "artefact")
    assert _same(tmp_path / "artefact", artefacts[0])
    names = ["model.pt", manifests.FILE_NAME, "reference.bin"]
    assert sorted(os.listdir(tmp_path / "artefact")) == names


def test_a_place_where_no_folder_can_be_made_is_named_as_it_was_given() -> None:
    with (
        pytest.raises((OSError, ValueError), match="/proc/place"),
        StagingFolder([Path("/proc/place")]),
    ):
        pass
