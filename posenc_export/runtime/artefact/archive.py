"""Zip archives as torch writes them: checked reading, reproducible writing."""

import io
import os
import zipfile
import zlib
from contextlib import contextmanager
from typing import BinaryIO, Callable, Iterator, Mapping

from posenc_export.shared.foreign import brief
from posenc_export.shared.refusal import expect

EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip archive can store
MOST = 1 << 16  # entries; a deep model with experts has about 20,000
# Bytes; zipfile reads the directory at once and needs about ten times as much memory for it.
DIRECTORY = 16 << 20
# Bytes of an entry that is parsed: JSON, which takes up to 20 times as much memory.
LONGEST = 32 << 20
HEADER = 30  # bytes before an entry, without its name

# What zipfile raises for an archive that is damaged or encrypted.
DAMAGE = (
    zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OverflowError,
    UnicodeDecodeError, zlib.error,
)  # fmt: skip


def check_archive(stream: BinaryIO) -> None:
    """Check the directory of a zip archive, not its entries. Raise ValueError if it is none,
    compressed, encrypted, too large, or has two entries with one name.
    """
    with _opened(stream):
        pass


def read_entries(content: bytes) -> dict[str, bytes]:
    """Read all entries of an archive that torch has just written; torch compresses code."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def read_checked(stream: BinaryIO, is_tensor: Callable[[str], bool]) -> dict[str, bytes]:
    """Read the entries of a zip archive by name. Raise ValueError as `check_archive`, and for one
    that is damaged, or that has more than LONGEST bytes and no name of a tensor.
    """
    with _opened(stream) as archive:
        for info in archive.infolist():
            holds = info.file_size <= LONGEST or is_tensor(info.filename)
            expect(holds, f"{info.filename[:80]!r} with at most {LONGEST} bytes", info.file_size)
        return {info.filename: archive.read(info) for info in archive.infolist()}


@contextmanager
def _opened(stream: BinaryIO) -> Iterator[zipfile.ZipFile]:
    bounded = _Bounded(stream)
    try:
        # A reader needs only the methods of _Bounded.
        with zipfile.ZipFile(bounded) as archive:
            bounded.most = None
            _check(archive.infolist(), stream.seek(0, os.SEEK_END))
            yield archive
    except DAMAGE as error:
        raise ValueError(f"expected a zip archive, got an error ({brief(error)})") from None


class _Bounded:
    """A stream that refuses reads of more than `most` bytes while zipfile reads a directory."""

    def __init__(self, stream: BinaryIO) -> None:
        self.seek, self.tell, self.seekable = stream.seek, stream.tell, stream.seekable
        self._read = stream.read
        self.most: int | None = DIRECTORY

    def read(self, size: int = -1) -> bytes:
        rule = f"a zip archive with a directory of at most {self.most} bytes"
        expect(self.most is None or size <= self.most, rule, size)
        return self._read(size)


def _check(infos: list[zipfile.ZipInfo], size: int) -> None:
    expect(len(infos) <= MOST, f"at most {MOST} entries", len(infos))
    names, total = set(), 0
    for info in infos:
        name, offset = repr(info.filename[:80]), info.header_offset
        expect(info.filename not in names, "unique names of entries", f"{name} twice")
        names.add(info.filename)
        plain = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
        got = f"{name} with {info.compress_size} bytes for {info.file_size}"
        expect(plain, "entries that are stored without compression", got)
        inside = 0 <= offset <= size - HEADER - info.file_size
        expect(inside, "entries inside the file", f"{name} at byte {offset} of {size}")
        total += info.file_size
    rule = f"entries that are together at most as large as the file of {size} bytes"
    expect(total <= size, rule, f"{total} bytes")


def packed(entries: Mapping[str, bytes]) -> bytes:
    """Pack entries into a zip archive, uncompressed and with a constant time stamp."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            archive.writestr(zipfile.ZipInfo(name, EPOCH), content)
    return buffer.getvalue()
