"""The least that a run of ONNX Runtime costs: a graph of one Identity node."""

from typing import Any, Callable

import numpy as np
import onnx
import onnxruntime
from onnx import helper

IR_VERSION, OPSET = 10, 23  # what torch.onnx writes


def bound(threads: int) -> Callable[[], Any]:
    """A run with input and output bound, ready to be called again and again."""
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "empty", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    arrays = [np.zeros(1, np.float32) for _ in ends]  # kept by the closure: OrtValues only borrow them
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in arrays]
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", values[0])
    binding.bind_ortvalue_output("y", values[1])

    def run(held: Any = (arrays, values)) -> None:
        session.run_with_iobinding(binding)

    return run
