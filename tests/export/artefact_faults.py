"""Faults planted in a loaded artefact: in the inputs of its graph, in its constants and attributes, and in its outputs. Measured as `posenc verify` measures."""

import dataclasses
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Tuple

import numpy as np
import onnx
from onnx import numpy_helper

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs.ort_graph import OrtGraph
from posenc_export.runtime.session.buffered_caches import BufferedCaches
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.session.state import Call, Feeds, Step
from posenc_export.runtime.verification import reference
from posenc_export.runtime.verification.measuring import Measured, measure
from posenc_export.runtime.verification.proof import accuracy_on

ChangeInputs = Callable[[Feeds], Feeds]
ChangeFile = Callable[[Any], None]  # changes a ModelProto in place
ChangeOutput = Callable[[np.ndarray], np.ndarray]


class ChangedGraph:
    """A graph whose inputs and outputs are changed at every call (runtime.session.buffered_caches.Graph)."""

    def __init__(self, graph: Any, inputs: Optional[ChangeInputs], output: Optional[ChangeOutput]) -> None:
        self.graph, self.inputs, self.output = graph, inputs or (lambda feeds: feeds), output or (lambda made: made)
        self.manifest, self.provider, self.device, self.strided = graph.manifest, graph.provider, graph.device, graph.strided

    def open(self, rows: int, capacity: int) -> BufferedCaches:
        return BufferedCaches.open(self, rows, capacity)

    def run(self, caches: BufferedCaches, call: Call) -> np.ndarray:
        return self.output(self.graph.run(caches, dataclasses.replace(call, feeds=self.inputs(dict(call.feeds)))))

    def step(self, caches: BufferedCaches, feeds: Feeds, rows: int) -> Step:
        def run(caches: BufferedCaches) -> Tuple[np.ndarray, BufferedCaches]:
            caches = caches.with_columns(caches.columns + 1)
            return self.run(caches, Call(0, rows, 1, feeds))[:, 0], caches.after(1, list(range(rows, caches.rows)))

        return Step(run)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of an artefact.

    Args:
        variant: "rope" or "alibi", the encoding of the model that it is planted in.
        inputs, output, file: what is changed.
        quantized_only: whether the fault exists only in the quantized graph, so that the float32 graph of the same numbers cannot show it.
    """

    variant: str = "rope"
    inputs: Optional[ChangeInputs] = None
    output: Optional[ChangeOutput] = None
    file: Optional[ChangeFile] = None
    quantized_only: bool = False


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


def _zeros(output: np.ndarray) -> np.ndarray:
    return np.zeros_like(output)


def _one_nan(output: np.ndarray) -> np.ndarray:
    made = output.copy()
    made[-1, ..., -1] = np.nan
    return made


def _tables(name: str, change: Callable[[np.ndarray], np.ndarray]) -> ChangeFile:
    """Return a function that changes the cos (7) or sin (8) tables of every attention node."""
    index = {"cos": 7, "sin": 8}[name]

    def edit(model: Any) -> None:
        _constants(model, {node.input[index] for node in model.graph.node if node.op_type == "GroupQueryAttention"}, change)

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
        _constants(model, {constant.name for constant in model.graph.initializer if list(constant.dims)[1:] == [1, 1]}, change)

    return edit


def _scales(change: Callable[[np.ndarray], np.ndarray]) -> ChangeFile:
    """Return a function that changes the scales of all products with quantized weights, or the weights of all products if none are quantized.

    In a graph with quantized caches, their scales become a quarter, so that large keys and values saturate: the operator uses the same scale when it reads them.
    """

    def edit(model: Any) -> None:
        scales = {name for node in model.graph.node if node.op_type in ("MatMulIntegerToFloat", "MatMulNBits") for name in node.input if name.endswith(".scales")}
        products = {node.input[1] for node in model.graph.node if node.op_type == "MatMul"}
        cached = {constant.name for constant in model.graph.initializer if constant.name.startswith("past_") and constant.name.endswith(".scale")}
        _constants(model, cached or scales or products, (lambda scale: scale / 4) if cached else change)

    return edit


def _constants(model: Any, names: Any, change: Callable[[np.ndarray], np.ndarray]) -> None:
    found = [constant for constant in model.graph.initializer if constant.name in names]
    assert found, "expected constants to change, got none"
    for constant in found:
        before = numpy_helper.to_array(constant)
        constant.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(change(before)).astype(before.dtype), constant.name))


FAULTS: Dict[str, Fault] = {
    "the last cached token is overwritten": Fault(inputs=_later_by_one),
    "logits of the token before": Fault(inputs=_logits_of_the_token_before),
    "all rows have the length of the first": Fault(inputs=_lengths_of_the_first_row),
    "rotation reversed": Fault(file=_tables("sin", np.negative)),
    "other layout of rotary pairs": Fault(file=_attribute("rotary_interleaved", 1)),
    "keys and queries not rotated": Fault(file=_attribute("do_rotary", 0)),
    "one frequency 1 % off": Fault(file=_tables("sin", lambda rows: _off(rows))),
    "window one token short": Fault(file=_attribute("local_window_size", 8)),
    "slopes doubled": Fault("alibi", file=_slopes(lambda rows: 2 * rows)),
    "slopes of the heads exchanged": Fault("alibi", file=_slopes(lambda rows: rows[::-1])),
    "scores scaled twice": Fault(file=_attribute("scale", 0.0625)),
    "scales of the products 10 % too large": Fault(file=_scales(lambda scales: 1.1 * scales), quantized_only=True),
    "scales of neighbouring outputs exchanged": Fault(file=_scales(lambda scales: np.roll(scales, 1, axis=0)), quantized_only=True),
    "zeros": Fault(output=_zeros, quantized_only=True),
    "one number is NaN": Fault(output=_one_nan, quantized_only=True),
}


def _off(rows: np.ndarray) -> np.ndarray:
    """sin table [M,D/2] with the second frequency 1 % too high."""
    made = rows.copy()
    angles = np.arange(len(rows)) * 1.01 * 10000.0 ** (-1 / rows.shape[1])
    made[:, 1] = np.sin(angles)
    return made


def measured(folder: Path, manifest: Manifest, fault: Fault, scratch: Path, open_graph: Callable[[Path, Manifest], Any]) -> Tuple[Measured, float]:
    """Measure an artefact with a planted fault until a cell exceeds its tolerance. Return the errors and the tolerance of the artefact.

    Args:
        folder: the correct artefact.
        scratch: an empty folder for a changed copy of its graph.
        open_graph: loads model.onnx.
    """
    path = folder / "model.onnx"
    if fault.file is not None:
        model = onnx.load(path)
        fault.file(model)
        path = scratch / "model.onnx"
        onnx.save_model(model, path, save_as_external_data=True, location="model.onnx.data", size_threshold=1024)
    loaded = Model(ChangedGraph(open_graph(path, manifest), fault.inputs, fault.output))
    assert manifest.reference is not None
    accuracy = accuracy_on(loaded.provider, manifest.reference)
    return measure(loaded.session(), reference.read(manifest, folder), accuracy, lambda _: None, until_failure=True), accuracy.tolerance


def on_cpu(path: Path, manifest: Manifest) -> OrtGraph:
    """Load model.onnx with ONNX Runtime on the CPU, with one thread."""
    return OrtGraph(path, manifest, "cpu", 1)
