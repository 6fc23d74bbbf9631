"""The table of graph inputs, outputs and states: dtype and axes, meaning, and values in a call."""

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import numpy as np

from posenc_export.runtime.artefact.records import Axis
from posenc_export.runtime.artefact.schema import Manifest, State, Value

B, S, P, M = "batch_size", "sequence_length", "past_sequence_length", "capacity"
W = "window_capacity"  # slots of caches of windows, if other states have M slots in a graph
T, Q, R = "total_sequence_length", "encoder_sequence_length", "logits_count"
# Inputs of a decoder that reads an encoder: outputs of the encoder, the same in every call.
ENCODER_MASK, ENCODER_AXES = "encoder_attention_mask", (B, "heads", Q, "head size")
HIDDEN, KEYS_AND_VALUES = "last_hidden_state", "encoder_key_values"
OUTPUTS: dict[str, str] = {
    "logits": (
        "Logits for the token after each new token; with input logits_index, after the tokens at "
        "these columns only. Of an encoder, the logits of its labels."
    ),
    HIDDEN: "Hidden states after the last layer.",
    KEYS_AND_VALUES: (
        "Keys and values of each token, for the decoder layers that read this encoder."
    ),
    "output": "Hidden states after the block.",
    "sentence_embedding": "An embedding of each row, pooled from hidden states without padding.",
}
OF_MODULE = "The output of the module's forward."  # in place of OUTPUTS["output"]
# By update rule of a state: meaning, and value in the first call.
UPDATES: dict[str, tuple[str, str]] = {
    "append": (
        "Grows: past has P slots along axis {axis}, present has P + S. Feed present back as past.",
        "P = 0: an empty array",
    ),
    "in_place": (
        "Fixed capacity M along axis {axis}; each call writes new slots. Feed present back "
        "as past, or bind both to one buffer.",
        "all slots hold {fill}",
    ),
    "replace": ("Replaced by each call. Feed present back as past.", "all values are {fill}"),
}
LAYER = re.compile(r"\.\d+\.")
POSITIONS = "Position of the token in each cache slot; -1 for a slot without a token."


class PaddedTokens(NamedTuple):
    """The tokens that a call feeds to some rows."""

    x: np.ndarray  # tokens [B,S] or [B,S,E], padded on the right
    counts: np.ndarray  # number of new tokens of each row [B]
    length: np.ndarray  # number of tokens in the cache of each row [B]
    first_position: np.ndarray  # position of the first token of each row [B]
    requested: np.ndarray  # number of last tokens of each row whose logits are requested [B]
    occupied: np.ndarray  # whether cached columns hold a token [B,P], for graphs that count columns
    valid: np.ndarray  # number of new columns of each row that the graph attends to [B]
    window_start: np.ndarray  # token of each row in slot 0 of the caches of windows [B]
    # Attributes of the tokens [n,B,S] by name, "grid" or "token_type_ids".
    planes: Mapping[str, np.ndarray] = MappingProxyType({})

    @property
    def inside(self) -> np.ndarray:
        """Whether a column holds a new token [B,S]."""
        return np.less(np.arange(self.x.shape[1])[None], self.counts[:, None])

    @property
    def places(self) -> np.ndarray:
        """Index of each column in its row, counted from the row's first token [B,S]."""
        return self.length[:, None] + np.arange(self.x.shape[1])


@dataclass(frozen=True)
class GraphInput:
    """A graph input."""

    dtype: str  # numpy dtype; "float" for that of activations
    forms: tuple[tuple[Axis, ...], ...]  # axes that it may have
    says: str  # meaning of its values
    # Its value in a call; None for tokens and outputs of an encoder, which are passed as they are.
    fill: Callable[[PaddedTokens], np.ndarray] | None = None
    belongs: Callable[[Manifest], bool] = lambda manifest: True  # whether an artefact may have it
    counts: bool = False  # whether it grows by one from a step to the next
    planes: bool = False  # whether coordinates add an axis 1+A before the others

    def values(self, name: str, manifest: Manifest) -> list[Value]:
        """Return the forms that the input of this name may have in an artefact."""
        planes = (1 + manifest.axes,) if self.planes and manifest.axes else ()
        return [Value(name, self.dtype, (*planes, *form)) for form in self.forms]


def _position_ids(tokens: PaddedTokens) -> np.ndarray:
    positions = np.where(tokens.inside, tokens.first_position[:, None] + tokens.places, -1)
    if "grid" in tokens.planes:
        return np.concatenate((positions[None], tokens.planes["grid"]))  # [1+A,B,S]
    return positions


def _logits_index(tokens: PaddedTokens) -> np.ndarray:
    # [B,R]: the last requested tokens of a row are its first columns. A row with fewer than R
    # repeats its last one; a row without tokens gives 0.
    most = int(tokens.requested.max(initial=0))
    columns = (tokens.counts - tokens.requested)[:, None] + np.arange(most)  # [B,R]
    return np.clip(columns, 0, np.maximum(tokens.counts - 1, 0)[:, None])


def _is_positions(manifest: Manifest) -> bool:
    return manifest.signature == "positions"


# The first input of a graph.
TOKENS: dict[str, GraphInput] = {
    "input_ids": GraphInput("int64", ((B, S),), "Ids of the new tokens."),
    "hidden_states": GraphInput("float", ((B, S, "width"),), "Hidden states of the new tokens."),
}
AFTER_TOKENS: dict[str, GraphInput] = {
    "token_type_ids": GraphInput(
        "int64",
        ((B, S),),
        "Segment of each token.",
        lambda tokens: tokens.planes.get("token_type_ids", np.zeros_like(tokens.x)[None])[0],
        lambda manifest: manifest.segments > 0,
    ),
    "position_ids": GraphInput(
        "int64",
        ((B, S),),
        "Position of each new token; -1 marks padding. With coordinates, plane 0 holds "
        "positions and planes 1 to A hold the coordinates.",
        _position_ids,
        _is_positions,
        counts=True,
        planes=True,
    ),
    "attention_mask": GraphInput(
        "int64",
        ((B, T), (B, S)),
        "1 for a token and 0 for padding, for the cached columns and the new ones. A 0 between "
        "ones is an error; -1 is padding that may stand there.",
        lambda tokens: np.where(np.concatenate((tokens.occupied, tokens.inside), axis=1), 1, -1),
        lambda manifest: manifest.signature == "mask",
    ),
    "logits_index": GraphInput(
        "int64",
        ((B, R),),
        "Columns 0 .. S-1 of the tokens of this call whose logits are requested; the logits "
        "come in the order of these columns. R may be 0.",
        _logits_index,
        lambda manifest: _is_positions(manifest) and manifest.decodes,
    ),
    "cache_position": GraphInput(
        "int64",
        ((B, S),),
        "Cache slot of each new token: counts up by 1 from the number of cached tokens of the row.",
        lambda tokens: tokens.places,
        counts=True,
    ),
    "first_position": GraphInput(
        "int64",
        ((B, 1),),
        "Position of the token in slot 0 of each row.",
        lambda tokens: tokens.first_position[:, None].copy(),
    ),
    "seqlens_k": GraphInput(
        "int32",
        ((B,),),
        "Number of valid tokens of each row after the call, minus 1.",
        # The kernel needs at least one token: slot 0 of a row without tokens is written, and
        # overwritten by its first token.
        lambda tokens: np.maximum(tokens.length + tokens.valid - 1, 0).astype(np.int32),
        counts=True,
    ),
    "total_sequence_length": GraphInput(
        "int32",
        ((),),
        "Largest number of valid tokens of any row after the call.",
        lambda tokens: np.array((tokens.length + tokens.counts).max(), np.int32),
        counts=True,
    ),
    "window_start": GraphInput(
        "int32",
        ((B,),),
        "Token of each row in slot 0 of its caches of windows; 0 if they hold all tokens.",
        lambda tokens: tokens.window_start.astype(np.int32),
        lambda manifest: any(state.window for state in manifest.states),
    ),
    "slots": GraphInput(
        "int64",
        ((T,),),
        "0, 1, ... T-1, where T is total_sequence_length. In a step of one token, T may be "
        "larger, up to the capacity, so that it changes rarely.",
        lambda tokens: np.arange((tokens.length + tokens.counts).max()),
        lambda manifest: manifest.target == "ort-cuda",
    ),
}
INPUTS = {**TOKENS, **AFTER_TOKENS}
OF_ENCODER: dict[str, GraphInput] = {
    ENCODER_MASK: GraphInput(
        "int64", ((B, Q),), "1 for a token of the encoder's sequence and 0 for padding."
    ),
    "past_key_values.N.encoder.key": GraphInput(
        "float",
        (ENCODER_AXES,),
        "Keys of the encoder's sequence for layer N: a part of encoder_key_values.",
    ),
    "past_key_values.N.encoder.value": GraphInput(
        "float", (ENCODER_AXES,), "Values of the encoder's sequence for layer N."
    ),
}


def fill(manifest: Manifest, tokens: PaddedTokens) -> dict[str, np.ndarray]:
    """Return the inputs of a call by name, without those of an encoder."""
    filled = {manifest.inputs[0].name: tokens.x}
    for value in manifest.inputs[1:]:
        filled[value.name] = AFTER_TOKENS[value.name].fill(tokens)  # type: ignore[misc]
    return filled


def new_row(states: Sequence[State], capacity: Any, past: Any = 0) -> list[dict[str, Any]]:
    """Return names, dtype, shape and initial value of the states of a row without tokens, as in
    page.json and in programs. capacity, past: sizes M and P, or their names.
    """
    sizes = {B: 1, P: past, M: capacity, W: capacity}
    return [
        {
            "past": state.past,
            "present": state.present,
            "dtype": state.dtype,
            "shape": [sizes.get(str(axis), axis) for axis in state.axes],
            "fill": state.fill,
        }
        for state in states
    ]


def meanings_of(manifest: Manifest) -> dict[str, str]:
    """Describe the inputs and outputs of a graph, by name, as far as the tables have them."""
    meanings = {v.name: INPUTS[v.name].says for v in manifest.inputs if v.name in INPUTS}
    meanings |= {v.name: OUTPUTS[v.name] for v in manifest.outputs if v.name in OUTPUTS}
    if manifest.kind == "module" and manifest.outputs[0].name == "output":
        meanings[manifest.outputs[0].name] = OF_MODULE
    for value in manifest.encoder:
        meanings[value.name] = OF_ENCODER[LAYER.sub(".N.", value.name)].says
    for state in manifest.states:
        rule, first = UPDATES[state.update]
        content = f"{POSITIONS} " if state.holds_positions else ""
        rule, first = rule.format(axis=state.axis), first.format(fill=state.fill)
        meanings[state.past] = f"{content}{rule} First call: {first}."
        meanings[state.present] = f"The next call's {state.past}."
    return meanings
