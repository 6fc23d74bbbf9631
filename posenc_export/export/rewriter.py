"""Replace semantic nodes of an ONNX graph, one at a time, by what a target has for them, and patterns of standard nodes by fewer ones."""

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from posenc_export import semantic

Values = Sequence[Optional[ir.Value]]
Lowering = Callable[["Rewriter", ir.Node], ir.Value]
NodeLowering = Callable[["Rewriter", ir.Node], Optional[ir.Value]]
Replaced = List[Tuple[ir.Value, ir.Value]]  # values, and those that take their place
Fusion = Callable[["Rewriter", ir.Node], Replaced]  # of a standard node; empty where its pattern does not hold


class Rewriter:
    """Emits nodes in front of the node that is being lowered. `finish` merges nodes with the same operator, inputs and attributes.

    Args:
        model: holds the semantic graph, which is changed in place.
        dtype: numpy dtype name of activations.
    """

    def __init__(self, model: ir.Model, dtype: str) -> None:
        self.model, self.graph, self.dtype = model, model.graph, dtype
        self.onnx_dtype = ir.DataType.FLOAT16 if dtype == "float16" else ir.DataType.FLOAT
        self._at: Optional[ir.Node] = None
        self._constants: Dict[Any, ir.Value] = {}
        self._names = 0

    def run(self, table: Mapping[str, Lowering]) -> None:
        """Lower every semantic node that the table names, in graph order."""
        for node in list(self.graph):
            if node.domain == semantic.DOMAIN and node.op_type in table:
                self._at = node
                node.outputs[0].replace_all_uses_with(table[node.op_type](self, node), replace_graph_outputs=True)

    def replace_nodes(self, table: Mapping[str, NodeLowering]) -> None:
        """Replace nodes of standard operators that the table names, in graph order; those for which it gives None stay."""
        for node in list(self.graph):
            if node.domain == "" and node.op_type in table:
                self._at = node
                made = table[node.op_type](self, node)
                if made is not None:
                    node.outputs[0].replace_all_uses_with(made, replace_graph_outputs=True)

    def fuse(self, table: Mapping[str, Fusion]) -> None:
        """Offer every standard node that the table names, in graph order, to its row; nodes whose outputs a row replaces are gone for those behind them."""
        for node in list(self.graph):
            if node.graph is not None and not node.domain and node.op_type in table:
                self._at = node
                for old, new in table[node.op_type](self, node):
                    old.replace_all_uses_with(new, replace_graph_outputs=True)
                    self.graph.remove(old.producer(), safe=True)  # type: ignore[arg-type]
        drop_unused(self.model)

    def emit(self, op: str, inputs: Values, domain: str = "", attributes: Optional[Mapping[str, Any]] = None) -> ir.Value:
        """The output of a new node."""
        return self.emit_all(op, inputs, 1, domain, attributes)[0]

    def emit_all(self, op: str, inputs: Values, outputs: int, domain: str = "", attributes: Optional[Mapping[str, Any]] = None) -> Tuple[ir.Value, ...]:
        """The outputs of a new node."""
        last = max((index for index, value in enumerate(inputs) if value is not None), default=-1)
        # Optional inputs that are missing at the end are not named.
        node = ir.node(op, list(inputs[: last + 1]), attributes=dict(attributes or {}), domain=domain, num_outputs=outputs)
        for value in node.outputs:
            self._names += 1
            value.name = f"lowered.{op.lower()}_{self._names}"
        assert self._at is not None
        self.graph.insert_before(self._at, node)
        return tuple(node.outputs)

    def constant(self, array: Any, dtype: Any = np.int64) -> ir.Value:
        """An initialiser holding array; equal ones are shared."""
        data = np.asarray(array, dtype=dtype)
        key = (data.dtype.str, data.shape, data.tobytes())
        if key not in self._constants:
            self._names += 1
            value = ir.Value(name=f"lowered.constant_{self._names}", shape=ir.Shape(data.shape), type=ir.TensorType(ir.DataType.from_numpy(data.dtype)))
            value.const_value = ir.tensor(data, name=value.name)
            self.graph.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]

    def weight(self, name: str, made: Callable[[], np.ndarray], dtype: Optional[ir.DataType] = None) -> ir.Value:
        """The initialiser of that name, made where there is none yet. Unlike in `constant`, contents are not compared.

        Args:
            dtype: that of the array where None; INT4 for numbers in an array of int8.
        """
        if name not in self.graph.initializers:
            array = made() if dtype is None else made().astype(dtype.numpy())
            tensor = ir.tensor(array, dtype=dtype, name=name)
            self.graph.register_initializer(ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor))
        return self.graph.initializers[name]

    def input(self, name: str, dtype: ir.DataType, axes: Sequence[Union[int, str]]) -> ir.Value:
        """A graph input of that name, made where there is none yet."""
        for value in self.graph.inputs:
            if value.name == name:
                return value
        value = ir.Value(name=name, shape=ir.Shape(axes), type=ir.TensorType(dtype))
        self.graph.inputs.append(value)
        return value

    def table(self, value: ir.Value) -> ir.Value:
        """A float32 table in the dtype of activations."""
        if value.const_value is None:
            raise ValueError(f"export: expected tables that are constants, got {value.name}; compute them when the module is built")
        return value if self.dtype == "float32" else self.constant(value.const_value.numpy(), self.dtype)

    def packed(self, value: ir.Value) -> ir.Value:
        """Heads [B,S,N,D] as [B,S,N*D]."""
        node = value.producer()
        if node is not None and node.op_type == "Heads":
            return node.inputs[0]  # type: ignore[return-value]
        return self.emit("Reshape", [value, self.constant([0, 0, -1])])

    def unpacked(self, value: ir.Value, heads: int) -> ir.Value:
        """[B,S,N*D] as semantic heads [B,S,N,D], still to be lowered."""
        return self.emit("Heads", [value], semantic.DOMAIN, {"heads": float(heads)})

    def finish(self) -> None:
        """Lower the remaining Heads nodes, sort the graph, merge common subexpressions, and remove unused nodes and initialisers.

        Raises:
            ValueError: semantic nodes that no table of the target names.
        """
        for node in list(self.graph):
            if node.domain == semantic.DOMAIN and node.op_type == "Heads":
                self._at = node
                made = self.emit("Reshape", [node.inputs[0], self.constant([0, 0, number(node, "heads"), -1])])
                node.outputs[0].replace_all_uses_with(made)
        drop_unused(self.model)
        self._constants.clear()  # unused ones were removed from the graph
        common.TopologicalSortPass()(self.model)  # a later phase may have used what an earlier one emitted further down
        common.CommonSubexpressionEliminationPass()(self.model)
        remaining = sorted({node.op_type for node in self.graph if node.domain == semantic.DOMAIN})
        if remaining:
            raise ValueError(f"export: expected operations that this target can lower, got {', '.join(remaining)}; choose target torchscript")


def number(node: ir.Node, name: str) -> int:
    """An integer attribute of a semantic node."""
    return int(node.attributes[name].value)


def size(value: Optional[ir.Value], axis: int) -> int:
    """A fixed size of a value."""
    assert value is not None and value.shape is not None
    found = value.shape[axis]
    assert isinstance(found, int), f"axis {axis} of {value.name} is dynamic"
    return found


def producer(value: Optional[ir.Value], op: str) -> Optional[ir.Node]:
    """The semantic node of type op that makes value, if one does."""
    node = None if value is None else value.producer()
    return node if node is not None and node.domain == semantic.DOMAIN and node.op_type == op else None


def drop_unused(model: ir.Model) -> None:
    """Remove nodes and initialisers that no output needs."""
    common.RemoveUnusedNodesPass()(model)
