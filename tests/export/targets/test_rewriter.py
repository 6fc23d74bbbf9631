"""Branches that a builder emits, and the semantic nodes that lowerings read."""

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import parser

from posenc_export.export.targets.builder import Builder, finish, replace_nodes
from posenc_export.ops import graph

PLAIN = (
    '<ir_version: 10, opset_import: ["": 23]> g (float[n] x, bool wanted) => (float[n] y) '
    "{ y = Neg(x) }"
)


def _with_branches() -> ir.Model:
    """y = 2 (x + x) if wanted, else 3 (x + x): the sum is outside the branches."""
    model = ir.from_proto(parser.parse_model(PLAIN))
    builder = Builder(model, "float32", 64)
    x, wanted = model.graph.inputs

    def lowered(op: Builder, node: ir.Node) -> ir.Value:
        double = op.Add(x, x)

        def times(factor: int) -> Any:
            return lambda op: op.Mul(double, op.constant(factor, "float32"))

        return op.choose(wanted, times(2), times(3))

    replace_nodes(builder, {"Neg": lowered})
    finish(builder)
    model.graph.outputs[0].shape = x.shape
    return model


@pytest.mark.parametrize(("wanted", "factor"), [(True, 4), (False, 6)])
def test_a_branch_reads_values_and_constants_of_the_graph_around_it(
    wanted: bool, factor: int
) -> None:
    written = ir.to_proto(_with_branches())
    onnx.checker.check_model(written, full_check=True)
    content, providers = written.SerializeToString(), ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(content, providers=providers)
    x = np.arange(3, dtype=np.float32)
    y = session.run(None, {"x": x, "wanted": np.array(wanted)})[0]
    np.testing.assert_array_equal(y, factor * x)


def test_nodes_of_branches_are_nodes_of_the_graph() -> None:
    operators = sorted(node.op_type for node in _with_branches().graph.all_nodes())
    assert operators == "Add If Mul Mul".split()


def test_a_semantic_node_is_read_by_the_names_it_was_emitted_with() -> None:
    first, sinks = [ir.Value(name=name) for name in ("q", "keys", "values", "mask")], ir.Value()
    attributes = {"heads": 4.0, "kv_heads": 2.0, "scale": 0.5, "softcap": 0.0}

    def attend(inputs: Any) -> graph.Attend:
        return graph.Attend(ir.node("Attend", inputs, attributes, domain=graph.DOMAIN))

    node, without = attend([*first, None, sinks]), attend(first)
    assert [node.q, node.keys, node.values, node.mask] == first
    assert node.content is None and node.sinks is sinks
    assert (node.heads, node.kv_heads, node.scale, node.softcap) == (4, 2, 0.5, 0.0)
    assert without.content is None and without.sinks is None


@pytest.mark.parametrize(
    "fields",
    [{"x": torch.ones(1)}, {"x": torch.ones(1), "heads": 1, "softcap": 0.0}],
    ids=["missing", "unknown"],
)
def test_a_semantic_node_is_emitted_with_all_of_its_fields_and_no_others(
    fields: dict[str, Any],
) -> None:
    with pytest.raises(AssertionError, match="SplitHeads"):
        graph.SplitHeads.emit(torch.ones(1), [1], **fields)
