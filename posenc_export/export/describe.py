"""Inputs, outputs and states of a model: its manifest, example inputs for tracing, and the eager
module as a target.
"""

from typing import Any, Dict, List, Tuple

import torch
from torch import Tensor

from posenc_export import encodings
from posenc_export.encodings.shared.base import StateSpec
from posenc_export.export.signatures import Model, has_cache, has_segments, takes_logits_index, wrap
from posenc_export.models.block import AttentionBlock
from posenc_export.models.config import AnyConfig
from posenc_export.models.config_json import encodings_of, kind_of, to_json
from posenc_export.models.stack import Stack, Text
from posenc_export.models.user_module import OwnModule, inner_of
from posenc_export.runtime.artefact.graph_inputs import ENCODER_MASK, B, M, P, Q, R, S, T
from posenc_export.runtime.artefact.manifest import Axis, Manifest, Package, State, Value
from posenc_export.runtime.artefact.records import Generation
from posenc_export.runtime.artefact.schema import INTERFACE, passed

TRACE = {
    B: 2,
    S: 5,
    P: 3,
    T: 8,
    M: 9,
    Q: 6,
    R: 4,
}  # no 0 or 1, which torch.export would fix; T = P + S columns fit into M slots
TORCH = {
    "capacity_bucket": 64,
    "continuation_rows": 0,
    "contiguous": False,
}  # of graphs of torch, which take the first slots of larger memory


def dtype_of(model: Model) -> str:
    """Return the numpy name of the dtype of weights, activations and caches."""
    attentions, inner = model.attentions(), inner_of(model)
    weight: Tensor = attentions[0].projection.output.weight if attentions else inner.tokens.weight()  # type: ignore[union-attr,operator]
    return str(weight.dtype).removeprefix("torch.")


def describe(
    model: Model, target: str, signature: str, layout: str, update: str, **geometry: Any
) -> Manifest:
    """Return the manifest of a model, without files and certificate.

    Args:
        layout: "rows" or "columns" (runtime.artefact.manifest).
        update: update rule of every cache, "append" or "in_place".
        geometry: the manifest's capacity_bucket, continuation_rows and contiguous, and weights,
            cache and calibration if they are quantized.
    """
    dtype = dtype_of(model)
    wanted = (
        [Value("logits_index", "int64", (B, R))] if takes_logits_index(model, signature) else []
    )
    sources, output = _inputs_and_output(model, R if wanted else S)
    ids: Tuple[Axis, ...] = (1 + model.axes, B, S) if model.axes else (B, S)
    slots: Axis = P if update == "append" else M
    states = (
        [State("past_positions", "present_positions", "int64", (B, slots), update, 1, -1)]
        if signature == "positions" and has_cache(model)
        else []
    )
    states += [
        _state("past_embedding.", "present_embedding.", carried, slots, update, dtype)
        for carried in model.token_encoding.embed_states()
    ]
    for layer, attention in enumerate(model.attentions()):
        states += [
            _state(f"past_key_values.{layer}.", f"present.{layer}.", carried, slots, update, dtype)
            for carried in attention.states()
        ]
    where = (
        Value("position_ids", "int64", ids)
        if signature == "positions"
        else Value("attention_mask", "int64", (B, T if states else S))
    )
    return Manifest(
        kind=kind_of(model.config),
        target=target,
        signature=signature,
        dtype=dtype,
        layout=layout,
        config=to_json(model.config),
        inputs=[*sources, where, *wanted],
        outputs=[output, *_readout(model, dtype)],
        states=states,
        max_positions=model.config.max_positions,
        axes=model.axes,
        chunk=min(
            encoding.chunk
            for encoding in (
                model.token_encoding,
                *(attention.encoding for attention in model.attentions()),
            )
        ),
        encoder=_encoder(model, passed(dtype)),
        step_weights=step_weights(model),
        interface=INTERFACE,
        stop_ids=list(text_of(model).stop_ids),
        start_ids=list(text_of(model).start_ids),
        generation=Generation(**text_of(model).generation) if text_of(model).generation else None,
        source=dict(getattr(model, "source", {})),
        packages=_packages(inner_of(model).config),
        **geometry,
    )


def text_of(model: Model) -> Text:
    """Return the tokenizer and stop ids of a model; an empty Text for a model that reads hidden
    states.
    """
    return Text() if isinstance(model, AttentionBlock) else model.text


def _packages(config: AnyConfig) -> Dict[str, Package]:
    """Return the packages of encodings defined outside this one, by encoding name."""
    found = {name: encodings.origin(name) for name in encodings_of(config)}
    return {
        name: Package(package.name, package.version)
        for name, package in found.items()
        if package is not None
    }


def step_weights(model: Model) -> int:
    """Return the number of weights that a decode step reads: every matrix once, and one row of
    the token table.
    """
    if isinstance(model, OwnModule):
        tables = [part.weight for part in model.modules() if isinstance(part, torch.nn.Embedding)]
        own = [any(weight is table for table in tables) for weight in model.own_weights()]
        return step_weights(model.inner()) + sum(
            w.size(1) if row else w.numel() for w, row in zip(model.own_weights(), own, strict=True)
        )
    total = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if ".encoding." not in name and not name.startswith("token_encoding.")
    )
    if not isinstance(model, Stack) or not model.config.tokens.vocabulary:
        return total
    table, head = model.tokens.embedding.weight, model.config.head
    return (
        total + int(table.size(1)) - (0 if head is not None and head.tied else int(table.numel()))
    )


def _inputs_and_output(model: Model, outputs: Axis) -> Tuple[List[Value], Value]:
    """Return the inputs other than positions, and the output. outputs: number of tokens per row
    that a decoder returns logits of.
    """
    dtype, width = passed(dtype_of(model)), model.config.width
    if isinstance(model, OwnModule):
        read = (
            Value("input_ids", "int64", (B, S))
            if model.vocabulary
            else Value("hidden_states", dtype, (B, S, width))
        )
        return [read], Value("output", dtype, (B, S, model.config.outputs))
    if isinstance(model, Stack):
        ids = [
            Value(name, "int64", (B, S))
            for name in ("input_ids", *(["token_type_ids"] if has_segments(model) else []))
        ]
        if model.config.tokens.features is not None:
            ids = [Value("input_features", dtype, (B, S, model.tokens.size))]
        if model.config.head is None:
            given = model.config.key_values
            return ids, Value(
                "last_hidden_state", dtype, (B, S, width)
            ) if given is None else Value("encoder_key_values", dtype, (B, S, given.size))
        return ids, Value("logits", dtype, (B, outputs, model.config.tokens.vocabulary))
    return [Value("hidden_states", dtype, (B, S, width))], Value("output", dtype, (B, S, width))


def _readout(model: Model, dtype: str) -> List[Value]:
    """Return the second output of an encoder with a readout; an empty list for other models."""
    given = model.config.readout if isinstance(model, Stack) else None
    return (
        []
        if given is None
        else [
            Value(
                given.output,
                dtype,
                (B, *(() if given.pooling else (S,)), given.size(model.config.width)),
            )
        ]
    )


def _encoder(model: Model, dtype: str) -> List[Value]:
    """Return the inputs that a decoder takes from an encoder; an empty list for a decoder
    without cross-attention.
    """
    values = []
    for layer, kind in enumerate(model.config.kinds if isinstance(model, Stack) else ()):
        if kind.attention.reads_encoder:
            axes = (B, kind.attention.kv_heads, Q, kind.attention.head_size)
            values += [
                Value(f"past_key_values.{layer}.encoder.{name}", dtype, axes)
                for name in ("key", "value")
            ]
    return [Value(ENCODER_MASK, "int64", (B, Q)), *values] if values else []


def _state(
    past: str, present: str, carried: StateSpec, slots: Axis, update: str, dtype: str
) -> State:
    if carried.grows:
        heads, size = carried.sizes
        return State(
            past + carried.name,
            present + carried.name,
            carried.dtype or dtype,
            (B, heads, slots, size),
            update,
            2,
        )
    return State(
        past + carried.name,
        present + carried.name,
        carried.dtype or dtype,
        (B, *carried.sizes),
        "replace",
        0,
    )


def eager(model: Model, signature: str = "positions") -> Tuple[torch.nn.Module, Manifest]:
    """Return the eager module wrapped in a calling convention, and the manifest that a session
    needs to run it.
    """
    manifest = describe(
        model,
        "eager",
        signature,
        "rows" if signature == "positions" else "columns",
        "in_place",
        **TORCH,
    )
    return wrap(model, signature), manifest


def trace_inputs(manifest: Manifest, slots: str = P) -> Tuple[Tuple[Any, ...], Tuple[Any, ...]]:
    """Return example arguments of the signature's forward and their dynamic axes. Encoder inputs
    follow the caches.

    slots: the axis of caches, for every target. Semantic operations append to caches with axis P.
    """
    arguments: List[Any] = []
    shapes: List[Any] = []

    def traced(
        dtype: str,
    ) -> str:  # the module reads its own dtype, which a graph may be passed in another one
        return manifest.dtype if dtype == manifest.passed_dtype else dtype

    for value in manifest.inputs:
        arguments.append(_example(traced(value.dtype), value.axes))
        shapes.append(_dynamic(value.axes))
    caches, dynamic = [], []
    for state in manifest.states:
        axes = tuple(slots if axis == M else axis for axis in state.axes)
        caches.append(_example(state.dtype, axes))
        dynamic.append(_dynamic(axes))
    for value in manifest.encoder:
        caches.append(_example(traced(value.dtype), value.axes))
        dynamic.append(_dynamic(value.axes))
    if any(state.past == "past_positions" for state in manifest.states):
        arguments.append(caches.pop(0))
        shapes.append(dynamic.pop(0))
    return (*arguments, caches), (*shapes, dynamic)


def _example(dtype: str, axes: Tuple[Axis, ...]) -> Tensor:
    return torch.ones(
        [TRACE[a] if isinstance(a, str) else a for a in axes], dtype=getattr(torch, dtype)
    )


def _dynamic(axes: Tuple[Axis, ...]) -> Dict[int, str]:
    return {index: axis for index, axis in enumerate(axes) if isinstance(axis, str)}
