"""The manifest of a model before its graph is written, and the eager module as a target."""

from typing import Dict, Tuple

import torch

from posenc_export import encodings
from posenc_export.export import graph_values
from posenc_export.export.read_module import ReadModule
from posenc_export.export.signatures import Model, wrap
from posenc_export.models.block import AttentionBlock
from posenc_export.models.config_json import kind_of, to_json
from posenc_export.models.placed import placed
from posenc_export.models.stack import Text
from posenc_export.models.whole_pass import encodings_in
from posenc_export.runtime.artefact.manifest import Manifest, Package
from posenc_export.runtime.artefact.records import Generation, Places
from posenc_export.runtime.artefact.schema import FIRST_INTERFACE, TARGETS


def describe(model: Model, target: str, signature: str) -> Manifest:
    """Return the manifest of a model in float32 or half precision, before its graph is written.
    target: one of TARGETS, or "eager" for the module itself, which torch runs.
    """
    text, kind = text_of(model), TARGETS.get(target, TARGETS["torchscript"])
    return Manifest(
        kind=kind_of(model.config),
        target=target,
        signature=signature,
        dtype=graph_values.dtype_of(model),
        layout=kind.layout[signature],
        config=to_json(model.config),
        inputs=graph_values.inputs_of(model, signature),
        outputs=graph_values.outputs_of(model, signature),
        states=graph_values.states_of(model, signature, "append" if kind.grows else "in_place"),
        max_positions=model.config.max_positions,
        capacity_bucket=kind.capacity_bucket,
        continuation_rows=kind.continuation_rows,
        contiguous=kind.contiguous,
        axes=model.axes,
        coordinate_range=model.coordinate_range,
        chunk=min(encoding.chunk for encoding in encodings_in(model)),
        encoder=graph_values.encoder_of(model),
        step_weights=graph_values.step_weights(model),
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


def _packages(model: Model) -> Dict[str, Package]:
    names = (spec["name"] for place in placed(model) for spec in place.specs)
    origins = {name: encodings.origin(name) for name in names}
    return {name: Package(o.name, o.version) for name, o in origins.items() if o is not None}


def eager(model: Model) -> Tuple[torch.nn.Module, Manifest]:
    """Return the eager module that takes positions, and the manifest to run it in a session."""
    return wrap(model, "positions"), describe(model, "eager", "positions")
