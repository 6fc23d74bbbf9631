"""Files with which optimum-onnx, transformers.js and onnxruntime-genai load signature "mask"."""

import itertools
import json
from pathlib import Path
from typing import Any, Mapping

from posenc_export.export.read_module import ReadModule
from posenc_export.models.stack import Stack
from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact.graph_inputs import KEYS_AND_VALUES
from posenc_export.runtime.artefact.manifest import Axis, Manifest
from posenc_export.runtime.artefact.rules import graph_file
from posenc_export.runtime.artefact.schema import TARGETS

CONFIG, GENERATION, GENAI = "config.json", "generation_config.json", "genai_config.json"
# Only for model type gemma, optimum-onnx 0.1 and transformers.js 4.3 both read heads, kv heads and
# head size separately.
DECODER, ENCODER = ("gemma", "GemmaForCausalLM"), ("bert", "BertModel")
GENAI_INPUTS = {
    "input_ids": "input_ids",
    "attention_mask": "attention_mask",
    "past_key_names": "past_key_values.%d.key",
    "past_value_names": "past_key_values.%d.value",
}
GENAI_OUTPUTS = {
    "logits": "logits",
    "present_key_names": "present.%d.key",
    "present_value_names": "present.%d.value",
}
NOTE = "model_type only selects the keys that hold the cache sizes; the graph is model.onnx, and "
NOTE += "posenc.json describes it"


def write(model: Stack | ReadModule, manifest: Manifest, folder: Path) -> None:
    """Write config.json, and for decoders generation_config.json and genai_config.json, if these
    formats can describe the graph.

    They cannot describe blocks, modules that are no checkpoint, parts of an encoder-decoder model,
    signature "positions", graphs that are not ONNX files, and decoders with states other than keys
    and values of one shape in every layer. A decoder for onnx-static only gets genai_config.json:
    the other programs grow their caches.
    """
    if manifest.signature != "mask" or graph_file(manifest) != "model.onnx":
        return
    sizes = _sizes(model)
    if not sizes or manifest.encoder or manifest.outputs[0].name == KEYS_AND_VALUES:
        return
    if manifest.encodes and not manifest.states:
        types = {"type_vocab_size": max(manifest.segments, 1)}
        _put(folder / CONFIG, {**_kind(manifest, ENCODER), **sizes, **types})
        return
    shape = _cache_shape(manifest, sizes.get("num_hidden_layers", 0))
    if not manifest.decodes or shape is None:
        return
    graph = TARGETS[manifest.target]
    grows = graph.grows or graph.fused
    _put(folder / GENAI, _genai(sizes, manifest, shape))
    if grows:
        _put(folder / CONFIG, _decoder(sizes, manifest, shape))
    if grows and GENERATION not in model.text.files:
        _put(folder / GENERATION, _ids(manifest))


def _cache_shape(manifest: Manifest, layers: int) -> tuple[Axis, Axis] | None:
    """Return heads and head size of all caches; None if layers differ or have other states."""
    parts = itertools.product(range(layers), ("key", "value"))
    wanted = [f"past_key_values.{layer}.{part}" for layer, part in parts]
    if [state.past for state in manifest.states] != wanted or any(
        len(state.axes) != 4 or state.dtype != manifest.dtype for state in manifest.states
    ):
        return None
    shapes = {(state.axes[1], state.axes[3]) for state in manifest.states}
    return shapes.pop() if len(shapes) == 1 else None


def _ids(manifest: Manifest) -> dict[str, Any]:
    """Return the special tokens: the stop ids, and None for the others, which are not known."""
    stops = manifest.stop_ids
    eos = stops[0] if len(stops) == 1 else stops or None
    return {"bos_token_id": None, "eos_token_id": eos, "pad_token_id": None}


def _sizes(model: Stack | ReadModule) -> dict[str, int]:
    """Return sizes for config.json; empty for a module that is no checkpoint."""
    if isinstance(model, ReadModule):
        return model.sizes
    config = model.config
    heads = config.kinds[0].attention.heads
    sizes = {"hidden_size": config.width, "num_hidden_layers": len(config.order)}
    return {**sizes, "num_attention_heads": heads}


def _kind(manifest: Manifest, model_type: tuple[str, str]) -> dict[str, Any]:
    return {
        "model_type": model_type[0],
        "architectures": [model_type[1]],
        "posenc_export": NOTE,
        "vocab_size": manifest.vocabulary,
        "max_position_embeddings": manifest.max_positions,
        # Selects the file name model.onnx, for every dtype of the graph.
        "transformers.js_config": {"dtype": "fp32"},
    }


def _decoder(
    sizes: Mapping[str, int], manifest: Manifest, shape: tuple[Axis, Axis]
) -> dict[str, Any]:
    heads, size = shape
    further = {"use_cache": True, "torch_dtype": manifest.dtype}
    further |= {"num_key_value_heads": heads, "head_dim": size}
    return {**_kind(manifest, DECODER), **sizes, **_ids(manifest), **further}


def _genai(
    sizes: Mapping[str, int], manifest: Manifest, shape: tuple[Axis, Axis]
) -> dict[str, Any]:
    """Return the keys of onnxruntime-genai 0.18, whose type "llama" feeds the graph's inputs."""
    heads, size = shape
    decoder = {
        "filename": "model.onnx",
        "head_size": size,
        **sizes,
        "num_key_value_heads": heads,
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "inputs": GENAI_INPUTS,
        "outputs": GENAI_OUTPUTS,
    }
    # onnxruntime-genai returns the logits of the last token of a prompt that is not pad_token_id.
    # Without stop tokens, this is the id least likely to end a prompt.
    last = manifest.vocabulary - 1
    ids = {"eos_token_id": manifest.stop_ids, "pad_token_id": next(iter(manifest.stop_ids), last)}
    most = {"vocab_size": manifest.vocabulary, "context_length": manifest.max_positions}
    model = {"type": "llama", **most, **ids, "decoder": decoder}
    search = {"do_sample": False, "max_length": manifest.max_positions}
    return {"model": model, "search": {**search, "past_present_share_buffer": manifest.in_place}}


def _put(path: Path, content: dict[str, Any]) -> None:
    files.write(path, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())
