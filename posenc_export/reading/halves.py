"""A flat graph in half precision: products with weights, and what attention reads, are rounded.

All else, such as norms, softmax by operators, activations and the residual stream, stays float32.
So no mask, epsilon or sum of squares of a module leaves the range of float16, and tables of
positions keep their numbers.
"""

import copy
import operator
from typing import Any, Collection, Dict, List, Optional, Set, Tuple

import torch
from torch.fx import Graph, Node

from posenc_export import ops
from posenc_export.reading.values import LAYOUT, aten, packet

PRODUCTS = {aten.linear, aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.einsum, aten.embedding}
# Which arguments of a semantic operation have the dtype of activations.
OPERANDS: Dict[Any, Tuple[int, ...]] = {
    ops.append: (0, 1),
    ops.attend: (0, 1, 2, 3, 7),
    ops.attention_mask: (3,),
    ops.rotate_pairs: (0,),
}
KEEPING = LAYOUT | {
    aten.chunk, aten.split, aten.split_with_sizes, aten.slice, aten.select, aten.t, aten.cat,
    ops.select_tokens, ops.split_heads, ops.passed, operator.getitem,
}  # fmt: skip


def rounded_weights(graph: Graph, trained: Collection[str]) -> Set[str]:
    """Return the names of the weights that products read. trained: those that may be rounded."""
    found = set[str]()
    for node in graph.nodes:
        for weight in _operands(node, trained):
            if (name := _weight(weight, trained)) is not None:
                found.add(name)
    return found


def in_half(graph: Graph, dtype: torch.dtype, trained: Collection[str]) -> Graph:
    """Return a flat graph with casts to and from `dtype`, in which it takes and returns states and
    hidden states. trained: as for `rounded_weights`, whose weights are to be cast.
    """
    return _InHalf(copy.deepcopy(graph), dtype, trained).run()


def _operands(node: Node, trained: Collection[str]) -> List[Node]:
    """Return the inputs of a node that are read in half precision."""
    inputs = [one for one in node.all_input_nodes if one.meta.get("dtype") is torch.float32]
    if packet(node) in PRODUCTS:
        return inputs if any(_weight(one, trained) for one in inputs) else []
    read = [node.args[i] for i in OPERANDS.get(node.target, ()) if i < len(node.args)]
    return [one for one in read if isinstance(one, Node)]


def _weight(node: Node, trained: Collection[str]) -> Optional[str]:
    """Return the name of the weight that a value is, perhaps in another layout; None for others."""
    while packet(node) in KEEPING and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return str(node.target) if node.op == "get_attr" and node.target in trained else None


class _InHalf:
    """The casts of a graph.

    Attributes:
        half: the values in half precision.
    """

    def __init__(self, graph: Graph, dtype: torch.dtype, trained: Collection[str]) -> None:
        self.graph, self.dtype, self.trained = graph, dtype, trained
        self.rounded = rounded_weights(graph, trained)
        self.half: Set[Node] = set()
        self.casts: Dict[Tuple[Node, bool], Node] = {}

    def run(self) -> Graph:
        for node in list(self.graph.nodes):
            floats = node.meta.get("dtype") is torch.float32
            if node.op == "placeholder" or node.op == "get_attr":
                if floats and (node.op == "placeholder" or node.target in self.rounded):
                    self.half.add(node)
                continue
            operands = set(_operands(node, self.trained))
            kept = packet(node) in KEEPING and self.half.issuperset(
                one for one in node.all_input_nodes if one.meta.get("dtype") is torch.float32
            )
            if node.op == "output":
                operands = set(node.all_input_nodes)
            elif not (floats or any(one in self.half for one in node.all_input_nodes)):
                continue
            if floats and (operands or kept):
                self.half.add(node)
            if not kept and packet(node) is not aten.sym_size:
                for one in node.all_input_nodes:
                    node.replace_input_with(one, self._cast(one, one in operands))
        return self.graph

    def _cast(self, node: Node, to_half: bool) -> Node:
        """Return a value in half precision, or in float32."""
        if node.meta.get("dtype") is not torch.float32 or (node in self.half) == to_half:
            return node
        if (node, to_half) not in self.casts:
            dtype = self.dtype if to_half else torch.float32
            with self.graph.inserting_after(node):
                cast = self.graph.call_function(aten.to.dtype, (node, dtype))
            cast.meta = dict(node.meta)
            self.casts[node, to_half] = cast
        return self.casts[node, to_half]
