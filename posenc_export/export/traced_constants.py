"""What a traced graph computes from constants alone, before the optimizer folds it to constants."""

from typing import Any, Dict, Set

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

ROUNDED = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


class TracedConstants:
    """The part of a traced graph that reads constants only.

    Args:
        graph: before it is optimized. Later changes of the graph change nothing here.
        opsets: version by domain.

    Attributes:
        read: names of the initializers that a node reads.
        tensors: initializers by name; weights are not copied.
    """

    def __init__(self, graph: ir.Graph, opsets: Dict[str, int]) -> None:
        self.opsets = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
        stored = {name: value.const_value for name, value in graph.initializers.items()}
        self.tensors = {name: tensor for name, tensor in stored.items() if tensor is not None}
        self.read = {name for name in self.tensors if list(graph.initializers[name].uses())}
        self._makers: Dict[str, onnx.NodeProto] = {}
        known = {value for value in graph.initializers.values() if value.name in self.tensors}
        for node in graph:
            inputs = [value for value in node.inputs if value is not None]
            if node.domain == "" and known.issuperset(inputs) and not _has_body(node):
                known.update(node.outputs)
                copied = ir.to_proto(node)
                self._makers |= {str(value.name): copied for value in node.outputs}

    def __contains__(self, name: str) -> bool:
        return name in self._makers

    def computed(self, name: str, precise: bool) -> np.ndarray:
        """Return a value: with the dtypes of the graph, or with precise numbers in float64."""
        known: Dict[str, np.ndarray] = {}
        self._compute(name, known, precise)
        return known[name]

    def sources(self, name: str) -> Set[str]:
        """Return the names of initializers that a value is computed from."""
        if name in self.tensors:
            return {name}
        return {
            source for read in self._makers[name].input if read for source in self.sources(read)
        }

    def _compute(self, name: str, known: Dict[str, np.ndarray], precise: bool) -> None:
        if name in known:
            return
        if name in self.tensors:
            numbers = self.tensors[name].numpy()
            floating = numbers.dtype.kind == "f"
            known[name] = numbers.astype(np.float64) if precise and floating else numbers
            return
        node = self._makers[name]
        for read in filter(None, node.input):
            self._compute(read, known, precise)
        computed = _precise(node) if precise else node
        inputs = list(dict.fromkeys(filter(None, node.input)))
        dtypes = [helper.np_dtype_to_tensor_dtype(known[read].dtype) for read in inputs]
        pairs = zip(inputs, dtypes, strict=True)
        types = [helper.make_tensor_value_info(*pair, None) for pair in pairs]
        outputs = [helper.make_empty_tensor_value_info(out) for out in node.output]
        graph = helper.make_graph([computed], "part", types, outputs)
        model = helper.make_model(graph, opset_imports=self.opsets)
        values: Any = ReferenceEvaluator(model).run(None, {n: known[n] for n in inputs})
        known.update(zip(node.output, values, strict=True))


def _has_body(node: ir.Node) -> bool:
    bodies = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return any(attribute.type in bodies for attribute in node.attributes.values())


def _precise(node: onnx.NodeProto) -> onnx.NodeProto:
    """Return a node that computes in float64 where the graph does in a narrower dtype."""
    copied = onnx.NodeProto()
    copied.CopyFrom(node)
    for attribute in copied.attribute:
        if attribute.name == "to" and node.op_type == "Cast" and attribute.i in ROUNDED:
            attribute.i = TensorProto.DOUBLE
        elif attribute.HasField("t") and attribute.t.data_type in ROUNDED:
            numbers = numpy_helper.to_array(attribute.t).astype(np.float64)
            attribute.t.CopyFrom(numpy_helper.from_array(numbers, attribute.t.name))
    return copied
