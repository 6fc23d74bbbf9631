"""Time of ONNX Runtime's GroupQueryAttention alone for one token of each row: a lower bound of a step on target `ort`.

bench.decode_cost measures it with the inputs and outputs that encodings need. By number of rows, with the heads of SmolLM2-135M:

    python -m bench.attention_kernels
"""

import statistics
import time
from typing import Any, Dict, List, Optional

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

ROUNDS = 100
ROWS, LAYERS = (1, 4, 16), 6  # caches of several layers, because those of a model do not stay in the processor's caches
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
    bindings = {name: _bound(heads, size * factor, keys, bias, softmax) for name, (factor, bias, softmax) in USES.items()}
    taken: Dict[str, List[float]] = {name: [] for name in USES}
    for _ in range(ROUNDS):
        for name, (session, binding) in bindings.items():
            start = time.perf_counter()
            session.run_with_iobinding(binding)
            taken[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in taken.items()}
    return [{"use": name, "microseconds": round(m * 1e6, 1), "over_alone": round(m / medians["alone"], 2)} for name, m in medians.items()]


def by_rows(heads: int, kv_heads: int, size: int, keys: int) -> Dict[int, float]:
    """Return microseconds of processor time for each row, by number of rows, medians of runs in turn, one thread."""
    bindings = {rows: [_bound(heads, size, keys, False, False, rows, kv_heads) for _ in range(LAYERS)] for rows in ROWS}
    taken: Dict[int, List[float]] = {rows: [] for rows in ROWS}
    for _ in range(ROUNDS):
        for rows, layers in bindings.items():
            start = time.process_time()
            for session, binding in layers:
                session.run_with_iobinding(binding)
            taken[rows].append((time.process_time() - start) / LAYERS / rows)
    return {rows: round(statistics.median(times) * 1e6, 1) for rows, times in taken.items()}


def _bound(heads: int, size: int, keys: int, bias: bool, softmax: bool, rows: int = 1, kv_heads: Optional[int] = None) -> Any:
    """A session on a graph with one node, and its inputs and outputs. kv_heads: None for `heads`."""
    rng, slots, kv_heads = np.random.default_rng(0), keys + 128, kv_heads or heads
    feeds: Dict[str, np.ndarray] = {name: rng.standard_normal((rows, 1, (heads if name == "q" else kv_heads) * size), dtype=np.float32) for name in "qkv"}
    feeds |= {name: rng.standard_normal((rows, kv_heads, slots, size), dtype=np.float32) for name in ("past_key", "past_value")}
    feeds |= {"seqlens_k": np.full(rows, keys - 1, np.int32), "total": np.array(keys, np.int32)}
    names = [*feeds]
    if bias:
        feeds["bias"] = rng.standard_normal((rows, heads, 1, keys), dtype=np.float32)
        names += ["", "", "", "bias"]
    outputs = ["y", "present_key", "present_value", *(["softmax"] if softmax else [])]
    attributes = {"num_heads": heads, "kv_num_heads": kv_heads, **({"qk_output": 2} if softmax else {})}
    node = helper.make_node("GroupQueryAttention", names, outputs, domain="com.microsoft", **attributes)
    inputs = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape) for name, array in feeds.items()]
    graph = helper.make_graph([node], "kernel", inputs, [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding, values = session.io_binding(), {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name, past in (("present_key", "past_key"), ("present_value", "past_value")):
        binding.bind_ortvalue_output(name, values[past])
    for name in outputs[:1] + outputs[3:]:
        binding.bind_output(name)
    return session, binding


if __name__ == "__main__":
    for number, microseconds in by_rows(9, 3, 64, 512).items():
        print(f"{number} rows: {microseconds} us for each")
