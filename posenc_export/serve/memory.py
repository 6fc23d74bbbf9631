"""Memory for caches: what the machine has, and what rows need."""

import bisect
import sys
from pathlib import Path

from posenc_export.runtime.session.session import Session
from posenc_export.shared.refusal import refusal

MEMINFO = Path("/proc/meminfo")
SHARE = 0.5  # of the available memory that caches of rows may take by default


def rows_memory(asked: int | None, prefixes: int, available: int | None) -> int:
    """Return the bytes that caches of rows may take: those asked for, or a share of the available
    ones. Raise ValueError if fewer are available.
    """
    if asked is None:
        return sys.maxsize if available is None else max(int(available * SHARE) - prefixes, 1)
    if available is not None and asked + prefixes > available:
        rule = f"memory for caches of {(asked + prefixes) / 1e9:.1f} GB, with those of prefixes"
        remedy = "give a smaller --memory or --prefix-memory"
        raise refusal("serve", rule, f"{available / 1e9:.1f} GB", remedy)
    return asked


def most_needed(session: Session, rows: int, tokens: int, chunk: int) -> int:
    """Return the most bytes of caches while they grow to rows of that many tokens."""
    # Rows that are read together are padded.
    padding = 0 if session.manifest.continuation_rows == 1 else chunk
    return session.memory_of(rows, tokens + padding)


def longest_row(session: Session, memory: int, context: int, chunk: int) -> int:
    """Return the most tokens, at most `context`, of which a single row fits into the memory."""
    tokens = range(1, context + 1)
    return bisect.bisect_right(tokens, memory, key=lambda n: most_needed(session, 1, n, chunk))


def available_memory() -> int | None:
    """Return the bytes that processes can allocate; None where the system does not tell them."""
    if not MEMINFO.is_file():
        return None
    lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else None
