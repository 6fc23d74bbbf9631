"""Rewrite an ONNX graph: replace each semantic node by nodes of the target, and patterns of standard nodes by fewer nodes."""

from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from posenc_export.export.quantization.formats import OnGrid
from posenc_export.ops import nodes

Values = Sequence[Optional[ir.Value]]
Lowering = Callable[["Rewriter", ir.Node], ir.Value]
NodeLowering = Callable[["Rewriter", ir.Node], Optional[ir.Value]]
Replaced = List[Tuple[ir.Value, ir.Value]]  # pairs of an old value and its replacement
Branch = Callable[[], Sequence[ir.Value]]  # emits the nodes of a branch of If, and returns its outputs
Fusion = Callable[["Rewriter", ir.Node], Replaced]  # takes a standard node; returns an empty list if the pattern does not match


class Rewriter:
    """Inserts nodes in front of the node that is being lowered. `finish` merges nodes with the same operator, inputs and attributes.

    Args:
        model: contains the semantic graph, which is modified in place.
        dtype: numpy dtype name of activations.
        cache: format of quantized caches; empty for caches in `dtype`.
        on_grid: grids and codes of rounded weights by the name that their nodes OnGrid have.

    Attributes:
        added: caches from `add_cache`: the cache beside which each one stands, its input and its output.
    """

    def __init__(self, model: ir.Model, dtype: str, cache: str = "", on_grid: Mapping[str, OnGrid] = MappingProxyType({})) -> None:
        self.model, self.graph, self.dtype, self.cache = model, model.graph, dtype, cache
        self._on_grid = dict(on_grid)
        self.added: List[Tuple[ir.Value, ir.Value, ir.Value]] = []
        self.onnx_dtype = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}.get(dtype, ir.DataType.FLOAT)
        self._at: Optional[ir.Node] = None
        self._branch: Optional[ir.Graph] = None
        self._constants: Dict[Any, ir.Value] = {}
        self._names = 0

    def run(self, table: Mapping[str, Lowering]) -> None:
        """Lower every semantic node whose type is in the table, in graph order."""
        for node in list(self.graph):
            if node.domain == nodes.DOMAIN and node.op_type in table:
                self._at = node
                node.outputs[0].replace_all_uses_with(table[node.op_type](self, node), replace_graph_outputs=True)

    def replace_nodes(self, table: Mapping[str, NodeLowering]) -> None:
        """Replace nodes of the target whose type is in the table, in graph order. A node stays if its function returns None."""
        for node in list(self.graph):
            if node.domain != nodes.DOMAIN and node.op_type in table:
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
        drop_unused(self.model)

    def emit(self, op: str, inputs: Values, domain: str = "", attributes: Optional[Mapping[str, Any]] = None) -> ir.Value:
        """Insert a node with one output, and return the output."""
        return self.emit_all(op, inputs, 1, domain, attributes)[0]

    def emit_all(self, op: str, inputs: Values, outputs: int, domain: str = "", attributes: Optional[Mapping[str, Any]] = None) -> Tuple[ir.Value, ...]:
        """Insert a node, and return its outputs."""
        last = max((index for index, value in enumerate(inputs) if value is not None), default=-1)
        # Trailing optional inputs are omitted.
        node = ir.node(op, list(inputs[: last + 1]), attributes=dict(attributes or {}), domain=domain, num_outputs=outputs)
        for value in node.outputs:
            self._names += 1
            value.name = f"lowered.{op.lower()}_{self._names}"
        self._insert(node)
        return tuple(node.outputs)

    def _insert(self, node: ir.Node) -> None:
        if self._branch is not None:
            self._branch.append(node)
        else:
            assert self._at is not None and self._at.graph is not None
            self._at.graph.insert_before(self._at, node)

    def choose(self, condition: ir.Value, then: Branch, otherwise: Branch) -> Tuple[ir.Value, ...]:
        """Insert an If node, and return its outputs.

        Args:
            condition: bool [].
            then, otherwise: called once each; emit the nodes of a branch, and return its outputs, which have the dtype of activations. Each output is made by a
                node of the branch. Nodes of a branch may read values of the graph around it.
        """
        branches = {"then_branch": self._emitted("then", then), "else_branch": self._emitted("else", otherwise)}
        outputs = self.emit_all("If", [condition], len(branches["then_branch"].outputs), attributes=branches)
        for value in outputs:
            value.type = ir.TensorType(self.onnx_dtype)
        return outputs

    def for_each(self, sources: Sequence[ir.Value], emits: Callable[..., ir.Value]) -> ir.Value:
        """Insert a Scan node over axis 0 of float32 sources, and return its outputs, stacked on a new axis 0.

        Args:
            emits: called once with one entry of each source; emits the nodes for it, and returns an output that one of them makes. Nodes may read values of the
                graph around them.
        """
        self._names += 1
        entries = [ir.Value(name=f"lowered.entry_{self._names}_{index}", type=ir.TensorType(ir.DataType.FLOAT)) for index in range(len(sources))]
        body = self._emitted("each", lambda: [emits(*entries)])
        body.inputs.extend(entries)
        return self.emit("Scan", sources, attributes={"body": body, "num_scan_inputs": len(sources)})

    def _emitted(self, name: str, emits: Branch) -> ir.Graph:
        around, self._branch = self._branch, ir.Graph([], [], nodes=[], name=name)
        outputs = emits()
        branch, self._branch = self._branch, around
        for value in outputs:
            value.type = ir.TensorType(self.onnx_dtype)
        branch.outputs.extend(outputs)
        return branch

    def constant(self, array: Any, dtype: Any = np.int64) -> ir.Value:
        """Return an initialiser with the content of `array`; equal arrays share one."""
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
        """Return the initialiser with this name; if there is none, create it from the array that `made` returns. Contents are not compared.

        Args:
            dtype: None for the dtype of the array; INT4 stores an int8 array in 4 bits.
        """
        if name not in self.graph.initializers:
            array = made() if dtype is None else made().astype(dtype.numpy())
            tensor = ir.tensor(array, dtype=dtype, name=name)
            self.graph.register_initializer(ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor))
        return self.graph.initializers[name]

    def input(self, name: str, dtype: ir.DataType, axes: Sequence[Union[int, str]]) -> ir.Value:
        """Return the graph input with this name; create it if there is none."""
        for value in self.graph.inputs:
            if value.name == name:
                return value
        value = ir.Value(name=name, shape=ir.Shape(axes), type=ir.TensorType(dtype))
        self.graph.inputs.append(value)
        return value

    def cache_beside(self, past: ir.Value, name: str) -> ir.Value:
        """Add an input for another cache of the same layer, with the shape of the cache `past`. `add_cache` makes it a state."""
        assert past.name is not None and past.shape is not None
        return self.input(f"{past.name.rpartition('.')[0]}.{name}", self.onnx_dtype, list(past.shape))  # type: ignore[arg-type]

    def add_cache(self, beside: ir.Value, past: ir.Value, present: ir.Value) -> None:
        """Make an input and a value that will be its next content a state of the graph."""
        self.added.append((beside, past, present))

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
        return self.emit("Heads", [value], nodes.DOMAIN, {"heads": float(heads)})

    def rounded(self, value: Optional[ir.Value]) -> Tuple[str, Optional[OnGrid]]:
        """Return the name of the rounded weight that `value` is, its grid and its codes; the grid and codes are None for another value."""
        node = producer(value, "OnGrid")
        name = "" if node is None else node.attributes.get_string("name")
        return name, self._on_grid.get(name)

    def mark(self, weight: ir.Value, name: str, found: OnGrid) -> ir.Value:
        """Return a constant as the rounded weight `name`, whose codes are those of the constant."""
        self._on_grid[name] = found
        made = self.emit("OnGrid", [weight], nodes.DOMAIN, {"name": name})
        made.shape, made.type = weight.shape, weight.type
        return made

    def finish(self) -> None:
        """Lower the remaining Heads nodes and nodes OnGrid, sort the graph, merge common subexpressions, and remove unused nodes and initialisers.

        Raises:
            ValueError: semantic nodes remain that the target's tables do not lower.
        """
        for node in list(self.graph.all_nodes()):
            if node.domain == nodes.DOMAIN and node.op_type == "Heads":
                self._at = node
                made = self.emit("Reshape", [node.inputs[0], self.constant([0, 0, number(node, "heads"), -1])])
                node.outputs[0].replace_all_uses_with(made)
            elif node.domain == nodes.DOMAIN and node.op_type == "OnGrid":
                self._unrounded(node)
        drop_unused(self.model)
        self._constants.clear()  # unused ones were removed from the graph
        common.TopologicalSortPass()(self.model)  # a table may use a value that an earlier table emitted further down
        common.CommonSubexpressionEliminationPass()(self.model)
        remaining = sorted({node.op_type for node in self.graph.all_nodes() if node.domain == nodes.DOMAIN})
        if remaining:
            raise ValueError(f"export: expected operations that this target can lower, got {', '.join(remaining)}; choose target torchscript")


    def _unrounded(self, node: ir.Node) -> None:
        """Let the readers of a node OnGrid read the constant, transposed here for those that read it transposed."""
        weight = constant_of(node.outputs[0])
        for reader, _ in list(node.outputs[0].uses()):
            if reader.op_type == "Transpose":
                made = self.weight(f"{weight.name}.transposed", lambda: np.ascontiguousarray(numbers_of(weight).T))
                reader.outputs[0].replace_all_uses_with(made)
        node.outputs[0].replace_all_uses_with(weight)


def constant_of(value: Optional[ir.Value]) -> ir.Value:
    """Return the constant that a node OnGrid returns, or the value itself."""
    node = producer(value, "OnGrid")
    return value if node is None else node.inputs[0]  # type: ignore[return-value]


def transposed(value: Optional[ir.Value]) -> Optional[ir.Value]:
    """Return what the Transpose node reads that produces `value`; None if another node produces it."""
    node = None if value is None else value.producer()
    return node.inputs[0] if node is not None and node.op_type == "Transpose" else None


def numbers_of(value: ir.Value) -> np.ndarray:
    """Return the content of a constant."""
    assert value.const_value is not None, f"{value.name} is computed in the graph"
    return value.const_value.numpy()


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
    return node if node is not None and node.domain == nodes.DOMAIN and node.op_type == op else None


def drop_unused(model: ir.Model) -> None:
    """Remove nodes and initialisers that no graph output depends on."""
    common.RemoveUnusedNodesPass()(model)
