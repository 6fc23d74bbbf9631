"""Operators of a graph that write to a value, replaced by functions of it."""

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten
WRITTEN = {  # operator that takes a part of a value: operator that replaces this part
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
}
PASSING = {aten.dropout.default, aten.type_as.default}  # may return their input itself
Memory = dict[Node, Node]  # by node so far, the first node whose value has the same memory


def writes(node: Node) -> bool:
    """Return whether an operator writes to an input."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def without_writes(graph: Graph) -> bool:
    """Replace operators that write to their first input. Return whether all could be replaced: not
    writes to an input of the graph, or to memory that is read in another layout afterwards.
    """
    memory: Memory = {}
    for node in list(graph.nodes):
        shown = _shown(node)
        memory[node] = node if shown is None else memory[shown]
        if writes(node) and not _write(node, memory):
            return False
    return True


def _shown(node: Node) -> Node | None:
    """Return the input of which a value is a view; None if it has memory of its own."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    if node.target is operator.getitem:
        return source if _shown(source) is not None else None
    schema = getattr(node.target, "_schema", None)
    shows = node.target in PASSING or (schema and any(one.alias_info for one in schema.returns))
    return source if shows else None


def _function(target: Any) -> Any:
    """Return the operator that computes the same as one that writes, without the write: add.Tensor
    for add_.Tensor, __or__.Tensor for __ior__.Tensor. None if there is none.
    """
    name, overload = target._schema.name.split("::")[1], target._overloadname
    plain = name.replace("__i", "__") if name.startswith("__i") else name.removesuffix("_")
    return getattr(getattr(aten, plain, None), overload, None) if plain != name else None


def _write(node: Node, memory: Memory) -> bool:
    """Replace an operator that writes. Later nodes read its result. Return whether it was done."""
    of, function, written = memory[node], _function(node.target), node.all_input_nodes[0]
    read = {n for n, own in memory.items() if own is of and n.users.keys() - memory.keys()}
    others, parts = read - {node, written}, list[Any]()
    if function is None or of.op != "call_function":
        return False
    whole: Any = written
    while others - {whole} and whole.target in WRITTEN:
        parts.append(whole)
        whole = whole.args[0]
    if others - {whole, *parts} or (parts and any(user.op == "output" for user in whole.users)):
        return False
    node.target, new = function, [node]
    for part in parts:
        like, *place = part.args
        new.append(_behind(new[-1], WRITTEN[part.target], (like, new[-1], *place), like))
    memory[node] = node
    memory.update({one: new[-1] for one in new[1:]})
    _read(whole, new[-1], memory)
    for part in reversed(parts if read - others or others.intersection(parts) else []):
        new.append(_behind(new[-1], part.target, (new[-1], *part.args[1:]), part))
        memory[new[-1]] = memory[new[-2]]
        _read(part, new[-1], memory)
    for old in {node, written} if parts else ():
        _read(old, new[-1], memory)
    return True


def _behind(node: Node, target: Any, args: Any, like: Node) -> Node:
    """Insert a new node behind a node, with the metadata of `like`."""
    with node.graph.inserting_after(node):
        new = node.graph.call_function(target, args)
    new.meta = dict(like.meta)
    return new


def _read(old: Node, new: Node, memory: Memory) -> None:
    """Let later nodes read `new` in place of `old`."""
    if old is not new:
        old.replace_all_uses_with(new, lambda user: user not in memory)
