"""One graph of torch.fx for the calls of a module, which every target reads."""

import re
import warnings
from typing import Any, Mapping

import torch
from torch import Tensor, library
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map

from posenc_export import ops
from posenc_export.ops import experts, scores
from posenc_export.ops.graph import semantic_graph
from posenc_export.reading.calls import Calls, empty_memory
from posenc_export.reading.graphs import VMAP
from posenc_export.reading.lengths import Call
from posenc_export.reading.refused import Refused
from posenc_export.reading.simplify import simplify
from posenc_export.reading.tracing import short_traces
from posenc_export.reading.whole import held_by

# Sizes of the trace: no 0 or 1, which torch.export would fix.
ROWS, NEW, SLOTS, LOGITS, SOURCES = 2, 3, 7, 4, 11
LONGEST = 200  # characters of an error of torch
LIBRARY = "posenc_reading"


# Operations for which a trace records a stand-in, an operator of the same name.
STANDING = (
    "append", "attention_mask", "attend", "rotate_pairs", "distances", "select_tokens",
    "gated_delta",
)  # fmt: skip
DEFAULT = r"=[^,)]*"  # a trace leaves out arguments that are equal to a default
_OF = getattr(torch.ops, LIBRARY)


def _stand_in(name: str) -> Any:
    """Define the stand-in of an operation, which has the shapes of its semantic node."""
    operation = getattr(ops, name)
    schema = re.sub(DEFAULT, "", library.infer_schema(operation, mutates_args=()))
    if name == "append":
        schema = schema.replace(")", ", Tensor key_positions)", 1)

    def fake(*given: Any) -> Any:
        if name == "append":  # all slots; a semantic node has the filled ones
            past, *_, key_positions = given
            return past.new_empty(*past.shape[:2], key_positions.shape[1], past.shape[3])
        with semantic_graph():
            return tree_map(lambda y: y.new_empty(y.shape), operation(*given))

    library.define(f"{LIBRARY}::{name}", schema)
    library.register_fake(f"{LIBRARY}::{name}", fake)
    return getattr(_OF, name).default


OPERATIONS: dict[Any, Any] = {_stand_in(name): getattr(ops, name) for name in STANDING}
OPERATIONS |= {experts.RUN: ops.weighted_experts, scores.SUFFIX_SUM: ops.suffix_sum}


class StandIns:
    """The semantic operations in a trace, which records one stand-in for each call.

    Args:
        key_positions: [B,T], with the number of slots T of caches.
    """

    def __init__(self, key_positions: Tensor) -> None:
        self.key_positions = key_positions

    def __getattr__(self, name: str) -> Any:
        return getattr(_OF, name)

    def append(self, *given: Tensor) -> Any:
        """Stand for ops.append."""
        return _OF.append(*given, self.key_positions)


class _Traced(torch.nn.Module):
    """Calls with their inputs as arguments."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls, self.last = calls, calls.values.max_positions - 1

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        key_positions: Tensor,
        write_index: Tensor,
        states: list[Tensor],
        index: Tensor | None = None,
        coordinates: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        operations: Any = StandIns(key_positions) if torch.compiler.is_exporting() else ops
        places, kept = (positions, key_positions, self.last), len(self.calls.caches)
        given = (states[:kept], coordinates, states[kept:])
        call = Call(operations, *places, self.calls.after, x, write_index, *given)
        result: tuple[Tensor, list[Tensor]] = self.calls(call, index)
        return result


def flat_graph(calls: Calls, names: Mapping[Node, str], with_index: bool) -> GraphModule:
    """Return a module forward(x, positions, key_positions, write_index, *states[, index]
    [, coordinates]) that returns (output, *new states), whose graph has operators of torch and of
    posenc_export.ops.

    Args:
        names: names of weights in the module that was read, by node.
        with_index: whether only the tokens of `index` [B,R] are returned.
    """
    capture = calls.values.capture
    x = capture.example[:ROWS, :NEW].clone()
    # Rows at positions of their own, so that operators that mix them are seen.
    positions = torch.arange(NEW) + torch.arange(ROWS)[:, None]
    states = [cache.empty(ROWS, SLOTS) for cache in calls.caches]
    memory = empty_memory(calls.memory, ROWS, SOURCES)
    sources = torch.export.Dim("sources", max=1 << 20)
    rows, new = (torch.export.Dim(name, min=1, max=1 << 20) for name in ("rows", "new"))
    slots, past, logits = (
        torch.export.Dim(name, max=1 << 30) for name in ("slots", "past", "logits")
    )
    per_token = {0: rows, 1: new}
    # Without causality, keys are the call's.
    count, keys = (SLOTS, slots) if calls.properties.causal else (NEW, new)
    key_positions = torch.arange(count) + torch.arange(ROWS)[:, None]
    given: dict[str, tuple[Any, Any]] = {  # with the axes that are free
        "x": (x, per_token),
        "positions": (positions, per_token),
        "key_positions": (key_positions, {0: rows, 1: keys}),
        "write_index": (torch.arange(NEW).expand(ROWS, -1).clone(), per_token),
        "states": (
            [*states, *memory],
            [
                *({0: rows} if cache.values else {0: rows, 2: past} for cache in calls.caches),
                *({0: rows, 1 if part.dim() == 2 else 2: sources} for part in memory),
            ],
        ),
    }
    if with_index:
        given["index"] = torch.zeros(ROWS, LOGITS, dtype=torch.int64), {0: rows, 1: logits}
    if capture.axes:
        given["coordinates"] = capture.drawn(ROWS, NEW)[0], {1: rows, 2: new}
    arguments, shapes = ({name: both[i] for name, both in given.items()} for i in (0, 1))
    traced = _Traced(calls)
    with torch.no_grad():
        traced(**arguments)  # once eagerly: cached properties must not be computed in the trace
        program = _exported(traced, arguments, shapes)
        if any(node.target in VMAP for node in program.graph.nodes):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of torch.export's own code
                program = program.run_decompositions({})
    return _without_stand_ins(program, _named(calls, names))


def _exported(
    traced: _Traced, arguments: dict[str, Any], shapes: dict[str, Any]
) -> torch.export.ExportedProgram:
    """Trace calls. Guards that torch cannot prove, mostly on strides, are not checked here, but by
    `_check_calls` of read.py.
    """
    for unproved in (False, True):
        try:
            with short_traces():
                return torch.export.export(
                    traced,
                    (),
                    arguments,
                    dynamic_shapes=shapes,
                    strict=False,
                    prefer_deferred_runtime_asserts_over_guards=unproved,
                )
        except RuntimeError as error:  # of a size that an operator fixes
            said = error
    text = " ".join(str(said).split())[:LONGEST]
    raise Refused(f"has an operator that takes one number of tokens alone: {text}") from said


def _named(calls: Calls, names: Mapping[Node, str]) -> dict[str, str]:
    """Return names of weights and tables in the flat graph, by their names in the calls."""
    found = {f"lengths.{name}": f"tables.{name}" for name, _ in calls.lengths.named_buffers()}
    for node, name in calls.weight_names.items():
        found[name] = names.get(node, f"constants.{name}")
    return {f"calls.{name}": new for name, new in found.items()}


def _without_stand_ins(
    program: torch.export.ExportedProgram, names: Mapping[str, str]
) -> GraphModule:
    """Return the graph with weights as attributes and the operations of posenc_export.ops."""
    inside, graph, root = held_by(program), Graph(), dict[str, Any]()
    known: dict[Node, Node] = {}
    sizes: dict[str, tuple[Node, int]] = {}  # the first input that has a size, and its axis
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name not in inside:
            for axis, size in enumerate(node.meta["val"].shape):
                sizes.setdefault(str(size), (node, axis))
        elif node.target is torch.ops.aten.sym_size.int:
            node.args = sizes.get(str(node.meta["val"]), node.args)
        if node.op == "placeholder" and node.name in inside:
            own, value = inside[node.name]
            if not node.users:
                continue
            name = names.get(own, f"constants.{own}".replace("calls.", ""))
            root[name] = torch.nn.Parameter(value, False) if value.is_floating_point() else value
            known[node] = graph.get_attr(name)
        elif node.op == "output":
            graph.output(tuple(known[argument] for argument in node.args[0]))
        elif node.op == "call_function" and node.target in OPERATIONS:
            operation = OPERATIONS[node.target]  # the stand-in of append has one argument more
            given = node.args[: 3 if operation is ops.append else None]
            arguments = torch.fx.node.map_arg(given, known.__getitem__)
            known[node] = graph.call_function(operation, arguments)
        else:
            known[node] = graph.node_copy(node, known.__getitem__)
        if node in known:
            known[node].meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    simplify(graph)
    for node in graph.nodes:
        value = node.meta.get("val")
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        node.meta = {"dtype": value.dtype} if isinstance(value, Tensor) else {}
    return GraphModule(root, graph)
