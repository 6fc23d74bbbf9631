"""Read the graph of a TorchScript file or a torch.export program as nodes of ONNX, for the check
"indices".

A call is run operator by operator. What reads positions, masks or sizes is written down as nodes
that compute the same for every call; all other operators keep their names. A branch of TorchScript
becomes a claim that every call takes it.
"""

import operator
from pathlib import Path
from typing import Any, Callable, Iterator, List, Mapping, Sequence, Tuple

from posenc_export.runtime.artefact.rules import graph_file
from posenc_export.runtime.artefact.schema import Manifest
from posenc_export.runtime.graphs import torch_files
from posenc_export.runtime.verification.aten_nodes import NUMBERS, Record, number
from posenc_export.runtime.verification.integer_graph import IntegerPart
from posenc_export.runtime.verification.solver import Untranslated

LISTS: Mapping[str, Callable[..., Any]] = {
    "aten::__getitem__.t": operator.getitem,
    "aten::add.t": operator.add,
    "aten::append.t": lambda x, item: x.append(item) or x,
    "aten::slice.t": lambda x, start, end, step: x[start:end:step],
    "aten::__is__": operator.is_,
    "aten::__isnot__": operator.is_not,
    "prim::ListConstruct": lambda *parts: list(parts),
    "prim::TupleConstruct": lambda *parts: parts,
    "prim::unchecked_cast": lambda x: x,
    "prim::dtype": lambda x: x.dtype,
    "prim::device": lambda x: x.device,
}


FILLED = {"past_positions": -1, "attention_mask": 1}  # inputs of a call; others are 0


class TorchGraph:
    """The graph of a file of torch. Raises as torch_files.load_torch."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        path, self.manifest = folder / graph_file(manifest), manifest
        if manifest.target == "pt2":
            program = torch_files.read_program(path, manifest)
            self._first, self._graph = torch_files.weights_of(program), program.graph
        else:
            script = torch_files.read_script(path)
            self._first, self._graph = [script], script.inlined_graph

    def part(self, rows: int, columns: int) -> Tuple[IntegerPart, int]:
        """Return the integer part, and the number of branches that sizes of computed numbers
        choose. Both are found in a call of some rows and columns.

        Raises:
            Untranslated: the graph has something that graphs of this package do not have.
        """
        import torch

        manifest, first = self.manifest, int(self.manifest.stores_positions)
        sizes = {"batch_size": rows, "logits_count": 1, "capacity": manifest.capacity_bucket}
        if manifest.by_columns and manifest.states:
            sizes["total_sequence_length"] = columns + 2  # two of which are cached

        def tensor(axes: Sequence[Any], name: str, dtype: str) -> Any:
            shape = [sizes.get(axis, columns) if isinstance(axis, str) else axis for axis in axes]
            return torch.full(shape, FILLED.get(name, 0), dtype=getattr(torch, dtype))

        inputs, encoder = (
            {value.name: tensor(value.axes, value.name, value.dtype) for value in values}
            for values in (manifest.inputs, manifest.encoder)
        )
        past = {
            state.past: tensor(state.axes, state.past, state.dtype) for state in manifest.states
        }
        record, states = Record({**inputs, **past, **encoder}), [*past.values()]
        arguments = [*self._first, *inputs.values(), *states[:first]]
        rest = [*states[first:], *encoder.values()]
        with torch.no_grad():
            if manifest.target == "pt2":
                _program(record, self._graph, [*arguments, *rest])
            else:
                _Script(record).run(self._graph, [*arguments, rest])
        if first:
            record.output("present_positions", states[0])
        return record.part(), record.assumed


def _program(record: Record, graph: Any, arguments: Sequence[Any]) -> None:
    """Run the graph of a torch.export program."""
    from torch.fx.node import map_arg

    given, known = iter(arguments), dict[Any, Any]()
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = next(given)
        elif node.op == "call_function":
            record.at(node.name)
            values, named = map_arg((node.args, node.kwargs), known.__getitem__)
            if node.target is operator.getitem:
                known[node] = values[0][values[1]]
            elif hasattr(node.target, "_schema"):
                known[node] = _applied(record, node.target, values, named)
            else:
                known[node] = _of_numbers(record, node.target.__name__, values)


def _applied(record: Record, overload: Any, values: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Run an operator, and write it down."""
    accepted = [each.name for each in overload._schema.arguments]
    return record.apply(
        overload, {**dict(zip(accepted, values, strict=False)), **named}, overload(*values, **named)
    )


def _of_numbers(record: Record, name: str, values: Sequence[Any]) -> Any:
    """Compute with sizes."""
    if name not in NUMBERS:
        raise Untranslated(f"operator {name} on sizes")
    result = getattr(operator, name)(*values)
    return number(result, NUMBERS[name], *values) if record.varies(values) else result


class _Script:
    """Runs the graph of a TorchScript file.

    Args:
        record: gets its operators.
    """

    def __init__(self, record: Record) -> None:
        self.record, self.known = record, dict[str, Any]()

    def run(self, block: Any, arguments: Sequence[Any]) -> List[Any]:
        """Run a block, and return its outputs."""
        for value, argument in zip(block.inputs(), arguments, strict=True):
            self.known[value.debugName()] = argument
        for node in block.nodes():
            self.record.at(next((value.debugName() for value in node.outputs()), ""))
            results = self._results(node, [self.known[x.debugName()] for x in node.inputs()])
            for value, result in zip(node.outputs(), results, strict=True):
                self.known[value.debugName()] = result
        return [self.known[value.debugName()] for value in block.outputs()]

    def _results(self, node: Any, values: List[Any]) -> Sequence[Any]:
        import torch

        kind, schema = node.kind(), node.schema()
        if kind == "prim::Constant":
            return [node.output().toIValue()]
        if kind == "prim::ListUnpack" or kind == "prim::TupleUnpack":
            return list(values[0])
        if kind == "prim::If":
            blocks = list(node.blocks())
            results = [self.run(blocks[n], []) for n in self.record.branches(values[0])]
            if len(results) == 1:
                return results[0]
            return [self.record.opaque("If", of, of[0]) for of in zip(*results, strict=True)]
        if kind == "prim::Loop":
            return self._loop(node, values)
        name = kind if schema == "(no schema)" else schema.partition("(")[0]
        if name in LISTS:
            return [LISTS[name](*values)]
        name, _, overload = name.removeprefix("aten::").partition(".")
        if not any(hasattr(value, "dim") for value in _flat(values)):
            if name in NUMBERS:
                return [_of_numbers(self.record, name, values)]
        operation = getattr(getattr(torch.ops.aten, name), overload or "default")
        accepted = operation._schema.arguments
        named = [(each.name, value) for each, value in zip(accepted, values, strict=True)]
        free = sum(not each.kwarg_only for each in accepted)
        return [_applied(self.record, operation, values[:free], dict(named[free:]))]

    def _loop(self, node: Any, values: List[Any]) -> Sequence[Any]:
        """Run a loop, of which only the inputs are written down."""
        count, condition, *carried = values
        (body,), record = node.blocks(), self.record
        with record.muted():
            for index in range(count):
                condition, *carried = self.run(body, [index, *carried])
                if not condition:
                    break
        return [record.opaque("Loop", values, result) for result in carried]


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        yield from _flat(value) if isinstance(value, (list, tuple)) else [value]
