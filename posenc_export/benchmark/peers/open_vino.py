"""OpenVINO on the graph of target `onnx`, in float32, with caches as state variables."""

from pathlib import Path
from typing import Any

import numpy as np
import openvino
from openvino._offline_transformations import apply_make_stateful_transformation

from posenc_export.benchmark.peers import CallSession
from posenc_export.runtime.artefact.manifest import Manifest


def open_session(folder: Path, manifest: Manifest, threads: int, batch: int) -> CallSession:
    core = openvino.Core()
    model = core.read_model(folder / "model.onnx")
    shapes: dict[str, Any] = {"input_ids": [batch, -1], "attention_mask": [batch, -1]}
    shapes |= {state.past: [batch, state.axes[1], -1, state.axes[3]] for state in manifest.states}
    model.reshape({name: openvino.PartialShape(shape) for name, shape in shapes.items()})
    caches = {state.past: state.present for state in manifest.states}
    apply_make_stateful_transformation(model, caches)
    settings: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = core.compile_model(model, "CPU", settings).create_infer_request()
    return OpenVinoSession(request)


class OpenVinoSession(CallSession):
    """Session on one infer request, whose state variables hold keys and values."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.reset()

    def reset(self) -> None:
        super().reset()
        self.request.reset_state()

    def rewind(self, n: int) -> None:
        super().rewind(n)
        for state in self.request.query_state():
            kept = np.ascontiguousarray(state.state.data[:, :, : self.length])
            state.state = openvino.Tensor(kept)

    def call(self, inputs: np.ndarray) -> np.ndarray:
        mask = np.ones((len(inputs), self.length + inputs.shape[1]), np.int64)
        fed = {"input_ids": inputs, "attention_mask": mask}
        logits: np.ndarray = self.request.infer(fed, share_inputs=True)["logits"].copy()
        return logits
