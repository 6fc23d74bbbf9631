"""Branches that a rewriter emits."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser

from posenc_export.export.targets.rewriter import Rewriter

PLAIN = '<ir_version: 10, opset_import: ["": 23]> g (float[n] x, bool wanted) => (float[n] y) { y = Neg(x) }'


def _with_branches() -> ir.Model:
    """y = 2 (x + x) if wanted, else 3 (x + x): the sum is outside the branches."""
    model = ir.from_proto(parser.parse_model(PLAIN))
    rewriter = Rewriter(model, "float32")
    x, wanted = model.graph.inputs

    def lowered(rewriter: Rewriter, node: ir.Node) -> ir.Value:
        double = rewriter.emit("Add", [x, x])
        branches = [lambda factor=factor: [rewriter.emit("Mul", [double, rewriter.constant(factor, "float32")])] for factor in (2, 3)]
        return rewriter.choose(wanted, *branches)[0]

    rewriter.replace_nodes({"Neg": lowered})
    rewriter.finish()
    model.graph.outputs[0].shape = x.shape
    return model


@pytest.mark.parametrize(("wanted", "factor"), [(True, 4), (False, 6)])
def test_a_branch_reads_values_and_constants_of_the_graph_around_it(wanted: bool, factor: int) -> None:
    written = ir.to_proto(_with_branches())
    onnx.checker.check_model(written, full_check=True)
    session = onnxruntime.InferenceSession(written.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": x, "wanted": np.array(wanted)})[0], factor * x)


def test_nodes_of_branches_are_nodes_of_the_graph() -> None:
    assert sorted(node.op_type for node in _with_branches().graph.all_nodes()) == ["Add", "If", "Mul", "Mul"]
