"""Publish folders in one step, by an exchange with those that stand at their destinations.

At every moment a destination holds either the old or the new folder, complete. Temporary folders of
a killed export are removed by the next export.
"""

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Iterator, Sequence

from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact.destinations import ARTEFACT, Kind, check_folder

STAGING = re.compile(re.escape(files.PREFIX) + "[0-9a-f]{16}")
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
# The file system or the kernel cannot exchange two folders.
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class StagingFolder:
    """Context manager for a temporary folder next to `places`, in one parent folder, whose
    subfolders are published there in place of folders of the same kind. Raises ValueError as
    check_folder.
    """

    def __init__(self, places: Sequence[Path], kind: Kind = ARTEFACT) -> None:
        self.kind, self.places = kind, []
        for place in places:  # a last name that is a link is not followed
            named = place.name not in ("", "..")
            self.places.append(place.parent.resolve() / place.name if named else place.resolve())
        self.parent = self.places[0].parent
        self._lock: int | None = None
        for place in places:
            check_folder(place, kind)

    def __enter__(self) -> Path:
        self.path = self.parent / (files.PREFIX + secrets.token_hex(8))
        try:
            self.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.parent):
                _sweep(self.parent)
                self.path.mkdir()
                self._lock = _lock(self.path, wait=True)
        except OSError as error:  # of a name that nobody gave
            raise OSError(error.errno, error.strerror, str(self.places[0])) from None
        return self.path

    def __exit__(self, *_: object) -> None:
        # The next export removes files that could not be removed now.
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)

    def publish(self, finished: Sequence[Path]) -> None:
        """Move one finished folder to each destination, or none: raise ValueError if check_folder
        refuses one now, OSError if the system does. Every destination is then unchanged.
        """
        for folder in finished:
            _sync_tree(folder)
        files.sync(self.path)
        done: list[tuple[Path, Path, bool]] = []
        with _locked(self.parent):
            try:
                for folder, place in zip(finished, self.places, strict=True):
                    check_folder(place, self.kind)
                    done.append((folder, place, _put(folder, place)))
                files.sync(self.parent)
            except (OSError, ValueError):
                for folder, place, replaced in reversed(done):
                    _put(folder, place) if replaced else os.rename(place, folder)
                raise


def _put(finished: Path, place: Path) -> bool:
    """Exchange `finished` with the folder at `place`, if there is one. Return whether there was."""
    if not place.exists() or not os.listdir(place):
        os.rename(finished, place)
        return False
    if not exchange(finished, place):
        aside = place.with_name(files.ASIDE + place.name)
        # Until the next rename, files.locate finds the artefact under this name.
        os.rename(place, aside)
        try:
            os.rename(finished, place)
            os.rename(aside, finished)
        except OSError:
            if place.exists():
                os.rename(place, finished)
            os.rename(aside, place)
            raise
    return True


def exchange(path: Path, other: Path) -> bool:
    """Exchange two paths atomically. Return False if the system does not support it."""
    library: Any = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        return False
    names = os.fsencode(path), os.fsencode(other)
    if library.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(path), None, str(other))


def _sweep(parent: Path) -> None:
    """Restore the folders that interrupted exports set aside; remove their temporary folders."""
    for path in sorted(parent.glob(files.PREFIX + "*")):
        if path.is_symlink() or not path.is_dir():
            continue
        # Another export removes or renames the folder now, or it belongs to another user.
        with suppress(OSError):
            if path.name.startswith(files.ASIDE):
                place = path.with_name(path.name.removeprefix(files.ASIDE))
                shutil.rmtree(path) if place.exists() else os.rename(path, place)
            elif STAGING.fullmatch(path.name):
                lock = _lock(path, wait=False)
                if lock is not None:  # no running export uses the folder
                    try:
                        shutil.rmtree(path)
                    finally:
                        os.close(lock)


def _sync_tree(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        _sync_tree(path) if path.is_dir() else files.sync(path)
    files.sync(folder)


def _lock(folder: Path, wait: bool) -> int | None:
    """Lock a folder until the returned descriptor is closed; None if it is or cannot be locked."""
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(number)
        return None
    return number


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder: only one export at a time creates and renames in it."""
    number = _lock(folder, wait=True)
    try:
        yield
    finally:
        if number is not None:
            os.close(number)
