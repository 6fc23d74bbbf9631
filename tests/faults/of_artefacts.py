"""Faults of artefacts of target ort: in the inputs and outputs of the graph, and in the
constants and attributes of its file.
"""

import dataclasses
from typing import Any, Callable, Sequence

import numpy as np
import onnx
from onnx import numpy_helper

from posenc_export.runtime.session.graph import Bound, Call, Feeds
from posenc_export.testing.planting import Fault

ChangeInputs = Callable[[Feeds], Feeds]
ChangeFile = Callable[[Any], None]  # changes a ModelProto in place
ChangeOutput = Callable[[np.ndarray], np.ndarray]
ChangeGraph = Callable[[Any], Any]


class ChangedGraph:
    """A graph whose inputs and outputs are changed at every call
    (runtime.session.graph.Graph).
    """

    def __init__(self, graph: Any, inputs: ChangeInputs, output: ChangeOutput) -> None:
        self.graph, self.inputs, self.output = graph, inputs, output
        self.manifest, self.provider, self.device, self.strided = (
            graph.manifest,
            graph.provider,
            graph.device,
            graph.strided,
        )

    def run(self, call: Call, states: Sequence[Bound]) -> np.ndarray:
        changed = dataclasses.replace(call, feeds=self.inputs(dict(call.feeds)))
        return self.output(self.graph.run(changed, states))

    def repeat(
        self, feeds: Feeds, states: Sequence[Bound], result: np.ndarray
    ) -> Callable[[], object]:
        def run() -> None:
            result[...] = self.run(Call(0, *result.shape[:2], feeds), states)

        return run


def _inputs(change: ChangeInputs) -> ChangeGraph:
    return lambda graph: ChangedGraph(graph, change, lambda output: output)


def _output(change: ChangeOutput) -> ChangeGraph:
    return lambda graph: ChangedGraph(graph, lambda feeds: feeds, change)


def _later_by_one(feeds: Feeds) -> Feeds:
    """Later calls see one key less: the last cached token is overwritten."""
    if feeds["input_ids"].shape[1] == 1:
        feeds["seqlens_k"] = np.maximum(feeds["seqlens_k"] - 1, 0)
    return feeds


def _logits_of_the_token_before(feeds: Feeds) -> Feeds:
    feeds["logits_index"] = np.maximum(feeds["logits_index"] - 1, 0)
    return feeds


def _lengths_of_the_first_row(feeds: Feeds) -> Feeds:
    feeds["seqlens_k"] = np.full_like(feeds["seqlens_k"], feeds["seqlens_k"][0])
    return feeds


def _one_nan(output: np.ndarray) -> np.ndarray:
    made = output.copy()
    made[-1, ..., -1] = np.nan
    return made


def _tables(name: str, change: Callable[[np.ndarray], np.ndarray]) -> ChangeFile:
    """Return a function that changes the cos (7) or sin (8) tables of every attention node."""
    index = {"cos": 7, "sin": 8}[name]

    def edit(model: Any) -> None:
        _constants(
            model,
            {
                node.input[index]
                for node in model.graph.node
                if node.op_type == "GroupQueryAttention"
            },
            change,
        )

    return edit


def _attribute(name: str, value: Any) -> ChangeFile:
    def edit(model: Any) -> None:
        for node in model.graph.node:
            if node.op_type == "GroupQueryAttention":
                kept = [attribute for attribute in node.attribute if attribute.name != name]
                del node.attribute[:]
                node.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])

    return edit


def _slopes(change: Callable[[np.ndarray], np.ndarray]) -> ChangeFile:
    """Return a function that changes the slopes of ALiBi, the constant [H,1,1]."""

    def edit(model: Any) -> None:
        _constants(
            model,
            {
                constant.name
                for constant in model.graph.initializer
                if list(constant.dims)[1:] == [1, 1]
            },
            change,
        )

    return edit


def _scales(change: Callable[[np.ndarray], np.ndarray]) -> ChangeFile:
    """Return a function that changes the scales of all products with quantized weights, or the
    weights of all products if none are quantized.
    """

    def edit(model: Any) -> None:
        scales = {
            constant.name
            for constant in model.graph.initializer
            if constant.name.endswith(".scales")
        }
        products = {node.input[1] for node in model.graph.node if node.op_type == "MatMul"}
        _constants(model, scales or products, change)

    return edit


def _one_query_a_position_later(model: Any) -> None:
    """Rotate the queries of the first head by one more position, by a product before each node."""
    pairs = 8  # of a head of 16 numbers (tests.faults.artefacts.described)
    for node in list(model.graph.node):
        if node.op_type == "GroupQueryAttention":
            sizes = {attribute.name: attribute.i for attribute in node.attribute}
            heads = sizes["num_heads"] + 2 * sizes["kv_num_heads"] * (not node.input[1])
            turn = np.eye(2 * pairs * heads, dtype=np.float32)
            angles = 10000.0 ** (-np.arange(pairs) / pairs)
            first, second = np.arange(pairs), np.arange(pairs) + pairs
            turn[first, first] = turn[second, second] = np.cos(angles)
            turn[first, second], turn[second, first] = np.sin(angles), -np.sin(angles)
            _multiply(model, node, turn)


def _multiply(model: Any, node: Any, matrix: np.ndarray) -> None:
    """Multiply the first input of a node by a matrix, in the dtype of the input."""
    name, before = f"{node.output[0]}.turned", node.input[0]
    model.graph.initializer.append(numpy_helper.from_array(matrix, f"{name}.matrix"))
    at = list(model.graph.node).index(node)
    made = [
        onnx.helper.make_node("CastLike", [f"{name}.matrix", before], [f"{name}.like"]),
        onnx.helper.make_node("MatMul", [before, f"{name}.like"], [name]),
    ]
    for offset, new in enumerate(made):
        model.graph.node.insert(at + offset, new)
    node.input[0] = name


def _constants(model: Any, names: Any, change: Callable[[np.ndarray], np.ndarray]) -> None:
    cast = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Cast"}
    names = {cast.get(name, name) for name in names}
    found = [constant for constant in model.graph.initializer if constant.name in names]
    assert found, "expected constants to change, got none"
    for constant in found:
        before = numpy_helper.to_array(constant)
        constant.CopyFrom(
            numpy_helper.from_array(
                np.ascontiguousarray(change(before)).astype(before.dtype), constant.name
            )
        )


def _off(rows: np.ndarray) -> np.ndarray:
    """sin table [M,D/2] with the second frequency 1 % too high."""
    made = rows.copy()
    angles = np.arange(len(rows)) * 1.01 * 10000.0 ** (-1 / rows.shape[1])
    made[:, 1] = np.sin(angles)
    return made


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            "the last cached token is overwritten",
            "caches",
            "graph",
            _inputs(_later_by_one),
            "rope",
            "ort",
        ),
        Fault(
            "logits of the token before",
            "tokens",
            "graph",
            _inputs(_logits_of_the_token_before),
            "rope",
            "ort",
        ),
        Fault(
            "all rows have the length of the first",
            "mask",
            "graph",
            _inputs(_lengths_of_the_first_row),
            "rope",
            "ort",
        ),
        Fault("rotation reversed", "rotation", "file", _tables("sin", np.negative), "rope", "ort"),
        Fault(
            "other layout of rotary pairs",
            "rotation",
            "file",
            _attribute("rotary_interleaved", 1),
            "rope",
            "ort",
        ),
        Fault(
            "keys and queries not rotated",
            "rotation",
            "file",
            _attribute("do_rotary", 0),
            "rope",
            "ort",
        ),
        Fault("one frequency 1 % off", "rotation", "file", _tables("sin", _off), "rope", "ort"),
        Fault(
            "window one token short",
            "mask",
            "file",
            _attribute("local_window_size", 8),
            "rope",
            "ort",
        ),
        Fault("slopes doubled", "bias", "file", _slopes(lambda rows: 2 * rows), "alibi", "ort"),
        Fault(
            "slopes of the heads exchanged",
            "bias",
            "file",
            _slopes(lambda rows: rows[::-1]),
            "alibi",
            "ort",
        ),
        Fault(
            "slope of one head halved",
            "bias",
            "file",
            _slopes(lambda rows: rows * np.where(np.arange(len(rows)) == 1, 0.5, 1)[:, None, None]),
            "alibi",
            "ort",
        ),
        Fault(
            "scores scaled 1 % off", "scores", "file", _attribute("scale", 0.2525), "rope", "ort"
        ),
        Fault(
            "queries of one head a position later",
            "positions",
            "file",
            _one_query_a_position_later,
            "rope",
            "ort",
        ),
        Fault("scores scaled twice", "scores", "file", _attribute("scale", 0.0625), "rope", "ort"),
        Fault(
            "scales of the products 10 % too large",
            "scales",
            "file",
            _scales(lambda scales: 1.1 * scales),
            "rope",
            "ort",
        ),
        Fault(
            "scales of neighbouring outputs exchanged",
            "scales",
            "file",
            _scales(lambda scales: np.roll(scales, 1, axis=0)),
            "rope",
            "ort",
        ),
        Fault("zeros", "outputs", "graph", _output(np.zeros_like), "rope", "ort"),
        Fault("one number is NaN", "outputs", "graph", _output(_one_nan), "rope", "ort"),
    )
}
