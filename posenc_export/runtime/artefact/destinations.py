"""Destinations: which folders and files a command may replace."""

import json
import os
from pathlib import Path
from typing import NamedTuple

from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact.manifest import FILE_NAME

HEAD = 4096  # bytes of a file in which its mark is


class Kind(NamedTuple):
    """A kind of folders that a command writes."""

    where: str  # start of error messages, the command
    name: str  # what the folder holds
    listing: str  # name of its JSON file whose key "files" lists the others


class Form(NamedTuple):
    """A form of files that a command writes."""

    where: str  # start of error messages, the command
    mark: bytes  # stands in the first HEAD bytes of every file of this form


ARTEFACT, PAGE = Kind("export", "an artefact", FILE_NAME), Kind("page", "a page", "page.json")


def check_folder(folder: Path, kind: Kind = ARTEFACT) -> None:
    """Raise ValueError for a folder that one of this kind must not replace: a symbolic link, a
    mount point, the working folder or one of its parents, a file, a folder in an artefact or with
    files that its listing does not name.
    """
    where = f"{kind.where}: expected a folder that is new, empty or {kind.name}"
    if folder.is_symlink():
        remedy = "give the folder that it points to"
        raise ValueError(f"{where}, got the symbolic link {folder}; {remedy}")
    place = folder.resolve()
    if place in (Path.cwd(), *Path.cwd().parents):
        rule = "and neither the working folder nor one of its parents"
        raise ValueError(f"{where} {rule}, got {folder}; give a subfolder or another folder")
    if os.path.ismount(place):
        raise ValueError(f"{where}, got the mount point {folder}; give a subfolder of it")
    _check_outside(folder, where)
    above = next(parent for parent in place.parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        why = "cannot be written" if above.is_dir() else "is a file"
        raise ValueError(f"{where}, got {folder} in {above}, which {why}; choose another name")
    if not place.exists():
        return
    if not place.is_dir():
        raise ValueError(f"{where}, got the file {folder}; choose another name")
    foreign = _foreign(place, _own(place, kind), "")
    if foreign is not None:
        remedy = "move that file or choose another folder"
        raise ValueError(f"{where}, got {folder}, which contains {foreign}; {remedy}")


def _check_outside(path: Path, where: str) -> None:
    """Refuse a path in an artefact, which holds only the files that its manifest lists."""
    above = path.absolute().parent.resolve()
    for parent in (above, *above.parents):
        if os.path.isfile(parent / FILE_NAME):
            got = f"{path} in the artefact {parent}"
            raise ValueError(f"{where} outside any artefact, got {got}; choose another folder")


def _own(folder: Path, kind: Kind) -> set[str]:
    """Return the listing, the paths that it lists, and temporary files of interrupted writes."""
    listed = {name for name in os.listdir(folder) if name.startswith(files.PART)}
    try:
        content = json.loads((folder / kind.listing).read_bytes())
        return listed | {kind.listing, *content["files"]}
    except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
        return listed  # no listing, or one that cannot be read


def _foreign(folder: Path, own: set[str], above: str) -> str | None:
    """Return the first path in a folder, named `above` with a slash, that is not in `own`."""
    for name in sorted(os.listdir(folder)):
        path, whole = folder / name, above + name
        foreign: str | None = whole
        if path.is_symlink() or not path.is_dir():
            foreign = None if whole in own else whole
        elif any(isinstance(entry, str) and entry.startswith(f"{whole}/") for entry in own):
            foreign = _foreign(path, own, f"{whole}/")
        if foreign is not None:
            return foreign
    return None


def check_file(path: Path, form: Form) -> None:
    """Raise ValueError for a file that one of this form must not replace: a symbolic link, a folder
    or device, a path in an artefact or in a folder that cannot be written, a file of another form.
    """
    where = f"{form.where}: expected a file that is new, empty or written by posenc {form.where}"
    if path.is_symlink():
        raise ValueError(f"{where}, got the symbolic link {path}; give the file that it points to")
    _check_outside(path, where)
    if path.exists() and not path.is_file():
        raise ValueError(f"{where}, got {path}, which is no file; choose another name")
    standing = next(parent for parent in path.absolute().parents if parent.exists())
    if not standing.is_dir() or not os.access(standing, os.W_OK):
        raise ValueError(f"{where} in a folder that can be written, got {path}; give another path")
    if path.exists() and path.stat().st_size:
        with path.open("rb") as stream:
            if form.mark not in stream.read(HEAD):
                got, remedy = f"{path}, which holds something else", "choose another name"
                raise ValueError(f"{where}, got {got}; move that file or {remedy}")


def write_file(path: Path, content: bytes, form: Form) -> None:
    """Write a file in one step, and the folders above it. Raise ValueError as check_file, or
    OSError, which leaves an existing file unchanged.
    """
    check_file(path, form)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, content)
