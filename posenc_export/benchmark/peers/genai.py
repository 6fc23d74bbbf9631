"""onnxruntime-genai, which loads an artefact folder by its genai_config.json."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai

from posenc_export.benchmark.peers import CallSession
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.shared.refusal import refusal


def open_session(folder: Path, manifest: Manifest, threads: int, batch: int) -> CallSession:
    if batch > 1:
        rule = "a batch of 1 row, because a Generator appends tokens to larger batches only once"
        raise refusal("genai", rule, batch, "pass --batch 1")
    config = onnxruntime_genai.Config(str(folder))
    # Without this, version 0.18 takes as long as with one thread on 2 cores. It sometimes crashed
    # after an overlay with a segmentation fault.
    options = {"session_options": {"intra_op_num_threads": threads}}
    config.overlay(json.dumps({"model": {"decoder": options}}))
    return GenaiSession(onnxruntime_genai.Model(config), manifest.max_positions)


class GenaiSession(CallSession):
    """Appends tokens to a Generator and reads logits from it, without sampling.

    Version 0.18 crashed with a segmentation fault after many calls of rewind_to, and while two
    Generators existed. A rewind therefore frees the Generator and appends the remaining tokens to a
    new one.
    """

    chunk = None

    def __init__(self, model: onnxruntime_genai.Model, max_positions: int) -> None:
        self.model, self.max_positions = model, max_positions
        self.reset()

    def reset(self) -> None:
        self.generator: Any = None
        parameters = onnxruntime_genai.GeneratorParams(self.model)
        parameters.set_search_options(max_length=self.max_positions)
        self.generator = onnxruntime_genai.Generator(self.model, parameters)
        self.tokens = np.zeros((1, 0), np.int32)

    def rewind(self, n: int) -> None:
        remaining = self.tokens[:, :-n]
        self.reset()
        self.call(remaining)

    def call(self, inputs: np.ndarray) -> np.ndarray:
        new = inputs.astype(np.int32)
        self.tokens = np.concatenate((self.tokens, new), axis=1)
        self.generator.append_tokens(new)
        logits: np.ndarray = self.generator.get_logits()
        return logits
