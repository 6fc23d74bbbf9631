"""Files by which optimum-onnx, transformers.js and onnxruntime-genai load the folder of an artefact with signature mask."""

import json
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

from posenc_export.models.config import StackConfig
from posenc_export.models.stack import Stack
from posenc_export.runtime import files
from posenc_export.runtime.manifest import Axis, Manifest
from posenc_export.runtime.rules import graph_file

CONFIG, GENERATION, GENAI = "config.json", "generation_config.json", "genai_config.json"
# GemmaConfig is the one whose heads, kv heads and head size are read one by one by both optimum-onnx 0.1 and transformers.js 4.3.
DECODER, ENCODER = ("gemma", "GemmaForCausalLM"), ("bert", "BertModel")
NOTE = "model_type tells programs where the sizes of the caches stand; the graph is model.onnx, and posenc.json describes it"


def write(model: Stack, manifest: Manifest, folder: Path) -> None:
    """Write config.json, and of decoders generation_config.json and genai_config.json, as far as these formats can describe the graph.

    Nothing is written for blocks, for the embedding part alone, for the parts of an encoder and decoder, for signature positions, for graphs that are no
    ONNX files, and for decoders whose states are anything else than keys and values of one shape in every layer. Decoders with in-place caches of standard
    operators get genai_config.json alone: the other programs grow their caches.
    """
    if manifest.signature != "mask" or graph_file(manifest) != "model.onnx":
        return
    if model.config.tokens.features is not None or model.config.key_values is not None:  # parts of an encoder and decoder, which these formats name otherwise
        return
    if not model.config.order:  # embedded tokens, which these formats have no model for
        return
    if manifest.kind == "encoder":
        _put(folder / CONFIG, _encoder(model.config))
        return
    shape = _cache_shape(manifest, len(model.config.order))
    if manifest.kind != "decoder" or shape is None:
        return
    grows = manifest.target != "onnx-static"
    _put(folder / GENAI, _genai(model.config, manifest, shape))
    if grows:
        _put(folder / CONFIG, _decoder(model.config, manifest, shape))
    if grows and GENERATION not in model.text.files:
        _put(folder / GENERATION, _ids(manifest))


def _cache_shape(manifest: Manifest, layers: int) -> Optional[Tuple[Axis, Axis]]:
    """Heads and head size of the keys and values of every layer; None where layers differ or states are of another kind."""
    wanted = [f"past_key_values.{layer}.{part}" for layer in range(layers) for part in ("key", "value")]
    if [state.past for state in manifest.states] != wanted or any(len(state.axes) != 4 or state.dtype != manifest.dtype for state in manifest.states):
        return None
    shapes = {(state.axes[1], state.axes[3]) for state in manifest.states}
    return shapes.pop() if len(shapes) == 1 else None


def _ids(manifest: Manifest) -> Dict[str, Any]:
    """Special tokens: those that end a text are known, and no other."""
    stops = manifest.stop_ids
    return {"bos_token_id": None, "eos_token_id": stops[0] if len(stops) == 1 else stops or None, "pad_token_id": None}


def _common(config: StackConfig, model_type: Tuple[str, str]) -> Dict[str, Any]:
    attention = config.kinds[0].attention
    return {
        "model_type": model_type[0],
        "architectures": [model_type[1]],
        "posenc_export": NOTE,
        "vocab_size": config.tokens.vocabulary,
        "hidden_size": config.width,
        "num_hidden_layers": len(config.order),
        "num_attention_heads": attention.heads,
        "max_position_embeddings": config.max_positions,
        "transformers.js_config": {"dtype": "fp32"},  # which says that the file is model.onnx, whatever the dtype in it
    }


def _encoder(config: StackConfig) -> Dict[str, Any]:
    return {**_common(config, ENCODER), "type_vocab_size": max(config.tokens.segments, 1)}


def _decoder(config: StackConfig, manifest: Manifest, shape: Tuple[Axis, Axis]) -> Dict[str, Any]:
    heads, size = shape
    return {**_common(config, DECODER), **_ids(manifest), "num_key_value_heads": heads, "head_dim": size, "use_cache": True, "torch_dtype": manifest.dtype}


def _genai(config: StackConfig, manifest: Manifest, shape: Tuple[Axis, Axis]) -> Dict[str, Any]:
    """Keys as of onnxruntime-genai 0.18. Its type names a family of graphs: "llama" takes input_ids, attention_mask and caches, and no more is used of it."""
    heads, size = shape
    decoder = {
        "filename": "model.onnx",
        "head_size": size,
        "hidden_size": config.width,
        "num_attention_heads": config.kinds[0].attention.heads,
        "num_hidden_layers": len(config.order),
        "num_key_value_heads": heads,
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {"logits": "logits", "present_key_names": "present.%d.key", "present_value_names": "present.%d.value"},
    }
    ids = {"eos_token_id": manifest.stop_ids, "pad_token_id": next(iter(manifest.stop_ids), 0)}
    model = {"type": "llama", "vocab_size": config.tokens.vocabulary, "context_length": manifest.max_positions, **ids, "decoder": decoder}
    in_place = any(state.update == "in_place" for state in manifest.states)
    return {"model": model, "search": {"do_sample": False, "max_length": manifest.max_positions, "past_present_share_buffer": in_place}}


def _put(path: Path, content: Dict[str, Any]) -> None:
    files.write(path, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())
