"""The manifest of a model before its graph is written: names, dtypes and axes of inputs, outputs
and states. Also examples of them for tracing, and the eager module as a target.
"""

from typing import Any, Callable

import torch
from torch import Tensor

from posenc_export import encodings
from posenc_export.encodings.shared.base import StateSpec
from posenc_export.export.read_module import ReadModule
from posenc_export.export.signatures import Model, has_cache, has_segments, takes_logits_index, wrap
from posenc_export.models.block import AttentionBlock
from posenc_export.models.config_json import kind_of, to_json
from posenc_export.models.stack import Stack, Text
from posenc_export.models.whole_pass import encodings_in, foreign_encodings
from posenc_export.runtime.artefact.graph_inputs import ENCODER_MASK, B, M, P, Q, R, S, T
from posenc_export.runtime.artefact.manifest import Axis, Manifest, Package, State, Value
from posenc_export.runtime.artefact.records import Generation, Places
from posenc_export.runtime.artefact.schema import FIRST_INTERFACE, TARGETS, passed

# No 0 or 1, which torch.export would fix; T = P + S columns fit into M slots.
SIZES = {B: 2, S: 5, P: 3, T: 8, M: 9, Q: 6, R: 4}


def dtype_of(model: Model) -> str:
    """Return the numpy name of the dtype of weights, activations and caches."""
    return str(model.weight_dtype()).removeprefix("torch.")


def inputs_of(model: Model, signature: str) -> list[Value]:
    """Return the inputs of a graph without states and encoder."""
    if isinstance(model, AttentionBlock) or not model.config.tokens:
        values = [Value("hidden_states", passed(dtype_of(model)), (B, S, model.config.width))]
    else:
        names = ["input_ids", *(["token_type_ids"] if has_segments(model) else [])]
        values = [Value(name, "int64", (B, S)) for name in names]
    if signature == "mask":
        columns = T if states_of(model, signature, "append") else S
        return [*values, Value("attention_mask", "int64", (B, columns))]
    axes: tuple[Axis, ...] = (1 + model.axes, B, S) if model.axes else (B, S)
    values.append(Value("position_ids", "int64", axes))
    index = Value("logits_index", "int64", (B, R))
    return [*values, *([index] if takes_logits_index(model, signature) else [])]


def outputs_of(model: Model, signature: str) -> list[Value]:
    """Return the output, and the second one of a model with a readout."""
    of_dtype, width = passed(dtype_of(model)), model.config.width
    tokens, readout = R if takes_logits_index(model, signature) else S, None
    if isinstance(model, ReadModule):
        name, width, readout = model.output_name, model.config.outputs, model.config.readout
    elif not isinstance(model, Stack):
        name = "output"
    elif model.config.head is not None:
        name, width = "logits", model.config.tokens.vocabulary
    else:
        name = "last_hidden_state"
    output = Value(name, of_dtype, (B, tokens, width))
    if readout is None:
        return [output]
    return [output, Value(readout.output, dtype_of(model), (B, readout.size))]


def encoder_of(model: Model) -> list[Value]:
    """Return the inputs of a decoder that depend on an encoder: its mask, keys and values."""
    dtype, values = passed(dtype_of(model)), []
    for index, (heads, size) in enumerate(model.memory if isinstance(model, ReadModule) else ()):
        name = f"past_key_values.{index // 2}.encoder.{('key', 'value')[index % 2]}"
        values.append(Value(name, dtype, (B, heads, Q, size)))
    return [Value(ENCODER_MASK, "int64", (B, Q)), *values] if values else []


def states_of(model: Model, signature: str, update: str) -> list[State]:
    """Return the states. update: update rule of those with one entry per token, "append" or
    "in_place"; others have "replace".
    """
    dtype, slots = dtype_of(model), P if update == "append" else M

    def state(past: str, present: str, carried: StateSpec) -> State:
        names = past + carried.name, present + carried.name, carried.dtype or dtype
        if not carried.grows:
            return State(*names, (B, *carried.sizes), "replace", 0)
        heads, size = carried.sizes
        return State(*names, (B, heads, slots, size), update, 2)

    places = State("past_positions", "present_positions", "int64", (B, slots), update, 1, -1)
    return [
        *([places] if signature == "positions" and has_cache(model) else []),
        *(
            state("past_embedding.", "present_embedding.", carried)
            for carried in model.token_encoding.embed_states()
        ),
        *(
            state(f"past_key_values.{layer}.", f"present.{layer}.", carried)
            for layer, attention in enumerate(model.attentions())
            for carried in attention.states()
        ),
    ]


def step_weights(model: Model) -> int:
    """Count the weights that a step reads: every matrix once, one row of the token table."""
    if isinstance(model, ReadModule):
        return model.step_weights()
    total = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if ".encoding." not in name and not name.startswith("token_encoding.")
    )
    if not isinstance(model, Stack):
        return total
    table, head = model.tokens.embedding.weight, model.config.head
    is_tied = head is not None and head.tied
    return total + int(table.size(1)) - (0 if is_tied else int(table.numel()))


def input_names(manifest: Manifest) -> list[str]:
    """Return the names of graph inputs, in the order of a calling convention."""
    states = [state.past for state in manifest.states]
    return [value.name for value in manifest.inputs] + states + [v.name for v in manifest.encoder]


def output_names(manifest: Manifest) -> list[str]:
    """Return the names of graph outputs, in the order of a calling convention."""
    states = [state.present for state in manifest.states]
    return [*(value.name for value in manifest.outputs), *states]


def trace_inputs(
    manifest: Manifest,
    slots: str = P,
    dim: Callable[[str], Any] = lambda name: torch.export.Dim.DYNAMIC,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return example arguments of the signature's forward and their dynamic axes. Encoder inputs
    follow the caches.

    Args:
        slots: name of the axis of slots of all caches; P, since semantic operations append.
        dim: returns what torch.export takes for the name of an axis.
    """
    values = [(_own(manifest, value.dtype), value.axes) for value in manifest.inputs]
    states = []
    for state in manifest.states:
        states.append((state.dtype, tuple(slots if axis == M else axis for axis in state.axes)))
    if any(state.past == "past_positions" for state in manifest.states):
        values.append(states.pop(0))
    states += [(_own(manifest, value.dtype), value.axes) for value in manifest.encoder]
    arguments, caches = ([_example(*part) for part in parts] for parts in (values, states))
    of_arguments, of_caches = ([_dynamic(axes, dim) for _, axes in p] for p in (values, states))
    return (*arguments, caches), (*of_arguments, of_caches)


def _own(manifest: Manifest, dtype: str) -> str:
    """Return the dtype of an input in the module. Callers of a graph may pass another one."""
    return manifest.dtype if dtype == manifest.passed_dtype else dtype


def _example(dtype: str, axes: tuple[Axis, ...]) -> Tensor:
    sizes = [SIZES[axis] if isinstance(axis, str) else axis for axis in axes]
    return torch.ones(sizes, dtype=getattr(torch, dtype))


def _dynamic(axes: tuple[Axis, ...], dim: Callable[[str], Any]) -> dict[int, Any]:
    return {index: dim(axis) for index, axis in enumerate(axes) if isinstance(axis, str)}


def describe(model: Model, target: str, signature: str) -> Manifest:
    """Return the manifest of a model in float32 or half precision, before its graph is written.
    target: one of TARGETS, or "eager" for the module itself, which torch runs.
    """
    text, kind = text_of(model), TARGETS.get(target, TARGETS["torchscript"])
    return Manifest(
        kind=kind_of(model.config),
        target=target,
        signature=signature,
        dtype=dtype_of(model),
        layout=kind.layout[signature],
        config=to_json(model.config),
        inputs=inputs_of(model, signature),
        outputs=outputs_of(model, signature),
        states=states_of(model, signature, "append" if kind.grows else "in_place"),
        max_positions=model.config.max_positions,
        capacity_bucket=kind.capacity_bucket,
        continuation_rows=kind.continuation_rows,
        contiguous=kind.contiguous,
        axes=model.axes,
        coordinate_range=model.coordinate_range,
        chunk=min(encoding.chunk for encoding in encodings_in(model)),
        encoder=encoder_of(model),
        step_weights=step_weights(model),
        interface=FIRST_INTERFACE,
        stop_ids=list(text.stop_ids),
        start_ids=list(text.start_ids),
        generation=Generation(**text.generation) if text.generation else None,
        source=dict(model.source),
        packages=_packages(model),
        places=_places(model),
    )


def text_of(model: Model) -> Text:
    """Return the tokenizer and stop ids of a model; empty if it reads hidden states."""
    return Text() if isinstance(model, AttentionBlock) else model.text


def _places(model: Model) -> Places:
    if isinstance(model, ReadModule):
        return Places(sees=model.sees())
    attentions = model.attentions()
    rules = [getattr(attention, "visibility", None) for attention in attentions]
    return Places(
        sees=[rule.rule if rule else "" for rule in rules],
        rows=[attention.encoding.row_rules() for attention in attentions],
        tokens=model.token_encoding.row_rules(),
        biases=[attention.encoding.bias_rule() for attention in attentions],
    )


def _packages(model: Model) -> dict[str, Package]:
    names = [encoding.built[0] for encoding in foreign_encodings(model)]
    origins = {name: encodings.origin(name) for name in names}
    return {name: Package(o.name, o.version) for name, o in origins.items() if o is not None}


def eager(model: Model) -> tuple[torch.nn.Module, Manifest]:
    """Return the eager module that takes positions, and the manifest to run it in a session."""
    return wrap(model, "positions"), describe(model, "eager", "positions")
