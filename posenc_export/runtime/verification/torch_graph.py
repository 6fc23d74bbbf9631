"""Read the graph of a torch.export program as nodes of ONNX, for the check "indices".

Operators of `aten_nodes.py` become nodes that compute the same for every call; all others keep
their names, and are no part of what is proved.
"""

import operator
from pathlib import Path
from typing import Any, Dict, List

import numpy as np

from posenc_export.runtime.artefact.rules import graph_file
from posenc_export.runtime.artefact.schema import Manifest
from posenc_export.runtime.graphs import onnx_parts, torch_files
from posenc_export.runtime.graphs.onnx_nodes import Constant
from posenc_export.runtime.verification.aten_nodes import (
    NAMES,
    NUMBERS,
    OPERATORS,
    Arguments,
    Written,
    element,
    value,
)
from posenc_export.runtime.verification.integer_graph import IntegerPart, integer_part
from posenc_export.runtime.verification.solver import Untranslated

MEMORY = "memory"  # stands for what an operator writes to: no part of what is proved
WRITES = {"index_put_": "values", "index_copy_": "source"}  # the argument that is written


def part_of_program(folder: Path, manifest: Manifest) -> IntegerPart:
    """Return the integer part of model.pt2, with the constants that it reads.

    Raises:
        OSError, ValueError: as torch_files.read_program.
        Untranslated: the graph has something that graphs of this package do not have.
    """
    program = torch_files.read_program(folder / graph_file(manifest), manifest)
    graph, specs = _Program(), iter(program.graph_signature.input_specs)
    tensors = iter(torch_files.weights_of(program))
    states = [state.past for state in manifest.states]
    ends = ([each.name for each in values] for values in (manifest.inputs, manifest.encoder))
    inputs = iter([*next(ends), *states, *next(ends)])
    for node in program.graph.nodes:
        if node.op == "call_function":
            graph.add(node)
        elif node.op == "placeholder" and (name := next(specs).target) is not None:
            graph.store(node, name, next(tensors))
        elif node.op == "placeholder":
            graph.begin(node, next(inputs))
    if manifest.stores_positions:
        graph.end("present_positions", states[0])
    return graph.part()


class _Program:
    """Writes the nodes of a program, in their order.

    Attributes:
        written: gets them.
    """

    def __init__(self) -> None:
        self.written = Written()
        self._stored: Dict[Any, Any] = {}  # by node, what is the same in every call
        self._inputs: Dict[str, Any] = {}  # nodes by name
        self._items: Dict[Any, List[str]] = {}  # names of the results of nodes with several

    def store(self, node: Any, name: str, result: Any) -> None:
        """Add a node whose result, tensors, is the same in every call."""
        self._stored[node] = result
        if hasattr(result, "dim"):
            shape = tuple(result.shape)
            self.written.graph.constants[name] = Constant(name, element(result.dtype), shape)
            self.written.names[node] = name

    def part(self) -> IntegerPart:
        """Return the integer part, with the numbers of the constants that it reads."""
        part = integer_part(self.written.graph)
        read = {name for node in part.nodes for name in node.inputs}
        for node, tensor in self._stored.items():
            if (name := self.written.names.get(node, "")) in read:
                numbers = tensor.detach()
                numbers = numbers.float() if element(numbers.dtype) == "bfloat16" else numbers
                part.graph.constants[name] = onnx_parts.constant(name, numbers.contiguous().numpy())
        return part

    def begin(self, node: Any, name: str) -> None:
        """Add an input."""
        self._inputs[name], self.written.names[node] = node, name
        self.written.graph.inputs[name] = element(value(node).dtype)

    def end(self, name: str, state: str) -> None:
        """Add an output: the memory of an input after the call."""
        graph, memory = self.written.graph, self._inputs[state]
        graph.nodes.append(onnx_parts.new_node("Identity", [self.written.name(memory)], [name]))
        graph.outputs.append(name)

    def add(self, node: Any) -> None:
        """Add a node. Raise Untranslated for an operator that is not known, but may matter."""
        from torch.fx.node import map_arg

        write, target, names = self.written, node.target, self.written.names
        write.place, schema = node.name, getattr(target, "_schema", None)
        of_constants = self._stored.keys() >= {*node.all_input_nodes}
        if of_constants and not (schema and schema.is_mutable):
            known, named = map_arg((node.args, node.kwargs), self._stored.__getitem__)
            self.store(node, node.name, target(*known, **named))
        elif target is operator.getitem:
            names[node] = self._items[node.args[0]][node.args[1]]
        elif schema is None:
            if target.__name__ not in NUMBERS:
                raise Untranslated(f"operator {target.__name__} on sizes")
            read = [[x] if isinstance(x, int) else x for x in node.args]
            names[node] = write.node(NUMBERS[target.__name__], *read)
        else:
            accepted = [each.name for each in schema.arguments]
            arguments = {**dict(zip(accepted, node.args, strict=False)), **node.kwargs}
            made = self._made(node, schema, arguments)
            names[node], self._items[node] = made[0], made

    def _made(self, node: Any, schema: Any, a: Arguments) -> List[str]:
        """Write an operator, and return the names of its results."""
        write, name = self.written, schema.name.partition("::")[2]
        if schema.is_mutable:
            return [self._changed(node, name, a)]
        if name == "sym_size":
            return [write.size(a["self"], a["dim"])]
        result = value(node)
        made = OPERATORS[name](write, a, result) if name in OPERATORS else None
        if made is None:
            count = len(result) if isinstance(result, (list, tuple)) else 1
            plain = {n: x for n, x in a.items() if isinstance(x, (int, float, str))}
            made = write.nodes(NAMES.get(name, name), count, *node.all_input_nodes, **plain)
        return made if isinstance(made, list) else [made]

    def _changed(self, node: Any, name: str, a: Arguments) -> str:
        """Write that a cache gets new slots, and return the name of it."""
        if name not in WRITES or a.get("accumulate"):
            raise Untranslated(f"operator {name}, which writes")
        write, memory, tokens = self.written, a["self"], next(iter(self._inputs.values()))
        if name == "index_put_":
            rows, columns = (write.name(index) for index in a["indices"])
            first = write.node("Gather", columns, np.array(0), axis=1)
        else:
            rows, columns = "", write.node("Unsqueeze", a["index"], [0])
            first = write.node("Slice", a["index"], [0], [1])
        sizes = write.sizes([write.size(tokens, axis) for axis in (0, 1)])
        write.node(name, MEMORY, rows, write.node("Expand", columns, sizes))
        source = memory
        while source.op != "placeholder":  # it is a view of a cache
            source = source.args[0]
        numbers = value(memory).is_floating_point()
        views = source is not memory or any(map(self._is_view, memory.users))
        if source in self._stored or views and not numbers:
            raise Untranslated("a cache that is read under two names")
        new = a[WRITES[name]]
        write.names[memory] = (
            write.node("Memory", MEMORY, memory)
            if numbers
            else write.node("TensorScatter", memory, new, first, axis=1)
        )
        return write.names[memory]

    def _is_view(self, node: Any) -> bool:
        """Return whether a node that was written has the memory of what it reads."""
        schema = getattr(node.target, "_schema", None)
        views = schema is not None and any(each.alias_info for each in schema.returns)
        return views and node in self.written.names
