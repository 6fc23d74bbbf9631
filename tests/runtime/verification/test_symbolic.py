"""Values of graphs for a solver: those of whole numbers are those of ONNX's own node tests."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import z3
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.loader import load_model_tests
from onnx.reference import ReferenceEvaluator

from posenc_export.runtime.graphs import onnx_nodes
from posenc_export.runtime.verification.operators import OPERATORS, UNDEFINED
from posenc_export.runtime.verification.symbolic import (
    Score,
    Solver,
    Tensor,
    Translation,
    Untranslated,
)

DEFINED = OPERATORS.keys() - UNDEFINED.keys()
SUMS = {"CumSum", "ReduceSum", "ReduceMax", "ReduceMin"}  # known for what they add up
LARGEST = 2000  # entries of an output that is compared


def cases() -> list[Any]:
    """Return the node tests of operators with a definition."""
    with warnings.catch_warnings(action="ignore"):  # of overflows in casts of other tests
        tests = load_model_tests(kind="node")
    nodes = [case for case in tests if len(case.model.graph.node) == 1 and case.data_sets]
    return [case for case in nodes if case.model.graph.node[0].op_type in DEFINED - OWN.keys()]


# What operators read, with their attributes, that ONNX tests with other types or values than graphs
# of positions have.
OWN: dict[str, tuple[list[np.ndarray], dict[str, Any]]] = {
    "Cast": ([np.array([-1.5, 0.0, 2.7], np.float32)], {"to": 7}),
    "ConstantOfShape": ([np.array([2, 3])], {}),
    "Mod": ([np.array([-5, 0, 7]), np.array(3)], {}),
    "Pad": ([np.array([[1, 2], [3, 4]]), np.array([0, 1, 2, 0]), np.array(-1)], {}),
    "Range": ([np.array(2), np.array(9), np.array(3)], {}),
}


def number(entry: Any) -> Any:
    """Return an entry of a translated tensor as a number."""
    if isinstance(entry, Score):
        if entry.hidden is True:
            return -np.inf
        return float(z3.simplify(entry.value).as_fraction())
    if isinstance(entry, z3.ExprRef):
        value = z3.simplify(entry)
        return z3.is_true(value) if z3.is_bool(value) else value.as_long()
    return entry


def entries(model: onnx.ModelProto, folder: Path) -> np.ndarray:
    """Return the entries of the first output of a model without inputs, as translated."""
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    nodes = onnx_nodes.read_nodes(folder / "model.onnx")
    values = Translation({}, nodes.constants, folder, (), Solver(), OPERATORS)
    values.run(nodes.nodes)
    result = values.get(model.graph.output[0].name)
    assert all(isinstance(size, int) for size in result.shape)
    got = [number(result.at(index)) for index in np.ndindex(*result.shape)]
    return np.array(got).reshape(result.shape)


def assert_equal(got: np.ndarray, wanted: np.ndarray, name: str = "") -> None:
    assert got.shape == wanted.shape, name
    numbers = got.astype(np.float64), wanted.astype(np.float64)
    np.testing.assert_allclose(*numbers, rtol=1e-6, err_msg=name)


def test_operators_are_those_of_onnx(tmp_path: Path) -> None:
    compared: set[str] = set()
    for case in cases():
        arrays = [value for values in case.data_sets[0] for value in values]
        if not all(isinstance(value, np.ndarray) and value.size <= LARGEST for value in arrays):
            continue
        model, (inputs, outputs) = onnx.ModelProto(), case.data_sets[0]
        model.CopyFrom(case.model)
        for value, numbers in zip(model.graph.input, inputs, strict=True):
            model.graph.initializer.append(numpy_helper.from_array(numbers, value.name))
        try:
            got = entries(model, tmp_path)
        except Untranslated:
            continue
        assert_equal(got, outputs[0], case.name)
        compared.add(case.model.graph.node[0].op_type)
    assert compared >= DEFINED - SUMS - OWN.keys()


@pytest.mark.parametrize("operator", OWN)
def test_an_operator_is_that_of_the_reference(operator: str, tmp_path: Path) -> None:
    inputs, attributes = OWN[operator]
    names = [f"input_{index}" for index in range(len(inputs))]
    node = helper.make_node(operator, names, ["result"], **attributes)
    result = helper.make_tensor_value_info("result", TensorProto.UNDEFINED, None)
    stored = [numpy_helper.from_array(x, name) for x, name in zip(inputs, names, strict=True)]
    graph = helper.make_graph([node], "graph", [], [result], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    (wanted,) = ReferenceEvaluator(model).run(None, {})
    assert_equal(entries(model, tmp_path), np.asarray(wanted))


def test_sizes_and_indices_may_be_symbols() -> None:
    rows, index = z3.Ints("rows index")
    x = Tensor([rows, 3], lambda at: 10 * at[0] + at[1])
    assert x.at([index, 2]).sexpr() == (10 * index + 2).sexpr()
