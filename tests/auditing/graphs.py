"""Graphs of tiny models as torch.onnx exports them, with and without faults of exporters."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.audit_exporters import Wrapper, caches_of, export_decoder

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "intermediate_size": 48, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
}
# Keys of SIZES that a config has under other names.
OWN_NAMES = {
    "gpt2": ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers",
             "intermediate_size", "max_position_embeddings"),
    "bloom": ("num_attention_heads", "num_key_value_heads", "num_hidden_layers",
              "intermediate_size", "max_position_embeddings"),
}  # fmt: skip
Model = Any


def model_of(name: str, folder: Path | None = None, seed: int = 1, **more: Any) -> Model:
    """Return a random model of transformers whose attention is far from uniform, and write it to
    `checkpoint` of a folder.
    """
    kind, changes = MODELS[name]
    torch.manual_seed(seed)
    sizes = {key: size for key, size in SIZES.items() if key not in OWN_NAMES.get(name, ())}
    config = getattr(transformers, kind)(**{**sizes, **changes, **more})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
    if folder is not None:
        model.save_pretrained(folder / "checkpoint")
    return model.eval()


_made = tempfile.TemporaryDirectory()


def right(name: str, cached: bool = True) -> Path:
    """Return a folder with the `checkpoint` and the graph right.onnx of a model, which is written
    once in a process; tests must not modify it.
    """
    folder = Path(_made.name, f"{name} {cached}")
    if not folder.exists():
        folder.mkdir()
        exported(model_of(name, folder), folder / "right.onnx", cached)
    return folder


def exported(model: Model, path: Path, cached: bool = True) -> Path:
    """Export a model with the tracer of TorchScript, which is faster."""
    past = caches_of(model) if cached else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return export_decoder(Wrapper(model).eval(), path, past, dynamo=False)
