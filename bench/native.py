"""CachedAttention of packages/kernels beside GroupQueryAttention of ONNX Runtime, or with caches in
float16 beside itself in float32.

    python -m bench.native [--threads 2] [--json FILE]

In turn in one process: the ratio of every round, its median, and the quantiles 0.1 and 0.9. Times
are those of the processor with one thread, and of the clock with more. Caches take CACHES bytes, so
that a call finds its keys in memory, as a step does that reads weights in between. Rows of the same
call in the file are replaced. `posenc bench` compares artefacts of both targets.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Sequence

import numpy as np
import onnxruntime

from bench import json_rows
from bench.timing import CLOCKS, in_turn, seconds
from posenc_export.benchmark.ratios import spread
from posenc_export.runtime.graphs import kernel_library
from posenc_export.runtime.graphs.kernel_library import DOMAIN, OPERATOR
from posenc_export.runtime.graphs.onnx_nodes import Nodes
from posenc_export.runtime.graphs.onnx_parts import ELEMENTS, new_node, serialised

CACHES, ROUNDS = 5e7, 7
SIZE, THETA = 64, 1e4
INPUTS = "query key value past_key past_value seqlens_k total_sequence_length cos_cache sin_cache"
SCALES = ["", "", "", "k_scale", "v_scale"]


class Geometry(NamedTuple):
    """Sizes of a call: heads, rows, new tokens of each row, cached tokens, and dtype of caches."""

    heads: int
    kv_heads: int
    rows: int = 1
    tokens: int = 1
    cached: int = 1024
    cache: str = "float32"


SHARING = ((9, 3), (32, 8), (8, 8))  # heads and kv heads
OPERATORS = [
    *(Geometry(9, 3, cached=n) for n in (16, 128, 512, 1024, 4096, 16384)),
    *(Geometry(32, 8, cached=n) for n in (128, 1024, 4096)),
    *(Geometry(8, 8, cached=n) for n in (128, 1024, 4096)),
    *(Geometry(*h, cached=n, cache="int8") for h in SHARING for n in (1024, 4096)),
    *(Geometry(*h, cached=n, cache="float16") for h in SHARING for n in (1024, 4096, 16384)),
    *(Geometry(9, 3, tokens=n) for n in (2, 4, 8, 16, 64, 256)),
    Geometry(9, 3, rows=16, cached=512),
    *(Geometry(9, 3, tokens=n, cached=0) for n in (64, 256, 1024)),
]


def numbers(geometry: Geometry) -> dict[str, np.ndarray]:
    """Return the inputs of a call but its caches."""
    heads, kv, rows, tokens, cached, cache = geometry
    random = np.random.default_rng(0)
    packed = random.standard_normal((rows, tokens, (heads + 2 * kv) * SIZE)).astype(np.float32)
    angles = np.outer(np.arange(cached + tokens), THETA ** (-np.arange(SIZE // 2) * 2 / SIZE))
    feeds = {"query": packed, "seqlens_k": np.full(rows, cached + tokens - 1, np.int32)}
    feeds |= {"cos_cache": np.cos(angles).astype(np.float32)}
    feeds |= {"sin_cache": np.sin(angles).astype(np.float32)}
    if cache == "int8":
        feeds |= dict.fromkeys(("k_scale", "v_scale"), np.full(kv * SIZE, 1 / 40, np.float32))
    return feeds


def contestants(geometry: Geometry) -> dict[str, tuple[str, Geometry]]:
    """Return operators and their calls by name; the second is compared with the first."""
    if geometry.cache == "float16":  # which GroupQueryAttention does not read beside float32
        both = {name: geometry._replace(cache=name) for name in ("float32", "float16")}
        return {name: (OPERATOR, call) for name, call in both.items()}
    return {name: (name, geometry) for name in ("GroupQueryAttention", OPERATOR)}


def opened(operator: str, geometry: Geometry, feeds: dict[str, np.ndarray], threads: int) -> Any:
    """Return a session with one node."""
    own = operator == OPERATOR
    names = [*INPUTS.split(), *SCALES, *(["", "cache_position"] if own else [])]
    free = {name: array.dtype.name for name, array in feeds.items()}
    free |= dict.fromkeys(("past_key", "past_value"), geometry.cache)
    free = {name: ELEMENTS.get(dtype, dtype) for name, dtype in free.items()}
    attributes: dict[str, Any] = {"num_heads": geometry.heads, "kv_num_heads": geometry.kv_heads}
    attributes |= {} if own else {"do_rotary": 1}
    if geometry.cache == "int8" and not own:
        attributes |= dict.fromkeys(("k_quant_type", "v_quant_type"), "PER_CHANNEL")
        attributes["kv_cache_bit_width"] = 8
    domain, outputs = DOMAIN if own else "com.microsoft", ["y", "key", "value"]
    names = [name if name in free else "" for name in names]
    node = new_node(operator, names, outputs, attributes, domain)
    content = serialised(Nodes(opsets={"": 21, domain: 1}), [node], outputs, free=free)
    return session_of(content, threads)


def session_of(content: bytes, threads: int) -> Any:
    """Return a session on a graph that may have operators of packages/kernels."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    kernel_library.register(options)
    return onnxruntime.InferenceSession(content, options, ["CPUExecutionProvider"])


def caches_of(geometry: Geometry, count: int) -> list[list[Any]]:
    """Return keys and values of several caches."""
    random = np.random.default_rng(0)
    shape = (geometry.rows, geometry.kv_heads, geometry.cached + geometry.tokens, SIZE)

    def cache(_: int) -> Any:
        numbers = random.standard_normal(shape, np.float32)
        numbers = np.clip(np.rint(40 * numbers), -128, 127) if geometry.cache == "int8" else numbers
        return onnxruntime.OrtValue.ortvalue_from_numpy(numbers.astype(geometry.cache))

    return [[*map(cache, range(2))] for _ in range(count)]


def calls_of(session: Any, feeds: dict[str, np.ndarray], caches: Sequence[Sequence[Any]]) -> Any:
    """Return a function that makes a call on every cache, in place."""
    bindings = []
    for both in caches:
        binding = session.io_binding()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        for name, cache in zip(("key", "value"), both, strict=True):
            binding.bind_ortvalue_input(f"past_{name}", cache)
            binding.bind_ortvalue_output(name, cache)
        binding.bind_output("y")
        bindings.append(binding)

    def run() -> None:
        for binding in bindings:
            session.run_with_iobinding(binding)

    return run


def of_operators(geometry: Geometry, threads: int) -> dict[str, Any]:
    """Return times of both operators for a call."""
    feeds, size = numbers(geometry), np.dtype(geometry.cache).itemsize
    slot = 2 * size * geometry.rows * geometry.kv_heads * SIZE  # bytes
    count = int(np.clip(CACHES // (slot * (geometry.cached + geometry.tokens)), 2, 24))
    slots = geometry.cached + np.arange(geometry.tokens)
    rest = {
        "GroupQueryAttention": {"total_sequence_length": np.array(slots[-1] + 1, np.int32)},
        OPERATOR: {"cache_position": np.tile(slots, (geometry.rows, 1))},
    }
    calls, both = {}, contestants(geometry)
    caches = {call.cache: caches_of(call, count) for _, call in both.values()}
    for name, (operator, call) in both.items():
        inputs = {**feeds, **rest[operator]}
        session = opened(operator, call, inputs, threads)
        run = calls_of(session, inputs, caches[call.cache])
        calls[name] = partial(seconds, run, CLOCKS[threads > 1])
    times = in_turn(calls, ROUNDS)
    shipped, own = times.values()
    us = {name: round(float(np.median(t)) / count * 1e6, 1) for name, t in times.items()}
    of_call = {**geometry._asdict(), "threads": threads}
    ratio = {name: round(n, 3) for name, n in vars(spread(np.divide(own, shipped))).items()}
    return {**of_call, "microseconds": us, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for geometry in OPERATORS:
        rows.append(of_operators(geometry, options.threads))
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        names = [_name(row) for row in rows]
        kept = [row for row in json_rows.read(options.json, []) if _name(row) not in names]
        json_rows.write(options.json, [*kept, *rows])


def _name(row: dict[str, Any]) -> dict[str, Any]:
    """Return what a row measured, without the results."""
    return {key: value for key, value in row.items() if not isinstance(value, dict)}


if __name__ == "__main__":
    main()
