"""How much memory caches take."""

import math

from posenc_export.runtime.session.caches import FIRST, Caches
from posenc_export.runtime.session.graph import Buffer


def allocated(caches: Caches) -> int:
    """Return the bytes of all buffers. Of lazy ones, only slots that may be written count."""
    slots, total = int(caches.notes.written.sum()), 0
    for buffer in {*caches.past, *caches.present}:
        lazy = buffer.mapping is not None
        total += slots * buffer.row_bytes // caches.extent if lazy else buffer.bytes
    return total


def peak(caches: Caches, rows: int, slots: int) -> int:
    """Return the most bytes while caches grow to `rows` rows of `slots` slots."""
    count, extent, now = 1 << (rows - 1).bit_length(), caches.fitting(slots), allocated(caches)
    fits = rows <= caches.rows and extent <= caches.extent
    if caches.lazy:  # `release` leaves up to FIRST slots of a row
        count, extent, fits = rows, slots + FIRST, rows <= max(caches.rows, caches.fewest_rows)
    elif fits:
        return now
    needed = 0
    for state in caches.states:
        numbers = math.prod(caches.shape(state, count, extent))
        needed += numbers * Buffer.element_bytes(state.dtype)
    return max(needed, now) if fits else needed + max(now, needed // 2)
