"""optimum-onnx, which loads an artefact folder by its config.json."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from optimum.onnxruntime import ORTModelForCausalLM

from posenc_export.benchmark.opened import CHUNK, CallSession, Opened
from posenc_export.runtime.artefact.manifest import Manifest


def open_session(folder: Path, manifest: Manifest, threads: int, batch: int) -> Opened:
    torch.set_num_threads(1)  # a second thread pool would slow down that of ONNX Runtime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return Opened(
        OptimumSession(ORTModelForCausalLM.from_pretrained(folder, session_options=options), batch),
        manifest.source,
    )


class OptimumSession(CallSession):
    """Session on the model, with growing tensors of keys and values."""

    past: Any = None

    def __init__(self, model: Any, batch: int) -> None:
        self.model = model
        self.chunk = (
            CHUNK if batch == 1 else None
        )  # GroupQueryAttention supports several rows of several tokens only with an empty cache

    def reset(self) -> None:
        super().reset()
        self.past = None

    def rewind(self, n: int) -> None:
        super().rewind(n)
        self.past = tuple(
            tuple(part[:, :, : self.length].contiguous() for part in layer)
            for layer in self.past or ()
        )

    def call(self, inputs: np.ndarray) -> np.ndarray:
        mask = torch.ones((len(inputs), self.length + inputs.shape[1]), dtype=torch.int64)
        with torch.inference_mode():
            output = self.model(
                input_ids=torch.from_numpy(inputs),
                attention_mask=mask,
                past_key_values=self.past,
                use_cache=True,
            )
        self.past = output.past_key_values
        logits: np.ndarray = output.logits.numpy()
        return logits
