"""Memory of the caches of all rows, compared with what the machine has before anything is
allocated.
"""

import math
from pathlib import Path
from typing import Optional

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.serve.requests import Limits

MEMINFO = Path("/proc/meminfo")


def check_memory(manifest: Manifest, limits: Limits, available: Optional[int]) -> None:
    """Raise ValueError if the caches of all rows and those of prefixes need more memory than there
    is.

    Args:
        available: bytes; None if they are not known.
    """
    each = bytes_per_slot(manifest) * limits.rows
    needed = each * limits.context + limits.prefix_memory
    if available is not None and needed > available:
        rule, got = (
            f"memory for caches of {limits.rows} rows of {limits.context} tokens",
            f"{available / 1e9:.1f} GB for {needed / 1e9:.1f} GB",
        )
        fits = max(available - limits.prefix_memory, 0) // each
        raise ValueError(
            f"serve: expected {rule}, got {got}; give fewer --rows or a smaller --context, "
            f"with these rows at most {fits}"
        )


def bytes_per_slot(manifest: Manifest) -> int:
    """Return the bytes of the caches of one row for one token."""
    cached = (state for state in manifest.states if not state.replaced)
    return sum(
        math.prod(axis for axis in state.axes if isinstance(axis, int))
        * np.dtype(state.dtype).itemsize
        for state in cached
    )


def available_memory() -> Optional[int]:
    """Return the memory in bytes that processes can allocate; None where the system does not
    tell it as Linux does.
    """
    if not MEMINFO.is_file():
        return None
    lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else None
