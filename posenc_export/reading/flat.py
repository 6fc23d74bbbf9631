"""One graph of torch.fx for the calls of a module, which every target reads."""

import warnings
from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch
from torch import Tensor, library
from torch.fx import Graph, GraphModule, Node

from posenc_export import ops
from posenc_export.ops import experts, scores
from posenc_export.reading.calls import Calls, empty_memory
from posenc_export.reading.lengths import Call
from posenc_export.reading.refused import Refused
from posenc_export.reading.simplify import simplify
from posenc_export.reading.tracing import short_traces
from posenc_export.reading.whole import held_by

# Sizes of the trace: no 0 or 1, which torch.export would fix.
ROWS, NEW, SLOTS, LOGITS, SOURCES = 2, 3, 7, 4, 11
LONGEST = 200  # characters of an error of torch
LIBRARY = "posenc_reading"
VMAP = {torch._C._functorch._add_batch_dim, torch._functorch.predispatch._add_batch_dim}


SCHEMAS = {  # of stand-ins of operations, which are only traced
    "append": "(Tensor past, Tensor new, Tensor write_index, Tensor key_positions)",
    "attention_mask": "(Tensor positions, Tensor key_positions, Tensor? bias, Tensor like,"
    " int before, int after, int chunk)",
    "attend": "(Tensor q, Tensor keys, Tensor values, Tensor mask, Tensor? content, float scale,"
    " float softcap, Tensor? sinks)",
    "rotate_pairs": "(Tensor x, Tensor positions, Tensor cos, Tensor sin, bool interleaved,"
    " bool linear)",
    "distances": "(Tensor q_positions, Tensor k_positions)",
    "select_tokens": "(Tensor x, Tensor index)",
    "passed": "(Tensor x)",
    "gated_delta": "(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor? rate, Tensor state)",
}
for _name, _schema in SCHEMAS.items():
    _results = "(Tensor, Tensor)" if _name == "gated_delta" else "Tensor"
    library.define(f"{LIBRARY}::{_name}", f"{_schema} -> {_results}")
_OF = getattr(torch.ops, LIBRARY)
OPERATIONS: Dict[Any, Any] = {getattr(_OF, name).default: getattr(ops, name) for name in SCHEMAS}
OPERATIONS |= {experts.RUN: ops.weighted_experts, scores.SUFFIX_SUM: ops.suffix_sum}


@library.register_fake(f"{LIBRARY}::append")
def _(past: Tensor, new: Tensor, write_index: Tensor, key_positions: Tensor) -> Tensor:
    return past.new_empty(past.shape[0], past.shape[1], key_positions.shape[1], past.shape[3])


@library.register_fake(f"{LIBRARY}::attention_mask")
def _(q: Tensor, k: Tensor, bias: Optional[Tensor], like: Tensor, *limits: int) -> Tensor:
    heads = 1 if bias is None else bias.shape[1]
    return like.new_empty(q.shape[0], heads, q.shape[1], k.shape[1])


@library.register_fake(f"{LIBRARY}::attend")
def _(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *more: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2] * values.shape[3])


@library.register_fake(f"{LIBRARY}::passed")
@library.register_fake(f"{LIBRARY}::rotate_pairs")
def _(x: Tensor, *more: Any) -> Tensor:
    return x.new_empty(x.shape)


@library.register_fake(f"{LIBRARY}::distances")
def _(q_positions: Tensor, k_positions: Tensor) -> Tensor:
    return torch.empty(q_positions.shape[0], 1, q_positions.shape[1], k_positions.shape[1])


@library.register_fake(f"{LIBRARY}::select_tokens")
def _(x: Tensor, index: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], index.shape[1], x.shape[2])


@library.register_fake(f"{LIBRARY}::gated_delta")
def _(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), more[-1].new_empty(more[-1].shape)


class StandIns:
    """Semantic operations as operators of a trace, which keep their place in it.

    Args:
        key_positions: [B,T]; a cache has as many slots.
    """

    attention_mask, distances = staticmethod(_OF.attention_mask), staticmethod(_OF.distances)
    attend, select_tokens = staticmethod(_OF.attend), staticmethod(_OF.select_tokens)
    rotate_pairs, gated_delta = staticmethod(_OF.rotate_pairs), staticmethod(_OF.gated_delta)
    passed = staticmethod(_OF.passed)

    def __init__(self, key_positions: Tensor) -> None:
        self.key_positions = key_positions

    def append(self, past: Tensor, new: Tensor, write_index: Tensor) -> Tensor:
        """Stand for ops.append."""
        result: Tensor = _OF.append(past, new, write_index, self.key_positions)
        return result


class _Traced(torch.nn.Module):
    """Calls with their inputs as arguments."""

    def __init__(self, calls: Calls, last: int) -> None:
        super().__init__()
        self.calls, self.last = calls, last

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        key_positions: Tensor,
        write_index: Tensor,
        states: List[Tensor],
        index: Optional[Tensor] = None,
        coordinates: Optional[Tensor] = None,
    ) -> Tuple[Tensor, List[Tensor]]:
        operations: Any = StandIns(key_positions) if torch.compiler.is_exporting() else ops
        places, after = (positions, key_positions, self.last), self.calls.after
        kept = len(self.calls.caches)
        given = (states[:kept], coordinates, states[kept:])
        call = Call(operations, *places, after, x, write_index, *given)
        result: Tuple[Tensor, List[Tensor]] = self.calls(call, index)
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
    count = SLOTS if calls.properties.causal else NEW  # otherwise keys are those of the call
    key_positions = torch.arange(count) + torch.arange(ROWS)[:, None]
    states = [cache.empty(ROWS, SLOTS) for cache in calls.caches]
    memory = empty_memory(calls.memory, ROWS, SOURCES)
    sources = torch.export.Dim("sources", max=1 << 20)
    rows, new = (torch.export.Dim(name, min=1, max=1 << 20) for name in ("rows", "new"))
    slots, past, logits = (
        torch.export.Dim(name, max=1 << 30) for name in ("slots", "past", "logits")
    )
    per_token = {0: rows, 1: new}
    write_index = torch.arange(NEW).expand(ROWS, -1).clone()
    given: Dict[str, Tuple[Any, Any]] = {  # with the axes that are free
        "x": (x, per_token),
        "positions": (positions, per_token),
        "key_positions": (
            key_positions,
            {0: rows, 1: slots if calls.properties.causal else new},
        ),
        "write_index": (write_index, per_token),
        "states": (
            [*states, *memory],
            [
                *({0: rows} if cache.values else {0: rows, 2: past} for cache in calls.caches),
                *({0: rows, 1 if part.dim() == 2 else 2: sources} for part in memory),
            ],
        ),
    }
    if with_index:
        index = torch.zeros(ROWS, LOGITS, dtype=torch.int64)
        given["index"] = index, {0: rows, 1: logits}
    if capture.axes:
        given["coordinates"] = capture.drawn(ROWS, NEW)[0], {1: rows, 2: new}
    arguments, shapes = ({name: both[i] for name, both in given.items()} for i in (0, 1))
    traced = _Traced(calls, calls.values.max_positions - 1)
    with torch.no_grad():
        traced(**arguments)  # once eagerly, so that no property is left to be found in the trace
        program = _exported(traced, arguments, shapes)
        if any(node.target in VMAP for node in program.graph.nodes):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of torch.export's own code
                program = program.run_decompositions({})
    return _without_stand_ins(program, _named(calls, names))


def _exported(
    traced: _Traced, arguments: Dict[str, Any], shapes: Dict[str, Any]
) -> torch.export.ExportedProgram:
    """Trace calls; guards that torch cannot prove, of strides as a rule, are left to _check_calls
    of read.py.
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


def _named(calls: Calls, names: Mapping[Node, str]) -> Dict[str, str]:
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
    known: Dict[Node, Node] = {}
    sizes: Dict[str, Tuple[Node, int]] = {}  # the first input that has a size, and its axis
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
            root[name] = (
                torch.nn.Parameter(value, requires_grad=False)
                if value.is_floating_point()
                else value
            )
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
