"""The model as onnxruntime-genai's model builder writes it for the CPU in 4 bits, from a checkpoint of LlamaForCausalLM with the same weights."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Mapping

from tokenizers import Tokenizer, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from posenc_export.benchmark.opened import Opened
from posenc_export.benchmark.peers import genai
from posenc_export.benchmark.peers.llama import described, renamed
from posenc_export.benchmark.peers.rebuilt import rebuilt
from posenc_export.runtime.artefact.manifest import Manifest

OPTIONS = ("prune_lm_head=true",)  # logits of the last token only


def open_session(folder: Path, manifest: Manifest, threads: int, batch: int) -> Opened:
    with tempfile.TemporaryDirectory() as place:
        weights = write_checkpoint(Path(place) / "checkpoint", manifest)
        build(Path(place))
        return genai.open_session(Path(place) / "built", manifest, threads, batch)._replace(weights=weights)


def write_checkpoint(folder: Path, manifest: Manifest) -> Mapping[str, Any]:
    """Write a checkpoint with a tokenizer of two words, because the builder requires one; return the origin of the weights."""
    model, source = rebuilt(manifest)
    peer = LlamaForCausalLM(described(manifest.config)).eval()
    peer.load_state_dict(renamed(model, manifest.config))
    peer.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"first": 0, "second": 1}, unk_token="first"))
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="first", eos_token="second").save_pretrained(folder)
    return source


def build(place: Path) -> None:
    """Build place/built from place/checkpoint in a process of its own, whose memory is not counted."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", "checkpoint", "-o", "built", "-p", "int4", "-e", "cpu", "-c", "cache"]
    done = subprocess.run(
        [*command, "--extra_options", *OPTIONS], cwd=place, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        raise ValueError(f"genai-int4: expected the model builder to succeed, got exit status {done.returncode}; its last lines: {done.stderr[-500:]}")
