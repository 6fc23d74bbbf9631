"""The inputs of one run of a graph of others, besides its caches.

Shapes: B batch, S new tokens, P past slots, T = P + S, M capacity.
"""

from typing import Dict

import numpy as np

from posenc_export.auditing.inputs import UNREAD, Interface, Value


def feeds_of(
    interface: Interface,
    tokens: np.ndarray,
    valid: np.ndarray,
    total: np.ndarray,
    next_position: np.ndarray,
    window: int,
) -> Dict[str, np.ndarray]:
    """Return the inputs by name.

    Args:
        tokens: [B,S] ids or [B,S,E].
        valid: [B,S], which of them are no padding.
        total: [B,T], which slots hold tokens, those of this call included.
        next_position: position of the first new token of each row [B].
        window: number of keys that a mask of four dimensions shows; 0 for all.
    """
    past, new = total.shape[1] - valid.shape[1], valid.shape[1]
    positions = np.where(valid, next_position[:, None] + valid.cumsum(1) - 1, 0)
    count = total.sum(1)
    numbers = {
        "cache_position": np.arange(past, past + new),
        "past_length": np.array(past),
        "last_index": count - 1,
        "first_position": (next_position - count + valid.sum(1))[:, None],
        "total_length": np.array(past + new),
        "use_cache_branch": np.array(past > 0),
        "token_type_ids": np.zeros(valid.shape, np.int64),
        "logits_to_keep": np.array(0),
        "logits_index": np.broadcast_to(np.arange(new), valid.shape),
        "row_order": np.arange(len(valid)),
        UNREAD: np.array(0),
        "position_ids": positions,
        "input_ids": tokens,
        "hidden_states": tokens,
    }
    feeds = {}
    for meaning, value in interface.inputs.items():
        if meaning.startswith("attention_mask"):
            feeds[value.name] = _mask(value, total, new, interface.capacity, window)
        else:
            feeds[value.name] = _shaped(numbers[meaning.split(" ")[0]], value, len(valid))
    return feeds


def _shaped(numbers: np.ndarray, value: Value, rows: int) -> np.ndarray:
    """Return numbers with the rank and dtype of an input."""
    rank = len(value.axes)
    if numbers.ndim == 2 and rank == 3 and value.whole:  # positions on several axes
        axes = value.axes[0]
        numbers = np.repeat(numbers[None], axes if isinstance(axes, int) else 3, axis=0)
    elif numbers.ndim == 2 and rank == 1:
        numbers = numbers[0]
    while numbers.ndim < rank:
        numbers = numbers[None]
    if rank == numbers.ndim == 2 and len(numbers) == 1 and value.axes[0] not in (1, None):
        numbers = np.repeat(numbers, rows, axis=0)
    return numbers.astype(value.held, order="C")  # a scalar stays one


def _mask(value: Value, total: np.ndarray, new: int, capacity: int, window: int) -> np.ndarray:
    """Return the mask [B,T], or [B,1,S,T] with causality, in the dtype of the input."""
    length = value.axes[-1] if isinstance(value.axes[-1], int) else 0
    slots = max(length, total.shape[1])
    if capacity and not length and len(value.axes) == 4:
        slots = capacity
    visible = np.zeros((len(total), slots), bool)
    visible[:, : total.shape[1]] = total
    if len(value.axes) == 4:
        query, key = np.arange(total.shape[1] - new, total.shape[1])[:, None], np.arange(slots)
        seen = key <= query
        if window:
            seen &= key > query - window
        visible = (visible[:, None] & seen)[:, None]
        # A query of padding that sees nothing would be a division of zero by zero.
        visible |= (key == query) & ~visible.any(-1, keepdims=True)
    if value.whole or value.dtype == "bool" or len(value.axes) == 2:
        return visible.astype(value.held)
    return np.where(visible, 0, np.finfo(value.held).min).astype(value.held)
