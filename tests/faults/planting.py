"""Planted faults, and correct models measured with them until a cell of the grid fails."""

import contextlib
import copy
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Literal

import onnx
import torch

from posenc_export.export.describe import Model, eager
from posenc_export.export.expected import accuracy_of, expected_outputs, oracle_cells
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs.ort_graph import OrtGraph
from posenc_export.runtime.graphs.torch_graph import TorchGraph
from posenc_export.runtime.session.model import Model as Loaded
from posenc_export.runtime.session.session import Session
from posenc_export.runtime.verification import proof
from posenc_export.runtime.verification.float32_form import load_form
from posenc_export.runtime.verification.measuring import measure
from posenc_export.runtime.verification.proof import Accuracy, Expected, Measured, accuracy_on

Place = Literal["module", "function", "session", "graph", "file"]


@dataclass(frozen=True)
class Fault:
    """A fault that the parity grid has to detect.

    Args:
        name: what is wrong.
        place: where it is planted, which decides what `plant` takes: "module", a model that it
            changes in place; "function", the correct function, for which it returns a wrong one;
            "session", a function that opens caches and a manifest, for which it returns a session;
            "graph", a loaded graph, for which it returns another; "file", an onnx.ModelProto that
            it changes in place.
        plant: plants it.
        model: name of the correct model; empty if it can be planted in any.
        target: target of the artefact in which it is planted; empty for the eager module.
        of: owner and name of the function, for place "function".
    """

    name: str
    place: Place
    plant: Callable[..., Any]
    model: str = ""
    target: str = ""
    of: tuple[Any, str] | None = None


class CorrectModel:
    """A correct model that runs eagerly. Its expected outputs are computed once for all faults.

    Args:
        model: the correct model, which is not changed.
        another: returns another model of the same weights, in which a fault is planted.
    """

    def __init__(self, model: Model, another: Callable[[], Model]) -> None:
        self.model, self.another = model, another
        self.module, self.manifest = eager(model)
        self.accuracy = accuracy_of(model, self.manifest)
        self.expected = expected_outputs(model, self.manifest, long=False)

    def measured(self, fault: Fault | None = None) -> Measured:
        """Measure the model with a fault until a cell fails. Without a fault, or with one in a
        function that the eager module calls, compare with the oracle too.
        """
        in_function = fault is not None and fault.place == "function"
        with replaced(fault):
            expected, measured = self.expected, Measured()
            if in_function:
                expected = expected_outputs(self.model, self.manifest, long=False)
            if fault is None or in_function:
                measured = Measured(oracle_cells(self.model, self.manifest, expected))
            if measured.exceeds(self.accuracy.tolerance):
                return measured
            return _until_failure(self._session(fault), expected, self.accuracy)

    def detects(self, fault: Fault | None = None) -> bool:
        """Whether the grid detects a fault; without one, whether the correct model fails."""
        return self.measured(fault).exceeds(self.accuracy.tolerance)

    def _session(self, fault: Fault | None) -> Session:
        module = self.module
        if fault and fault.place == "module":
            model = self.another()
            with torch.no_grad():
                fault.plant(model)
            module = eager(model)[0]
        return opened(TorchGraph(module, self.manifest), fault)


def on_cpu(path: Path, manifest: Manifest) -> OrtGraph:
    """Load model.onnx on one thread of the CPU, in its float32 form if it has one."""
    if manifest.reference is not None and manifest.reference.float32:
        return load_form(path.parent, manifest, 1).graph
    return OrtGraph(path, manifest, "cpu", 1)


class CorrectArtefact:
    """A correct artefact of an ONNX target. Its files are read once for all faults.

    An artefact that rounds activations is measured in its float32 form, as `posenc verify` does.

    Args:
        folder: the artefact.
        manifest: its manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        assert manifest.reference is not None
        self.model, self.manifest = onnx.load(folder / "model.onnx"), manifest
        self.graph = on_cpu(folder / "model.onnx", manifest)
        accuracy = accuracy_on(self.graph.provider, manifest.reference)
        self.accuracy = Accuracy(accuracy.float32) if accuracy.float32 else accuracy
        self.expected = proof.read(manifest, folder)

    def measured(self, fault: Fault | None = None) -> Measured:
        """Measure the artefact with a fault until a cell fails."""
        with replaced(fault):
            return _until_failure(opened(self._graph(fault), fault), self.expected, self.accuracy)

    def detects(self, fault: Fault | None = None) -> bool:
        """Whether the grid detects a fault; without one, whether the correct artefact fails."""
        return self.measured(fault).exceeds(self.accuracy.tolerance)

    def _graph(self, fault: Fault | None) -> Any:
        if fault is None or fault.place != "file":
            return self.graph
        with tempfile.TemporaryDirectory() as scratch:
            model, path = copy.deepcopy(self.model), Path(scratch) / "model.onnx"
            fault.plant(model)
            outside: Any = {"save_as_external_data": True, "location": "model.onnx.data"}
            onnx.save_model(model, path, size_threshold=1024, **outside)
            return on_cpu(path, self.manifest)


def opened(graph: Any, fault: Fault | None) -> Session:
    """Open a session on a graph, with a fault of a graph or a session planted."""
    if fault and fault.place == "session":
        return fault.plant(graph)
    return Loaded(fault.plant(graph) if fault and fault.place == "graph" else graph).session()


@contextlib.contextmanager
def replaced(fault: Fault | None) -> Iterator[None]:
    """Context in which the function of a fault is replaced by the wrong one."""
    if fault is None or fault.of is None:
        yield
        return
    owner, name = fault.of
    right = getattr(owner, name)
    setattr(owner, name, fault.plant(right))
    try:
        yield
    finally:
        setattr(owner, name, right)


def _until_failure(session: Session, expected: Expected, accuracy: Accuracy) -> Measured:
    return measure(session, expected, accuracy, lambda _: None, until_failure=True)
