"""What a graph is fed for a call, and the limits a call must keep.

Shapes: B batch, S new tokens, T columns in use, R tokens whose logits are wanted.
"""

from typing import Callable, Dict, List, Tuple

import numpy as np

from posenc_export.runtime.manifest import Manifest
from posenc_export.runtime.rows import Beside

Feeds = Dict[str, np.ndarray]  # of a call: graph inputs by name, caches left out


def padded(rows: List[np.ndarray], beside: Beside) -> Tuple[np.ndarray, Dict[str, np.ndarray]]:
    """Rows [count,*] as [B,S,*], zeros behind them, and what stands beside them, [n,count] of each, as [n,B,S]."""
    new = max(len(row) for row in rows)
    x = np.zeros((len(rows), new, *rows[0].shape[1:]), rows[0].dtype)
    others = {name: np.zeros((len(parts[0]), len(rows), new), np.int64) for name, parts in beside.items()}
    for row, part in enumerate(rows):
        x[row, : len(part)] = part
        for name, parts in beside.items():
            others[name][:, row, : len(part)] = parts[row]
    return x, others


def last_columns(counts: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Columns [B,R] of the last kept [B] of counts [B] tokens, which stand first in their rows; the last one again where a row keeps fewer than R, column 0 where
    it has none."""
    columns = (counts - kept)[:, None] + np.arange(int(kept.max(initial=0)))
    return np.clip(columns, 0, np.maximum(counts - 1, 0)[:, None])


def build(
    manifest: Manifest,
    x: np.ndarray,
    others: Dict[str, np.ndarray],
    counts: np.ndarray,
    kept: np.ndarray,
    length: np.ndarray,
    start: np.ndarray,
    slots: np.ndarray,
) -> Feeds:
    """The inputs the manifest lists, by name.

    Args:
        x, others: tokens [B,S] or [B,S,E], and what stands beside them [n,B,S].
        counts, kept: tokens of each row [B], and how many of the last ones have their logits wanted.
        length, start: tokens held and first positions [B].
        slots: held slots [B,T-S].
    """
    offsets = np.arange(x.shape[1])
    inside = offsets[None] < counts[:, None]
    places = length[:, None] + offsets

    def position_ids() -> np.ndarray:
        order = np.where(inside, start[:, None] + places, -1)
        return np.concatenate((order[None], others["grid"])) if manifest.axes else order

    makers: Dict[str, Callable[[], np.ndarray]] = {
        manifest.inputs[0].name: lambda: x,
        "token_type_ids": lambda: others["token_type_ids"][0] if "token_type_ids" in others else np.zeros_like(x),
        "position_ids": position_ids,
        "logits_index": lambda: last_columns(counts, kept),
        "cache_position": lambda: places,
        "first_position": lambda: start[:, None].copy(),
        "seqlens_k": lambda: np.maximum(length + counts - 1, 0).astype(np.int32),  # a row without tokens: one, to be overwritten
        "total_sequence_length": lambda: np.array((length + counts).max(), np.int32),
        "attention_mask": lambda: np.concatenate((slots, inside), axis=1).astype(np.int64),
    }
    return {value.name: makers[value.name]() for value in manifest.inputs}


def check_room(manifest: Manifest, capacity: int, start: np.ndarray, length: np.ndarray, counts: np.ndarray) -> None:
    """Refuse `counts` more tokens [B] where positions or an in-place cache of `capacity` slots end.

    Raises:
        ValueError: the first position outside the range, or the tokens that would have to be held.
    """
    ends = [int(first) + int(held) + int(count) for first, held, count in zip(start, length, counts, strict=True)]  # of any size: no sum wraps around
    for where in (max(ends) - 1, int(start.max()), int(start.min())):
        if not 0 <= where < manifest.max_positions:
            raise ValueError(f"session: positions are 0 .. {manifest.max_positions - 1}, got {where}; rewind, or export with larger max_positions")
    held = int((length + counts).max())
    if any(state.update == "in_place" for state in manifest.states) and held > capacity:
        raise ValueError(f"session: the cache holds {capacity} tokens, got {held}; open the session with a larger capacity")


def check_keeps(manifest: Manifest, what: str) -> None:
    """Refuse what only a model with caches can do.

    Raises:
        ValueError: a bidirectional model.
    """
    if not manifest.states:
        raise ValueError(f"session: {what} needs what is cached, got a bidirectional model, which reads a row at once; call prefill")


def check_rows(manifest: Manifest, what: str) -> None:
    """Refuse what needs rows that come and go one by one.

    Raises:
        ValueError: a bidirectional model, or one whose rows share columns.
    """
    check_keeps(manifest, what)
    if manifest.layout == "columns":
        raise ValueError(
            f"session: {what} needs rows that fill their own first slots, got target {manifest.target} with signature {manifest.signature}, "
            "whose rows share columns; export target ort, onnx-static or torchscript with signature positions"
        )
