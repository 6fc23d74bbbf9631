"""A flat graph in half precision: products with weights, and what attention reads, are rounded.

Everything else, such as norms, softmax by operators, activations and the residual stream, stays in
float32. So no mask, epsilon or sum of squares of a module leaves the range of float16, and tables
of positions keep their numbers.
"""

import copy
import operator
from typing import Any, Collection

import torch
from torch.fx import Graph, Node

from posenc_export import ops
from posenc_export.ops.layers import EDGE
from posenc_export.reading.values import LAYOUT, aten, packet

PRODUCTS = {aten.linear, aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.einsum, aten.embedding}
# Arguments of a product that are its bias. A product is rounded if its weight may be: a router,
# whose weight may not, stays in float32 with its bias.
BIAS = {aten.linear: slice(2, None), aten.addmm: slice(1)}
# Which arguments of a semantic operation have the dtype of activations.
OPERANDS: dict[Any, list[int]] = {
    ops.append: [0, 1],
    ops.attend: [0, 1, 2, 3, 7],
    ops.attention_mask: [3],
    ops.rotate_pairs: [0],
    ops.weighted_experts: [0, 1, 2, 3, 4, 6, 7, 8],
}
KEEPING = LAYOUT | {
    aten.chunk, aten.split, aten.split_with_sizes, aten.slice, aten.select, aten.t, aten.cat,
    ops.select_tokens, ops.split_heads, EDGE.overloadpacket, operator.getitem,
}  # fmt: skip


def rounded_weights(graph: Graph, trained: Collection[str]) -> set[str]:
    """Return the names of the weights that products read. trained: those that may be rounded."""
    read = (one for node in graph.nodes for one in _operands(node, trained))
    return {name for name in (_weight(one, trained) for one in read) if name is not None}


def in_half(graph: Graph, dtype: torch.dtype, trained: Collection[str]) -> Graph:
    """Return a flat graph with casts to and from `dtype`, which its states and hidden states have.
    The caller casts the weights that `rounded_weights` returns for `trained`.
    """
    graph, rounded = copy.deepcopy(graph), rounded_weights(graph, trained)
    half: set[Node] = set()
    casts: dict[Any, Node] = {}

    def cast(node: Node, to_half: bool, reader: Node) -> Node:
        if not _floats(node) or (node in half) == to_half:
            return node
        if (node, to_half) not in casts:
            # The cast of a weight stands in the layer that reads it.
            insert = graph.inserting_after if node.op != "get_attr" else graph.inserting_before
            with insert(node if node.op != "get_attr" else reader):
                kind = dtype if to_half else torch.float32
                casts[node, to_half] = graph.call_function(aten.to.dtype, (node, kind))
        return casts[node, to_half]

    for node in list(graph.nodes):
        inputs, operands = node.all_input_nodes, _operands(node, trained)
        kept = packet(node) in KEEPING and half.issuperset(x for x in inputs if _floats(x))
        taken = node.op == "placeholder" or (node.op == "get_attr" and node.target in rounded)
        if _floats(node) and (taken or (inputs and (operands or kept))):
            half.add(node)
        if not kept and packet(node) is not aten.sym_size:
            for one in inputs:
                to_half = one in operands or node.op == "output"
                node.replace_input_with(one, cast(one, to_half, node))
    return graph


def _floats(node: Node) -> bool:
    return node.meta.get("dtype") is torch.float32


def _operands(node: Node, trained: Collection[str]) -> list[Node]:
    """Return the inputs of a node that are read in half precision."""
    if packet(node) in PRODUCTS:
        inputs = [one for one in node.all_input_nodes if _floats(one)]
        bias = node.args[BIAS[packet(node)]] if packet(node) in BIAS else ()
        weights = [one for one in inputs if one not in bias]
        return inputs if any(_weight(one, trained) for one in weights) else []
    read = [node.args[i] for i in OPERANDS.get(node.target, ()) if i < len(node.args)]
    return [one for one in read if isinstance(one, Node)]


def _weight(node: Node, trained: Collection[str]) -> str | None:
    """Return the name of a weight from a node that has it, perhaps rearranged; None for others."""
    while packet(node) in KEEPING and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return str(node.target) if node.op == "get_attr" and node.target in trained else None
