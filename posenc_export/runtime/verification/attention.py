"""Attention in float64, and the contract of GroupQueryAttention with 8-bit caches."""

from dataclasses import dataclass
from typing import Iterator, List, Optional, Sequence, Tuple

import numpy as np

from posenc_export.runtime.graphs.onnx_nodes import Node
from posenc_export.runtime.verification import contracts
from posenc_export.runtime.verification.contracts import UNDERFLOW, UNIT
from posenc_export.runtime.verification.kernels import CheckedNode, Graph, Record

QUERY, KEY, VALUE, LAST, COS, SIN, POSITIONS, BIAS, SINK = 0, 1, 2, 5, 7, 8, 9, 10, 11
# Of CachedAttention (packages/kernels/README.md).
BY_DISTANCE, KEY_COS, KEY_SIN, QUERY_ROWS, KEY_ROWS, ROW_OF_DISTANCE = 14, 16, 17, 18, 19, 20
DECAYS, INPUTS = 21, 22
SCALES = (12, 13)  # of keys and of values
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


def by_query_head(part: np.ndarray, heads: int) -> np.ndarray:
    """Repeat keys or values [K,T,D] for each of the query heads that share them."""
    return np.repeat(part, heads // len(part), axis=0)  # [heads,T,D]


def by_token(part: np.ndarray) -> np.ndarray:
    """Return numbers of heads [heads,S,D] as [S,heads*D]."""
    return part.transpose(1, 0, 2).reshape(part.shape[1], -1)


def cached_attention(graph: Graph, node: Node) -> Optional[CheckedNode]:
    """A GroupQueryAttention or CachedAttention with 8-bit caches."""
    if node.attributes.get("k_quant_type") != "PER_CHANNEL":
        return None
    inputs = [*node.inputs, *[""] * INPUTS][:INPUTS]
    computed = (*(QUERY, KEY, VALUE), LAST, POSITIONS, BIAS, QUERY_ROWS, KEY_ROWS, DECAYS)
    reads = [inputs[index] for index in computed if inputs[index]]
    others = [name for name in ("softcap", "smooth_softmax") if node.attributes.get(name, 0) > 0]
    others += ["head_sink"] if inputs[SINK] else []
    skipped = f"{', '.join(others)}: not in the contract" if others else ""

    def ratios(records: Sequence[Record]) -> np.ndarray:
        return np.concatenate([_of_call(graph, node, inputs, call) for call in records])

    name = f"{node.operator} {node.inputs[3]}"
    return CheckedNode(name, node.outputs[0], (*reads, *node.outputs[1:3]), ratios, skipped=skipped)


def _of_call(graph: Graph, node: Node, inputs: List[str], call: Record) -> np.ndarray:
    """Return errors over bounds [S] of a call of one row."""
    last = call[inputs[LAST]]
    total, channels = int(last[0]) + 1, [graph.numbers(inputs[at]) for at in SCALES]
    q, k, v = _heads(graph, node, inputs, call)
    caches = [call[name][0].astype(np.float64) for name in node.outputs[1:3]]
    count, ratio = q.numbers.shape[1], np.zeros(q.numbers.shape[1])
    read = []
    for heads, cache, channel in zip((k, v), caches, channels, strict=True):
        of_channel = channel.reshape(len(cache), 1, -1).astype(np.float64)
        appended = cache[:, total - count : total]
        ratio = np.maximum(ratio, _of_codes(heads, appended, of_channel))
        read.append(cache[:, :total] * of_channel)
    biases = [call[inputs[BIAS]][0][..., :total].astype(np.float64)] if inputs[BIAS] else []
    seen = visible(count, total, int(node.attributes.get("local_window_size", -1)))
    behind = np.arange(total - count, total)[:, None] - np.arange(total)
    if inputs[BY_DISTANCE]:
        table = graph.numbers(inputs[BY_DISTANCE]).astype(np.float64)
        biases.append(table[:, np.clip(behind, 0, table.shape[1] - 1)])
    if inputs[ROW_OF_DISTANCE]:
        rows = graph.numbers(inputs[ROW_OF_DISTANCE])
        index = rows[np.clip(behind, 0, len(rows) - 1)]
        biases += _picked(node, inputs, call, index)
    if inputs[DECAYS]:
        biases.append(sums_between(call[inputs[DECAYS]][0, :, :, 0], count, total))
    if node.attributes.get("chunk_size", 0):
        seen = seen & (
            behind <= call[inputs[POSITIONS]][0][:, None] % node.attributes["chunk_size"]
        )
    scale = float(node.attributes["scale"])
    value, bound = _attended(q, read, scale, biases, seen)
    y = call[node.outputs[0]][0].reshape(count, -1)
    return np.maximum(ratio, contracts.over(y, value, bound))


def _picked(node: Node, inputs: List[str], call: Record, index: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the entries [H,S,T] of rows of queries and of keys at an index [S,T]."""
    count, total = index.shape
    if inputs[QUERY_ROWS]:
        rows = call[inputs[QUERY_ROWS]][0].astype(np.float64)  # [H,S,R]
        yield rows[:, np.arange(count)[:, None], index]
    if inputs[KEY_ROWS]:
        rows = call[inputs[KEY_ROWS]][0].astype(np.float64)  # [H*R,T,1] or [H,T,R]
        heads = int(node.attributes["num_heads"])
        by_slot = len(rows) == heads
        by_row = rows.transpose(0, 2, 1) if by_slot else rows.reshape(heads, -1, rows.shape[1])
        factor = float(node.attributes.get("key_row_scale", 1.0))
        yield factor * by_row[:, index, np.arange(total)]


def _heads(graph: Graph, node: Node, inputs: List[str], call: Record) -> Tuple[Heads, Heads, Heads]:
    """Return queries, keys and values of the new tokens, rotated if the node rotates."""
    kv_heads = int(node.attributes["kv_num_heads"])
    counts = (int(node.attributes["num_heads"]), kv_heads, kv_heads)
    read = [call[inputs[index]] for index in (QUERY, KEY, VALUE) if inputs[index]]
    # [1,S,n] or [1,heads,S,D] as [S,n]
    flat = [part[0] if part.ndim == 3 else by_token(part[0]) for part in read]
    joined = np.concatenate(flat, axis=1).astype(np.float64)
    ends = np.cumsum([n * call[node.outputs[1]].shape[3] for n in counts[:2]])
    q, k, v = (
        Heads.of_tokens(part.reshape(len(joined), n, -1))
        for part, n in zip(np.split(joined, ends, axis=1), counts, strict=True)
    )
    if node.attributes.get("do_rotary", 0):
        at = np.arange(len(joined)) + int(call[inputs[LAST]][0]) + 1 - len(joined)
        by_slot = node.operator == "GroupQueryAttention" and at[0] == 0
        if inputs[POSITIONS] and not by_slot:  # a first call counts from the first position
            at = call[inputs[POSITIONS]][0]
        elif inputs[POSITIONS]:
            at = at + call[inputs[POSITIONS]][0, 0]
        interleaved = bool(node.attributes.get("rotary_interleaved", 0))
        of_keys = (KEY_COS, KEY_SIN) if inputs[KEY_COS] else (COS, SIN)
        (q_cos, q_sin), (k_cos, k_sin) = (
            [graph.numbers(inputs[index])[at].astype(np.float64) for index in tables]
            for tables in ((COS, SIN), of_keys)
        )
        q, k = q.rotated(q_cos, q_sin, interleaved), k.rotated(k_cos, k_sin, interleaved)
    return q, k, v


def _of_codes(heads: Heads, codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return twice the distance [S] of codes from those that rint(x / scale) may have."""
    lowest, highest = contracts.codes_of(heads.numbers / scale, heads.error / scale)
    distance = np.maximum(np.maximum(lowest - codes, codes - highest), 0)
    result: np.ndarray = 2 * distance.max(axis=(0, 2))
    return result


def _attended(
    q: Heads, read: List[np.ndarray], scale: float, biases: List[np.ndarray], seen: np.ndarray
) -> Tuple[np.ndarray, np.ndarray]:
    """Return attention to keys and values [K,T,D] that are seen [S,T], and its bound [S,H*D].

    A score has D + OF_SCORE roundings, those of its bias, and the errors of q. If all scores of a
    token are within d of theirs, its weights are within a factor of exp(2 d). A weight, and its
    product with a value, has T + OF_WEIGHT further roundings.
    """
    keys, values = (by_query_head(part, len(q.numbers)) for part in read)
    size, total = q.numbers.shape[2], keys.shape[1]
    turned = keys.transpose(0, 2, 1)
    scores = scale * (q.numbers @ turned)
    away = (size + OF_SCORE) * UNIT * np.abs(q.numbers) + q.error
    error = scale * (away @ np.abs(turned))
    for bias in biases:
        scores = scores + bias
        error = error + (1 + len(biases)) * UNIT * np.abs(bias)
    error = np.where(seen, error + 4 * UNIT * np.abs(scores), 0)
    weights = softmax(np.where(seen, scores, -np.inf))
    part = np.expm1(2 * error.max(axis=2, keepdims=True)) + (total + OF_WEIGHT) * UNIT
    bound = part * (weights @ np.abs(values)) + UNDERFLOW
    return by_token(weights @ values), by_token(bound)
