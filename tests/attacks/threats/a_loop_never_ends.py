"""Compute for hours in a Loop of 2^62 rounds."""

from pathlib import Path

import onnx

from tests.attacks.grammar import _onnx

COMMANDS = ("audit",)
ENDS = True


def write(folder: Path, trace: Path) -> Path:
    helper, kinds, model = onnx.helper, onnx.TensorProto, _onnx()
    kind = [helper.make_tensor_value_info(n, kinds.FLOAT, None) for n in ("x", "y")]
    rounds = [helper.make_tensor_value_info("i", kinds.INT64, [])]
    going = [helper.make_tensor_value_info(n, kinds.BOOL, []) for n in ("c", "d")]
    nodes = [helper.make_node("Add", ["x", "x"], ["y"]), helper.make_node("Identity", ["c"], ["d"])]
    body = helper.make_graph(nodes, "b", [*rounds, going[0], kind[0]], [going[1], kind[1]])
    model.graph.node[0].output[0] = "first"
    model.graph.node.append(helper.make_node("Loop", ["most", "", "first"], ["logits"], body=body))
    model.graph.initializer.append(helper.make_tensor("most", kinds.INT64, [], [2**62]))
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path
