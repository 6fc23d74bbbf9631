"""Zip archives as torch writes them: read without surprises, and packed so that equal content gives equal bytes."""

import io
import zipfile
import zlib
from typing import Dict

EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip archive can carry


def read_entries(content: bytes) -> Dict[str, bytes]:
    """Content by name.

    Raises:
        ValueError: no zip archive, a damaged one, or one with two entries of a name.
    """
    entries: Dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for info in archive.infolist():
                if info.filename in entries:
                    raise ValueError(f"every entry has a name of its own, got {info.filename!r} twice")
                entries[info.filename] = archive.read(info)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, OverflowError) as error:  # damaged, or encrypted
        raise ValueError(f"the file is a zip archive, got {error}") from None
    return entries


def packed(entries: Dict[str, bytes]) -> bytes:
    """Stored as they are, without the time."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            archive.writestr(zipfile.ZipInfo(name, EPOCH), content)
    return buffer.getvalue()
