"""The flat graph of a module as source that TorchScript compiles."""

import itertools
import linecache
import operator
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from posenc_export import ops

HEADER = """
class Scripted(torch.nn.Module):
    def forward(
        self, x: Tensor, positions: Tensor, coordinates: Tensor, key_positions: Tensor,
        write_index: Tensor, states: List[Tensor], segments: Optional[Tensor] = None,
        logits_index: Optional[Tensor] = None,
    ) -> Tuple[Tensor, List[Tensor]]:
"""
ALL = """\
        if logits_index is None:
            logits_index = torch.arange(x.size(1)).expand(x.size(0), -1)
"""
INFIX = {operator.add: "+", operator.mul: "*", operator.sub: "-", operator.floordiv: "//"}
OPTIONAL_TENSORS = "List[Optional[Tensor]]"
# TorchScript writes dtypes as numbers, in the order of c10::ScalarType.
DTYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4,
    torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bool: 11, torch.bfloat16: 15,
}  # fmt: skip
FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1}
IGNORED = ("device", "pin_memory", "layout")  # of the process that runs it
_numbers = itertools.count()


def scripted(calls: GraphModule, caches: int) -> torch.nn.Module:
    """Return a module with the arguments of reading.read.Reading.forward, whose code TorchScript
    compiles.

    Args:
        calls: the flat graph.
        caches: number of states.
    """
    source = _Source(calls, caches)
    name = f"<posenc_export reading {next(_numbers)}>"
    text = source.text()
    # torch.jit.script reads the source by the name of its file.
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    scope: Dict[str, Any] = {
        "torch": torch, "ops": ops, "Tensor": Tensor, "List": List, "Optional": Optional,
        "Tuple": Tuple, "__name__": name,
    }  # fmt: skip
    exec(compile(text, name, "exec"), scope)  # of the graph, no text of others
    module: torch.nn.Module = scope["Scripted"]()
    for place, value in source.tensors.items():
        module.register_buffer(place, value)
    return module.eval()


class _Source:
    """Source of a graph.

    Attributes:
        tensors: weights and tables by the names of attributes.
    """

    def __init__(self, calls: GraphModule, caches: int) -> None:
        self.calls, self.tensors = calls, dict[str, Tensor]()
        places = [node for node in calls.graph.nodes if node.op == "placeholder"]
        states = [f"states[{index}]" for index in range(caches)]
        given = ["x", "positions", "key_positions", "write_index", *states, "logits_index"]
        self.names = dict(zip(places, given, strict=False))
        self.takes_index = len(places) == len(given)

    def text(self) -> str:
        """Return the source, and collect the tensors."""
        lines: List[str] = []
        for node in self.calls.graph.nodes:
            if node.op == "get_attr":
                place = node.target.replace(".", "__")
                owner, _, last = node.target.rpartition(".")
                self.tensors[place] = getattr(self.calls.get_submodule(owner), last).detach()
                self.names[node] = f"self.{place}"
            elif node.op == "call_function":
                expression = self._expression(node)
                self.names[node] = f"v{len(lines)}"
                lines.append(f"        {self.names[node]} = {expression}\n")
            elif node.op == "output":
                y, *present = (self.names[argument] for argument in node.args[0])
                states = (
                    f"[{', '.join(present)}]" if present else "torch.jit.annotate(List[Tensor], [])"
                )
                lines.append(f"        return {y}, {states}\n")
        start = HEADER + (ALL if self.takes_index else "")
        return start + "".join(lines)

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
                arguments[place] = f"torch.jit.annotate({kind}, {arguments[place]})"
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
        if isinstance(value, torch.dtype):
            return str(DTYPES[value])
        if isinstance(value, torch.memory_format):
            return str(FORMATS[value])
        if isinstance(value, float) and value in (float("inf"), float("-inf")) or value != value:
            return f'float("{value}")'
        return repr(value)
