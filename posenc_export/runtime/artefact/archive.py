"""Zip archives as torch writes them: checked reading, reproducible writing, streamed repacking."""

import io
import os
import struct
import zipfile
import zlib
from bisect import bisect_right
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Callable, Dict, Iterator, List, Mapping, Optional, Union

from posenc_export.shared.foreign import brief

EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip archive can store
MOST = 1 << 16  # entries; a deep model with experts has about 20,000
# Bytes; zipfile reads the directory at once and needs about ten times as much memory for it.
DIRECTORY = 16 << 20
# Bytes of an entry that is parsed: JSON, which takes up to 20 times as much memory.
LONGEST = 32 << 20
UNPACKED = 256 << 20  # bytes of all entries of an archive that are compressed
BLOCK = 1 << 20  # bytes read at once from entries that stay in their file
HEADER = struct.Struct("<26x2H")  # before an entry: the lengths of its name and extra field


@dataclass(frozen=True)
class Stored:
    """The content of an entry that stays in its file."""

    offset: int  # first byte in the file
    size: int  # number of bytes

    def __len__(self) -> int:
        return self.size


Entry = Union[bytes, Stored]
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


def read_entries(content: bytes) -> Dict[str, bytes]:
    """Read all entries of an archive that torch has just written; torch compresses code."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def read_most(
    stream: BinaryIO, stays: Callable[[str], bool], compressed: bool = False
) -> Dict[str, Entry]:
    """Read the entries of a zip archive, except those whose content `stays` in the file, by name.
    Raise ValueError as `check_archive`, and for one that is damaged or has more than LONGEST bytes.

    Args:
        compressed: whether entries may be that are read, up to UNPACKED bytes in all.
    """
    with _opened(stream, stays if compressed else None) as archive:
        entries: Dict[str, Entry] = {}
        for info in archive.infolist():
            if stays(info.filename):
                entries[info.filename] = Stored(_start(archive, info, stream), info.file_size)
                continue
            if info.file_size > LONGEST:
                rule = f"{info.filename[:80]!r} with at most {LONGEST} bytes"
                raise ValueError(f"expected {rule}, got {info.file_size}")
            entries[info.filename] = archive.read(info)
        return entries


@contextmanager
def _opened(
    stream: BinaryIO, stored: Optional[Callable[[str], bool]] = None
) -> Iterator[zipfile.ZipFile]:
    bounded = _Bounded(stream)
    try:
        # A reader needs only the methods of _Bounded.
        with zipfile.ZipFile(bounded) as archive:
            bounded.most = None
            _check(archive.infolist(), stream.seek(0, os.SEEK_END), stored)
            yield archive
    except DAMAGE as error:
        raise ValueError(f"expected a zip archive, got an error ({brief(error)})") from None


class _Bounded:
    """A stream that refuses reads of more than `most` bytes while zipfile reads a directory."""

    def __init__(self, stream: BinaryIO) -> None:
        self.seek, self.tell, self.seekable = stream.seek, stream.tell, stream.seekable
        self._read = stream.read
        self.most: Optional[int] = DIRECTORY

    def read(self, size: int = -1) -> bytes:
        if self.most is not None and size > self.most:
            rule = f"a zip archive with a directory of at most {self.most} bytes"
            raise ValueError(f"expected {rule}, got {size}")
        return self._read(size)


def _check(
    infos: List[zipfile.ZipInfo], size: int, stored: Optional[Callable[[str], bool]]
) -> None:
    """stored: whether the entry of a name must be uncompressed; None if all must."""
    if len(infos) > MOST:
        raise ValueError(f"expected at most {MOST} entries, got {len(infos)}")
    names, unpacked = set(), 0
    for info in infos:
        name, rule, got = repr(info.filename[:80]), "", ""
        if info.filename in names:
            rule, got = "unique names of entries", f"{name} twice"
        elif info.compress_type == zipfile.ZIP_DEFLATED and stored and not stored(info.filename):
            unpacked += info.file_size
        elif info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            rule = "entries that are stored without compression"
            got = f"{name} with {info.compress_size} bytes for {info.file_size}"
        elif not 0 <= info.header_offset <= size - HEADER.size - info.file_size:
            rule, got = "entries inside the file", f"{name} at byte {info.header_offset} of {size}"
        if rule:
            raise ValueError(f"expected {rule}, got {got}")
        names.add(info.filename)
    if unpacked > UNPACKED:
        raise ValueError(f"expected at most {UNPACKED} bytes of packed entries, got {unpacked}")
    total = sum(info.file_size for info in infos) - unpacked
    if total > size:
        rule = f"entries that are together at most as large as the file of {size} bytes"
        raise ValueError(f"expected {rule}, got {total} bytes")


def _start(archive: zipfile.ZipFile, info: zipfile.ZipInfo, stream: BinaryIO) -> int:
    archive.open(info).close()  # compares the header with the directory
    stream.seek(info.header_offset)
    start = info.header_offset + HEADER.size + sum(HEADER.unpack(stream.read(HEADER.size)))
    if start + info.file_size > stream.seek(0, os.SEEK_END):
        name = repr(info.filename[:80])
        raise ValueError(f"expected entries inside the file, got {name} beyond its end")
    return start


def packed(entries: Mapping[str, bytes]) -> bytes:
    """Pack entries into a zip archive, uncompressed and with a constant time stamp."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            archive.writestr(zipfile.ZipInfo(name, EPOCH), content)
    return buffer.getvalue()


class Repacked(io.RawIOBase):
    """A zip archive of entries, for reading. What stays in `stream` is read from there each time.
    Raises ValueError if that file becomes shorter.
    """

    def __init__(self, entries: Mapping[str, Entry], stream: BinaryIO) -> None:
        self._stream, self._at, self._size = stream, 0, 0
        self._parts: Dict[int, Entry] = {}  # by first byte in this archive
        # It calls only the methods below.
        with zipfile.ZipFile(self, "w") as archive:
            for name, content in entries.items():
                info = zipfile.ZipInfo(name, EPOCH)
                info.file_size = len(content)
                with archive.open(info, "w") as to:
                    self._copy(content, to)
        self._starts = sorted(self._parts)
        self.seek(0)

    def _copy(self, content: Entry, to: Any) -> None:
        if isinstance(content, bytes):
            to.write(content)
            return
        # Read once here, for the checksum that the archive stores.
        for done in range(0, content.size, BLOCK):
            first, offset = self._at, content.offset + done
            self._stream.seek(offset)
            to.write(self._stream.read(min(BLOCK, content.size - done)))
            self._parts[first] = Stored(offset, self._at - first)

    def write(self, data: Any) -> int:
        """Append a part, or replace one: zipfile writes a header again after its content."""
        self._parts[self._at] = bytes(data)
        self._at += len(data)
        self._size = max(self._size, self._at)
        return len(data)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read at the current byte until the buffer is full or the archive ends."""
        view = memoryview(buffer).cast("B")
        done, count = 0, min(len(view), max(self._size - self._at, 0))
        while done < count:
            first = self._starts[bisect_right(self._starts, self._at) - 1]
            part, skipped = self._parts[first], self._at - first
            size = min(len(part) - skipped, count - done)
            if isinstance(part, bytes):
                view[done : done + size] = part[skipped : skipped + size]
            else:
                self._stream.seek(part.offset + skipped)
                if self._stream.readinto(view[done : done + size]) != size:  # type: ignore[attr-defined]
                    raise ValueError("expected a file that is not changed meanwhile, got less")
            done, self._at = done + size, self._at + size
        return count
