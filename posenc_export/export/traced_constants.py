"""What a traced graph computes from constants alone, before the optimizer folds it to constants."""

from typing import Any, List, Set

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

ROUNDED = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


class TracedConstants:
    """The part of a traced graph that reads constants only.

    Args:
        graph: before it is optimized. Later changes of the graph change nothing here.

    Attributes:
        read: names of the initializers that a node reads.
        tensors: initializers by name; weights are not copied.
    """

    def __init__(self, graph: ir.Graph) -> None:
        stored = {name: value.const_value for name, value in graph.initializers.items()}
        self.tensors = {name: tensor for name, tensor in stored.items() if tensor is not None}
        self.read = {name for name in self.tensors if list(graph.initializers[name].uses())}
        known = {value for value in graph.initializers.values() if value.name in self.tensors}
        computed: List[ir.Value] = []
        for node in graph:
            inputs = [value for value in node.inputs if value is not None]
            if node.domain == "" and known.issuperset(inputs) and not _has_body(node):
                known.update(node.outputs)
                computed += node.outputs
        self._names = {value.name for value in computed}
        self._graph = ir.convenience.extract(graph, [], computed) if computed else None

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def _part(self, name: str) -> ir.Graph:
        """Return the nodes and constants that compute a value."""
        assert self._graph is not None
        return ir.convenience.extract(self._graph, [], [name])

    def computed(self, name: str, precise: bool) -> np.ndarray:
        """Return a value: with the dtypes of the graph, or with precise numbers in float64."""
        model = ir.to_proto(ir.Model(self._part(name), ir_version=10))
        if precise:
            _make_precise(model.graph)
        values: Any = ReferenceEvaluator(model).run(None, {})
        return np.asarray(values[0])

    def sources(self, name: str) -> Set[str]:
        """Return the names of initializers that a value is computed from."""
        return set(self._part(name).initializers)


def _has_body(node: ir.Node) -> bool:
    bodies = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return any(attribute.type in bodies for attribute in node.attributes.values())


def _make_precise(graph: onnx.GraphProto) -> None:
    """Let a graph compute in float64 what it computes in a narrower dtype."""
    tensors = list(graph.initializer)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and node.op_type == "Cast" and attribute.i in ROUNDED:
                attribute.i = TensorProto.DOUBLE
            elif attribute.HasField("t"):
                tensors.append(attribute.t)
    for tensor in tensors:
        if tensor.data_type in ROUNDED:
            numbers = numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(numpy_helper.from_array(numbers, tensor.name))
