"""CachedAttention of packages/kernels beside GroupQueryAttention of ONNX Runtime, or with caches in
float16 beside itself in float32, and artefacts of target ort-native beside those of ort
(native_artefacts.py).

    python -m bench.native [--artefacts ORT NATIVE] [--threads 2] [--json FILE]

In turn in one process: the ratio of every round, its median, and the quantiles 0.1 and 0.9. Times
are those of the processor with one thread, and of the clock with more. Caches of the operators take
CACHES bytes, so that a call finds its keys in memory, as a step does that reads weights in between.
Artefacts are those of one decoder that writes text, such as SmolLM2-135M. Rows of the same name in
the file are replaced.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from bench import native_artefacts
from bench.timing import CLOCKS, in_turn, seconds, spread
from posenc_export.runtime.graphs import kernel_library
from posenc_export.runtime.graphs.kernel_library import DOMAIN, OPERATOR
from posenc_export.shared import json_rows

CACHES, ROUNDS = 5e7, 7
SIZE, THETA = 64, 1e4
INPUTS = "query key value past_key past_value seqlens_k total_sequence_length cos_cache sin_cache"
SCALES = ["", "", "", "k_scale", "v_scale"]
TYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.int8): TensorProto.INT8,
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.int64): TensorProto.INT64,
}


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


def numbers(geometry: Geometry) -> Dict[str, np.ndarray]:
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


def contestants(geometry: Geometry) -> Dict[str, Tuple[str, Geometry]]:
    """Return operators and their calls by name; the second is compared with the first."""
    if geometry.cache == "float16":  # which GroupQueryAttention does not read beside float32
        both = {name: geometry._replace(cache=name) for name in ("float32", "float16")}
        return {name: (OPERATOR, call) for name, call in both.items()}
    return {name: (name, geometry) for name in ("GroupQueryAttention", OPERATOR)}


def opened(operator: str, geometry: Geometry, feeds: Dict[str, np.ndarray], threads: int) -> Any:
    """Return a session with one node."""
    own = operator == OPERATOR
    names = [*INPUTS.split(), *SCALES, *(["", "cache_position"] if own else [])]
    known = {**feeds, "past_key": np.zeros(0, geometry.cache)}
    known["past_value"] = known["past_key"]
    names = [name if name in known else "" for name in names]
    attributes: Dict[str, Any] = {"num_heads": geometry.heads, "kv_num_heads": geometry.kv_heads}
    if not own:
        attributes["do_rotary"] = 1
        if geometry.cache == "int8":
            attributes |= dict.fromkeys(("k_quant_type", "v_quant_type"), "PER_CHANNEL")
            attributes["kv_cache_bit_width"] = 8
    domain = DOMAIN if own else "com.microsoft"
    outputs = {"y": np.float32, "key": known["past_key"].dtype, "value": known["past_key"].dtype}
    graph = helper.make_graph(
        [helper.make_node(operator, names, list(outputs), domain=domain, **attributes)],
        "call",
        [helper.make_tensor_value_info(n, TYPES[known[n].dtype], None) for n in names if n],
        [helper.make_tensor_value_info(n, TYPES[np.dtype(d)], None) for n, d in outputs.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(domain, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    kernel_library.register(options)
    cpu = ["CPUExecutionProvider"]
    return onnxruntime.InferenceSession(model.SerializeToString(), options, cpu)


def caches_of(geometry: Geometry, count: int) -> List[List[Any]]:
    """Return keys and values of several caches."""
    random = np.random.default_rng(0)
    shape = (geometry.rows, geometry.kv_heads, geometry.cached + geometry.tokens, SIZE)
    made = [[random.standard_normal(shape, np.float32) for _ in range(2)] for _ in range(count)]
    if geometry.cache == "int8":
        made = [[np.clip(np.rint(40 * x), -128, 127) for x in both] for both in made]
    made = [[x.astype(geometry.cache) for x in both] for both in made]
    return [[onnxruntime.OrtValue.ortvalue_from_numpy(x) for x in both] for both in made]


def calls_of(session: Any, feeds: Dict[str, np.ndarray], caches: Sequence[Sequence[Any]]) -> Any:
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


def of_operators(geometry: Geometry, threads: int) -> Dict[str, Any]:
    """Return times of both operators for a call."""
    feeds, size = numbers(geometry), np.dtype(geometry.cache).itemsize
    slot = 2 * size * geometry.rows * geometry.kv_heads * SIZE  # bytes
    count = int(np.clip(CACHES // (slot * (geometry.cached + geometry.tokens)), 2, 24))
    slots = geometry.cached + np.arange(geometry.tokens)
    rest = {
        "GroupQueryAttention": {"total_sequence_length": np.array(slots[-1] + 1, np.int32)},
        OPERATOR: {"cache_position": np.tile(slots, (geometry.rows, 1))},
    }
    calls: Dict[str, Callable[[], float]] = {}
    both = contestants(geometry)
    caches = {call.cache: caches_of(call, count) for _, call in both.values()}
    for name, (operator, call) in both.items():
        inputs = {**feeds, **rest[operator]}
        session = opened(operator, call, inputs, threads)
        run = calls_of(session, inputs, caches[call.cache])
        calls[name] = lambda run=run: seconds(run, CLOCKS[threads > 1])  # type: ignore[misc]
    times = in_turn(calls, ROUNDS)
    shipped, own = times.values()
    us = {name: round(float(np.median(t)) / count * 1e6, 1) for name, t in times.items()}
    of_call = {**geometry._asdict(), "threads": threads}
    return {**of_call, "microseconds": us, "ratio": spread(own, shipped)}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--artefacts", type=Path, nargs=2, metavar=("ORT", "NATIVE"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.artefacts:
        measured = native_artefacts.measured(options.artefacts, options.threads)
    else:
        measured = (of_operators(geometry, options.threads) for geometry in OPERATORS)
    rows = []
    for row in measured:
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.json:
        names = [_name(row) for row in rows]
        kept = json.loads(options.json.read_text()) if options.json.exists() else []
        json_rows.write(options.json, [*(r for r in kept if _name(r) not in names), *rows])
    return 0


def _name(row: Dict[str, Any]) -> Dict[str, Any]:
    """Return what a row measured, without the results."""
    return {key: value for key, value in row.items() if not isinstance(value, dict)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
