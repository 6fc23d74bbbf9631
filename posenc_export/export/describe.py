"""What goes in and comes out of a model: its manifest, its trace inputs, and the eager module itself as a target."""

from typing import Any, Dict, List, Tuple

import torch
from torch import Tensor

from posenc_export.encodings.base import Carried
from posenc_export.export.signatures import Model, attentions, has_cache, wrap
from posenc_export.models.attention import AttentionBlock
from posenc_export.models.config import AttentionConfig, to_json
from posenc_export.models.decoder import Decoder
from posenc_export.models.encoder import Encoder
from posenc_export.runtime.manifest import Axis, Manifest, State, Value

B, S, P, T, M = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length", "capacity"
TRACE = {B: 2, S: 5, P: 3, T: 8}  # no 0 or 1: torch.export would fix those sizes


def attention_of(model: Model) -> AttentionConfig:
    return model.config if isinstance(model, AttentionBlock) else model.config.attention


def layers_of(model: Model) -> int:
    return len(attentions(model))


def dtype_of(model: Model) -> str:
    """numpy name of the dtype of weights, activations and caches."""
    return str(attentions(model)[0].qkv.weight.dtype).removeprefix("torch.")


def describe(model: Model, target: str, signature: str, layout: str, update: str, **geometry: Any) -> Manifest:
    """The manifest of a model, files and certificate still open.

    Args:
        layout: "rows" or "columns" (runtime.manifest).
        update: "append" or "in_place", of every cache.
        geometry: capacity_bucket, continuation_rows, contiguous.
    """
    config, dtype, described = attention_of(model), dtype_of(model), to_json(model.config)
    sources, output = _ends(model)
    ids: Tuple[Axis, ...] = (1 + model.encoding.axes, B, S) if model.encoding.axes else (B, S)
    where = Value("position_ids", "int64", ids) if signature == "positions" else Value("attention_mask", "int64", (B, T if has_cache(model) else S))
    slots: Axis = P if update == "append" else M
    states = [State("past_positions", "present_positions", "int64", (B, slots), update, 1, -1)] if signature == "positions" and has_cache(model) else []
    states += [_state("past_embedding.", "present_embedding.", carried, slots, update, dtype) for carried in model.encoding.embed_states()]
    for layer, attention in enumerate(attentions(model)):
        states += [_state(f"past_key_values.{layer}.", f"present.{layer}.", carried, slots, update, dtype) for carried in attention.states()]
    return Manifest(
        kind=str(described["kind"]),
        target=target,
        signature=signature,
        dtype=dtype,
        layout=layout,
        config=described,
        inputs=[*sources, where],
        outputs=[output],
        states=states,
        max_positions=config.max_positions,
        axes=model.encoding.axes,
        chunk=min(encoding.chunk for encoding in (model.encoding, *(attention.encoding for attention in attentions(model)))),
        source=dict(getattr(model, "source", {})),
        **geometry,
    )


def _ends(model: Model) -> Tuple[List[Value], Value]:
    """What is read beside positions, and what comes out."""
    dtype, width = dtype_of(model), attention_of(model).width
    ids = Value("input_ids", "int64", (B, S))
    if isinstance(model, Decoder):
        return [ids], Value("logits", dtype, (B, S, model.config.vocabulary))
    if isinstance(model, Encoder):
        return [ids, Value("token_type_ids", "int64", (B, S))], Value("last_hidden_state", dtype, (B, S, width))
    return [Value("hidden_states", dtype, (B, S, width))], Value("output", dtype, (B, S, width))


def _state(past: str, present: str, carried: Carried, slots: Axis, update: str, dtype: str) -> State:
    if carried.grows:
        heads, size = carried.sizes
        return State(past + carried.name, present + carried.name, carried.dtype or dtype, (B, heads, slots, size), update, 2)
    return State(past + carried.name, present + carried.name, carried.dtype or dtype, (B, *carried.sizes), "replace", 0)


def eager(model: Model, signature: str = "positions") -> Tuple[torch.nn.Module, Manifest]:
    """The live module in a calling convention, and the manifest a session drives it by."""
    manifest = describe(model, "eager", signature, "columns", "append", capacity_bucket=0, continuation_rows=0, contiguous=False)
    return wrap(model, signature), manifest


def trace_inputs(manifest: Manifest) -> Tuple[Tuple[Any, ...], Tuple[Any, ...]]:
    """Example arguments of the signature's forward, and the dynamic axes of each; caches as "append", whatever the target does with them."""
    arguments: List[Any] = []
    shapes: List[Any] = []
    for value in manifest.inputs:
        arguments.append(_example(value.dtype, value.axes))
        shapes.append(_dynamic(value.axes))
    caches, dynamic = [], []
    for state in manifest.states:
        axes = tuple(P if axis == M else axis for axis in state.axes)
        caches.append(_example(state.dtype, axes))
        dynamic.append(_dynamic(axes))
    if any(state.past == "past_positions" for state in manifest.states):
        arguments.append(caches.pop(0))
        shapes.append(dynamic.pop(0))
    return (*arguments, caches), (*shapes, dynamic)


def _example(dtype: str, axes: Tuple[Axis, ...]) -> Tensor:
    return torch.ones([TRACE[a] if isinstance(a, str) else a for a in axes], dtype=getattr(torch, dtype))


def _dynamic(axes: Tuple[Axis, ...]) -> Dict[int, str]:
    return {index: axis for index, axis in enumerate(axes) if isinstance(axis, str)}
