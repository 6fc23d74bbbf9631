"""optimum-onnx, which loads an artefact folder by its config.json."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from optimum.onnxruntime import ORTModelForCausalLM

from posenc_export.benchmark.opened import CHUNK, Opened, in_chunks
from posenc_export.runtime.artefact.manifest import Manifest


def open_session(folder: Path, manifest: Manifest, threads: int, batch: int) -> Opened:
    torch.set_num_threads(1)  # a second thread pool would slow down that of ONNX Runtime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    start = time.perf_counter()
    model = ORTModelForCausalLM.from_pretrained(folder, session_options=options)
    return Opened(OptimumSession(model), time.perf_counter() - start, manifest.source)


class OptimumSession:
    """Session on the model, with growing tensors of keys and values."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.reset()

    def reset(self) -> None:
        self.past: Any = None
        self.length = 0

    def prefill(self, inputs: np.ndarray, logits_to_keep: int) -> np.ndarray:
        """Append a prompt. A batch is one call, because GroupQueryAttention supports several rows of several tokens only with an empty cache."""
        return in_chunks(self._call, inputs, CHUNK if len(inputs) == 1 else inputs.shape[1])

    def step(self, inputs: np.ndarray) -> np.ndarray:
        return self._call(inputs[:, None])[:, 0]

    def rewind(self, n: int) -> None:
        self.length -= n
        self.past = tuple(tuple(part[:, :, : self.length].contiguous() for part in layer) for layer in self.past or ())

    def _call(self, tokens: np.ndarray) -> np.ndarray:
        self.length += tokens.shape[1]
        mask = torch.ones((len(tokens), self.length), dtype=torch.int64)
        with torch.inference_mode():
            output = self.model(input_ids=torch.from_numpy(tokens), attention_mask=mask, past_key_values=self.past, use_cache=True)
        self.past = output.past_key_values
        logits: np.ndarray = output.logits.numpy()
        return logits
