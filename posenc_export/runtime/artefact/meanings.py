"""Descriptions of graph inputs, outputs and states for programs that run a graph without a session:
text of docs/runtimes and of model.onnx's doc strings.

Shapes: B rows, S new tokens, R of them whose logits are requested, P tokens in the cache, T = P +
S, M capacity, Q tokens of an encoder, E width, V vocabulary, A coordinates.
"""

import re
from dataclasses import dataclass
from typing import Dict, Tuple

from posenc_export.runtime.artefact.schema import Manifest, State


@dataclass(frozen=True)
class Meaning:
    """Description of one graph input."""

    shape: str  # dtype and axes
    says: str  # meaning of its values
    when: str  # artefacts that have this input
    first: str  # its value in the first call, on a row of S tokens


INPUTS: Dict[str, Meaning] = {
    "input_ids": Meaning(
        "int64 [B,S]",
        "Ids of the new tokens.",
        "decoders, encoders, and own modules with a vocabulary",
        "the prompt",
    ),
    "input_features": Meaning(
        "float [B,S,F]",
        "Features of each token. For a spectrogram, a token is two consecutive frames, "
        "concatenated.",
        "encoders of features",
        "the features of the whole input",
    ),
    "hidden_states": Meaning(
        "float [B,S,E]",
        "Hidden states of the new tokens.",
        "blocks, and own modules with a width",
        "the hidden states of the prompt",
    ),
    "token_type_ids": Meaning(
        "int64 [B,S]",
        "Segment of each token.",
        "encoders with segments",
        "0 everywhere if there is one segment",
    ),
    "position_ids": Meaning(
        "int64 [B,S], or [1+A,B,S] with coordinates",
        "Position of each new token; -1 marks padding. With coordinates, plane 0 holds "
        "positions and planes 1 to A hold the coordinates.",
        "signature positions, if the graph reads positions",
        "0, 1, ... S-1, or any other start",
    ),
    "attention_mask": Meaning(
        "int64 [B,T]",
        "1 for a token and 0 for padding, for the cached columns and the new ones.",
        "signature mask",
        "1 for each token of the prompt [B,S]",
    ),
    "logits_index": Meaning(
        "int64 [B,R]",
        "Columns 0 .. S-1 of the tokens of this call whose logits are requested; the logits "
        "come in the order of these columns. R may be 0.",
        "decoders with signature positions",
        "S-1 for the logits of the next token; 0, 1, ... S-1 for all",
    ),
    "cache_position": Meaning(
        "int64 [B,S]",
        "Cache slot of each new token: the number of tokens in the row's cache for the "
        "first, then counting up by 1.",
        "in-place caches with compact rows, if positions or slots are read",
        "0, 1, ... S-1",
    ),
    "first_position": Meaning(
        "int64 [B,1]",
        "Position of the token in slot 0 of each row.",
        "in-place caches with compact rows, if key positions are read",
        "0, or the start",
    ),
    "seqlens_k": Meaning(
        "int32 [B]",
        "Number of valid tokens of each row after the call, minus 1.",
        "targets ort and ort-cuda with signature positions",
        "S - 1",
    ),
    "total_sequence_length": Meaning(
        "int32 []",
        "Largest number of valid tokens of any row after the call.",
        "targets ort and ort-cuda with signature positions",
        "S",
    ),
    "slots": Meaning(
        "int64 [T]",
        "0, 1, ... T-1, where T is total_sequence_length. In a step of one token, both may "
        "count more slots, up to the capacity, so that they change rarely.",
        "target ort-cuda, if the graph computes with slots",
        "0, 1, ... S-1",
    ),
}
# Inputs of a decoder that reads an encoder: outputs of the encoder, the same in every call.
OF_ENCODER: Dict[str, Meaning] = {
    name: Meaning(shape, says, "decoders that read an encoder", "the same in every call")
    for name, shape, says in (
        (
            "encoder_attention_mask",
            "int64 [B,Q]",
            "1 for a token of the encoder's sequence and 0 for padding.",
        ),
        (
            "past_key_values.N.encoder.key",
            "float [B,heads,Q,head size]",
            "Keys of the encoder's sequence for layer N: a slice of encoder_key_values, "
            "which holds keys and values of each layer in turn.",
        ),
        (
            "past_key_values.N.encoder.value",
            "float [B,heads,Q,head size]",
            "Values of the encoder's sequence for layer N.",
        ),
    )
}
OUTPUTS: Dict[str, str] = {
    "logits": (
        "Logits for the token after each new token; with input logits_index, after the tokens at "
        "these columns only. Of an encoder, the logits of its labels."
    ),
    "last_hidden_state": "Hidden states after the last layer; for a model without layers, the embedded tokens.",
    "encoder_key_values": "Keys and values of each token, for the decoder layers that read this encoder.",
    "output": "Hidden states after the block.",
    "sentence_embedding": "The embedding of each row, pooled from its hidden states without padding.",
}
OF_MODULE = "The output of the own module's forward."  # in place of OUTPUTS["output"]
# By update rule of a state: meaning, and value in the first call.
UPDATES: Dict[str, Tuple[str, str]] = {
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


def of_state(state: State) -> str:
    """Describe a state in a few sentences: its content, how it is passed from call to call, and
    its initial value.
    """
    rule, first = UPDATES[state.update]
    content = f"{POSITIONS} " if state.past == "past_positions" else ""
    return f"{content}{rule.format(axis=state.axis)} First call: {first.format(fill=state.fill)}."


def of_graph(manifest: Manifest) -> Dict[str, str]:
    """Describe every input and output of a graph, by name. Names that are not in the tables of
    this module are left out.
    """
    meanings = {
        value.name: INPUTS[value.name].says for value in manifest.inputs if value.name in INPUTS
    }
    meanings |= {
        value.name: OUTPUTS[value.name] for value in manifest.outputs if value.name in OUTPUTS
    }
    if manifest.kind == "module":
        meanings[manifest.outputs[0].name] = OF_MODULE
    for value in manifest.encoder:
        meanings[value.name] = OF_ENCODER[LAYER.sub(".N.", value.name)].says
    for state in manifest.states:
        meanings[state.past] = of_state(state)
        meanings[state.present] = f"The next call's {state.past}."
    return meanings
