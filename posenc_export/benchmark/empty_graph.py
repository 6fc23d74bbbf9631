"""A graph of one Identity node, whose time is the fixed cost of a run of ONNX Runtime."""

from typing import Any, Callable

import numpy as np
import onnx
import onnxruntime
from onnx import helper

IR_VERSION, OPSET = 10, 23  # those of torch.onnx


def bound(threads: int) -> Callable[[], Any]:
    """Return a function that runs the graph with input and output bound. threads: intra-op
    threads.
    """
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])], "empty", ends[:1], ends[1:]
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    arrays = [
        np.zeros(1, np.float32) for _ in ends
    ]  # the closure keeps them alive, because OrtValues do not own them
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in arrays]
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", values[0])
    binding.bind_ortvalue_output("y", values[1])

    def run(alive: Any = (arrays, values)) -> None:
        session.run_with_iobinding(binding)

    return run
