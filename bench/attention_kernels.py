"""Time of ONNX Runtime's GroupQueryAttention alone for one token, with the inputs and outputs that encodings need: a lower bound of a step on target `ort`."""

import statistics
import time
from typing import Any, Dict, List

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

ROUNDS = 100
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


def _bound(heads: int, size: int, keys: int, bias: bool, softmax: bool) -> Any:
    """A session on a graph with one node, and its inputs and outputs."""
    rng, slots = np.random.default_rng(0), keys + 128
    feeds: Dict[str, np.ndarray] = {name: rng.standard_normal((1, 1, heads * size), dtype=np.float32) for name in "qkv"}
    feeds |= {name: rng.standard_normal((1, heads, slots, size), dtype=np.float32) for name in ("past_key", "past_value")}
    feeds |= {"seqlens_k": np.array([keys - 1], np.int32), "total": np.array(keys, np.int32)}
    names = [*feeds]
    if bias:
        feeds["bias"] = rng.standard_normal((1, heads, 1, keys), dtype=np.float32)
        names += ["", "", "", "bias"]
    outputs = ["y", "present_key", "present_value", *(["softmax"] if softmax else [])]
    attributes = {"num_heads": heads, "kv_num_heads": heads, **({"qk_output": 2} if softmax else {})}
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
