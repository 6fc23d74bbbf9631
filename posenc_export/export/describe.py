"""What goes in and comes out of a model: its manifest, its trace inputs, and the eager module itself as a target."""

from typing import Any, Dict, List, Tuple

import torch
from torch import Tensor

from posenc_export.encodings.base import Carried
from posenc_export.export.signatures import Model, has_cache, has_segments, wrap
from posenc_export.models.config import kind_of, to_json, widest
from posenc_export.models.stack import Stack
from posenc_export.numerics import tolerance
from posenc_export.runtime.manifest import Axis, Manifest, State, Value

B, S, P, T, M = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length", "capacity"
TRACE = {B: 2, S: 5, P: 3, T: 8}  # no 0 or 1: torch.export would fix those sizes


def dtype_of(model: Model) -> str:
    """numpy name of the dtype of weights, activations and caches."""
    return str(model.attentions()[0].projection.output.weight.dtype).removeprefix("torch.")


def describe(model: Model, target: str, signature: str, layout: str, update: str, **geometry: Any) -> Manifest:
    """The manifest of a model, files and certificate still open.

    Args:
        layout: "rows" or "columns" (runtime.manifest).
        update: "append" or "in_place", of every cache.
        geometry: capacity_bucket, continuation_rows, contiguous.
    """
    dtype = dtype_of(model)
    sources, output = _ends(model)
    ids: Tuple[Axis, ...] = (1 + model.axes, B, S) if model.axes else (B, S)
    where = Value("position_ids", "int64", ids) if signature == "positions" else Value("attention_mask", "int64", (B, T if has_cache(model) else S))
    slots: Axis = P if update == "append" else M
    states = [State("past_positions", "present_positions", "int64", (B, slots), update, 1, -1)] if signature == "positions" and has_cache(model) else []
    states += [_state("past_embedding.", "present_embedding.", carried, slots, update, dtype) for carried in model.token_encoding.embed_states()]
    for layer, attention in enumerate(model.attentions()):
        states += [_state(f"past_key_values.{layer}.", f"present.{layer}.", carried, slots, update, dtype) for carried in attention.states()]
    return Manifest(
        kind=kind_of(model.config),
        target=target,
        signature=signature,
        dtype=dtype,
        layout=layout,
        config=to_json(model.config),
        inputs=[*sources, where],
        outputs=[output],
        states=states,
        max_positions=model.config.max_positions,
        axes=model.axes,
        chunk=min(encoding.chunk for encoding in (model.token_encoding, *(attention.encoding for attention in model.attentions()))),
        step_weights=step_weights(model),
        stop_ids=list(model.text.stop_ids) if isinstance(model, Stack) else [],
        source=dict(getattr(model, "source", {})),
        **geometry,
    )


def step_weights(model: Model) -> int:
    """Weights that a step reads: every matrix once, of the token table one row."""
    total = sum(parameter.numel() for name, parameter in model.named_parameters() if ".encoding." not in name and not name.startswith("token_encoding."))
    if isinstance(model, Stack) and not (model.config.head is not None and model.config.head.tied):
        total -= model.tokens.embedding.weight.numel()
    return total + (model.tokens.embedding.weight.size(1) if isinstance(model, Stack) else 0)


def bound_of(model: Model, manifest: Manifest) -> float:
    """The largest error, relative to the largest output, that rounding explains in an artefact of this model."""
    return tolerance(manifest.dtype, len(model.attentions()), widest(model.config))


def _ends(model: Model) -> Tuple[List[Value], Value]:
    """What is read beside positions, and what comes out."""
    dtype, width = dtype_of(model), model.config.width
    if isinstance(model, Stack):
        ids = [Value(name, "int64", (B, S)) for name in ("input_ids", *(["token_type_ids"] if has_segments(model) else []))]
        if model.config.head is None:
            return ids, Value("last_hidden_state", dtype, (B, S, width))
        return ids, Value("logits", dtype, (B, S, model.config.tokens.vocabulary))
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
