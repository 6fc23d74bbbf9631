"""A flat graph as a module whose source every target reads, TorchScript too."""

import itertools
import keyword
import linecache
import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from posenc_export import ops

HEADER = """
class Calls(torch.nn.Module):
    def forward(
        self, x: Tensor, positions: Tensor, key_positions: Tensor, write_index: Tensor,
        states: list[Tensor], index: Tensor, coordinates: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
"""
INFIX = {operator.add: "+", operator.mul: "*", operator.sub: "-", operator.floordiv: "//"}
OPTIONAL_TENSORS = "List[Optional[Tensor]]"  # as schemas of operators write it
IGNORED = ("device", "pin_memory", "layout")  # arguments that the process decides which runs it
_numbers = itertools.count()


def with_source(graph: GraphModule) -> torch.nn.Module:
    """Return a module forward(x, positions, key_positions, write_index, states, index, coordinates)
    with the weights of a flat graph (flat.flat_graph), whose code TorchScript compiles.
    """
    module_name, text = f"{__name__}_{next(_numbers)}", _Source(graph).text()
    name = f"<{module_name}>"
    # torch.jit.script reads the source by the name of its file.
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    scope: dict[str, Any] = {"torch": torch, "ops": ops, "Tensor": Tensor, "__name__": module_name}
    exec(compile(text, name, "exec"), scope)  # a text of operators and numbers from this file
    module: torch.nn.Module = scope["Calls"]()
    for part, held in graph.named_children():
        module.add_module(part, held)
    for own, weight in graph.named_parameters(recurse=False):
        module.register_parameter(own, weight)
    for own, value in graph.named_buffers(recurse=False):
        module.register_buffer(own, value)
    return module.eval()


class _Source:
    """The source of a graph."""

    def __init__(self, calls: GraphModule) -> None:
        self.calls = calls
        self.names: dict[Node, str] = {}

    def text(self) -> str:
        """Return the source of the class."""
        lines: list[str] = []
        for node in self.calls.graph.nodes:
            if node.op == "placeholder":
                state = node.name.removeprefix("states_")
                self.names[node] = f"states[{state}]" if state != node.name else node.name
            elif node.op == "get_attr":
                self.names[node] = _attribute(node.target)
            elif node.op == "output":
                y, *present = (self.names[argument] for argument in node.args[0])
                states = f"[{', '.join(present)}]"
                states = states if present else f"torch.jit.annotate(list[Tensor], {states})"
                lines.append(f"        return {y}, {states}\n")
            else:
                expression = self._expression(node)
                self.names[node] = f"v{len(lines)}"
                lines.append(f"        {self.names[node]} = {expression}\n")
        return HEADER + "".join(lines)

    def _expression(self, node: Node) -> str:
        target: Any = node.target
        arguments = [self._value(argument) for argument in node.args]
        if target in INFIX:
            return f" {INFIX[target]} ".join(arguments)
        if target is operator.getitem:
            return f"{arguments[0]}[{arguments[1]}]"
        if target is torch.ops.aten.sym_size.int:
            return f"{arguments[0]}.size({arguments[1]})"
        if not isinstance(target, torch._ops.OpOverload):
            return f"ops.{target.__name__}({', '.join(arguments)})"
        for place, parameter in enumerate(target._schema.arguments[: len(arguments)]):
            kind = str(parameter.type)
            if kind == OPTIONAL_TENSORS:
                arguments[place] = f"torch.jit.annotate(list[Tensor | None], {arguments[place]})"
            elif kind == "float":
                arguments[place] = f"float({arguments[place]})"
        arguments += [
            f"{name}={self._value(value)}"
            for name, value in node.kwargs.items()
            if name not in IGNORED
        ]
        return f"torch.ops.aten.{target._schema.name.split('::')[1]}({', '.join(arguments)})"

    def _value(self, value: Any) -> str:
        if isinstance(value, Node):
            return self.names[value]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._value, value))}]"
        if isinstance(value, (torch.dtype, torch.memory_format)):
            return str(value)
        if (isinstance(value, float) and value in (float("inf"), float("-inf"))) or value != value:
            return f'float("{value}")'
        return repr(value)


def _attribute(path: str) -> str:
    """Return an expression for a weight; names of layers may be numbers."""
    expression = "self"
    for name in path.split("."):
        is_name = name.isidentifier() and not keyword.iskeyword(name)
        expression = f"{expression}.{name}" if is_name else f"getattr({expression}, {name!r})"
    return expression
