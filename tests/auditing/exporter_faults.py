"""Faults in what other exporters read (a checkpoint) and in what they write (a graph)."""

import json
import shutil
from pathlib import Path
from typing import Any, Callable, NamedTuple

import numpy as np
import onnx
import onnx.parser
from safetensors.numpy import load_file, save_file

Weights = dict[str, np.ndarray]


class CheckpointFault(NamedTuple):
    """A checkpoint that an exporter reads wrong is one with another config or other weights.

    Args:
        family: name of the checkpoint.
        causes: what an audit may answer.
        config: keys that are changed.
        weights: changes the weights in place.
    """

    family: str
    causes: tuple[str, ...]
    config: Callable[[dict[str, Any]], Any] = lambda config: None
    weights: Callable[[Weights], None] = lambda weights: None

    def plant(self, checkpoint: Path, output: Path) -> None:
        """Write the wrong checkpoint."""
        shutil.copytree(checkpoint, output)
        config = json.loads((output / "config.json").read_text(encoding="utf-8"))
        self.config(config)
        (output / "config.json").write_text(json.dumps(config), encoding="utf-8")
        weights = load_file(output / "model.safetensors")
        self.weights(weights)
        save_file(weights, output / "model.safetensors", {"format": "pt"})


def _exchanged(weights: Weights) -> None:
    """Order the numbers of queries and keys as pairs, which a rotation of halves then exchanges."""
    order = np.arange(16).reshape(8, 2).T.reshape(-1)
    for name in weights:
        if "q_proj" in name or "k_proj" in name:
            heads = weights[name].reshape(-1, 16, weights[name].shape[1])
            weights[name] = np.ascontiguousarray(heads[:, order].reshape(weights[name].shape))


def _scaled(weights: Weights) -> None:
    for name in weights:
        if "q_proj" in name:
            weights[name] = weights[name] * np.float32(2)


def _long(config: dict[str, Any]) -> None:
    config["rope_scaling"]["short_factor"] = config["rope_scaling"]["long_factor"]


def _with(cause: str, **keys: Any) -> CheckpointFault:
    return CheckpointFault("mistral", (cause,), lambda config: config.update(**keys))


OF_CHECKPOINTS = {
    "window ignored": _with("window ignored", sliding_window=None),
    "window off by one": _with("window off by one", sliding_window=9),
    "theta": _with("theta", rope_theta=500000.0),
    "interleaved for half": CheckpointFault("llama", ("attention",), weights=_exchanged),
    "scale": CheckpointFault("llama", ("scale",), weights=_scaled),
    "long factors always": CheckpointFault("phi3", ("long factors always",), _long),
}
# Numbers of slots that faulty nodes read.
SIZES = """
    of_ids = Shape (input_ids)
    of_mask = Shape (attention_mask)
    S = Gather (of_ids, one)
    T = Gather (of_mask, one)
    P = Sub (T, S)
"""

CONSTANTS = """<int64 zero = {0}, int64 one = {1}, int64 limit = {12}, int64[1] start = {0},
    int64[1] first = {1}, int64[1] last = {-1}, int64[1] end = {9223372036854775807},
    int64[1] rows = {0}, int64[1] columns = {1}, int64[1] slots = {2}>"""


class GraphFault(NamedTuple):
    """Nodes in ONNX text between a value X and its readers, which then read Y.

    Args:
        family, causes: as of CheckpointFault.
        values: which values, of a graph: its inputs, its outputs, or inputs or outputs of nodes.
        nodes: compute Y.
    """

    family: str
    causes: tuple[str, ...]
    values: str
    nodes: str

    def plant(self, graph: Path, output: Path) -> int:
        """Write the wrong graph; return the number of places."""
        model = onnx.load(graph)
        places = self._places(model)
        for number, (place, is_output) in enumerate(sorted(places)):
            insert(model.graph, place, self.nodes, f"fault_{number}_", is_output)
        onnx.save(model, output)
        return len(places)

    def _places(self, model: onnx.ModelProto) -> dict[tuple[str, bool], None]:
        kind, _, text = self.values.partition(":")
        name = tuple(text.split(","))
        if kind == "input":
            return {(v.name, False): None for v in model.graph.input if v.name in name}
        if kind == "output":
            return {(v.name, True): None for v in model.graph.output if v.name.endswith(name)}
        nodes = [node for node in model.graph.node if node.op_type in name]
        ends = [node.input[0] if kind == "read" else node.output[0] for node in nodes]
        return dict.fromkeys((end, False) for end in ends)


def plant(graph: Path, value: str, nodes: str, output: Path, constants: str = CONSTANTS) -> None:
    """Write a graph with nodes between an input and its readers."""
    model = onnx.load(graph)
    insert(model.graph, value, nodes, "fault_", False, constants)
    onnx.save(model, output)


def insert(
    graph: onnx.GraphProto,
    value: str,
    text: str,
    prefix: str,
    is_output: bool,
    constants: str = CONSTANTS,
) -> None:
    """Insert nodes between a value and its readers; for an output, behind what computes it."""
    inputs = "int64[n] X, int64[b, s] input_ids, int64[b, t] attention_mask"
    header = f"faulty ({inputs}) => (int64[n] Y) {constants}"
    parsed = onnx.parser.parse_graph(header + "{" + text + "}")
    names = {"X": value, "Y": f"{prefix}Y", "input_ids": "input_ids"}
    names["attention_mask"] = "attention_mask"
    if is_output:
        names = {**names, "X": f"{prefix}X", "Y": value}
    place = 0
    for index, node in enumerate(graph.node):
        if value in node.output:
            place = index + 1
            node.output[:] = [names["X"] if name == value else name for name in node.output]
        node.input[:] = [names["X" if is_output else "Y"] if n == value else n for n in node.input]
    for node in parsed.node:
        node.input[:] = [names.get(name, prefix + name) if name else "" for name in node.input]
        node.output[:] = [names.get(name, prefix + name) for name in node.output]
    for constant in parsed.initializer:
        constant.name = prefix + constant.name
    graph.initializer.extend(parsed.initializer)
    nodes = [*graph.node]
    del graph.node[:]
    graph.node.extend([*nodes[:place], *parsed.node, *nodes[place:]])


OF_GRAPHS = {
    "offset not applied to padded rows": GraphFault(
        "gpt2", ("positions ignored",), "input:position_ids",
        SIZES + "range = Range (P, T, one)\n Y = Expand (range, of_ids)"),
    "cache shifted": GraphFault(
        "mistral", ("cache",), "output:value,values",
        """newest = Slice (X, last, end, slots)
        others = Slice (X, start, last, slots)
        Y = Concat <axis = 2> (newest, others)"""),
    "mask one short": GraphFault(
        "mistral", ("mask", "padding"), "input:attention_mask",
        """short = Slice (X, first, end, columns)
        newest = Slice (X, last, end, columns)
        Y = Concat <axis = 1> (short, newest)"""),
    "second row copied": GraphFault(
        "mistral", ("copied row",), "input:input_ids",
        """row = Slice (X, start, first, rows)
        of_all = Shape (X)
        Y = Expand (row, of_all)"""),
    "cache capped": GraphFault(
        "qwen3", ("capacity",), "input:attention_mask",
        SIZES + """range = Range (zero, T, one)
        new = GreaterOrEqual (range, P)
        early = Less (range, limit)
        seen = Or (new, early)
        kept = Cast <to = 7> (seen)
        Y = Mul (X, kept)"""),
    "angles in float16": GraphFault(
        "qwen3", ("angles",), "read:Cos,Sin",
        "half = Cast <to = 10> (X)\n Y = Cast <to = 1> (half)"),
    "bias from slots of the call": GraphFault(
        "bloom", ("cache",), "written:CumSum", SIZES + "less = Sub (X, P)\n Y = Max (less, zero)"),
    "no ALiBi for padded rows": GraphFault(
        "bloom", ("padding",), "written:CumSum",
        "unpadded = Slice (attention_mask, start, first, columns)\n Y = Mul (X, unpadded)"),
}  # fmt: skip
# Faults that the page does not plant in graphs of other exporters.
OTHERS = {
    "rotary positions are slots": OF_GRAPHS["offset not applied to padded rows"]._replace(
        family="llama"),
    "positions one too large": GraphFault(
        "gpt2", ("positions shifted",), "input:position_ids", "Y = Add (X, one)"),
    "new tokens one position late": GraphFault(
        "llama", ("cache",), "input:position_ids",
        SIZES + "more = Min (P, one)\n Y = Add (X, more)"),
}  # fmt: skip
