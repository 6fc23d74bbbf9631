"""Rewrite an ONNX graph: replace each semantic node by nodes of the target, and patterns of standard nodes by fewer nodes."""

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import onnx_ir as ir

from posenc_export import ops

Values = Sequence[Optional[ir.Value]]
Lowering = Callable[["Rewriter", ir.Node], ir.Value]
NodeLowering = Callable[["Rewriter", ir.Node], Optional[ir.Value]]
Replaced = List[Tuple[ir.Value, ir.Value]]  # pairs of an old value and its replacement
Fusion = Callable[["Rewriter", ir.Node], Replaced]  # takes a standard node; returns an empty list if the pattern does not match


class Rewriter:
    """Inserts nodes in front of the node that is being lowered. Equal nodes with the same inputs are emitted once.

    Args:
        graph: the semantic graph, modified in place.
        dtype: numpy dtype name of activations.
    """

    def __init__(self, graph: ir.Graph, dtype: str) -> None:
        self.graph, self.dtype = graph, dtype
        self.onnx_dtype = ir.DataType.FLOAT16 if dtype == "float16" else ir.DataType.FLOAT
        self._at: Optional[ir.Node] = None
        self._seen: Dict[Any, Tuple[ir.Value, ...]] = {}
        self._names = 0

    def run(self, table: Mapping[str, Lowering]) -> None:
        """Lower every semantic node whose type is in the table, in graph order."""
        for node in list(self.graph):
            if node.domain == ops.DOMAIN and node.op_type in table:
                self._at = node
                node.outputs[0].replace_all_uses_with(table[node.op_type](self, node), replace_graph_outputs=True)

    def replace_nodes(self, table: Mapping[str, NodeLowering]) -> None:
        """Replace standard nodes whose type is in the table, in graph order. A node stays if its function returns None."""
        for node in list(self.graph):
            if node.domain == "" and node.op_type in table:
                self._at = node
                made = table[node.op_type](self, node)
                if made is not None:
                    node.outputs[0].replace_all_uses_with(made, replace_graph_outputs=True)

    def fuse(self, table: Mapping[str, Fusion]) -> None:
        """Apply the fusions of a table to the standard nodes of their type, in graph order. Nodes that a fusion replaces are removed at once."""
        for node in list(self.graph):
            if node.graph is not None and not node.domain and node.op_type in table:
                self._at = node
                for old, new in table[node.op_type](self, node):
                    old.replace_all_uses_with(new, replace_graph_outputs=True)
                    self.graph.remove(old.producer(), safe=True)  # type: ignore[arg-type]
        drop_dead(self.graph)

    def emit(self, op: str, inputs: Values, domain: str = "", attributes: Optional[Mapping[str, Any]] = None) -> ir.Value:
        """Insert a node with one output, and return the output."""
        return self.emit_all(op, inputs, 1, domain, attributes)[0]

    def emit_all(self, op: str, inputs: Values, outputs: int, domain: str = "", attributes: Optional[Mapping[str, Any]] = None) -> Tuple[ir.Value, ...]:
        """Insert a node, and return its outputs."""
        given = dict(attributes or {})
        last = max((index for index, value in enumerate(inputs) if value is not None), default=-1)
        inputs = inputs[: last + 1]  # trailing optional inputs are omitted
        key = (domain, op, tuple(id(value) for value in inputs), repr(sorted(given.items())), outputs)
        if key not in self._seen:
            assert self._at is not None
            node = ir.node(op, list(inputs), attributes=given, domain=domain, num_outputs=outputs)
            for value in node.outputs:
                self._names += 1
                value.name = f"lowered.{op.lower()}_{self._names}"
            self.graph.insert_before(self._at, node)
            self._seen[key] = tuple(node.outputs)
        return self._seen[key]

    def constant(self, array: Any, dtype: Any = np.int64) -> ir.Value:
        """Return an initialiser with the content of `array`; equal arrays share one."""
        data = np.asarray(array, dtype=dtype)
        key = ("constant", data.dtype.str, data.shape, data.tobytes())
        if key not in self._seen:
            self._names += 1
            value = ir.Value(name=f"lowered.constant_{self._names}", shape=ir.Shape(data.shape), type=ir.TensorType(ir.DataType.from_numpy(data.dtype)))
            value.const_value = ir.tensor(data, name=value.name)
            self.graph.register_initializer(value)
            self._seen[key] = (value,)
        return self._seen[key][0]

    def weight(self, name: str, made: Callable[[], np.ndarray], dtype: Optional[ir.DataType] = None) -> ir.Value:
        """Return the initialiser with this name; if there is none, create it from the array that `made` returns. Contents are not compared.

        Args:
            dtype: None for the dtype of the array; INT4 stores an int8 array in 4 bits.
        """
        if name not in self.graph.initializers:
            array = made() if dtype is None else made().astype(dtype.numpy())
            tensor = ir.tensor(array, dtype=dtype, name=name)
            self.graph.register_initializer(ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor))
        return self.graph.initializers[name]

    def side_by_side(self, matrices: Sequence[ir.Value]) -> ir.Value:
        """Return an initialiser [K,sum of n] that concatenates constant matrices [K,n] when it is read."""
        parts = [matrix.const_value for matrix in matrices if matrix.const_value is not None]
        shape, dtype = ir.Shape([size(matrices[0], 0), sum(size(matrix, 1) for matrix in matrices)]), parts[0].dtype
        self._names += 1
        value = ir.Value(name=f"lowered.weights_{self._names}", shape=shape, type=ir.TensorType(dtype))
        value.const_value = ir.LazyTensor(lambda: ir.tensor(np.concatenate([part.numpy() for part in parts], axis=1)), dtype, shape, name=value.name)
        self.graph.register_initializer(value)
        return value

    def input(self, name: str, dtype: ir.DataType, axes: Sequence[Union[int, str]]) -> ir.Value:
        """Return the graph input with this name; create it if there is none."""
        for value in self.graph.inputs:
            if value.name == name:
                return value
        value = ir.Value(name=name, shape=ir.Shape(axes), type=ir.TensorType(dtype))
        self.graph.inputs.append(value)
        return value

    def table(self, value: ir.Value) -> ir.Value:
        """Return a constant float32 table in the dtype of activations."""
        if value.const_value is None:
            raise ValueError(f"export: expected constant tables, got {value.name}, which is computed in the graph; compute it when the module is built")
        return value if self.dtype == "float32" else self.constant(value.const_value.numpy(), self.dtype)

    def packed(self, value: ir.Value) -> ir.Value:
        """Merge heads [B,S,N,D] to [B,S,N*D]."""
        node = value.producer()
        if node is not None and node.op_type == "Heads":
            return node.inputs[0]  # type: ignore[return-value]
        return self.emit("Reshape", [value, self.constant([0, 0, -1])])

    def unpacked(self, value: ir.Value, heads: int) -> ir.Value:
        """Split [B,S,N*D] to heads [B,S,N,D] with a semantic node, which `finish` lowers."""
        return self.emit("Heads", [value], ops.DOMAIN, {"heads": float(heads)})

    def finish(self) -> None:
        """Lower the remaining Heads nodes, and remove unused nodes and initialisers.

        Raises:
            ValueError: semantic nodes remain that the target's tables do not lower.
        """
        for node in list(self.graph):
            if node.domain == ops.DOMAIN and node.op_type == "Heads":
                self._at = node
                made = self.emit("Reshape", [node.inputs[0], self.constant([0, 0, number(node, "heads"), -1])])
                node.outputs[0].replace_all_uses_with(made)
        drop_dead(self.graph)
        self._seen.clear()  # some of these values were removed from the graph
        self.graph.sort()  # a table may use a value that an earlier table emitted further down
        unlowered = sorted({node.op_type for node in self.graph if node.domain == ops.DOMAIN})
        if unlowered:
            raise ValueError(f"export: expected operations that this target can lower, got {', '.join(unlowered)}; choose target torchscript")


def number(node: ir.Node, name: str) -> int:
    """Return an attribute of a semantic node as an integer."""
    return int(node.attributes[name].value)


def size(value: Optional[ir.Value], axis: int) -> int:
    """Return the static size of one axis of a value."""
    assert value is not None and value.shape is not None
    found = value.shape[axis]
    assert isinstance(found, int), f"axis {axis} of {value.name} is dynamic"
    return found


def producer(value: Optional[ir.Value], op: str) -> Optional[ir.Node]:
    """Return the semantic node of type `op` that produces `value`, or None."""
    node = None if value is None else value.producer()
    return node if node is not None and node.domain == ops.DOMAIN and node.op_type == op else None


def drop_dead(graph: ir.Graph) -> None:
    """Remove nodes and initialisers that no graph output depends on."""
    kept = {id(value) for value in graph.outputs}
    for node in reversed(list(graph)):
        if not any(value.uses() or id(value) in kept for value in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses():
            del graph.initializers[name]
