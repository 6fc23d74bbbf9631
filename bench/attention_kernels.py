"""Time of ONNX Runtime's GroupQueryAttention alone: a lower bound of a pass on target `ort`.

bench.decode_cost measures it with the inputs and outputs that encodings need. By number of rows and of tokens, with the heads of SmolLM2-135M:

    python -m bench.attention_kernels
"""

import statistics
import time
from typing import Any, Dict, List, Mapping, Optional, Sequence

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

ROUNDS = 100
TOKENS = (1, 2, 4, 8, 16, 64)  # of a pass of one row
DEPTHS = (256, 1024, 4096)  # cached tokens before it
ROWS, LAYERS = (
    (1, 4, 16),
    6,
)  # caches of several layers, because those of a model do not stay in the processor's caches
# For each use: factor on the head size, bias of scores, softmax as an output.
USES = {
    "alone": (1, False, False),
    "with a bias of each head": (1, True, False),
    "with its softmax as an output": (1, False, True),
    "with both": (1, True, True),
    "with heads of twice the size": (2, False, False),
}


def measured(heads: int, size: int, keys: int) -> List[Dict[str, Any]]:
    """Return {"use", "microseconds", "over_alone"} for each of USES, medians of runs in turn, one thread, caches written in place."""
    bindings = {
        name: _bound(heads, size * factor, keys, bias, softmax)
        for name, (factor, bias, softmax) in USES.items()
    }
    taken: Dict[str, List[float]] = {name: [] for name in USES}
    for _ in range(ROUNDS):
        for name, (session, binding) in bindings.items():
            start = time.perf_counter()
            session.run_with_iobinding(binding)
            taken[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in taken.items()}
    return [
        {
            "use": name,
            "microseconds": round(m * 1e6, 1),
            "over_alone": round(m / medians["alone"], 2),
        }
        for name, m in medians.items()
    ]


def by_rows(heads: int, kv_heads: int, size: int, keys: int) -> Dict[int, float]:
    """Return microseconds of processor time for each row, by number of rows, medians of runs in turn, one thread."""
    bindings = {
        rows: [_bound(heads, size, keys, False, False, rows, kv_heads) for _ in range(LAYERS)]
        for rows in ROWS
    }
    taken: Dict[int, List[float]] = {rows: [] for rows in ROWS}
    for _ in range(ROUNDS):
        for rows, layers in bindings.items():
            start = time.process_time()
            for session, binding in layers:
                session.run_with_iobinding(binding)
            taken[rows].append((time.process_time() - start) / LAYERS / rows)
    return {rows: round(statistics.median(times) * 1e6, 1) for rows, times in taken.items()}


def by_tokens(heads: int, kv_heads: int, size: int, keys: int) -> List[Dict[str, Any]]:
    """Return {"tokens", "group_query", "standard"} for each of TOKENS: microseconds of processor time of a pass after `keys` tokens, medians of runs in turn, one thread.

    "standard" has the queries of all heads that share keys as rows of one product, where GroupQueryAttention has one product for each head.
    """
    found = []
    for tokens in TOKENS:
        layers = range(LAYERS)
        bindings = {
            "group_query": [
                _bound(heads, size, keys + tokens, False, False, 1, kv_heads, tokens)
                for _ in layers
            ],
            "standard": [_standard(heads, size, keys + tokens, kv_heads, tokens) for _ in layers],
        }
        taken: Dict[str, List[float]] = {name: [] for name in bindings}
        for _ in range(ROUNDS // 4):
            for name, each in bindings.items():
                start = time.process_time()
                for session, binding in each:
                    session.run_with_iobinding(binding)
                taken[name].append((time.process_time() - start) / LAYERS)
        found.append(
            {
                "tokens": tokens,
                **{name: round(statistics.median(times) * 1e6, 1) for name, times in taken.items()},
            }
        )
    return found


def _standard(heads: int, size: int, keys: int, kv_heads: int, tokens: int) -> Any:
    """A session on Slice, FusedMatMul, Add, Softmax and MatMul, and its inputs and outputs: queries [1,kv_heads,group * tokens,size], caches and an additive mask."""
    rng, rows = np.random.default_rng(0), heads // kv_heads * tokens
    feeds = {
        "q": rng.standard_normal((1, kv_heads, rows, size), dtype=np.float32),
        "length": np.array([keys]),
    }
    feeds |= {
        name: rng.standard_normal((1, kv_heads, keys + 128, size), dtype=np.float32)
        for name in ("keys", "values")
    }
    feeds["mask"] = np.zeros((1, 1, rows, keys), np.float32)
    nodes = [
        helper.make_node("Slice", ["keys", "zero", "length", "axis"], ["valid_keys"]),
        helper.make_node("Slice", ["values", "zero", "length", "axis"], ["valid_values"]),
        helper.make_node(
            "FusedMatMul",
            ["q", "valid_keys"],
            ["scores"],
            domain="com.microsoft",
            transB=1,
            alpha=size**-0.5,
        ),
        helper.make_node("Add", ["scores", "mask"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "valid_values"], ["y"]),
    ]
    constants = [
        numpy_helper.from_array(np.array([number]), name)
        for name, number in (("zero", 0), ("axis", 2))
    ]
    return _opened(nodes, feeds, ["y"], constants)


def _bound(
    heads: int,
    size: int,
    keys: int,
    bias: bool,
    softmax: bool,
    rows: int = 1,
    kv_heads: Optional[int] = None,
    tokens: int = 1,
) -> Any:
    """A session on a graph with one node, and its inputs and outputs. keys: with the new ones. kv_heads: None for `heads`."""
    rng, slots, kv_heads = np.random.default_rng(0), keys + 128, kv_heads or heads
    feeds: Dict[str, np.ndarray] = {
        name: rng.standard_normal(
            (rows, tokens, (heads if name == "q" else kv_heads) * size), dtype=np.float32
        )
        for name in "qkv"
    }
    feeds |= {
        name: rng.standard_normal((rows, kv_heads, slots, size), dtype=np.float32)
        for name in ("past_key", "past_value")
    }
    feeds |= {"seqlens_k": np.full(rows, keys - 1, np.int32), "total": np.array(keys, np.int32)}
    names = [*feeds]
    if bias:
        feeds["bias"] = rng.standard_normal((rows, heads, 1, keys), dtype=np.float32)
        names += ["", "", "", "bias"]
    outputs = ["y", "present_key", "present_value", *(["softmax"] if softmax else [])]
    attributes = {
        "num_heads": heads,
        "kv_num_heads": kv_heads,
        **({"qk_output": 2} if softmax else {}),
    }
    node = helper.make_node(
        "GroupQueryAttention", names, outputs, domain="com.microsoft", **attributes
    )
    return _opened(
        [node], feeds, outputs, in_place={"present_key": "past_key", "present_value": "past_value"}
    )


def _opened(
    nodes: List[Any],
    feeds: Dict[str, np.ndarray],
    outputs: List[str],
    constants: Sequence[Any] = (),
    in_place: Mapping[str, str] = {},
) -> Any:
    """Return a session on a graph, and its inputs and outputs. in_place: outputs that are written over an input."""
    inputs = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
        )
        for name, array in feeds.items()
    ]
    graph = helper.make_graph(
        nodes,
        "kernel",
        inputs,
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        constants,
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    binding, values = (
        session.io_binding(),
        {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()},
    )
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in outputs:
        if name in in_place:
            binding.bind_ortvalue_output(name, values[in_place[name]])
        else:
            binding.bind_output(name)
    return session, binding


if __name__ == "__main__":
    for number, microseconds in by_rows(9, 3, 64, 512).items():
        print(f"{number} rows: {microseconds} us for each")
    for keys in DEPTHS:
        for row in by_tokens(9, 3, 64, keys):
            ratio = row["standard"] / row["group_query"]
            print(
                f"{row['tokens']} tokens after {keys}: {row['group_query']} us, with standard operators {row['standard']} us ({ratio:.2f})"
            )
