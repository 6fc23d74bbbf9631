"""The model as the builder of onnxruntime-genai writes it in 4 bits, with the same weights."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from posenc_export.benchmark.opened import Opened
from posenc_export.benchmark.peers import genai
from posenc_export.benchmark.peers.llama import llama
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.shared.refusal import refusal

OPTIONS = ("prune_lm_head=true",)  # logits of the last token only


def open_session(folder: Path, manifest: Manifest, threads: int, batch: int) -> Opened:
    with tempfile.TemporaryDirectory() as place:
        model, weights = llama(manifest)
        model.save_pretrained(Path(place) / "checkpoint")
        build(Path(place) / "checkpoint", Path(place) / "built", "int4", "cpu")
        start = time.perf_counter()
        session = genai.open_session(Path(place) / "built", manifest, threads, batch).session
        return Opened(session, weights, time.perf_counter() - start)


def build(checkpoint: Path, built: Path, precision: str, provider: str, *options: str) -> None:
    """Build a folder for onnxruntime-genai from a checkpoint without a tokenizer, which gets one of
    two words, in a process whose memory is not counted. Raise ValueError if the builder fails.
    """
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
