"""Remove tokens from the middle of a row. Later tokens move to their positions, so that a text can
go on without end in a range of positions (StreamingLLM, Xiao et al. 2309.17453).

Shapes: K key heads, T tokens, D head size.
"""

from typing import Any, List, Union

import numpy as np

from posenc_export.runtime.artefact.cache_formats import SCALED
from posenc_export.runtime.artefact.records import CachedKeys, KeyRotation
from posenc_export.runtime.artefact.summary import summary
from posenc_export.runtime.session.caches import Caches, Move
from posenc_export.runtime.session.errors import expected
from posenc_export.runtime.session.graph import part_of

SINKS = 4  # first tokens that stay: they take the attention that goes nowhere else
LEAST = SINKS + 4  # room that `generate` needs
Positions = Union[int, np.ndarray]


def turned(rotation: KeyRotation, keys: np.ndarray, old: Positions, new: Positions) -> np.ndarray:
    """Return float64 keys [K,T,D] that are rotated at positions `old` as if they were rotated at
    positions `new`, each one number or [T].
    """
    angles = _angles(rotation, new) - _angles(rotation, old)  # [T,pairs]
    cos, sin = np.cos(angles), np.sin(angles)
    i, j = np.array(rotation.pairs, int).reshape(-1, 2).T
    result = keys.astype(np.float64)
    x, y = result[..., i], result[..., j]
    result[..., i], result[..., j] = x * cos - y * sin, x * sin + y * cos
    return result


def _angles(rotation: KeyRotation, positions: Positions) -> np.ndarray:
    dtype = np.float32 if rotation.single else np.float64
    places = np.asarray(positions, dtype).reshape(-1, 1)
    return (places * np.array(rotation.frequencies, dtype)).astype(np.float64)


def check(caches: Caches) -> CachedKeys:
    """Return how cached keys depend on positions. Raise ValueError unless tokens can be moved."""
    manifest, provider = caches.graph.manifest, caches.graph.provider
    keys = manifest.cached_keys
    if keys is None:
        rule = "for discard, cached keys that positions only rotate, as the manifest then states"
        got = f"encoding {summary(manifest)['encoding']} without that statement"
        remedy = "export again, or read the tokens that are to stay in a new session"
        raise expected(rule, got, remedy)
    if provider != "cpu":
        raise expected("for discard, provider cpu", provider, "load with provider='cpu'")
    if manifest.by_columns or not all(state.in_place for state in manifest.states):
        got = f"target {manifest.target} with signature {manifest.signature}"
        remedy = "export target ort or onnx-static with signature positions"
        raise expected("for discard, caches that are written in place", got, remedy)
    if keys.rotation_of and manifest.cache in SCALED:
        rule = "for discard of rotated keys, caches of numbers without scales"
        raise expected(rule, f"cache {manifest.cache}", "export without cache")
    return keys


def check_endless(session: Any, speculate: object) -> None:
    """Raise ValueError unless `generate` can make room in the caches of a session."""
    check(session._state.caches)
    if speculate is not None:
        raise expected("endless or speculate", "both", "leave one out")
    room = int((session.length + session.room).min(initial=session.capacity))
    if room < LEAST:
        remedy = "give a larger capacity, or begin at an earlier position"
        raise expected(f"for endless, room for at least {LEAST} tokens of a row", room, remedy)


def shift(
    caches: Caches, keys: CachedKeys, row: int, first: int, length: int, after: int, count: int
) -> Move:
    """Return the tokens of a row that move if `count` tokens behind its first `after` are removed.

    Args:
        keys: how cached keys depend on positions.
        first, length: position of the first token of the row, and number of its tokens.

    Raises:
        ValueError: caches of windows do not hold the tokens that the next one would read.
    """
    slots: List[int] = []
    content: List[np.ndarray] = []
    kept = int(caches.notes.windows.first_kept[row])
    next_kept = max(kept - count, min(kept, after))
    _check_kept(caches.window.size, next_kept, length - count)
    for state, past in zip(caches.states, caches.past, strict=True):
        begin, next_begin = (kept, next_kept) if state.window else (0, 0)
        moving = max(after + count, begin)  # first token that moves
        place = slice(moving - begin, length - begin)
        moved = past.array[part_of(row, state.axis, place)].copy()
        old = first + np.arange(moving, length)
        rotation = keys.rotation_of.get(state.past)
        if state.holds_positions:
            moved -= count
        elif rotation is not None:
            turns, most = keys.rotations[rotation], np.finfo(moved.dtype).max
            moved = turned(turns, moved, old, old - count).clip(-most, most).astype(moved.dtype)
        slots.append(moving - count - next_begin)
        content.append(moved)
    return Move(row, next_kept, slots, content)


def _check_kept(size: int, first: int, length: int) -> None:
    """Raise ValueError unless caches of windows from token `first` on hold the last `size` - 1 of
    a row of some length.
    """
    if first and length < first + size - 1:
        rule = f"for discard, at least {first + size - 1} tokens that stay, since keys of windows"
        remedy = "discard fewer tokens"
        raise expected(f"{rule} are kept for the last tokens only", length, remedy)


def make_room(session: Any) -> int:
    """Discard half of the tokens behind the first SINKS of each row that is full. Return how many
    tokens there is room for in every row.
    """
    full = session.room < 1
    if full.any():
        counts = np.where(full, (session.length - SINKS) // 2, 0)
        session.discard(np.maximum(counts, 0), SINKS)
    return int(session.room.min())
