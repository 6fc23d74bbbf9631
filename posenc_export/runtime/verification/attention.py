"""Attention nodes in float64, and the contract of those with caches in a format of few bits."""

from dataclasses import dataclass
from typing import Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from posenc_export.runtime.artefact.cache_formats import CACHE_FORMATS, SCALED
from posenc_export.runtime.graphs.onnx_nodes import Node
from posenc_export.runtime.verification import contracts
from posenc_export.runtime.verification.attention_scores import (
    INTERPOLATION,
    NEIGHBOURS,
    at_counts,
    in_pieces,
    softmax,
    sums_between,
    visible,
    with_between,
)
from posenc_export.runtime.verification.contracts import UNDERFLOW, UNIT
from posenc_export.runtime.verification.kernels import CheckedNode, Graph, Record
from posenc_export.runtime.verification.turned_keys import Turns

QUERY, KEY, VALUE, LAST, COS, SIN, POSITIONS, BIAS, SINK = 0, 1, 2, 5, 7, 8, 9, 10, 11
# Of CachedAttention (packages/kernels/README.md).
BY_DISTANCE, KEY_COS, KEY_SIN, QUERY_ROWS, KEY_ROWS, ROW_OF_DISTANCE = 14, 16, 17, 18, 19, 20
DECAYS, COUNT_ROWS, NUMBERS, FACTORS, PIECES = 21, 22, 23, 24, 25
DISTANCE_QUERIES, DISTANCE_KEYS, TURN_COS, TURN_SIN = 26, 27, 28, 29
SCALES = (12, 13)  # of keys and of values
TABLES = (COS, SIN, SINK, *SCALES, BY_DISTANCE, KEY_COS, KEY_SIN, ROW_OF_DISTANCE, NUMBERS, PIECES,
          DISTANCE_KEYS)  # fmt: skip
# Roundings of a score beside the sum over D: the scale of a channel, that of scores, and of the
# register's parts.
OF_SCORE = 8
# Of a weight beside the sum over T: the exponential, its quotient by their sum, and the register's
# parts.
OF_WEIGHT = 24


@dataclass(frozen=True)
class Heads:
    """Numbers of heads [heads,S,D] float64, and bounds of the error of a kernel's numbers."""

    numbers: np.ndarray
    error: np.ndarray

    @staticmethod
    def of_tokens(numbers: np.ndarray) -> "Heads":
        """Return exact numbers [S,heads,D] by head."""
        by_head = numbers.transpose(1, 0, 2).astype(np.float64)
        return Heads(by_head, np.zeros_like(by_head))

    def rotated(self, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> "Heads":
        """Rotate the first channels by angles [S,n/2]; each number is a sum with 3 roundings."""
        size = 2 * cos.shape[1]
        first = slice(0, size, 2) if interleaved else slice(0, size // 2)
        second = slice(1, size, 2) if interleaved else slice(size // 2, size)
        a, b = self.numbers[..., first], self.numbers[..., second]
        numbers, error = self.numbers.copy(), self.error.copy()
        numbers[..., first], numbers[..., second] = a * cos - b * sin, a * sin + b * cos
        error[..., first] = 3 * UNIT * (np.abs(a * cos) + np.abs(b * sin))
        error[..., second] = 3 * UNIT * (np.abs(a * sin) + np.abs(b * cos))
        return Heads(numbers, error)


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
    error: Union[float, np.ndarray] = 0.0  # of the biases, beside that of adding them
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

    def heads(self) -> Tuple[Heads, Heads, Heads]:
        """Return queries, keys and values of the new tokens, rotated if the node rotates."""
        node, kv_heads = self.node, int(self.node.attributes["kv_num_heads"])
        counts = (int(node.attributes["num_heads"]), kv_heads, kv_heads)
        read = [self[index] for index in (QUERY, KEY, VALUE) if self.has(index)]
        # [S,n] or [heads,S,D] as [S,n]
        flat = [part if part.ndim == 2 else by_token(part) for part in read]
        joined = np.concatenate(flat, axis=1).astype(np.float64)
        size = flat[0].shape[1] // (sum(counts) if len(flat) == 1 else counts[0])
        ends = np.cumsum([n * size for n in counts[:2]])
        q, k, v = (
            Heads.of_tokens(part.reshape(len(joined), n, -1))
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
            q, k = q.rotated(q_cos, q_sin, interleaved), k.rotated(k_cos, k_sin, interleaved)
        return q, k, v

    def _rotated_positions(self, count: int) -> np.ndarray:
        """Return the rows of rotation tables that the new tokens read [S]."""
        slots = np.arange(count) + int(self[LAST]) + 1 - count
        if not self.has(POSITIONS):
            return slots
        # In its first call, GroupQueryAttention counts from the first position.
        by_slot = self.node.operator == "GroupQueryAttention" and slots[0] == 0
        return slots + self[POSITIONS][0] if by_slot else self[POSITIONS]

    def scores(self, q: Heads, total: int) -> Scores:
        """Return the scores of queries and all keys, `total`."""
        known, (_, count, size) = self.node.attributes, q.numbers.shape
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
        product, error = self._by_distance(behind) if self.has(DISTANCE_KEYS) else (None, 0.0)
        biases += [] if product is None else [product]
        seen = visible(count, total, int(known.get("local_window_size", -1)))
        if known.get("chunk_size", 0):
            seen = seen & (behind <= self[POSITIONS][:, None] % known["chunk_size"])
        scale = float(known.get("scale", 0.0)) or size**-0.5
        sinks = self[SINK][:, None, None] if self.has(SINK) else -np.inf
        rows = self[COUNT_ROWS] if self.has(COUNT_ROWS) else None
        turns = None
        if self.has(TURN_COS):
            turns = Turns(self[TURN_COS], self[TURN_SIN], bool(known.get("rotary_interleaved", 0)))
        return Scores(scale, known.get("softcap", 0.0), biases, rows, seen, sinks, error, turns)

    def _by_distance(self, behind: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Return the products [H,S,T] of the other queries with the keys of distances [S,T], and
        bounds of their error: D roundings, those of neighbours, and those of the register's parts.
        """
        queries, keys = self[DISTANCE_QUERIES].astype(np.float64), self[DISTANCE_KEYS]
        index = 2 * (keys.shape[1] - 2 * NEIGHBOURS) - behind.clip(0)
        at = np.arange(len(index))[:, None], index
        products = with_between(queries @ keys.transpose(0, 2, 1), INTERPOLATION)[:, *at]
        sizes = np.abs(queries) @ np.abs(keys).transpose(0, 2, 1)
        bounds = with_between(sizes, np.abs(INTERPOLATION))[:, *at]
        return products, (keys.shape[2] + NEIGHBOURS + OF_SCORE) * UNIT * bounds

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
    q: Heads, read: Sequence[np.ndarray], scores: Scores
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the softmax [H,S,T], the output [S,H*D] for keys and values [K,T,D], and its bound
    [S,H*D], which holds without softcap, sinks and counts.

    A score has D + OF_SCORE roundings, those of its bias, and the errors of q. If all scores of a
    token are within d of theirs, its weights are within a factor of exp(2 d). A weight, and its
    product with a value, has T + OF_WEIGHT further roundings.
    """
    keys, values = (by_query_head(part, len(q.numbers)) for part in read)
    size, total = q.numbers.shape[2], keys.shape[1]
    turned, biases = keys.transpose(0, 2, 1), scores.biases
    products, further = q.numbers @ turned, np.zeros(())
    if scores.turns is not None:
        products, further = scores.turns.products(q.numbers, keys)
    numbers = scores.scale * products
    if scores.count_rows is not None:
        biases = [*biases, at_counts(scores.count_rows, np.where(scores.seen, numbers, -np.inf))]
    if scores.softcap:
        numbers = scores.softcap * np.tanh(numbers / scores.softcap)
    away = (size + OF_SCORE) * UNIT * np.abs(q.numbers) + q.error
    error = scores.scale * (away @ np.abs(turned) + further) + scores.error
    for bias in biases:
        numbers = numbers + bias
        error = error + (1 + len(biases)) * UNIT * np.abs(bias)
    error = np.where(scores.seen, error + 4 * UNIT * np.abs(numbers), 0)
    weights = softmax(np.where(scores.seen, numbers, -np.inf), scores.sinks)
    part = np.expm1(2 * error.max(axis=2, keepdims=True)) + (total + OF_WEIGHT) * UNIT
    bound = part * (weights @ np.abs(values)) + UNDERFLOW
    return weights, by_token(weights @ values), by_token(bound)


def cached_attention(graph: Graph, node: Node) -> Optional[CheckedNode]:
    """A GroupQueryAttention or CachedAttention with caches in a format of CACHE_FORMATS."""
    if graph.manifest.cache not in CACHE_FORMATS:
        return None
    inputs = Inputs(node, graph.numbers)
    computed = [QUERY, KEY, VALUE, LAST, POSITIONS, BIAS, QUERY_ROWS, KEY_ROWS, DECAYS]
    computed += NUMBERS, FACTORS, PIECES, DISTANCE_QUERIES, DISTANCE_KEYS, TURN_COS, TURN_SIN
    reads = [node.inputs[index] for index in computed if inputs.has(index)]
    others = [name for name in ("softcap", "smooth_softmax") if node.attributes.get(name, 0) > 0]
    kinds = ((SINK, "head_sink"), (COUNT_ROWS, "count_rows"))
    others += [name for index, name in kinds if inputs.has(index)]
    skipped = f"{', '.join(others)}: not in the contract" if others else ""

    def ratios(records: Sequence[Record]) -> np.ndarray:
        return np.concatenate([_of_call(graph, node, call) for call in records])

    name = f"{node.operator} {node.inputs[3]}"
    return CheckedNode(name, node.outputs[0], (*reads, *node.outputs[1:3]), ratios, skipped=skipped)


def _of_call(graph: Graph, node: Node, call: Record) -> np.ndarray:
    """Return errors over bounds [S] of a call of one row."""
    inputs = Inputs(node, lambda name: call[name] if name in call else graph.numbers(name))
    q, *appended = inputs.heads()
    count, total = q.numbers.shape[1], int(inputs[LAST]) + 1
    ratio, read = np.zeros(count), []
    for heads, name, scale in zip(appended, node.outputs[1:3], SCALES, strict=True):
        cache, of_channel = call[name][0].astype(np.float64), np.ones((1, 1, 1))
        stored = cache[:, total - count : total]
        if graph.manifest.cache in SCALED:
            of_channel = inputs[scale].reshape(len(cache), 1, -1).astype(np.float64)
            ratio = np.maximum(ratio, _of_codes(heads, stored, of_channel))
        else:
            ratio = np.maximum(ratio, _of_numbers(heads, stored, graph.manifest.cache))
        read.append(cache[:, :total] * of_channel)
    _, value, bound = attended(q, read, inputs.scores(q, total))
    y = call[node.outputs[0]][0].reshape(count, -1)
    return np.maximum(ratio, contracts.over(y, value, bound))


def _of_codes(heads: Heads, codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return twice the distance [S] of codes from those that rint(x / scale) may have."""
    lowest, highest = contracts.codes_of(heads.numbers / scale, heads.error / scale)
    distance = np.maximum(np.maximum(lowest - codes, codes - highest), 0)
    result: np.ndarray = 2 * distance.max(axis=(0, 2))
    return result


def _of_numbers(heads: Heads, cached: np.ndarray, dtype: str) -> np.ndarray:
    """Return 2 for tokens [S] with a number other than those that rounding to a dtype may give,
    otherwise 0. Numbers beyond the largest one become that one.
    """
    most = np.finfo(dtype).max
    lowest, highest = (
        np.clip(heads.numbers + error, -most, most).astype(dtype)
        for error in (-heads.error, heads.error)
    )
    return 2.0 * ((cached < lowest) | (cached > highest)).any(axis=(0, 2))
