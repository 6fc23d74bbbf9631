"""The model as onnxruntime-genai's model builder writes it for the CPU in 4 bits, from a
checkpoint of LlamaForCausalLM with the same weights.
"""

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
    """Build a folder for onnxruntime-genai from a checkpoint without a tokenizer, in a process of
    its own, whose memory is not counted.

    Args:
        checkpoint: gets a tokenizer of two words, because the builder requires one.
        precision, provider, options: of the builder.

    Raises:
        ValueError: the builder failed.
    """
    words = Tokenizer(models.WordLevel({"first": 0, "second": 1}, unk_token="first"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="first", eos_token="second"
    ).save_pretrained(checkpoint)
    command = [
        sys.executable,
        "-m",
        "onnxruntime_genai.models.builder",
        "-i",
        checkpoint.name,
        "-o",
        built.name,
        "-p",
        precision,
        "-e",
        provider,
        "-c",
        "cache",
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    extra = ["--extra_options", *OPTIONS, *options]
    done = subprocess.run(
        [*command, *extra],
        cwd=checkpoint.parent,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise ValueError(
            "genai: expected the model builder to succeed, got exit status "
            f"{done.returncode}; its last lines: {done.stderr[-500:]}"
        )
