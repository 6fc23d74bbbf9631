"""onnxruntime-genai, which loads an artefact folder by its genai_config.json, or the model as its
builder writes it in 4 bits, with the same weights.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai

from posenc_export.benchmark.opened import CallSession, Opened
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.shared.refusal import refusal

OPTIONS = ("prune_lm_head=true",)  # logits of the last token only


def open_session(
    folder: Path, manifest: Manifest, threads: int, batch: int, built: bool = False
) -> Opened:
    """Open a folder, or the model that the builder makes of the artefact's weights."""
    if built:
        return open_built(folder, manifest, threads, batch)
    if batch > 1:
        rule = "a batch of 1 row, because a Generator appends tokens to larger batches only once"
        raise refusal("genai", rule, batch, "pass --batch 1")
    config = onnxruntime_genai.Config(str(folder))
    # Without this, version 0.18 takes as long as with one thread on 2 cores. It sometimes crashed
    # after an overlay with a segmentation fault.
    options = {"session_options": {"intra_op_num_threads": threads}}
    config.overlay(json.dumps({"model": {"decoder": options}}))
    session = GenaiSession(onnxruntime_genai.Model(config), manifest.max_positions)
    return Opened(session, manifest.source)


def open_built(folder: Path, manifest: Manifest, threads: int, batch: int) -> Opened:
    from posenc_export.benchmark.peers.llama import llama

    with tempfile.TemporaryDirectory() as place:
        model, weights = llama(manifest)
        model.save_pretrained(Path(place) / "checkpoint")
        build(Path(place) / "checkpoint", Path(place) / "built", "int4", "cpu")
        start = time.perf_counter()
        session = open_session(Path(place) / "built", manifest, threads, batch).session
        return Opened(session, weights, time.perf_counter() - start)


def build(checkpoint: Path, built: Path, precision: str, provider: str, *options: str) -> None:
    """Build a folder for onnxruntime-genai from a checkpoint without a tokenizer, which gets one of
    two words, in a process whose memory is not counted. Raise ValueError if the builder fails.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"first": 0, "second": 1}, unk_token="first"))
    ends = {"bos_token": "first", "eos_token": "second"}
    PreTrainedTokenizerFast(tokenizer_object=words, **ends).save_pretrained(checkpoint)
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-c", "cache"]
    command += ["-i", checkpoint.name, "-o", built.name, "-p", precision, "-e", provider]
    command += ["--extra_options", *OPTIONS, *options]
    environment, place = {**os.environ, "HF_HUB_OFFLINE": "1"}, checkpoint.parent
    done = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        rule, got = "the model builder to succeed", f"exit status {done.returncode}"
        raise refusal("genai", rule, got, f"its last lines: {done.stderr[-500:]}")


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
