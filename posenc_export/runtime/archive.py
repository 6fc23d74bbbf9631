"""Zip archives as torch writes them: checked reading, and reproducible writing (equal content gives equal bytes)."""

import io
import zipfile
import zlib
from typing import Dict

EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip archive can store


def read_entries(content: bytes) -> Dict[str, bytes]:
    """Read all entries of a zip archive, as content by name.

    Raises:
        ValueError: the content is not a zip archive, is damaged, or has two entries with the same name.
    """
    entries: Dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for info in archive.infolist():
                if info.filename in entries:
                    raise ValueError(f"expected unique names of entries, got {info.filename!r} twice")
                entries[info.filename] = archive.read(info)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, OverflowError) as error:  # damaged, or encrypted
        raise ValueError(f"expected a zip archive, got {error}") from None
    return entries


def packed(entries: Dict[str, bytes]) -> bytes:
    """Pack entries into a zip archive, uncompressed and with a constant time stamp."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            archive.writestr(zipfile.ZipInfo(name, EPOCH), content)
    return buffer.getvalue()
