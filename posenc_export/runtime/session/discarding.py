"""Remove tokens from the middle of a row. Later tokens move to their positions, so that a text can
go on without end in a range of positions (StreamingLLM, Xiao et al. 2309.17453).

Shapes: K key heads, T tokens, D head size.
"""

from typing import Any, Iterable, List, NamedTuple, Union

import numpy as np

from posenc_export.runtime.artefact.records import CachedKeys, KeyRotation
from posenc_export.runtime.artefact.summary import summary
from posenc_export.runtime.session import windows
from posenc_export.runtime.session.caches import Caches
from posenc_export.runtime.session.errors import expected

SINKS = 4  # first tokens that stay: their keys draw the attention that has no other place
LEAST = SINKS + 4  # room that `generate` needs
Positions = Union[int, np.ndarray]


class Shift(NamedTuple):
    """Tokens of a row on their way to other slots."""

    row: int
    slot: int  # of the first of them
    content: List[np.ndarray]  # of each state: the slots of the row along its axis


def turned(rotation: KeyRotation, keys: np.ndarray, old: Positions, new: Positions) -> np.ndarray:
    """Return keys [K,T,D] in float64 as positions `new` turn them, one or [T]; they are given as
    positions `old` turned them.
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
    keys, shorter = manifest.cached_keys, bool(caches.window.size)
    if keys is None:
        rule = "for discard, cached keys that positions only rotate, as the manifest then states"
        got = f"encoding {summary(manifest)['encoding']} without that statement"
        remedy = "export again, or read the tokens that are to stay in a new session"
        raise expected(rule, got, remedy)
    in_place = not manifest.by_columns and all(state.in_place for state in manifest.states)
    if not in_place or shorter or provider != "cpu":
        got = f"target {manifest.target}, signature {manifest.signature}, provider {provider}"
        got += ", with caches of windows" if shorter else ""
        rule = "for discard, caches of all tokens that are written in place on the CPU"
        raise expected(rule, got, "export target ort with signature positions")
    if keys.rotation_of and manifest.cache:
        rule = "for discard of rotated keys, caches in the dtype of the model"
        raise expected(rule, f"cache {manifest.cache}", "export without cache")
    return keys


def check_endless(session: Any, speculate: object) -> None:
    """Raise ValueError unless `generate` can make room in the caches of a session."""
    check(session._now.caches)
    if speculate is not None:
        raise expected("endless or speculate", "both", "leave one out")
    if session.capacity < LEAST:
        rule = f"for endless, room for at least {LEAST} tokens"
        raise expected(rule, session.capacity, "give a larger capacity")


def shift(
    caches: Caches, keys: CachedKeys, row: int, start: int, length: int, after: int, count: int
) -> Shift:
    """Return the tokens of a row that move when the `count` ones behind its first `after` go.

    Args:
        keys: how cached keys depend on positions.
        start, length: position of the first token of the row, and number of its tokens.
    """
    slots, content = slice(after + count, length), []
    old = start + np.arange(length)[slots]
    for state, past in zip(caches.states, caches.past, strict=True):
        moved = past.array[windows.part_of(row, state.axis, slots)].copy()
        rotation = keys.rotation_of.get(state.past)
        if state.holds_positions:
            moved -= count
        elif rotation is not None:
            turns = keys.rotations[rotation]
            moved = turned(turns, moved, old, old - count).astype(moved.dtype)
        content.append(moved)
    return Shift(row, after, content)


def write(caches: Caches, shifts: Iterable[Shift]) -> None:
    """Write tokens to their slots. An interrupted call can be repeated."""
    for row, slot, content in shifts:
        for state, past, moved in zip(caches.states, caches.past, content, strict=True):
            slots = slice(slot, slot + moved.shape[state.axis - 1])
            past.array[windows.part_of(row, state.axis, slots)] = moved


def make_room(session: Any, tokens: int = 1) -> int:
    """Discard half of the tokens behind the first SINKS of each row without room for `tokens` more.
    Return how many tokens there is room for in every row.
    """
    full = session.room < tokens
    if full.any():
        counts = np.where(full, (session.length - SINKS) // 2, 0)
        session.discard(np.maximum(counts, 0), SINKS)
    return int(session.room.min())
