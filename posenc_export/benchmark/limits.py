"""Lower bound of the bytes that a decode step reads from memory."""

from posenc_export.runtime.manifest import Manifest

ITEM_BYTES = {"float32": 4, "float16": 2}


def cache_values(manifest: Manifest, context: int) -> int:
    """Return the number of values in the valid part of all key and value caches of one row."""
    grown = [state for state in manifest.states if state.update != "replace" and len(state.axes) == 4]
    return context * sum(int(state.axes[1]) * int(state.axes[3]) for state in grown)


def step_bytes(manifest: Manifest, context: int, batch: int = 1) -> int:
    """Return the bytes that a decode step of `batch` rows must read with `context` tokens in the cache: the weights once, and the valid cache of each row.

    Raises:
        ValueError: the manifest has an unknown dtype.
    """
    if manifest.dtype not in ITEM_BYTES:
        raise ValueError(f"benchmark: expected dtype to be one of {', '.join(ITEM_BYTES)}, got {manifest.dtype!r}; export again")
    return ITEM_BYTES[manifest.dtype] * (manifest.step_weights + batch * cache_values(manifest, context))


def share_of_limit(read: int, seconds: float, bandwidth: float) -> float:
    """Return the achieved read rate as a share of the bandwidth; 1 is the speed of reading the bytes without computing.

    Args:
        read: bytes.
        seconds: time of reading them.
        bandwidth: bytes per second.

    Raises:
        ValueError: seconds or bandwidth is not positive.
    """
    if seconds <= 0.0 or bandwidth <= 0.0:
        raise ValueError(f"benchmark: expected a time and a bandwidth above 0, got {seconds} s and {bandwidth} B/s; measure again")
    return read / seconds / bandwidth
