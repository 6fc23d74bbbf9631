"""Publish folders in one step: made beside their place, flushed to the disk, then exchanged with the folder that was there.

At every moment a name holds the old folder or the new one, complete. What a killed export leaves beside it is removed by the next export.
"""

import ctypes
import errno
import json
import os
import re
import secrets
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, List, Optional, Sequence, Set, Tuple

from posenc_export.runtime import files
from posenc_export.runtime.manifest import FILE_NAME

try:
    import fcntl
except ModuleNotFoundError:  # Windows has no locks on folders; nothing is swept there
    fcntl = None  # type: ignore[assignment]

WORKSHOP = re.compile(re.escape(files.PREFIX) + "[0-9a-f]{16}")
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
CANNOT = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # the file system or the kernel cannot exchange two folders


def check_place(folder: Path) -> None:
    """Refuse a folder that an artefact cannot replace as a whole.

    Raises:
        ValueError: a link, a mount point, the folder this process works in or one above it, a file, a folder that holds anything else than an artefact.
    """
    where = "export: expected a folder that is new, empty or an artefact"
    if folder.is_symlink():
        raise ValueError(f"{where}, got the link {folder}; give the folder it leads to")
    place = folder.resolve()
    if place in (Path.cwd(), *Path.cwd().parents):
        raise ValueError(f"{where} outside the path to the working folder, got {folder}; give a folder in it or elsewhere")
    if os.path.ismount(place):
        raise ValueError(f"{where}, got the mount point {folder}; give a folder in it")
    if not place.exists():
        return
    if not place.is_dir():
        raise ValueError(f"{where}, got the file {folder}; choose another")
    foreign = sorted(set(os.listdir(place)) - _own(place))
    if foreign:
        raise ValueError(f"{where}, got {folder} with {foreign[0]} in it; move that, or choose another folder")


def _own(folder: Path) -> Set[str]:
    """posenc.json, the names that it lists, in any schema, and temporary files of interrupted writes."""
    listed = {name for name in os.listdir(folder) if name.startswith(files.PART)}
    try:
        content = json.loads((folder / FILE_NAME).read_bytes())
        listed |= {FILE_NAME, *content["files"]}
    except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):  # no manifest, or one that cannot be read
        return listed
    return {name for name in listed if (folder / name).is_symlink() or not (folder / name).is_dir()}


class Workshop:
    """A temporary folder beside `places`, in which folders are made that are then published under the names of `places`.

    Args:
        places: where the finished folders go; all in one folder.

    Raises:
        ValueError: check_place of one of them.
    """

    def __init__(self, places: Sequence[Path]) -> None:
        self.places = [_absolute(place) for place in places]
        self.parent = self.places[0].parent
        self._made: List[Path] = []
        self._lock: Optional[int] = None
        for place in places:
            check_place(place)

    def __enter__(self) -> Path:
        try:
            self._make_parents()
            with _locked(self.parent):
                _sweep(self.parent)
                self.path = self.parent / (files.PREFIX + secrets.token_hex(8))
                self.path.mkdir()
                self._lock = _lock(self.path, wait=True)
        except OSError:
            self._drop_parents()
            raise
        return self.path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)  # what cannot be removed now is removed by the next export
        if self._lock is not None:
            os.close(self._lock)
        self._drop_parents()

    def publish(self, made: Sequence[Path]) -> None:
        """Move finished folders, one for each place, to their places: all of them, or none where one cannot be moved.

        Raises:
            ValueError: check_place of one of them, which may have changed.
            OSError: the system refuses, or the disk is full; every place is as it was.
        """
        for folder in made:
            _sync_tree(folder)
        files.sync(self.path)
        done: List[Tuple[Path, Path, bool]] = []
        with _locked(self.parent):
            try:
                for folder, place in zip(made, self.places, strict=True):
                    check_place(place)
                    done.append((folder, place, _put(folder, place)))
                files.sync(self.parent)
            except (OSError, ValueError):
                for folder, place, replaced in reversed(done):
                    _put(folder, place) if replaced else os.rename(place, folder)
                raise

    def _make_parents(self) -> None:
        missing = [folder for folder in (self.parent, *self.parent.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            self._made.append(folder)
            files.sync(folder.parent)

    def _drop_parents(self) -> None:
        for folder in reversed(self._made):
            if os.listdir(folder):
                return
            folder.rmdir()


def _absolute(folder: Path) -> Path:
    return folder.resolve() if folder.name in ("", "..") else folder.parent.resolve() / folder.name


def _put(made: Path, place: Path) -> bool:
    """Move made to place. A folder that was there goes to where made was; returns whether there was one."""
    if not place.exists() or not os.listdir(place):
        os.rename(made, place)  # onto an empty folder, too
        return False
    if not exchange(made, place):
        aside = place.with_name(files.ASIDE + place.name)
        os.rename(place, aside)  # files.locate finds it there
        try:
            os.rename(made, place)
            os.rename(aside, made)
        except OSError:
            if place.exists():
                os.rename(place, made)
            os.rename(aside, place)
            raise
    return True


def exchange(one: Path, other: Path) -> bool:
    """Exchange two paths in one step; returns False where the system or the file system cannot.

    Raises:
        OSError: another reason.
    """
    library: Any = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
    if not hasattr(library, "renameat2"):
        return False
    if library.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def sweep(folder: Path) -> None:
    """Restore the folders that interrupted exports set aside in a folder, and remove their temporary folders."""
    if folder.is_dir():
        with _locked(folder):
            _sweep(folder)


def _sweep(parent: Path) -> None:
    for path in sorted(parent.glob(files.PREFIX + "*")):
        if path.is_symlink() or not path.is_dir():
            continue
        if path.name.startswith(files.ASIDE):
            place = parent / path.name.removeprefix(files.ASIDE)
            shutil.rmtree(path) if place.exists() else os.rename(path, place)
        elif WORKSHOP.fullmatch(path.name) and fcntl is not None:
            lock = _lock(path, wait=False)
            if lock is not None:  # no export works there
                shutil.rmtree(path)
                os.close(lock)


def _sync_tree(folder: Path) -> None:
    """Flush files to the disk, then the folders that hold them."""
    for path in sorted(folder.iterdir()):
        _sync_tree(path) if path.is_dir() else files.sync(path)
    files.sync(folder)


def _lock(folder: Path, wait: bool) -> Optional[int]:
    """A descriptor that holds the lock of a folder until it is closed or its process ends; None where another process has it, or the system has no locks."""
    if fcntl is None:
        return None
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(number)
        return None
    return number


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, so that one export at a time creates, sweeps and renames in it."""
    number = _lock(folder, wait=True)
    try:
        yield
    finally:
        if number is not None:
            os.close(number)
