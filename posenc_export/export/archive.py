"""Zip archives that torch writes, written again so that equal content gives equal bytes."""

import zipfile
from pathlib import Path
from typing import Dict

EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip archive can carry


def read_entries(path: Path) -> Dict[str, bytes]:
    """Content by name."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_entries(path: Path, entries: Dict[str, bytes]) -> None:
    """Stored as they are, without the time."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            archive.writestr(zipfile.ZipInfo(name, EPOCH), content)
