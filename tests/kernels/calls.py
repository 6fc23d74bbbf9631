"""Calls of the operator CachedAttention alone: a model with one node, and its contract."""

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from posenc_export.runtime.graphs import kernel_library
from posenc_export.runtime.graphs.kernel_library import DOMAIN, OPERATOR
from posenc_export.runtime.graphs.onnx_parts import new_node
from posenc_export.runtime.verification.conformance.attention import NEIGHBOURS, Inputs

NAMES = (
    "query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length",
    "cos_cache", "sin_cache", "position_ids", "attention_bias", "head_sink", "k_scale", "v_scale",
    "distance_bias", "cache_position", "key_cos_cache", "key_sin_cache", "query_rows", "key_rows",
    "row_of_distance", "key_decays", "count_rows", "number_of_distance", "query_factors", "pieces",
    "distance_queries", "distance_keys", "turn_cos", "turn_sin",
)  # fmt: skip
ELEMENTS = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.int8): TensorProto.INT8,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.int64): TensorProto.INT64,
    np.dtype(np.float16): TensorProto.FLOAT16,
}
# Inputs with an axis of tokens after that of rows, and after that of heads
BY_TOKEN = {"query", "key", "value", "cache_position", "position_ids", "query_factors"}
BY_TOKEN |= {"turn_cos", "turn_sin"}
BY_HEAD = {"attention_bias", "query_rows", "count_rows", "distance_queries"}
built = pytest.mark.skipif(
    kernel_library.path() is None, reason="the library of packages/kernels is not built"
)


def model(feeds: dict[str, np.ndarray], attributes: dict[str, Any]) -> bytes:
    """Return a model of one node that reads these inputs."""
    names = [name if name in feeds else "" for name in NAMES]
    while not names[-1]:
        names.pop()
    outputs = ["y", "present_key", "present_value"]
    outputs += ["row_weights"] if "row_of_distance" in feeds else []
    node = helper.make_node(OPERATOR, names, outputs, domain=DOMAIN, **attributes)
    cache = ELEMENTS[feeds["past_key"].dtype]
    elements = (TensorProto.FLOAT, cache, cache, TensorProto.FLOAT)
    types = dict(zip(outputs, elements, strict=False))
    graph = helper.make_graph(
        [node],
        "call",
        [
            helper.make_tensor_value_info(name, ELEMENTS[feeds[name].dtype], None)
            for name in names
            if name
        ],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in types.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return onnx.ModelProto(ir_version=10, graph=graph, opset_import=opsets).SerializeToString(
        deterministic=True
    )


@functools.lru_cache(64)
def session(content: bytes, threads: int = 1) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, threads
    if DOMAIN.encode() in content:
        kernel_library.register(options)
    return onnxruntime.InferenceSession(content, options, ["CPUExecutionProvider"])


def run(
    feeds: dict[str, np.ndarray], attributes: dict[str, Any], threads: int = 1
) -> list[np.ndarray]:
    """Return output, keys and values of a call."""
    results: list[np.ndarray] = session(model(feeds, attributes), threads).run(None, feeds)
    return results


@dataclass
class Case:
    """A call with random numbers.

    Args:
        heads, kv_heads: H and K.
        size, value_size: head sizes of keys and of values, which is 0 for the same.
        cached, counts: tokens in the cache and new tokens of each row.
        tokens: new tokens S with padding; 0 for the longest row.
        kinds: what scores consist of: "rotation", "interleaved", "partial", "positions",
            "key rotation", "distance", "bias", "sinks", "query rows", "key rows", "decays",
            "counts", "pieces", "distance keys", "turns".
        attributes: further attributes of the node.
        cache: dtype of the caches.
    """

    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    value_size: int = 0
    cached: tuple[int, ...] = (5,)
    counts: tuple[int, ...] = (1,)
    kinds: tuple[str, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)
    cache: str = "float32"
    packed: bool = True
    capacity: int = 0
    reach: int = 0
    table_rows: int = 5
    feeds: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng(0)
        rows, tokens = len(self.cached), max(self.counts)
        last = [n + c for n, c in zip(self.cached, self.counts, strict=True)]
        self.capacity = self.capacity or max(last) + 3
        self.value_size = self.value_size or self.size
        sizes = (self.size, self.value_size)

        def numbers(*shape: int) -> np.ndarray:
            return random.standard_normal(shape).astype(np.float32)

        heads = {
            name: numbers(rows, tokens, n * size)
            for name, n, size in (
                ("query", self.heads, self.size),
                ("key", self.kv_heads, self.size),
                ("value", self.kv_heads, self.value_size),
            )
        }  # fmt: skip
        caches = [numbers(rows, self.kv_heads, self.capacity, size) for size in sizes]
        for cache in caches:
            for row, n in enumerate(self.cached):
                cache[row, :, n:] = np.nan  # slots that nothing may read
        self.feeds = (
            {"query": np.concatenate(list(heads.values()), axis=2)} if self.packed else heads
        )
        self._scales = [random.uniform(0.01, 0.03, self.kv_heads * size).astype(np.float32)
                        for size in sizes]  # fmt: skip
        if self.cache == "int8":
            of_heads = [s.reshape(self.kv_heads, 1, -1) for s in self._scales]
            caches = [
                np.clip(np.rint(np.nan_to_num(c, nan=3.0) / s), -128, 127)
                for c, s in zip(caches, of_heads, strict=True)
            ]
            self.feeds |= dict(zip(("k_scale", "v_scale"), self._scales, strict=True))
        past = [cache.astype(self.cache) for cache in caches]
        self.feeds |= {"past_key": past[0], "past_value": past[1]}
        self.feeds["seqlens_k"] = np.array(last, np.int32) - 1
        first = np.array(self.cached, np.int64)[:, None]
        self.feeds["cache_position"] = first + np.arange(tokens)
        self._start = np.arange(rows)[:, None] * 7 + 2
        if {"positions", "chunk"} & {*self.kinds}:
            self.feeds["position_ids"] = self._start + first + np.arange(tokens)
        self._add_tables(numbers, tokens)

    def _add_tables(self, numbers: Any, tokens: int) -> None:
        length = self.capacity + 7 * len(self.cached) + 2
        half = self.size // 4 if "partial" in self.kinds else self.size // 2
        if "rotation" in self.kinds:
            self.feeds |= {"cos_cache": numbers(length, half), "sin_cache": numbers(length, half)}
        if "key rotation" in self.kinds:
            self.feeds |= {
                name: numbers(length, half) for name in ("key_cos_cache", "key_sin_cache")
            }
        if "distance" in self.kinds:
            self.feeds["distance_bias"] = numbers(self.heads, self.reach or self.capacity)
        if "bias" in self.kinds:
            self.feeds["attention_bias"] = numbers(
                len(self.cached), self.heads, tokens, self.capacity
            )
        if "sinks" in self.kinds:
            self.feeds["head_sink"] = numbers(self.heads)
        shape = (len(self.cached), self.heads)
        if "query rows" in self.kinds:
            self.feeds["query_rows"] = numbers(*shape, tokens, self.table_rows)
        if "key rows" in self.kinds:
            of_rows = (len(self.cached), self.heads * self.table_rows, self.capacity, 1)
            self.feeds["key_rows"] = numbers(*of_rows)
        if {"query rows", "key rows"} & {*self.kinds}:
            rows = np.random.default_rng(1).integers(0, self.table_rows, self.reach or 9)
            self.feeds["row_of_distance"] = rows.astype(np.int32)

        if "decays" in self.kinds:
            self.feeds["key_decays"] = -np.abs(numbers(*shape, self.capacity, 1))
            for row, (n, count) in enumerate(zip(self.cached, self.counts, strict=True)):
                self.feeds["key_decays"][row, :, n + count :] = np.nan
        if "counts" in self.kinds:
            self.feeds["count_rows"] = numbers(*shape, tokens, self.table_rows)
        if "pieces" in self.kinds:
            starts = np.sort(numbers(self.heads, self.table_rows), 1)
            slopes = numbers(self.heads, self.table_rows)
            steps = (slopes[:, :-1] - slopes[:, 1:]) * starts[:, 1:]
            values = np.concatenate((np.ones((self.heads, 1)), 1 + steps.cumsum(1)), 1)
            self.feeds["pieces"] = np.stack((starts, slopes, values), 2).astype(np.float32)
            self.feeds["number_of_distance"] = numbers(self.reach or self.capacity)
            self.feeds["query_factors"] = numbers(len(self.cached), tokens)
        if "distance keys" in self.kinds:
            self.feeds["distance_queries"] = numbers(*shape, tokens, self.size)
            # Every second distance, from beyond the largest one to beyond 0, as sums of waves.
            last = (self.reach or self.capacity) + 2 * NEIGHBOURS
            distances = np.arange(last, -33, -1)[last % 2 :: 2]
            angles = np.multiply.outer(distances, [1.0, 0.7, 0.001])
            waves = numbers(2, self.heads, self.size, 3) / self.size**0.5
            both = np.stack((np.cos(angles), np.sin(angles)))
            keys = np.einsum("phdw,ptw->htd", waves, both)
            self.feeds["distance_keys"] = keys.astype(np.float32)
        if "turns" in self.kinds:
            digits = 16.0 ** np.arange(4)[:, None] * np.arange(16)
            turns = np.random.default_rng(2).uniform(-3, 3, (*shape[:1], tokens, half))
            turns[:, 1::3] = 0  # for these tokens, keys are as they are
            angles = turns[:, :, None] * digits.reshape(-1, 1)
            self.feeds["turn_cos"] = np.cos(angles).astype(np.float32)
            self.feeds["turn_sin"] = np.sin(angles).astype(np.float32)

    @property
    def node(self) -> dict[str, Any]:
        attributes = {"num_heads": self.heads, "kv_num_heads": self.kv_heads, **self.attributes}
        attributes |= {"rotary_interleaved": 1} if "interleaved" in self.kinds else {}
        return attributes | ({"key_row_scale": 0.25} if "key rows" in self.kinds else {})

    def run(self, threads: int = 1) -> list[np.ndarray]:
        return run(self.feeds, self.node, threads)

    def expected(self) -> tuple[np.ndarray, list[list[np.ndarray]]]:
        """Return the output [B,S,H*D] that the contract states, in float64, and the keys and values
        of each row as read.
        """
        y = np.zeros((len(self.cached), max(self.counts), self.heads * self.value_size))
        self.row_weights = np.zeros((len(y), self.heads, y.shape[1], self.table_rows))
        names = [name if name in self.feeds else "" for name in NAMES]
        attributes = {**self.node, "do_rotary": int("rotation" in self.kinds)}
        node, read = new_node(OPERATOR, names, ["y"], attributes), []
        for row, (n, count) in enumerate(zip(self.cached, self.counts, strict=True)):
            feeds = dict(self.feeds)  # with the new tokens of this row alone
            feeds |= {name: feeds[name][:, :count] for name in feeds.keys() & BY_TOKEN}
            feeds |= {name: feeds[name][:, :, :count] for name in feeds.keys() & BY_HEAD}
            inputs = Inputs(node, feeds, row)
            q, *new = inputs.heads()
            read.append([self._appended(row, n, x, number) for number, x in enumerate(new)])
            if not count:
                continue
            weights, y[row, :count] = inputs.attended(q, *read[-1])
            if "row_of_distance" in feeds:
                picked = np.eye(self.table_rows)[inputs.picked_rows(count, n + count)]
                self.row_weights[row, :, :count] = np.einsum("hst,str->hsr", weights, picked)
        return y, read

    def _appended(self, row: int, n: int, new: np.ndarray, number: int) -> np.ndarray:
        """Return a cache with new heads as attention reads it, [K,T,D]."""
        past = self.feeds[("past_key", "past_value")[number]][row, :, :n].astype(np.float64)
        if self.cache != "int8":
            return np.concatenate((past, new.astype(self.cache)), axis=1, dtype=np.float64)
        scale = self._scales[number].reshape(self.kv_heads, 1, -1).astype(np.float64)
        codes = np.clip(np.rint(new / scale), -128, 127)
        return np.concatenate((past, codes), axis=1) * scale
