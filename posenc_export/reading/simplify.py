"""Remove from a flat graph what only rearranges a value and gives it back."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from posenc_export import ops
from posenc_export.reading.graphs import COPIES, keeps_dtype
from posenc_export.reading.values import packet

aten = torch.ops.aten
RESHAPES = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.flatten.using_ints,
    aten.unflatten.int,
}  # fmt: skip
ORDERS = {
    aten.permute.default, aten.transpose.int, aten.t.default, aten.mT.default, aten.movedim.int,
    aten.movedim.intlist,
}  # fmt: skip
ENTRY_BY_ENTRY = {
    aten.silu, aten.sigmoid, aten.relu, aten.gelu, aten.tanh, aten.softplus, aten.exp, aten.neg,
    aten.sqrt, aten.rsqrt, aten.reciprocal, aten.pow, aten.add, aten.sub, aten.mul, aten.div,
}  # fmt: skip
REDUCTIONS = {aten.sum.dim_IntList, aten.mean.dim}
WHOLE = {aten.expand.default, aten.slice.Tensor}  # without effect if the sizes stay the same
CHECKS = {aten._assert_tensor_metadata.default, aten._assert_scalar.default}


def simplify(graph: Graph) -> None:
    """Join reshapes and permutations in a row, and remove those that change nothing.

    Every node has its value under meta["val"].
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in CHECKS:
            graph.erase_node(node)
        elif node.target in COPIES or keeps_dtype(node):
            _replace(node, node.args[0])
        elif node.target in ORDERS:
            _permute(node)
        elif packet(node) in ENTRY_BY_ENTRY or _keeps_axes(node):
            _permute_after(node)
        elif node.target in RESHAPES:
            _reshape(node)
        elif node.target is aten.slice_scatter.default:
            _join_slices(node)
        elif node.target in WHOLE and _shape(node) == _shape(node.args[0]):
            _replace(node, node.args[0])
    _join_equal(graph)
    graph.eliminate_dead_code()


def _join_slices(node: Node) -> None:
    """Replace writes of adjacent slices that fill a whole axis by one concatenation."""
    parts: list[Any] = []
    into: Any = node
    axis: Any = node.args[2] if len(node.args) == 5 else None
    left = end = node.meta["val"].shape[axis] if isinstance(axis, int) else None
    while left and into.target is aten.slice_scatter.default:
        base, part, *place = into.args
        if len(place) != 3 or place[0] != axis or min(place[2], end) != left:
            return
        into, left = base, place[1]
        parts.insert(0, part)
    if left == 0:
        node.target, node.args, node.kwargs = aten.cat.default, (parts, axis), {}


def _join_equal(graph: Graph) -> None:
    """Merge nodes that have the same operator, inputs and arguments."""
    known: dict[str, Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is not ops.append:
            key = repr((str(node.target), node.args, node.kwargs))
            if known.setdefault(key, node) is not node:
                node.replace_all_uses_with(known[key])


def _replace(node: Node, other: Any) -> None:
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def _shape(node: Any) -> list[str] | None:
    """Return the sizes as text, equal for equal symbols."""
    value = node.meta.get("val")
    return [str(size) for size in value.shape] if isinstance(value, Tensor) else None


def _order(node: Node) -> list[int]:
    """Return the permutation of a node, found by running it on axes of different sizes."""
    sizes = range(1, 1 + node.meta["val"].dim())
    operator: Any = node.target
    turned = operator(torch.empty(*sizes, device="meta"), *node.args[1:])
    return [size - 1 for size in turned.shape]


def _permute(node: Node) -> None:
    order, source = _order(node), node.args[0]
    assert isinstance(source, Node)
    if source.op == "call_function" and source.target is aten.permute.default:
        inner: Any = source.args[1]
        order, source = [inner[axis] for axis in order], source.args[0]
    if order == list(range(len(order))):
        _replace(node, source)
    else:
        node.target, node.args, node.kwargs = aten.permute.default, (source, order), {}


def _keeps_axes(node: Node) -> bool:
    """Return whether a node is a sum or mean with keepdim=True."""
    return node.target in REDUCTIONS and len(node.args) == 3 and bool(node.args[2])


def _permute_after(node: Node) -> None:
    """Move a permutation that all inputs of a node share behind the node, if only nodes of such
    kinds read the permuted inputs. Vectors, such as the weight of a norm, need no permutation if it
    keeps the last axis.
    """
    wide = [one for one in node.all_input_nodes if one.meta["val"].dim()]
    read = [one for one in wide if one.target is aten.permute.default]
    order: Any = read[0].args[1] if read else None
    if order is None or any(one.args[1] != order for one in read):
        return
    vectors = [one for one in wide if one not in read]  # such as the weight of a norm
    if any(one.meta["val"].dim() > 1 for one in vectors) or (
        vectors and order[-1] + 1 < len(order)
    ):
        return
    users = {user for one in read for user in one.users}
    if not all(packet(u) in ENTRY_BY_ENTRY or _keeps_axes(u) or u.target in ORDERS for u in users):
        return
    graph, back = node.graph, [order.index(axis) for axis in range(len(order))]
    for one in read:
        node.replace_input_with(one, one.args[0])  # type: ignore[arg-type]
    if node.target in REDUCTIONS:
        axes: Any = node.args[1]
        node.update_arg(1, [order[axis] for axis in axes])
    with graph.inserting_after(node):
        permuted = graph.call_function(aten.permute.default, (node, order))
    permuted.meta = dict(node.meta)
    node.meta = {"val": node.meta["val"].permute(back)}
    node.replace_all_uses_with(permuted, lambda user: user is not permuted)


def _reshape(node: Node) -> None:
    source: Any = node.args[0]
    if node.target in (aten.view.default, aten._unsafe_view.default):
        node.target = aten.reshape.default
    while source.op == "call_function" and source.target in (aten.reshape.default, ops.split_heads):
        if node.target is not aten.reshape.default:
            break
        source = source.args[0]
    before, after = _shape(source), _shape(node)
    if before == after:
        _replace(node, source)
    elif before and after and _splits_heads(before, after):
        node.target, node.args, node.kwargs = ops.split_heads, (source, int(after[2])), {}
    else:
        node.args = (source, *node.args[1:])


def _splits_heads(before: list[str], after: list[str]) -> bool:
    """Return whether sizes [B,S,N*D] become [B,S,N,D]."""
    axes = len(before), len(after)
    return axes == (3, 4) and before[:2] == after[:2] and after[2].isdigit()
