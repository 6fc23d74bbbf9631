"""What the inputs, outputs and states of a graph mean to a program that runs it without a session: docs/runtimes and the doc strings of model.onnx.

Shapes: B rows, S new tokens, R of them whose logits are wanted, P tokens in the cache, T = P + S, M capacity, Q tokens of an encoder, E width, V vocabulary,
A coordinates.
"""

import re
from dataclasses import dataclass
from typing import Dict, Tuple

from posenc_export.runtime.schema import Manifest, State


@dataclass(frozen=True)
class Meaning:
    """One input of a graph.

    Args:
        shape: dtype and axes.
        says: what its values mean.
        when: which artefacts have it.
        first: its value in the first call of a row of S tokens.
    """

    shape: str
    says: str
    when: str
    first: str


INPUTS: Dict[str, Meaning] = {
    "input_ids": Meaning("int64 [B,S]", "Ids of the new tokens.", "decoders and encoders", "the prompt"),
    "input_features": Meaning(
        "float [B,S,F]", "Features of each token; of a spectrogram, two frames one behind the other.", "encoders of features", "those of the whole input"
    ),
    "hidden_states": Meaning("float [B,S,E]", "Hidden states of the new tokens.", "blocks", "those of the prompt"),
    "token_type_ids": Meaning("int64 [B,S]", "Segment of each token.", "encoders with segments", "0 everywhere for one segment"),
    "position_ids": Meaning(
        "int64 [B,S], or [1+A,B,S] with coordinates",
        "Position of each new token; -1 marks padding. With coordinates, plane 0 holds positions and planes 1 to A hold the coordinates.",
        "signature positions, where the graph reads positions",
        "0, 1, ... S-1, or any other start",
    ),
    "attention_mask": Meaning(
        "int64 [B,T]", "1 for a token and 0 for padding, over the columns in the cache and the new ones.", "signature mask", "1 for each token of the prompt [B,S]"
    ),
    "logits_index": Meaning(
        "int64 [B,R]",
        "Columns 0 .. S-1 of the tokens of this call whose logits are wanted, in their order; R may be 0.",
        "decoders with signature positions",
        "S-1 for the token behind the prompt; 0, 1, ... S-1 for all",
    ),
    "cache_position": Meaning(
        "int64 [B,S]",
        "Cache slot of each new token: the number of tokens that the row holds, then one more for each token.",
        "in-place caches with compact rows, where positions or slots are read",
        "0, 1, ... S-1",
    ),
    "first_position": Meaning(
        "int64 [B,1]", "Position of the token in slot 0 of each row.", "in-place caches with compact rows, where key positions are read", "0, or the start"
    ),
    "seqlens_k": Meaning(
        "int32 [B]", "Number of valid tokens of each row after the call, minus 1.", "targets ort and ort-cuda with signature positions", "S - 1"
    ),
    "total_sequence_length": Meaning(
        "int32 []", "Largest number of valid tokens of any row after the call.", "targets ort and ort-cuda with signature positions", "S"
    ),
}
# What a decoder that reads an encoder is given of it, the same in every call.
OF_ENCODER: Dict[str, Meaning] = {
    "encoder_attention_mask": Meaning(
        "int64 [B,Q]", "1 for a token of the encoder's sequence and 0 for padding.", "decoders that read an encoder", "the same in every call"
    ),
    "past_key_values.N.encoder.key": Meaning(
        "float [B,heads,Q,head size]",
        "Keys of the encoder's sequence for layer N: a part of encoder_key_values, which holds keys and values of each layer in turn.",
        "decoders that read an encoder",
        "the same in every call",
    ),
    "past_key_values.N.encoder.value": Meaning(
        "float [B,heads,Q,head size]", "Values of the encoder's sequence for layer N.", "decoders that read an encoder", "the same in every call"
    ),
}
OUTPUTS: Dict[str, str] = {
    "logits": "Logits of the token after each new token; with input logits_index, after the tokens at these columns.",
    "last_hidden_state": "Hidden states behind the last layer; of a model without layers, the embedded tokens.",
    "encoder_key_values": "Keys and values of each token for the layers of a decoder that read this encoder.",
    "output": "Hidden states behind the block.",
}
# By the update rule of a state: shape, meaning, value in the first call.
UPDATES: Dict[str, Tuple[str, str]] = {
    "append": ("Grows: past has P slots along axis {axis}, present has P + S. Feed present back as past.", "P = 0: an empty array"),
    "in_place": ("Fixed capacity M along axis {axis}; new slots are written. Feed present back as past, or bind both to one buffer.", "all slots hold {fill}"),
    "replace": ("Replaced by each call. Feed present back as past.", "all values are {fill}"),
}
LAYER = re.compile(r"\.\d+\.")
POSITIONS = "Position of the token in each cache slot; -1 for a slot that holds none."


def of_state(state: State) -> str:
    """One or two sentences on a state: what it holds, how it goes from call to call, what it holds at first."""
    rule, first = UPDATES[state.update]
    held = f"{POSITIONS} " if state.past == "past_positions" else ""
    return f"{held}{rule.format(axis=state.axis)} First call: {first.format(fill=state.fill)}."


def of_graph(manifest: Manifest) -> Dict[str, str]:
    """Sentences on every input and output of a graph, by name; names that this module does not know are left out."""
    found = {value.name: INPUTS[value.name].says for value in manifest.inputs if value.name in INPUTS}
    found |= {value.name: OUTPUTS[value.name] for value in manifest.outputs if value.name in OUTPUTS}
    for value in manifest.encoder:
        found[value.name] = OF_ENCODER[LAYER.sub(".N.", value.name)].says
    for state in manifest.states:
        found[state.past] = of_state(state)
        found[state.present] = f"The next call's {state.past}."
    return found
