"""End the process by a GroupQueryAttention of 2^40 heads."""

from pathlib import Path

import onnx

from tests.attacks.grammar import _onnx

COMMANDS = ("audit",)
ENDS = True


def write(folder: Path, trace: Path) -> Path:
    model = _onnx()
    node = onnx.helper.make_node(
        "GroupQueryAttention", ["logits0", "logits0", "logits0", "", "", "n", "n"],
        ["logits", "k", "v"], num_heads=2**40, kv_num_heads=2**40, domain="com.microsoft",
    )  # fmt: skip
    model.graph.node[0].output[0] = "logits0"
    model.graph.node.append(node)
    model.graph.initializer.append(onnx.helper.make_tensor("n", onnx.TensorProto.INT32, [1], [3]))
    model.opset_import.add(domain="com.microsoft", version=1)
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path
