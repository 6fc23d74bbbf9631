"""How much memory caches take."""

import math

import numpy as np

from posenc_export.runtime.session.caches import FIRST, Caches
from posenc_export.runtime.session.graph import Buffer


def allocated(caches: Caches) -> int:
    """Return the bytes of all buffers. Of lazy ones, only slots that may be written count."""
    slots, total = int(caches.notes.written.sum()), 0
    for buffer in {*caches.past, *caches.present}:
        lazy = buffer.mapping is not None
        total += slots * buffer.row_bytes // caches.extent if lazy else buffer.bytes
    return total


def release(caches: Caches, lengths: np.ndarray) -> None:
    """Return memory of lazy caches to the system: that of the slots behind the tokens of each row,
    if they are more than FIRST. The first rows have `lengths` [n] tokens, others none.
    """
    written = caches.notes.written
    kept = np.concatenate((lengths, np.zeros(len(written) - len(lengths), np.int64)))
    for row in np.flatnonzero(written > kept + FIRST).tolist() if caches.lazy else ():
        for state, past in zip(caches.states, caches.past, strict=True):
            if past.mapping is not None:
                past.release(row, state.axis, int(kept[row]))
        written[row] = kept[row]


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
