"""A hand-written graph on ONNX Runtime, bound, with caches that are updated in place."""

from pathlib import Path
from typing import Any, Dict

import numpy as np
import onnxruntime
import torch

from posenc_export.benchmark.opened import CHUNK, CallSession, Opened
from posenc_export.benchmark.peers import hand_graph
from posenc_export.benchmark.peers.rebuilt import rebuilt
from posenc_export.runtime.artefact.manifest import Manifest

WRITE = {"block": hand_graph.block, "decoder": hand_graph.decoder}


def open_session(folder: Path, manifest: Manifest, threads: int, batch: int) -> Opened:
    torch.set_num_threads(1)  # a second thread pool would slow down that of ONNX Runtime
    model, source = rebuilt(manifest)
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    graph = WRITE[manifest.kind](manifest.config, weights)
    return Opened(HandSession(graph, threads, batch, manifest.max_positions), source)


class HandSession(CallSession):
    """Session on a serialised graph of hand_graph, with caches of `capacity` slots."""

    def __init__(self, graph: bytes, threads: int, batch: int, capacity: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.set_denormal_as_zero", "1")  # as the runtime does
        cpu = ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(graph, options, providers=cpu)
        source, *inputs = self.session.get_inputs()
        self.caches: Dict[str, np.ndarray] = {
            value.name: np.zeros((batch, value.shape[1], capacity, value.shape[3]), np.float32)
            for value in inputs
            if value.name.startswith("past_")
        }
        self.seqlens, self.total = np.zeros(batch, np.int32), np.zeros((), np.int32)
        # GroupQueryAttention supports several rows of several tokens only with an empty cache.
        self.chunk = CHUNK if batch == 1 else None
        dtype = np.int64 if source.type == "tensor(int64)" else np.float32
        self.step_input = np.zeros((batch, 1, *source.shape[2:]), dtype)
        self.step_run, self.step_output = self._bound(self.step_input)

    def call(self, inputs: np.ndarray) -> np.ndarray:
        end = self.length + inputs.shape[1]
        self.seqlens[:], self.total[...] = end - 1, end
        if inputs.shape[1] == 1:
            self.step_input[:] = inputs
            self.session.run_with_iobinding(self.step_run)
            return self.step_output.copy()
        binding, output = self._bound(np.ascontiguousarray(inputs))
        self.session.run_with_iobinding(binding)
        return output

    def _bound(self, inputs: np.ndarray) -> Any:
        """Return a binding and its output. The session keeps the arrays alive."""
        source, result = self.session.get_inputs()[0], self.session.get_outputs()[0]
        rows = result.shape[1] if isinstance(result.shape[1], int) else inputs.shape[1]
        output = np.zeros((len(inputs), rows, result.shape[-1]), np.float32)
        binding = self.session.io_binding()
        fed = {source.name: inputs, "seqlens_k": self.seqlens, "total_sequence_length": self.total}
        written = {name.replace("past", "present"): array for name, array in self.caches.items()}
        for name, array in {**fed, **self.caches}.items():
            binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
        for name, array in {result.name: output, **written}.items():
            binding.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
        return binding, output
