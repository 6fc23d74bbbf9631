"""Descriptions of graph inputs, outputs and states for programs that run a graph without a session:
text of docs/runtimes and of model.onnx's doc strings.

Shapes: B rows, S new tokens, R of them whose logits are requested, P tokens in the cache, T = P +
S, M capacity, Q tokens of an encoder, E width, V vocabulary, A coordinates.
"""

import re
from typing import Dict, Tuple

from posenc_export.runtime.artefact.graph_inputs import INPUTS, OF_ENCODER
from posenc_export.runtime.artefact.schema import Manifest, State

OUTPUTS: Dict[str, str] = {
    "logits": (
        "Logits for the token after each new token; with input logits_index, after the tokens at "
        "these columns only. Of an encoder, the logits of its labels."
    ),
    "last_hidden_state": (
        "Hidden states after the last layer; for a model without layers, the embedded tokens."
    ),
    "encoder_key_values": (
        "Keys and values of each token, for the decoder layers that read this encoder."
    ),
    "output": "Hidden states after the block.",
    "sentence_embedding": (
        "The embedding of each row, pooled from its hidden states without padding."
    ),
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
    """Describe a state: its content, how it is passed from call to call, its initial value."""
    rule, first = UPDATES[state.update]
    content = f"{POSITIONS} " if state.holds_positions else ""
    return f"{content}{rule.format(axis=state.axis)} First call: {first.format(fill=state.fill)}."


def of_graph(manifest: Manifest) -> Dict[str, str]:
    """Describe the inputs and outputs of a graph, by name, as far as the tables have them."""
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
