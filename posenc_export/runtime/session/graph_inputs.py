"""Build the graph inputs of a call, and check its limits.

Shapes: B batch, S new tokens, T columns in use, R tokens whose logits are requested.
"""

from typing import Callable, Dict, List, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session.arguments import TokenAttributes

STEP_SLOTS = 128  # scores of slots that hold no token are computed too
Feeds = Dict[str, np.ndarray]  # graph inputs of a call by name, without the caches


def padded(rows: List[np.ndarray], attributes: TokenAttributes) -> Tuple[np.ndarray, Dict[str, np.ndarray]]:
    """Right-pad rows [count,*] with zeros to [B,S,*], and the attributes [n,count] of each row to [n,B,S]."""
    new = max(len(row) for row in rows)
    x = np.zeros((len(rows), new, *rows[0].shape[1:]), rows[0].dtype)
    others = {name: np.zeros((len(parts[0]), len(rows), new), np.int64) for name, parts in attributes.items()}
    for row, part in enumerate(rows):
        x[row, : len(part)] = part
        for name, parts in attributes.items():
            others[name][:, row, : len(part)] = parts[row]
    return x, others


def last_columns(counts: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Return the columns [B,R] of the last `kept` [B] of `counts` [B] valid tokens, which are the first columns of each row.

    A row that keeps fewer than R tokens repeats its last column; a row without tokens gives column 0.
    """
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
    """Build the graph inputs that the manifest lists, by name.

    Args:
        x, others: tokens [B,S] or [B,S,E], and their attributes [n,B,S] by name.
        counts: number of new tokens of each row [B].
        kept: number of last tokens of each row whose logits are requested [B].
        length, start: number of cached tokens, and position of the first token, of each row [B].
        slots: whether a column holds a token of the row [B,T-S].
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
        # The kernel needs at least one token: slot 0 of a row without tokens is written, and overwritten by its first token.
        "seqlens_k": lambda: np.maximum(length + counts - 1, 0).astype(np.int32),
        "total_sequence_length": lambda: np.array((length + counts).max(), np.int32),
        "slots": lambda: np.arange(int((length + counts).max())),
        "attention_mask": lambda: np.concatenate((slots, inside), axis=1).astype(np.int64),
    }
    return {value.name: makers[value.name]() for value in manifest.inputs}


def count_slots(feeds: Feeds, capacity: int) -> int:
    """Let steps of one token that take slots as an input count a multiple of STEP_SLOTS of them, so that the input changes once in as many steps. Return their number."""
    count = min(-(-len(feeds["slots"]) // STEP_SLOTS) * STEP_SLOTS, capacity)
    feeds["slots"] = np.arange(count)
    if "total_sequence_length" in feeds:
        feeds["total_sequence_length"][...] = count
    return count


def count_padding(feeds: Feeds, new: int) -> None:
    """Let every row of a first call have all `new` columns, padding included.

    GroupQueryAttention with a bias on CUDA (ONNX Runtime 1.31) subtracts the columns from the length of each row to get its cached tokens. For a shorter row that is
    negative, and shifts its causal mask. Tokens see no padding, which follows them, and the next tokens overwrite it.
    """
    if "seqlens_k" in feeds:
        feeds["seqlens_k"][...] = new - 1


def check_room(manifest: Manifest, capacity: int, start: np.ndarray, length: np.ndarray, counts: np.ndarray) -> None:
    """Check that `counts` [B] more tokens fit into the range of positions and into in-place caches of `capacity` slots.

    Raises:
        ValueError: a position is outside the range, or a row would have more tokens than the cache has slots.
    """
    ends = [int(first) + int(held) + int(count) for first, held, count in zip(start, length, counts, strict=True)]  # Python integers do not overflow
    for position in (max(ends) - 1, int(start.max()), int(start.min())):
        if not 0 <= position < manifest.max_positions:
            raise ValueError(f"session: expected positions 0 .. {manifest.max_positions - 1}, got {position}; rewind, or export with larger max_positions")
    held = int((length + counts).max())
    if any(state.update == "in_place" for state in manifest.states) and held > capacity:
        raise ValueError(f"session: expected at most {capacity} tokens of a row in the cache, got {held}; open the session with a larger capacity")


def check_has_cache(manifest: Manifest, call: str) -> None:
    """Check that a call is made on a model with caches.

    Raises:
        ValueError: the model is bidirectional.
    """
    if not manifest.states:
        raise ValueError(f"session: expected a model with a cache for {call}, got a bidirectional model, which reads whole rows; call prefill")


def check_rows_are_independent(manifest: Manifest, call: str) -> None:
    """Check that rows can be added and removed one by one.

    Raises:
        ValueError: the model is bidirectional, or its rows share cache columns.
    """
    check_has_cache(manifest, call)
    if manifest.layout == "columns":
        raise ValueError(
            f"session: expected rows with cache slots of their own for {call}, got target {manifest.target} with signature {manifest.signature}, "
            "whose rows share columns; export target ort, onnx-static or torchscript with signature positions"
        )
