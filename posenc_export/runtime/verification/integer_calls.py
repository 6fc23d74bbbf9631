"""Calls on the integer part of a graph: rows of all lengths around every edge, and their inputs.

Shapes: B rows, S new tokens, P slots of caches that a call is given, T keys of a call, A
coordinates.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Set, Tuple

import numpy as np

from posenc_export.runtime.artefact.graph_inputs import W
from posenc_export.runtime.artefact.schema import Manifest
from posenc_export.runtime.verification import described, integer_graph

EXHAUSTIVE = 64  # slots up to which all combinations of cached and new tokens are evaluated
DEEPEST = 8192  # slots up to which every cached length is evaluated
PROMPT = 1024  # length of the longest prompt around an edge
ROWS = 256  # of a call that evaluates steps
REQUESTED = 5  # columns of logits
SLACK = 3  # slots that no row has reached
CELLS = 1 << 24  # of a call: queries times keys
SIZES = (8, 16, 64, 128, 256, 512)
NAMES = ("size", "reach", "original_max_positions", "max_distance", "span", "max_relative")
EDGES = (*NAMES, "left", "right", "extent", "clamp", "period", "first")


@dataclass(frozen=True)
class Call:
    """Rows that a graph is called with."""

    start: np.ndarray  # position of the first token of each row [B]
    cached: np.ndarray  # number of tokens in its caches [B]
    new: np.ndarray  # number of new tokens [B]
    width: int  # columns S; those after the new tokens of a row are padding
    slots: int  # slots P of the caches

    @property
    def columns(self) -> np.ndarray:
        """Places of new tokens in their rows [B,S]."""
        return self.cached[:, None] + np.arange(self.width)

    @property
    def queries(self) -> np.ndarray:
        """Positions of new tokens [B,S], -1 at padding."""
        inside = np.arange(self.width) < self.new[:, None]
        return np.where(inside, self.start[:, None] + self.columns, -1)

    @property
    def past(self) -> np.ndarray:
        """Positions of the slots before the call [B,P], -1 where none was written."""
        slots = np.arange(self.slots)
        return np.where(slots < self.cached[:, None], self.start[:, None] + slots, -1)


@dataclass(frozen=True)
class Places:
    """A call as a graph of an artefact takes it, and what follows from its description."""

    feeds: Mapping[str, np.ndarray]  # inputs of the graph by name
    queries: np.ndarray  # positions of new tokens [B,S], -1 at padding
    keys: np.ndarray  # positions of keys [B,T], -1 where there is none
    coordinates: Any  # of new tokens [A,B,S]; None without coordinates
    first: np.ndarray  # slot that the first new token of each row is written to [B]
    # Slot of the last token of each row [B]; of the last column if slots are columns
    last: np.ndarray
    call: Call  # rows of the call
    window_slots: int  # slots of caches of windows that the call reads

    @property
    def in_windows(self) -> "Places":
        """The same call with the keys in caches of windows, from `window_start` on [B,W]."""
        first, count = self.feeds["window_start"].astype(np.int64), self.window_slots
        slots = first[:, None] + np.arange(count)
        keys = np.take_along_axis(_padded(self.keys, 2 * self.keys.shape[1]), slots, 1)
        return replace(self, keys=keys, first=self.first - first, last=self.last - first)


def edges(manifest: Manifest) -> List[int]:
    """Return lengths at which the behaviour of an artefact changes, by its description."""
    most = manifest.max_positions
    numbers = {*SIZES, manifest.chunk, manifest.capacity_bucket, most}
    numbers |= set(_numbers(manifest.config))
    near = {number + shift for number in numbers for shift in (-1, 0, 1)}
    return sorted(number for number in near if 0 < number <= most)


def _numbers(config: Any) -> Iterator[int]:
    """Yield the numbers of a description that are lengths or distances."""
    if isinstance(config, dict):
        for name, value in config.items():
            if name in EDGES and isinstance(value, (int, float)) and not isinstance(value, bool):
                yield int(value)
            yield from _numbers(value)
    elif isinstance(config, list):
        for value in config:
            yield from _numbers(value)


def whole_range(manifest: Manifest) -> Call:
    """Return one row with all positions."""
    none, most = np.array([0]), manifest.max_positions
    return Call(none, none, np.array([most]), most, 0)


def calls(manifest: Manifest, heads: int = 1) -> Iterator[Call]:
    """Yield the calls of an artefact: all combinations of a few slots, a step at every cached
    length, and calls on both sides of each edge; without caches whole sequences. Masks of several
    heads are evaluated on half as many slots, and at as many lengths as CELLS allow.
    """
    most, lengths = manifest.max_positions, edges(manifest)
    few = min(EXHAUSTIVE if heads == 1 else EXHAUSTIVE // 2, most)
    if not described.has_cache(manifest):
        yield _whole(most, np.arange(1, few + 1))
        for length in lengths:
            if few < length <= PROMPT:
                yield _whole(most, np.array([length, 1, length // 2]))
        return
    width = few
    while width:
        pairs = [(c, n) for n in range(width // 2 + 1, width + 1) for c in range(few - n + 1)]
        yield from _of_pairs(manifest, pairs, width)
        width //= 2
    deepest = min(most, DEEPEST, max(few, math.isqrt(4 * CELLS // heads)))
    for begin in range(few, deepest, ROWS):
        steps = [(cached, 1) for cached in range(begin, min(begin + ROWS, deepest))]
        yield from _of_pairs(manifest, steps, 1)
    by_width: Dict[int, Set[Tuple[int, int]]] = {}
    for length in lengths:
        widths = {1, 2, 7, manifest.chunk - 1, manifest.chunk, manifest.chunk + 1, length}
        for new in widths:
            if 0 < new <= min(length, PROMPT) and length > few:
                by_width.setdefault(new, set()).add((length - new, new))
    for width, chosen in sorted(by_width.items()):
        ordered = sorted(chosen)
        rows = max(1, CELLS // (heads * width * (ordered[-1][0] + width)))
        for begin in range(0, len(ordered), rows):
            yield from _of_pairs(manifest, ordered[begin : begin + rows], width)


def _of_pairs(manifest: Manifest, pairs: Sequence[Tuple[int, int]], width: int) -> Iterator[Call]:
    """Yield one call of rows with (cached, new) tokens, from first, odd and last positions on."""
    if not pairs:
        return
    cached, new = np.array(pairs, np.int64).T
    room = manifest.max_positions - cached - new
    starts = np.stack([np.zeros_like(room), room, np.minimum(room, 1), np.minimum(room, 7)])
    rows = np.arange(len(pairs))
    yield Call(starts[rows % 4, rows], cached, new, width, int(cached.max()))


def _whole(most: int, new: np.ndarray) -> Call:
    room = most - new
    start = np.where(np.arange(len(new)) % 2, room, np.minimum(room, 1))
    return Call(start, np.zeros_like(new), new, int(new.max()), 0)


def placed(manifest: Manifest, call: Call) -> Places:
    """Return the inputs of a graph for a call, by their meanings and the update rules."""
    by_mask, caches = manifest.signature == "mask", described.has_cache(manifest)
    queries, columns, past = call.queries, call.columns, call.past
    first, last = call.cached, np.maximum(call.cached + call.new - 1, 0)
    mask = queries >= 0
    keys = np.concatenate((past, queries), 1) if caches else queries
    if by_mask:
        mask = np.concatenate((past >= 0, mask), 1) if caches else mask
        keys = np.where(mask, np.cumsum(mask, 1) - 1, -1)
        queries = keys[:, keys.shape[1] - call.width :]
        first = np.full_like(first, call.slots if caches else 0)
        last = np.full_like(first, keys.shape[1] - 1)
    capacity = call.slots
    if caches and manifest.in_place:
        capacity = call.slots + call.width + SLACK
        if not by_mask:
            keys = _written(manifest, call, capacity)
        elif not manifest.contiguous:
            keys = _padded(keys, capacity)
    total = np.array(last.max() + 1, np.int32)
    coordinates = _coordinates(queries, manifest.axes) if manifest.axes else None
    ids = queries if coordinates is None else np.concatenate((queries[None], coordinates))
    requested = np.maximum(call.new - 1, 0)[:, None] - np.arange(REQUESTED) % 3
    feeds = _empty(manifest, call, capacity) | {
        "position_ids": ids,
        "attention_mask": np.where(mask, 1, -1),
        "past_positions": _padded(past, capacity) if manifest.in_place else past,
        "cache_position": columns,
        "first_position": call.start[:, None].copy(),
        "seqlens_k": last.astype(np.int32),
        "total_sequence_length": total,
        "window_start": (call.cached // 2).astype(np.int32),
        "slots": np.arange(int(total)),
        "logits_index": np.maximum(requested, 0),
        integer_graph.EMBEDDED: np.zeros((*queries.shape, 1), np.float32),
    }
    of_rows = int((last - feeds["window_start"]).max()) + 1
    in_windows = of_rows if manifest.contiguous else capacity - 1
    return Places(feeds, queries, keys, coordinates, first, last, call, in_windows)


def _coordinates(positions: np.ndarray, axes: int) -> np.ndarray:
    """Return coordinates [A,B,S] that differ from positions [B,S] and from each other."""
    divisors = np.arange(axes, 0, -1)[:, None, None]
    return np.where(positions < 0, 0, positions // divisors)


def _empty(manifest: Manifest, call: Call, capacity: int) -> Dict[str, np.ndarray]:
    """Return all inputs and states by name, of which the integer part reads shapes only: without
    numbers if an axis has a size that no call changes.
    """
    sizes = {"batch_size": len(call.new), "sequence_length": call.width, "capacity": capacity}
    sizes |= {W: capacity - 1}  # as many slots as `window_start` leaves, and others that no row has
    sizes |= {"past_sequence_length": capacity, "encoder_sequence_length": 1}
    values = {value.name: (value.axes, value.dtype) for value in manifest.inputs}
    values |= {value.name: (value.axes, value.dtype) for value in manifest.encoder}
    values |= {state.past: (state.axes, state.dtype) for state in manifest.states}
    arrays = {}
    for name, (axes, dtype) in values.items():
        shape = [sizes.get(axis, 1) if isinstance(axis, str) else 0 for axis in axes]
        arrays[name] = np.zeros(shape, dtype if dtype.startswith("int") else np.float32)
    return arrays


def _written(manifest: Manifest, call: Call, capacity: int) -> np.ndarray:
    """Return the positions of keys in rows that fill their own first slots: [B,T]."""
    if manifest.contiguous:  # slots count on from the first, also those of padding
        slots = np.arange(int((call.cached + call.new).max()))
        keys = call.start[:, None] + slots
        return np.where(keys < manifest.max_positions, keys, -1)
    keys = _padded(call.past, capacity)
    np.put_along_axis(keys, call.columns, call.queries, 1)
    return keys


def _padded(past: np.ndarray, capacity: int) -> np.ndarray:
    return np.pad(past, ((0, 0), (0, capacity - past.shape[1])), constant_values=-1)
