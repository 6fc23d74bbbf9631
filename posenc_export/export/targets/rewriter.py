"""Passes over an ONNX graph: lower semantic nodes, replace nodes, fuse patterns."""

from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple, Type

import onnx_ir as ir
from onnx_ir.passes import common

from posenc_export.export.targets.builder import Builder, numbers_of
from posenc_export.ops import graph
from posenc_export.ops.graph import OnGrid, SplitHeads
from posenc_export.shared.refusal import refusal

Lowering = Callable[[Builder, Any], ir.Value]  # takes a semantic node of ops/graph.py
Table = Mapping[Type[graph.Node], Lowering]
NodeLowering = Callable[[Builder, ir.Node], Optional[ir.Value]]  # returns None to leave the node
Replaced = List[Tuple[ir.Value, ir.Value]]  # pairs of an old value and its replacement
# Takes a standard node; returns an empty list if the pattern does not match.
Fusion = Callable[[Builder, ir.Node], Replaced]


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


def fuse(op: Builder, table: Mapping[str, Fusion]) -> None:
    """Apply fusions to standard nodes in graph order; replaced nodes are removed at once."""
    for node in list(op.graph):
        if node.graph is not None and not node.domain and node.op_type in table:
            new = op.empty()
            replaced = table[node.op_type](new, node)
            op.graph.insert_before(node, new.nodes)
            for old, value in replaced:
                old.replace_all_uses_with(value, replace_graph_outputs=True)
                op.graph.remove(old.producer(), safe=True)  # type: ignore[arg-type]
    common.RemoveUnusedNodesPass()(op.model)


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
        if reader.op_type == "Transpose":
            transposed = op.weight(f"{weight.name}.transposed", lambda: numbers_of(weight).T)
            reader.outputs[0].replace_all_uses_with(transposed)
    read.output.replace_all_uses_with(weight)
