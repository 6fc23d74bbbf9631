"""The model as onnxruntime-genai's model builder writes it for the CPU in 4 bits, from a checkpoint of LlamaForCausalLM with the same weights."""

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
from posenc_export.benchmark.peers.rebuilt import Weights
from posenc_export.runtime.artefact.manifest import Manifest

OPTIONS = ("prune_lm_head=true",)  # logits of the last token only


def open_session(folder: Path, manifest: Manifest, threads: int, batch: int) -> Opened:
    with tempfile.TemporaryDirectory() as place:
        weights = write_checkpoint(Path(place) / "checkpoint", manifest)
        build(Path(place))
        start = time.perf_counter()
        session = genai.open_session(Path(place) / "built", manifest, threads, batch).session
        return Opened(session, weights, time.perf_counter() - start)


def write_checkpoint(folder: Path, manifest: Manifest) -> Weights:
    """Write a checkpoint with a tokenizer of two words, because the builder requires one; return the origin of the weights."""
    model, weights = llama(manifest)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"first": 0, "second": 1}, unk_token="first"))
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="first", eos_token="second").save_pretrained(folder)
    return weights


def build(place: Path) -> None:
    """Build place/built from place/checkpoint in a process of its own, whose memory is not counted."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", "checkpoint", "-o", "built", "-p", "int4", "-e", "cpu", "-c", "cache"]
    done = subprocess.run(
        [*command, "--extra_options", *OPTIONS], cwd=place, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        raise ValueError(f"genai-int4: expected the model builder to succeed, got exit status {done.returncode}; its last lines: {done.stderr[-500:]}")
