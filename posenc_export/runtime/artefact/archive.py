"""Zip archives as torch writes them: checked reading, reproducible writing, and repacking
without holding large content in memory.
"""

import io
import os
import zipfile
from bisect import bisect_right
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Callable, Dict, Iterator, List, Mapping, Optional, Union

EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip archive can store
MOST = 1 << 16  # entries; a deep model with experts has about 20,000
DIRECTORY = (
    16 << 20
)  # bytes; zipfile reads the directory at once and needs about ten times as much memory for it
LONGEST = (
    32 << 20
)  # bytes of an entry that is parsed: JSON, which takes up to 20 times as much memory
BLOCK = 1 << 20  # bytes read at once from entries that stay in their file
# Bytes of the header before an entry, without its name and extra field, whose lengths are the last
# four.
HEADER = 30


@dataclass(frozen=True)
class Stored:
    """The content of an entry that stays in its file."""

    offset: int  # first byte in the file
    size: int  # number of bytes

    def __len__(self) -> int:
        return self.size


Entry = Union[bytes, Stored]


def check_archive(stream: BinaryIO) -> None:
    """Check the directory of a zip archive, not its entries. Raise ValueError if it is none,
    compressed, encrypted, too large, or has two entries with one name.
    """
    with _opened(stream):
        pass


def read_entries(content: bytes) -> Dict[str, bytes]:
    """Read all entries of an archive that torch has just written, as content by name. torch
    compresses code.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def read_most(stream: BinaryIO, stays: Callable[[str], bool]) -> Dict[str, Entry]:
    """Read the entries of a zip archive, except those whose content stays in the file.

    Args:
        stays: whether the content of the entry with a name stays in the file.

    Raises:
        ValueError: as for `check_archive`; an entry is damaged, or is read and has more than
            LONGEST bytes.
    """
    with _opened(stream) as archive:
        entries: Dict[str, Entry] = {}
        for info in archive.infolist():
            if stays(info.filename):
                entries[info.filename] = Stored(_start(archive, info, stream), info.file_size)
            elif info.file_size > LONGEST:
                raise ValueError(
                    f"expected {info.filename[:80]!r} with at most {LONGEST} bytes, got "
                    f"{info.file_size}"
                )
            else:
                entries[info.filename] = archive.read(info)
        return entries


@contextmanager
def _opened(stream: BinaryIO) -> Iterator[zipfile.ZipFile]:
    bounded = _Bounded(stream)
    try:
        # A reader needs only the methods of _Bounded.
        with zipfile.ZipFile(bounded) as archive:
            bounded.most = None
            _check(archive.infolist(), stream.seek(0, os.SEEK_END))
            yield archive
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        RuntimeError,
        EOFError,
        OverflowError,
        UnicodeDecodeError,
    ) as error:  # damaged, or encrypted
        raise ValueError(f"expected a zip archive, got {error}") from None


class _Bounded:
    """A stream that refuses to read more than `most` bytes at once, while zipfile reads the
    directory of an archive.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.seek, self.tell, self.seekable, self._read = (
            stream.seek,
            stream.tell,
            stream.seekable,
            stream.read,
        )
        self.most: Optional[int] = DIRECTORY

    def read(self, size: int = -1) -> bytes:
        if self.most is not None and size > self.most:
            raise ValueError(
                f"expected a zip archive with a directory of at most {self.most} bytes, got {size}"
            )
        return self._read(size)


def _check(infos: List[zipfile.ZipInfo], size: int) -> None:
    if len(infos) > MOST:
        raise ValueError(f"expected at most {MOST} entries, got {len(infos)}")
    names = set()
    for info in infos:
        name = info.filename[:80]
        if info.filename in names:
            raise ValueError(f"expected unique names of entries, got {name!r} twice")
        names.add(info.filename)
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise ValueError(
                f"expected entries that are stored without compression, got {name!r} with "
                f"{info.compress_size} bytes for {info.file_size}"
            )
        if not 0 <= info.header_offset <= size - HEADER - info.file_size:
            raise ValueError(
                f"expected entries inside the file, got {name!r} at byte "
                f"{info.header_offset} of {size}"
            )
    total = sum(info.file_size for info in infos)
    if total > size:
        raise ValueError(
            f"expected entries that are together at most as large as the file of {size} "
            f"bytes, got {total} bytes"
        )


def _start(archive: zipfile.ZipFile, info: zipfile.ZipInfo, stream: BinaryIO) -> int:
    """Return the offset of the content of an entry."""
    archive.open(info).close()  # compares the header with the directory
    stream.seek(info.header_offset + HEADER - 4)
    lengths = stream.read(4)
    start = (
        info.header_offset
        + HEADER
        + int.from_bytes(lengths[:2], "little")
        + int.from_bytes(lengths[2:], "little")
    )
    if start + info.file_size > stream.seek(0, os.SEEK_END):
        raise ValueError(
            f"expected entries inside the file, got {info.filename[:80]!r} beyond its end"
        )
    return start


def packed(entries: Mapping[str, bytes]) -> bytes:
    """Pack entries into a zip archive, uncompressed and with a constant time stamp."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            archive.writestr(zipfile.ZipInfo(name, EPOCH), content)
    return buffer.getvalue()


class Repacked(io.RawIOBase):
    """A zip archive of entries, for reading. Content that stays in a file is read from there each
    time.

    Args:
        stream: the file of all entries of type Stored; open as long as this archive.

    Raises:
        ValueError: the file is shorter than when its directory was read.
    """

    def __init__(self, entries: Mapping[str, Entry], stream: BinaryIO) -> None:
        self._stream, self._at, self._size = stream, 0, 0
        self._parts: Dict[int, Entry] = {}  # by first byte in this archive
        self._source: Optional[int] = None  # byte of the file whose content is being written
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
        for done in range(
            0, content.size, BLOCK
        ):  # read once here, for the checksum that the archive stores
            self._source = content.offset + done
            self._stream.seek(self._source)
            to.write(self._stream.read(min(BLOCK, content.size - done)))
        self._source = None

    def write(self, data: Any) -> int:
        """Append a part, or replace one of equal length: zipfile writes the header of an entry
        again after its content.
        """
        self._parts[self._at] = (
            bytes(data) if self._source is None else Stored(self._source, len(data))
        )
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
        """Read at the current byte until the buffer is full or the archive ends. Return the
        number of bytes.
        """
        view = memoryview(buffer).cast("B")
        done, count = 0, min(len(view), max(self._size - self._at, 0))
        while done < count:
            first = self._starts[bisect_right(self._starts, self._at) - 1]
            part, skipped = self._parts[first], self._at - first
            taken = min(len(part) - skipped, count - done)
            self._take(part, skipped, view[done : done + taken])
            done, self._at = done + taken, self._at + taken
        return count

    def _take(self, part: Entry, skipped: int, view: memoryview) -> None:
        if isinstance(part, bytes):
            view[:] = part[skipped : skipped + len(view)]
            return
        self._stream.seek(part.offset + skipped)
        if self._stream.readinto(view) != len(view):  # type: ignore[attr-defined]
            raise ValueError(
                "expected a file that does not change while it is read, got a shorter one"
            )
