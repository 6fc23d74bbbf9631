"""The builder that lowerings emit the nodes of an ONNX graph with, and passes over the graph: lower
semantic nodes, replace standard nodes.
"""

import copy
import functools
import itertools
import math
from types import MappingProxyType
from typing import Any, Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from posenc_export.export.quantization.grid import OnGrid as Rounding
from posenc_export.export.trace import transposed
from posenc_export.ops import graph
from posenc_export.ops.graph import OnGrid, SplitHeads
from posenc_export.runtime.artefact.graph_inputs import INPUTS
from posenc_export.shared.refusal import refusal

FLOAT, DOUBLE, INT32, INT64 = (
    int(dtype)
    for dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT32, ir.DataType.INT64)
)
MICROSOFT = "com.microsoft"  # domain of ONNX Runtime's own operators

# Emits the nodes of a branch of If, and returns its output.
Branch = Callable[["Builder"], ir.Value]
Input = ir.Value | int | Sequence[int] | np.ndarray | None


class Builder:
    """Collects new nodes of a graph: `op.Transpose(x, perm=[1, 0])` appends a node and returns its
    output. Integers and lists among inputs become int64 constants.

    Args:
        model: contains the graph, which gets new constants and inputs.
        dtype: numpy dtype name of activations.
        max_positions: the range of positions is 0 .. max_positions - 1.
        on_grid: grids and codes of rounded weights by the name that their nodes OnGrid have.
        levels: encodings.shared.tables.levels_of; empty for a graph that stores whole tables.
        on_device: as in Lowerings.

    Attributes:
        nodes: the new nodes, which are not in the graph yet.
        windows: number of last tokens that are read of a cache that may begin at a later token than
            the first, by the name of its input.
    """

    def __init__(
        self,
        model: ir.Model,
        dtype: str,
        max_positions: int,
        on_grid: Mapping[str, Rounding] = MappingProxyType({}),
        levels: Mapping[str, Any] = MappingProxyType({}),
        on_device: bool = False,
    ) -> None:
        self.model, self.graph, self.dtype = model, model.graph, dtype
        self.max_positions, self.on_device = max_positions, on_device
        known = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
        self.onnx_dtype = known.get(dtype, ir.DataType.FLOAT)
        self.levels, self.nodes = levels, list[ir.Node]()
        self.windows: dict[str, int] = {}
        self.constants: dict[Any, ir.Value] = {}
        self._on_grid, self._names = dict(on_grid), itertools.count(1)

    def empty(self) -> "Builder":
        """Return a builder for the same graph without nodes."""
        other = copy.copy(self)
        other.nodes = []
        return other

    def __getattr__(self, name: str) -> Callable[..., ir.Value]:
        """Return a function that appends a node of the operator `name`."""
        if not name[0].isupper():
            raise AttributeError(name)
        return functools.partial(self.node, name)

    def node(self, operator: str, *inputs: Input, domain: str = "", **attributes: Any) -> ir.Value:
        """Append a node with one output, and return the output."""
        return self.several(1, operator, *inputs, domain=domain, **attributes)[0]

    def several(
        self, outputs: int, operator: str, *inputs: Input, domain: str = "", **attributes: Any
    ) -> tuple[ir.Value, ...]:
        """Append a node with some number of outputs, and return them."""
        kept = (type(None), ir.Value)
        sources = [value if isinstance(value, kept) else self.constant(value) for value in inputs]
        while sources and sources[-1] is None:  # trailing optional inputs are omitted
            sources.pop()
        node = ir.node(operator, sources, attributes=attributes, domain=domain, num_outputs=outputs)
        for value in node.outputs:
            value.name = f"lowered.{operator.lower()}_{next(self._names)}"
        self.nodes.append(node)
        return tuple(node.outputs)

    def choose(self, condition: ir.Value, then: Branch, otherwise: Branch) -> ir.Value:
        """Append an If node, and return its output, which has the dtype of activations.

        Args:
            condition: bool [].
            then, otherwise: emit the nodes of a branch with the builder they get. The output is
                made by a node of the branch, which may read values of the graph.
        """
        graphs: Any = {}
        for key, emits in {"then": then, "else": otherwise}.items():
            inside = self.empty()
            graphs[f"{key}_branch"] = inside.graph_of(key, [], [emits(inside)], self.onnx_dtype)
        chosen = self.node("If", condition, **graphs)
        chosen.type = ir.TensorType(self.onnx_dtype)
        return chosen

    def graph_of(
        self,
        name: str,
        inputs: Sequence[ir.Value],
        outputs: Sequence[ir.Value],
        dtype: ir.DataType = ir.DataType.FLOAT,
    ) -> ir.Graph:
        """Return the collected nodes as the graph of a branch or loop, with outputs of a dtype."""
        for output in outputs:
            output.type = ir.TensorType(dtype)
        return ir.Graph(inputs, outputs, nodes=self.nodes, name=name)

    def named(self) -> ir.Value:
        """Return a new float32 value with a name of its own, as the input of an inner graph."""
        name, dtype = f"lowered.scanned_{next(self._names)}", ir.TensorType(ir.DataType.FLOAT)
        return ir.Value(name=name, type=dtype)

    def constant(self, array: Any, dtype: Any = np.int64) -> ir.Value:
        """Return an initialiser with the content of `array`; equal arrays share one."""
        data = np.asarray(array, dtype=dtype)
        key = (data.dtype.str, data.shape, data.tobytes())
        if key not in self.constants:
            name = f"lowered.constant_{next(self._names)}"
            self.constants[key] = self.initialiser(ir.tensor(data, name=name))
        return self.constants[key]

    def weight(
        self, name: str, made: Callable[[], np.ndarray], dtype: ir.DataType | None = None
    ) -> ir.Value:
        """Return the initialiser with this name; if there is none, create it from the array that
        `made` returns. Contents are not compared. dtype: None for the dtype of the array; INT4
        stores an int8 array in 4 bits.
        """
        if name not in self.graph.initializers:
            array = made() if dtype is None else made().astype(dtype.numpy())
            self.initialiser(ir.tensor(array, dtype=dtype, name=name))
        return self.graph.initializers[name]

    def initialiser(self, tensor: ir.TensorProtocol) -> ir.Value:
        """Return a new initialiser."""
        value = ir.Value(
            name=tensor.name,
            shape=ir.Shape(tensor.shape.numpy()),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self.graph.register_initializer(value)
        return value

    def input(self, name: str) -> ir.Value:
        """Return an input from the table of graph inputs, created if there is none."""
        for value in self.graph.inputs:
            if value.name == name:
                return value
        row = INPUTS[name]
        dtype = ir.TensorType(ir.DataType[row.dtype.upper()])
        value = ir.Value(name=name, shape=ir.Shape(row.forms[0]), type=dtype)
        self.graph.inputs.append(value)
        return value

    def table(self, value: ir.Value) -> ir.Value:
        """Return a constant float32 table in the dtype of activations.

        The file has the numbers in float32, and ONNX Runtime casts them when it loads the graph, so
        that the float32 form of the file reads them exactly (verification/float32_form.py).
        """
        if value.const_value is None:
            got = f"{value.name}, which is computed in the graph"
            raise refusal("export", "constant tables", got, "compute it when the module is built")
        if self.dtype == "float32":
            return value
        rounded = self.Cast(value, to=int(self.onnx_dtype))
        rounded.shape, rounded.type = value.shape, ir.TensorType(self.onnx_dtype)
        return rounded

    def merge_heads(self, value: ir.Value) -> ir.Value:
        """Merge heads [B,S,N,D] to [B,S,N*D]."""
        split = SplitHeads.of(value)
        if split is not None:
            return split.x
        sizes = [] if value.shape is None else value.shape[2:]
        # ONNX Runtime infers no shape of attention from a size that is not stated.
        width = math.prod(sizes) if sizes and all(isinstance(s, int) for s in sizes) else -1
        return self.Reshape(value, [0, 0, width])

    def split_heads(self, value: ir.Value, heads: int) -> ir.Value:
        """Split [B,S,N*D] to heads [B,S,N,D] with a semantic node, which `finish` lowers."""
        return self.SplitHeads(value, domain=graph.DOMAIN, heads=heads)

    def rounded(self, value: ir.Value | None) -> tuple[str, Rounding | None]:
        """Return the name, and the grid and codes, of a rounded weight; else "", None."""
        read = OnGrid.of(value)
        name = "" if read is None else read.name
        return name, self._on_grid.get(name)

    def mark(self, weight: ir.Value, name: str, rounding: Rounding) -> ir.Value:
        """Return a constant as the rounded weight `name`, whose codes are those of the constant."""
        self._on_grid[name] = rounding
        marked = self.OnGrid(weight, domain=graph.DOMAIN, name=name)
        marked.shape, marked.type = weight.shape, weight.type
        return marked


def constant_of(value: ir.Value) -> ir.Value:
    """Return the constant that a node OnGrid returns, or the value itself."""
    read = OnGrid.of(value)
    return value if read is None else read.weight


def numbers_of(value: ir.Value) -> np.ndarray:
    """Return the content of a constant."""
    assert value.const_value is not None, f"{value.name} is computed in the graph"
    return value.const_value.numpy()


def size(value: ir.Value, axis: int) -> int:
    """Return the static size of one axis of a value."""
    length = None if value.shape is None else value.shape[axis]
    assert isinstance(length, int), f"axis {axis} of {value.name} is dynamic"
    return length


Lowering = Callable[[Builder, Any], ir.Value]  # takes a semantic node of ops/graph.py
Table = Mapping[type[graph.Node], Lowering]
NodeLowering = Callable[[Builder, ir.Node], ir.Value | None]  # returns None to leave the node


def lower(op: Builder, table: Table) -> None:
    """Lower every semantic node whose class is in the table, in graph order."""
    by_name = {kind.__name__: kind for kind in table}
    for node in list(op.graph):
        if node.domain == graph.DOMAIN and node.op_type in by_name:
            kind, new = by_name[node.op_type], op.empty()
            _replace(node, table[kind](new, kind(node)), new.nodes)


def replace_nodes(op: Builder, table: Mapping[str, NodeLowering]) -> None:
    """Replace nodes by operator in graph order, except where the function returns None."""
    for node in list(op.graph):
        if node.domain != graph.DOMAIN and node.op_type in table:
            new = op.empty()
            value = table[node.op_type](new, node)
            if value is not None:
                _replace(node, value, new.nodes)


def _replace(node: ir.Node, value: ir.Value, nodes: Sequence[ir.Node]) -> None:
    """Put new nodes in front of a node, and let the readers of its output read `value`."""
    assert node.graph is not None
    node.graph.insert_before(node, nodes)
    node.outputs[0].replace_all_uses_with(value, replace_graph_outputs=True)


def finish(op: Builder) -> None:
    """Lower the remaining nodes SplitHeads and OnGrid, sort the graph, merge nodes with equal
    operator, inputs and attributes, and remove unused nodes and constants. ValueError: semantic
    nodes remain that the target's tables do not lower.
    """
    for node in list(op.graph.all_nodes()):
        if node.domain == graph.DOMAIN and node.op_type == "SplitHeads":
            split, new = SplitHeads(node), op.empty()
            _replace(node, new.Reshape(split.x, [0, 0, split.heads, -1]), new.nodes)
        elif node.domain == graph.DOMAIN and node.op_type == "OnGrid":
            _read_constant(op, OnGrid(node))
    common.RemoveUnusedNodesPass()(op.model)
    op.constants.clear()  # unused ones were removed from the graph
    # A table may use a value that an earlier table emitted further down.
    common.TopologicalSortPass()(op.model)
    common.CommonSubexpressionEliminationPass()(op.model)
    own = (node for node in op.graph.all_nodes() if node.domain == graph.DOMAIN)
    remaining = sorted({node.op_type for node in own})
    if remaining:
        rule = "operations that this target can lower"
        raise refusal("export", rule, ", ".join(remaining), "choose target torchscript")


def _read_constant(op: Builder, read: OnGrid) -> None:
    """Let the readers of OnGrid read the constant, in a transposed copy if they do so."""
    weight = read.weight
    for reader, _ in list(read.output.uses()):
        if transposed(reader.outputs[0]) is read.output:
            turned = op.weight(f"{weight.name}.T", lambda: numbers_of(weight).T)
            reader.outputs[0].replace_all_uses_with(turned)
    read.output.replace_all_uses_with(weight)
