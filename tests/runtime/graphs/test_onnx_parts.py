"""Parts of graphs are read and written as the package onnx reads and writes them."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from posenc_export.export import export
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.runtime.graphs import onnx_parts
from posenc_export.runtime.graphs.onnx_nodes import read_nodes
from tests.soak.steps import resident
from tests.traces import sources

DTYPES = (*map(np.dtype, ("float32", "float64", "float16", "int8", "uint8", "int32", "int64")),)


@pytest.fixture(scope="module", params=["ort", "onnx"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = sources(decoder_config(64, 2, 32, block_config(32, 4, 64), tied=False))
    result = tmp_path_factory.mktemp(request.param) / "model"
    weights = "int4" if request.param == "ort" else None
    export(model, request.param, result, verify=False, weights=weights)
    return result


def test_constants_are_those_that_onnx_reads(folder: Path) -> None:
    graph = read_nodes(folder / "model.onnx")
    stored = onnx.load(folder / "model.onnx").graph.initializer
    assert list(graph.constants) == [tensor.name for tensor in stored]
    for tensor in stored:
        numbers = graph.constants[tensor.name].array(folder)
        np.testing.assert_array_equal(numbers, numpy_helper.to_array(tensor))


def test_attributes_are_those_that_onnx_reads(folder: Path) -> None:
    for node, stored in zip(
        read_nodes(folder / "model.onnx").nodes,
        onnx.load(folder / "model.onnx").graph.node,
        strict=True,
    ):
        values = {a.name: helper.get_attribute_value(a) for a in stored.attribute}
        assert node.attributes.keys() == values.keys()
        for name, value in values.items():
            if isinstance(value, bytes):
                assert node.attributes[name] == value.decode()
            elif not isinstance(value, (onnx.TensorProto, onnx.GraphProto)):
                assert node.attributes[name] == value


def test_a_graph_that_is_written_again_is_equal(folder: Path) -> None:
    graph = read_nodes(folder / "model.onnx")
    content = onnx_parts.serialised(graph, graph.nodes, graph.outputs, tuple(graph.inputs))
    before, after = onnx.load(folder / "model.onnx"), onnx.load_from_string(content)
    onnx.load_external_data_for_model(after, str(folder))
    assert list(before.graph.node) == list(after.graph.node)
    assert list(before.graph.input) == list(after.graph.input)
    assert list(before.graph.output) == list(after.graph.output)
    assert list(before.graph.initializer) == list(after.graph.initializer)
    assert list(before.opset_import) == list(after.opset_import)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_new_constant_is_the_array_that_onnx_reads(dtype: np.dtype) -> None:
    numbers = np.arange(6).reshape(2, 3).astype(dtype)
    tensor = onnx.TensorProto.FromString(onnx_parts.constant("x", numbers).serialised)
    assert numpy_helper.to_array(tensor).dtype == dtype
    np.testing.assert_array_equal(numpy_helper.to_array(tensor), numbers)


@pytest.mark.parametrize("element", ["int4", "uint4", "bfloat16"])
def test_packed_numbers_are_those_that_onnx_reads(element: str, tmp_path: Path) -> None:
    kind = getattr(onnx.TensorProto, element.upper())
    tensor = helper.make_tensor("x", kind, [3], [1.0, 7.0, 2.0])
    raw = numpy_helper.from_array(numpy_helper.to_array(tensor), "x")
    node = helper.make_node("Identity", ["x"], ["y"])
    outputs = [helper.make_tensor_value_info("y", kind, [3])]
    model = helper.make_model(helper.make_graph([node], "g", [], outputs, [raw]))
    onnx.save(model, tmp_path / "model.onnx")
    numbers = read_nodes(tmp_path / "model.onnx").constants["x"].array(tmp_path)
    np.testing.assert_array_equal(numbers.astype(np.float32), [1.0, 7.0, 2.0])


def test_a_changed_attribute_is_what_onnx_runtime_runs(tmp_path: Path) -> None:
    node = helper.make_node("Concat", ["x", "x"], ["y"], axis=0)
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["rows", 2])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    model = helper.make_model(
        helper.make_graph([node], "g", [x], [y]), opset_imports=[helper.make_opsetid("", 23)]
    )
    onnx.save(model, tmp_path / "model.onnx")
    graph = read_nodes(tmp_path / "model.onnx")
    changed = onnx_parts.with_attribute(graph.nodes[0], "axis", -1)
    session = onnx_parts.opened(onnx_parts.serialised(graph, [changed], ["y"]), tmp_path)
    fed = np.ones((3, 2), np.float32)
    assert session.run(None, {"x": fed})[0].shape == (3, 4)


def test_a_part_that_is_cut_out_computes_its_values_from_free_inputs(folder: Path) -> None:
    graph = read_nodes(folder / "model.onnx")
    node = next(node for node in graph.nodes if node.operator in ("MatMul", "MatMulNBits"))
    nodes, free = [*onnx_parts.constant_nodes(graph), node], {node.inputs[0]: "float"}
    content = onnx_parts.serialised(graph, nodes, node.outputs, free=free)
    fed = np.ones((1, 2, 32), np.float32)
    product = onnx_parts.opened(content, folder).run(None, {node.inputs[0]: fed})[0]
    assert product.shape[:2] == (1, 2) and product.any()


def test_an_open_part_keeps_no_memory_of_its_calls(tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["": 21]> g (int64[2] n) => (float y) {'
    text += " z = ConstantOfShape(n) w = Neg(z) y = ReduceMax<keepdims=0>(w) }"
    session = onnx_parts.opened(onnx.parser.parse_model(text).SerializeToString(), tmp_path)
    session.run(None, {"n": np.array([8, 8])})
    before = resident()
    session.run(None, {"n": np.array([8192, 8192])})  # 256 MB for each value
    assert resident() - before < 64 << 20
