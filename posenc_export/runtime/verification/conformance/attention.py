"""Attention over a cache in float64 (packages/kernels/README.md).

Shapes: H heads, S tokens of a call, T keys, R rows of a table.
"""

from dataclasses import dataclass
from typing import Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from posenc_export.runtime.graphs.onnx_nodes import Node

UNIT = 2.0**-24  # unit roundoff of float32
ROTATED = 6 * UNIT  # bound of the error of a number of size 1 after its rotation
QUERY, KEY, VALUE, LAST, COS, SIN, POSITIONS, BIAS, SINK = 0, 1, 2, 5, 7, 8, 9, 10, 11
# Of CachedAttention (packages/kernels/README.md).
BY_DISTANCE, KEY_COS, KEY_SIN, QUERY_ROWS, KEY_ROWS, ROW_OF_DISTANCE = 14, 16, 17, 18, 19, 20
DECAYS, COUNT_ROWS, NUMBERS, FACTORS, PIECES = 21, 22, 23, 24, 25
DISTANCE_QUERIES, DISTANCE_KEYS, TURN_COS, TURN_SIN = 26, 27, 28, 29
SCALES = (12, 13)  # of keys and of values
TABLES = (COS, SIN, SINK, *SCALES, BY_DISTANCE, KEY_COS, KEY_SIN, ROW_OF_DISTANCE, NUMBERS, PIECES,
          DISTANCE_KEYS)  # fmt: skip
NEIGHBOURS = 16  # of a distance between two keys of distances, on each side
# Weights of products with them: a sinc under a Kaiser window.
_AWAY = np.arange(NEIGHBOURS) + 0.5
INTERPOLATION = np.sinc(_AWAY) * np.i0(18 * np.sqrt(1 - (_AWAY / NEIGHBOURS) ** 2)) / np.i0(18)
DIGITS = 16  # numbers of a digit of a distance (packages/kernels/README.md)


def visible(count: int, total: int, window: int) -> np.ndarray:
    """Return which tokens [S,T] the last S tokens attend to: up to themselves, within a window."""
    at, ends = np.arange(total), np.arange(total - count, total)[:, None]
    seen: np.ndarray = (at <= ends) & (at > ends - (window if window > 0 else total + 1))
    return seen


def softmax(scores: np.ndarray, sinks: float | np.ndarray = -np.inf) -> np.ndarray:
    """Return the weights of scores [heads,S,T]; scores of sinks [heads,1,1] take a part."""
    largest = np.maximum(scores.max(axis=2, keepdims=True), sinks)
    weights = np.exp(scores - largest)
    return np.asarray(weights / (weights.sum(axis=2, keepdims=True) + np.exp(sinks - largest)))


def sums_between(decays: np.ndarray, count: int, total: int) -> np.ndarray:
    """Return the sums [H,S,T] of the decays of keys [H,T] after each key, up to each of the last S
    tokens.
    """
    sums = decays[:, :total].astype(np.float64).cumsum(1)
    return np.asarray(sums[:, total - count :, None] - sums[:, None])


def at_counts(rows: np.ndarray, products: np.ndarray) -> np.ndarray:
    """Return rows [H,S,R] between their entries at the counts of keys: the sums of the sigmoids of
    their products [H,S,T] and those of all later keys, at most R - 1.
    """
    gates, last = 1 / (1 + np.exp(-products)), rows.shape[2] - 1
    counts = np.minimum(gates[..., ::-1].cumsum(2)[..., ::-1], last)
    below = counts.astype(int)
    low, high = (
        np.take_along_axis(rows, np.minimum(index, last), 2).astype(np.float64)
        for index in (below, below + 1)
    )
    return np.asarray(low + (counts - below) * (high - low))


def in_pieces(x: np.ndarray, pieces: np.ndarray) -> np.ndarray:
    """Return functions [H,S,T] of numbers x [S,T] that are linear in pieces [H,pieces,3], each with
    its least number, slope and value at 0.
    """
    index = [np.searchsorted(of_head[1:, 0], x, "right") for of_head in pieces]
    return np.stack([p[i, 1] * x + p[i, 2] for p, i in zip(pieces, index, strict=True)])


def with_between(products: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return products [...,n] with keys of every second distance and, in turn, those of distances
    between two keys: sums of 2 NEIGHBOURS products with weights, from the nearest on. Without keys
    that have fewer neighbours.
    """
    count = products.shape[-1] - 2 * NEIGHBOURS + 1
    parts = [products[..., n : n + count] for n in range(2 * NEIGHBOURS)]
    pairs = zip(parts[NEIGHBOURS - 1 :: -1], parts[NEIGHBOURS:], weights, strict=True)
    between = sum(weight * (before + after) for before, after, weight in pairs)
    return np.stack((parts[NEIGHBOURS - 1], between), -1).reshape(*products.shape[:-1], -1)


def of_digits(angles: np.ndarray, digits: int) -> Tuple[np.ndarray, np.ndarray]:
    """Return the inputs turn_cos and turn_sin [B,S,16*digits,r/2] for angles per slot [B,S,r/2]."""
    distances = np.outer(DIGITS ** np.arange(digits), np.arange(DIGITS)).reshape(-1, 1)
    turns = angles[:, :, None] * distances
    return np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)


@dataclass(frozen=True)
class Turns:
    """Angles of each query: those of the distances d 16^l in row d + 16 l.

    Args:
        cos, sin: [S,16*digits,r/2].
        interleaved: see ops.rotate_pairs.
    """

    cos: np.ndarray
    sin: np.ndarray
    interleaved: bool

    def at(self, distances: np.ndarray) -> np.ndarray:
        """Return the rotations [S,T,r/2] complex at distances [S,T], as products over digits."""
        rows = self.cos + 1j * self.sin.astype(np.float64)
        queries, result = np.arange(len(rows))[:, None], np.ones(1)
        for first in range(0, rows.shape[1], DIGITS):
            digit = distances // DIGITS ** (first // DIGITS) % DIGITS
            result = result * rows[queries, first + digit]
        return result

    def products(self, q: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return the products [H,S,T] of queries [H,S,D] with keys [H,T,D], of which the last are
        their own.
        """
        count, total = q.shape[1], keys.shape[1]
        ends = np.arange(total - count, total)[:, None]
        rotations = self.at(np.maximum(ends - np.arange(total), 0))
        of_q, of_keys = self._pairs(q), self._pairs(keys)
        plain = 2 * rotations.shape[2]
        y: np.ndarray = q[..., plain:] @ keys[..., plain:].transpose(0, 2, 1)
        for query in range(count):
            turned = of_q[:, query, None] * rotations[query]
            y[:, query] += (turned.conj() * of_keys).real.sum(2)
        return y

    def _pairs(self, x: np.ndarray) -> np.ndarray:
        """Return the rotated pairs of heads [..,D] as complex numbers [..,r/2]."""
        half = self.cos.shape[2]
        if self.interleaved:
            return np.asarray(x[..., : 2 * half : 2] + 1j * x[..., 1 : 2 * half : 2])
        return np.asarray(x[..., :half] + 1j * x[..., half : 2 * half])


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """Rotate the first channels of heads [heads,S,D] by angles [S,n/2]."""
    size = 2 * cos.shape[-1]
    first = slice(0, size, 2) if interleaved else slice(0, size // 2)
    second = slice(1, size, 2) if interleaved else slice(size // 2, size)
    a, b, numbers = x[..., first], x[..., second], x.copy()
    numbers[..., first], numbers[..., second] = a * cos - b * sin, a * sin + b * cos
    return numbers


def by_query_head(part: np.ndarray, heads: int) -> np.ndarray:
    """Repeat keys or values [K,T,D] for each of the query heads that share them."""
    return np.repeat(part, heads // len(part), axis=0)  # [heads,T,D]


def by_token(part: np.ndarray) -> np.ndarray:
    """Return numbers of heads [heads,S,D] as [S,heads*D]."""
    return part.transpose(1, 0, 2).reshape(part.shape[1], -1)


class Scores(NamedTuple):
    """How the scores of a row follow from products of queries and keys, [H,S,T]."""

    scale: float
    softcap: float  # 0 for none
    biases: List[np.ndarray]  # are added, of H heads or of one
    count_rows: Optional[np.ndarray]  # rows of queries that are read at counts of keys [H,S,R]
    seen: np.ndarray  # which keys queries see [S,T]
    sinks: Union[float, np.ndarray]  # scores of sinks [H,1,1]; -inf for none
    turns: Optional[Turns] = None  # by which keys are rotated further for each query


@dataclass(frozen=True)
class Inputs:
    """The inputs of an attention node in a call, by index: those of one row, without its axis.

    Args:
        node: a GroupQueryAttention or CachedAttention (packages/kernels/README.md).
        value: returns the numbers of an input by its name.
        row: the row of the call.
    """

    node: Node
    value: Callable[[str], np.ndarray]
    row: int = 0

    def has(self, index: int) -> bool:
        """Return whether the node has an input."""
        return index < len(self.node.inputs) and self.node.inputs[index] != ""

    def __getitem__(self, index: int) -> np.ndarray:
        numbers = self.value(self.node.inputs[index])
        return numbers if index in TABLES else np.asarray(numbers[self.row])

    def heads(self) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return queries, keys and values [heads,S,D] of the new tokens, rotated if the node
        rotates.
        """
        node, kv_heads = self.node, int(self.node.attributes["kv_num_heads"])
        counts = (int(node.attributes["num_heads"]), kv_heads, kv_heads)
        read = [self[index] for index in (QUERY, KEY, VALUE) if self.has(index)]
        # [S,n] or [heads,S,D] as [S,n]
        flat = [part if part.ndim == 2 else by_token(part) for part in read]
        joined = np.concatenate(flat, axis=1).astype(np.float64)
        size = flat[0].shape[1] // (sum(counts) if len(flat) == 1 else counts[0])
        ends = np.cumsum([n * size for n in counts[:2]])
        q, k, v = (
            part.reshape(len(joined), n, -1).transpose(1, 0, 2)
            for part, n in zip(np.split(joined, ends, axis=1), counts, strict=True)
        )
        if node.attributes.get("do_rotary", 0):
            at = self._rotated_positions(len(joined))
            interleaved = bool(node.attributes.get("rotary_interleaved", 0))
            of_keys = (KEY_COS, KEY_SIN) if self.has(KEY_COS) else (COS, SIN)
            (q_cos, q_sin), (k_cos, k_sin) = (
                [self[index][at].astype(np.float64) for index in tables]
                for tables in ((COS, SIN), of_keys)
            )
            q, k = rotated(q, q_cos, q_sin, interleaved), rotated(k, k_cos, k_sin, interleaved)
        return q, k, v

    def _rotated_positions(self, count: int) -> np.ndarray:
        """Return the rows of rotation tables that the new tokens read [S]."""
        slots = np.arange(count) + int(self[LAST]) + 1 - count
        if not self.has(POSITIONS):
            return slots
        # In its first call, GroupQueryAttention counts from the first position.
        by_slot = self.node.operator == "GroupQueryAttention" and slots[0] == 0
        return slots + self[POSITIONS][0] if by_slot else self[POSITIONS]

    def scores(self, q: np.ndarray, total: int) -> Scores:
        """Return the scores of queries and all keys, `total`."""
        known, (_, count, size) = self.node.attributes, q.shape
        biases = [self[BIAS][..., :total].astype(np.float64)] if self.has(BIAS) else []
        behind = np.arange(total - count, total)[:, None] - np.arange(total)
        if self.has(BY_DISTANCE):
            table = self[BY_DISTANCE].astype(np.float64)
            biases.append(table[:, np.clip(behind, 0, table.shape[1] - 1)])
        if self.has(ROW_OF_DISTANCE):
            biases += self._picked(self.picked_rows(count, total))
        if self.has(DECAYS):
            biases.append(sums_between(self[DECAYS][:, :, 0], count, total))
        if self.has(PIECES):
            numbers = self[NUMBERS].astype(np.float64)
            of_keys = numbers[np.clip(behind, 0, len(numbers) - 1)]
            biases.append(
                in_pieces(of_keys * self[FACTORS][:, None], self[PIECES].astype(np.float64))
            )
        if self.has(DISTANCE_KEYS):
            biases.append(self._by_distance(behind))
        seen = visible(count, total, int(known.get("local_window_size", -1)))
        if known.get("chunk_size", 0):
            seen = seen & (behind <= self[POSITIONS][:, None] % known["chunk_size"])
        scale = float(known.get("scale", 0.0)) or size**-0.5
        sinks = self[SINK][:, None, None] if self.has(SINK) else -np.inf
        rows = self[COUNT_ROWS] if self.has(COUNT_ROWS) else None
        turns = None
        if self.has(TURN_COS):
            turns = Turns(self[TURN_COS], self[TURN_SIN], bool(known.get("rotary_interleaved", 0)))
        return Scores(scale, known.get("softcap", 0.0), biases, rows, seen, sinks, turns)

    def _by_distance(self, behind: np.ndarray) -> np.ndarray:
        """Return the products [H,S,T] of the other queries with the keys of distances [S,T]."""
        queries, keys = self[DISTANCE_QUERIES].astype(np.float64), self[DISTANCE_KEYS]
        index = 2 * (keys.shape[1] - 2 * NEIGHBOURS) - behind.clip(0)
        products = with_between(queries @ keys.transpose(0, 2, 1), INTERPOLATION)
        return np.asarray(products[:, np.arange(len(index))[:, None], index])

    def picked_rows(self, count: int, total: int) -> np.ndarray:
        """Return the row that the distance of each query and key picks [S,T]."""
        behind = np.arange(total - count, total)[:, None] - np.arange(total)
        rows = self[ROW_OF_DISTANCE]
        return rows[np.clip(behind, 0, len(rows) - 1)]

    def _picked(self, index: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the entries [H,S,T] of rows of queries and of keys at an index [S,T]."""
        count, total = index.shape
        if self.has(QUERY_ROWS):
            rows = self[QUERY_ROWS].astype(np.float64)  # [H,S,R]
            yield rows[:, np.arange(count)[:, None], index]
        if self.has(KEY_ROWS):
            rows = self[KEY_ROWS].astype(np.float64)  # [H*R,T,1] or [H,T,R]
            heads = int(self.node.attributes["num_heads"])
            by_slot = len(rows) == heads
            by_row = rows.transpose(0, 2, 1) if by_slot else rows.reshape(heads, -1, rows.shape[1])
            factor = float(self.node.attributes.get("key_row_scale", 1.0))
            yield factor * by_row[:, index, np.arange(total)]


def attended(
    q: np.ndarray, read: Sequence[np.ndarray], scores: Scores
) -> Tuple[np.ndarray, np.ndarray]:
    """Return the softmax [H,S,T] and the output [S,H*D] for keys and values [K,T,D]."""
    keys, values = (by_query_head(part, len(q)) for part in read)
    turns = scores.turns
    products = turns.products(q, keys) if turns else q @ keys.transpose(0, 2, 1)
    numbers, biases = scores.scale * products, scores.biases
    if scores.count_rows is not None:
        biases = [*biases, at_counts(scores.count_rows, np.where(scores.seen, numbers, -np.inf))]
    if scores.softcap:
        numbers = scores.softcap * np.tanh(numbers / scores.softcap)
    for bias in biases:
        numbers = numbers + bias
    weights = softmax(np.where(scores.seen, numbers, -np.inf), scores.sinks)
    return weights, by_token(weights @ values)


def tolerance(scale: float, size: int) -> float:
    """Return the bound of the error of weighted sums of numbers of size 1 in float32, with scores
    of size scale * sqrt(D). A key too many changes them by 1 / keys.
    """
    return 4e-6 * max(1.0, scale * size**0.5)
