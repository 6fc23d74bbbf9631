"""Files of an artefact folder: atomic writes, digests, recovery after an interrupted export."""

import hashlib
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Iterator

from posenc_export.runtime.artefact.records import File
from posenc_export.runtime.artefact.schema import Manifest
from posenc_export.shared.preset_folders import preset_folder
from posenc_export.shared.refusal import path_of

PREFIX = ".posenc-"  # names of temporary folders and files of an export start with it
# Prefix of the artefact that is being replaced, on systems that cannot exchange two folders
# atomically.
ASIDE = f"{PREFIX}old-"
PART = f"{PREFIX}part-"  # prefix of a file that is being written
CACHE = "POSENC_CACHE"  # variable with the folder of files that can be made again


def locate(folder: str | Path) -> Path:
    """Return the folder, else the artefact that an interrupted export set aside, else a preset."""
    folder = path_of("artefact", folder)
    if folder.exists():
        return folder
    aside = folder.with_name(ASIDE + folder.name) if folder.name else folder
    return aside if aside.is_dir() else preset_folder(str(folder)) or folder


def cache_folder() -> Path:
    """Return the folder for files that can be made again: that of CACHE, or posenc_export in the
    user's folder of caches, as XDG says. Raise OSError without a home.
    """
    if named := os.environ.get(CACHE):
        return Path(named)
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        caches = caches if caches.is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError(str(error)) from None
    return caches / "posenc_export"


def utf8(path: Path) -> str:
    """Return a path for libraries that read names as UTF-8, whatever the locale."""
    name = os.fsencode(path)
    try:
        return name.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"runtime: expected a path in UTF-8, got {name!r}; rename it") from None


def replace(path: Path, content: bytes) -> None:
    """Replace the content of a file atomically: it holds the old content or the new one."""
    part = path.with_name(PART + secrets.token_hex(4))
    try:
        write(part, content)
        os.replace(part, path)
    finally:  # also after an interrupt or on a full disk
        part.unlink(missing_ok=True)
    sync(path.parent)


def write(path: Path, content: bytes) -> File:
    """Write a file and flush it to disk. Return its digest and size."""
    with writing(path) as stream:
        stream.write(content)
    return stream.entry()


class Hashed:
    """A writer that computes the digest of a file while writing it, from its beginning."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._hash, self.bytes = stream, hashlib.sha256(), 0

    def write(self, content: bytes | memoryview) -> None:
        """Append bytes."""
        self._stream.write(content)
        self._hash.update(content)
        self.bytes += len(content)

    def align(self, to: int) -> None:
        """Append zeros up to the next multiple of `to` bytes."""
        self.write(bytes(-self.bytes % to))

    def entry(self) -> File:
        """Return digest and size of the bytes written so far."""
        return File(self._hash.hexdigest(), self.bytes)


@contextmanager
def writing(path: Path) -> Iterator[Hashed]:
    """Open a file for writing in parts. It is flushed to disk when the context ends."""
    with path.open("wb") as stream:
        yield Hashed(stream)
        stream.flush()
        os.fsync(stream.fileno())


def sync(path: Path) -> None:
    """Flush the content of a file, or the entries of a folder, to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def entry(path: Path) -> File:
    """Return digest and size of a file."""
    with path.open("rb") as stream:
        return File(hashlib.file_digest(stream, "sha256").hexdigest(), path.stat().st_size)


def check(folder: Path, manifest: Manifest) -> None:
    """Raise ValueError for the first listed file that is missing or altered."""
    with checked(folder, manifest, meanwhile=""):
        pass


@contextmanager
def checked(folder: Path, manifest: Manifest, meanwhile: str) -> Iterator[None]:
    """Compare every file that the manifest lists with its digest and size. Raise ValueError for one
    that is missing or altered, also in place of an exception in the context.

    Args:
        meanwhile: name of the file to compare in a thread while the context is open; it ends when
            that is done. Code in the context may read the file as plain numbers, never parse it.
    """
    # First all sizes, so that no file is hashed that is far larger than the one that was written.
    for name, listed in sorted(manifest.files.items()):
        path = folder / name
        if not path.is_file():  # a link is allowed: the content that it points to is compared
            raise ValueError(f"artefact {folder}: expected the file {name}, got none; export again")
        if path.stat().st_size != listed.bytes:
            raise _altered(folder, name, listed, f"{path.stat().st_size} bytes")
    for name in sorted(manifest.files):
        if name != meanwhile:
            _compare(folder, name, manifest)
    if meanwhile not in manifest.files:
        yield
        return
    with ThreadPoolExecutor(1) as pool:
        actual = pool.submit(entry, folder / meanwhile)
        try:
            yield
        finally:
            _compare(folder, meanwhile, manifest, actual.result())


def _compare(folder: Path, name: str, manifest: Manifest, actual: File | None = None) -> None:
    actual, listed = actual or entry(folder / name), manifest.files[name]
    if actual != listed:
        got = f"{actual.bytes} bytes and sha256 {actual.sha256[:12]}..."
        raise _altered(folder, name, listed, got) from None


def _altered(folder: Path, name: str, listed: File, got: str) -> ValueError:
    wanted = f"{listed.bytes} bytes and sha256 {listed.sha256[:12]}..."
    rule = f"expected {name} with {wanted}"
    return ValueError(f"artefact {folder}: {rule}, got {got}; export again")
