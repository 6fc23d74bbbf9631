"""What a graph is fed for a call, and the limits a call must keep.

Shapes: B batch, S new tokens, T columns in use.
"""

from typing import Callable, Dict, List, Optional, Tuple

import numpy as np

from posenc_export.runtime.manifest import Manifest


def padded(rows: List[np.ndarray], coordinates: List[np.ndarray]) -> Tuple[np.ndarray, Optional[np.ndarray]]:
    """Rows [count,*] as [B,S,*], zeros behind them; coordinates [axes,count] of each as [axes,B,S], or None where there are none."""
    new = max(len(row) for row in rows)
    x = np.zeros((len(rows), new, *rows[0].shape[1:]), rows[0].dtype)
    grid = np.zeros((len(coordinates[0]), len(rows), new), np.int64) if coordinates else None
    for row, part in enumerate(rows):
        x[row, : len(part)] = part
        if grid is not None:
            grid[:, row, : len(part)] = coordinates[row]
    return x, grid


def build(
    manifest: Manifest, x: np.ndarray, grid: Optional[np.ndarray], counts: np.ndarray, length: np.ndarray, start: np.ndarray, slots: np.ndarray
) -> Dict[str, np.ndarray]:
    """The inputs the manifest lists, by name: x [B,S] or [B,S,E], grid [axes,B,S], counts of tokens, tokens held and first positions [B], held slots [B,T-S]."""
    offsets = np.arange(x.shape[1])
    inside = offsets[None] < counts[:, None]
    places = length[:, None] + offsets

    def position_ids() -> np.ndarray:
        order = np.where(inside, start[:, None] + places, -1)
        axes = manifest.axes
        return order if not axes else np.concatenate((order[None], np.repeat(order[None], axes, 0) if grid is None else grid))

    makers: Dict[str, Callable[[], np.ndarray]] = {
        manifest.inputs[0].name: lambda: x,
        "position_ids": position_ids,
        "cache_position": lambda: places,
        "first_position": lambda: start[:, None].copy(),
        "seqlens_k": lambda: np.maximum(length + counts - 1, 0).astype(np.int32),  # a row without tokens: one, to be overwritten
        "total_sequence_length": lambda: np.array((length + counts).max(), np.int32),
        "attention_mask": lambda: np.concatenate((slots, inside), axis=1).astype(np.int64),
    }
    return {value.name: makers[value.name]() for value in manifest.inputs}


def check_tokens(vocabulary: int, rows: List[np.ndarray]) -> None:
    """Refuse ids outside 0 .. vocabulary - 1.

    Raises:
        ValueError: the lowest and the highest id of the row.
    """
    for row in rows:
        if row.size and (row.min() < 0 or row.max() >= vocabulary):
            raise ValueError(f"session: token ids are 0 .. {vocabulary - 1}, got {int(row.min())} .. {int(row.max())}")


def check_room(manifest: Manifest, capacity: int, start: np.ndarray, length: np.ndarray, counts: np.ndarray) -> None:
    """Refuse `counts` more tokens [B] where positions or an in-place cache of `capacity` slots end.

    Raises:
        ValueError: the first position outside the range, or the tokens that would have to be held.
    """
    held = length + counts
    for where in (int((start + held).max()) - 1, int(start.min())):
        if not 0 <= where < manifest.max_positions:
            raise ValueError(f"session: positions are 0 .. {manifest.max_positions - 1}, got {where}; rewind, or export with larger max_positions")
    if any(state.update == "in_place" for state in manifest.states) and int(held.max()) > capacity:
        raise ValueError(f"session: the cache holds {capacity} tokens, got {int(held.max())}; load with a larger capacity")
