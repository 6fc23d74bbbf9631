"""What goes in and comes out of a model: its manifest, its trace inputs, and the eager module itself as a target."""

from typing import Any, Dict, List, Tuple, Union

import torch
from torch import Tensor

from posenc_export.export.signatures import SIGNATURES
from posenc_export.models.attention import AttentionBlock
from posenc_export.models.config import AttentionConfig, DecoderConfig, to_json
from posenc_export.models.decoder import Decoder
from posenc_export.runtime.manifest import Axis, Manifest, State, Value

Model = Union[Decoder, AttentionBlock]
B, S, P, T, M = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length", "capacity"
TRACE = {B: 2, S: 5, P: 3, T: 8}  # no 0 or 1: torch.export would fix those sizes


def attention_of(model: Model) -> AttentionConfig:
    return model.config.attention if isinstance(model.config, DecoderConfig) else model.config


def layers_of(model: Model) -> int:
    return model.config.layers if isinstance(model.config, DecoderConfig) else 1


def dtype_of(model: Model) -> str:
    """numpy name of the dtype of weights, activations and caches."""
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def describe(model: Model, target: str, signature: str, layout: str, update: str, **geometry: Any) -> Manifest:
    """The manifest of a model, files and certificate still open.

    Args:
        layout: "rows" or "columns" (runtime.manifest).
        update: "append" or "in_place", of every cache.
        geometry: capacity_bucket, continuation_rows, contiguous.
    """
    config, dtype = attention_of(model), dtype_of(model)
    decoder = isinstance(model, Decoder)
    source = Value("input_ids", "int64", (B, S)) if decoder else Value("hidden_states", dtype, (B, S, config.width))
    output = Value("logits", dtype, (B, S, model.config.vocabulary)) if isinstance(model.config, DecoderConfig) else Value("output", dtype, (B, S, config.width))
    where = Value("position_ids", "int64", (B, S)) if signature == "positions" else Value("attention_mask", "int64", (B, T))
    slots: Axis = P if update == "append" else M
    states = [State("past_positions", "present_positions", "int64", (B, slots), update, 1, -1)] if signature == "positions" else []
    axes = (B, config.kv_heads, slots, config.head_size)
    for layer in range(layers_of(model)):
        for part in ("key", "value"):
            states.append(State(f"past_key_values.{layer}.{part}", f"present.{layer}.{part}", dtype, axes, update, 2))
    return Manifest(
        kind="decoder" if decoder else "block",
        target=target,
        signature=signature,
        dtype=dtype,
        layout=layout,
        config=to_json(model.config),
        inputs=[source, where],
        outputs=[output],
        states=states,
        max_positions=config.max_positions,
        source=dict(getattr(model, "source", {})),
        **geometry,
    )


def eager(model: Model, signature: str = "positions") -> Tuple[torch.nn.Module, Manifest]:
    """The live module in a calling convention, and the manifest a session drives it by."""
    manifest = describe(model, "eager", signature, "columns", "append", capacity_bucket=0, continuation_rows=0, contiguous=False)
    return SIGNATURES[signature](model).eval(), manifest


def trace_inputs(manifest: Manifest) -> Tuple[Tuple[Any, ...], Tuple[Any, ...]]:
    """Example arguments of the signature's forward, and the dynamic axes of each; caches as "append", whatever the target does with them."""
    arguments: List[Any] = []
    shapes: List[Any] = []
    for value in manifest.inputs[:2]:
        arguments.append(_example(value.dtype, value.axes))
        shapes.append(_dynamic(value.axes))
    caches, dynamic = [], []
    for state in manifest.states:
        axes = tuple(P if axis == M else axis for axis in state.axes)
        caches.append(_example(state.dtype, axes))
        dynamic.append(_dynamic(axes))
    if manifest.signature == "positions":
        arguments.append(caches.pop(0))
        shapes.append(dynamic.pop(0))
    return (*arguments, caches), (*shapes, dynamic)


def _example(dtype: str, axes: Tuple[Axis, ...]) -> Tensor:
    return torch.ones([TRACE[a] if isinstance(a, str) else a for a in axes], dtype=getattr(torch, dtype))


def _dynamic(axes: Tuple[Axis, ...]) -> Dict[int, str]:
    return {index: axis for index, axis in enumerate(axes) if isinstance(axis, str)}
