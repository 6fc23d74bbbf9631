"""The manifest of a model before its graph is written, and the eager module as a target."""

from dataclasses import dataclass, field
from typing import Dict, Mapping, Optional, Tuple

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
from posenc_export.runtime.artefact.manifest import Calibration, Manifest, Package
from posenc_export.runtime.artefact.records import Generation, Places, Weights
from posenc_export.runtime.artefact.schema import FIRST_INTERFACE, GRAPHS


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """How the graphs of a target keep the tokens that they have read."""

    layout: Mapping[str, str]  # "rows" or "columns" (runtime.artefact.manifest), by signature
    # capacity_bucket, continuation_rows, contiguous: as in the manifest
    capacity_bucket: int = 0
    continuation_rows: int = 0
    contiguous: bool = False


ROWS = {"positions": "rows", "mask": "columns"}
# Graphs of torch take the first slots of larger memory.
TORCH = CacheLayout(layout=ROWS, capacity_bucket=64)


@dataclass(frozen=True)
class FewBits:
    """What an artefact rounds to few bits, as in the manifest."""

    weights: Optional[Weights] = None
    formats: Mapping[str, str] = field(default_factory=dict)
    cache: str = ""
    calibration: Optional[Calibration] = None


def describe(
    model: Model, target: str, signature: str, caches: CacheLayout, few_bits: FewBits = FewBits()
) -> Manifest:
    """Return the manifest of a model without what the stages of an export find out.

    Args:
        caches: of the target.
        few_bits: what the target is to round; the weights of the model are rounded already.
    """
    text, grows = text_of(model), target in GRAPHS and GRAPHS[target].grows
    return Manifest(
        kind=kind_of(model.config),
        target=target,
        signature=signature,
        dtype=graph_values.dtype_of(model),
        layout=caches.layout[signature],
        config=to_json(model.config),
        inputs=graph_values.inputs_of(model, signature),
        outputs=graph_values.outputs_of(model, signature),
        states=graph_values.states_of(model, signature, "append" if grows else "in_place"),
        max_positions=model.config.max_positions,
        capacity_bucket=caches.capacity_bucket,
        continuation_rows=caches.continuation_rows,
        contiguous=caches.contiguous,
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
        weights=few_bits.weights,
        formats=dict(few_bits.formats),
        cache=few_bits.cache,
        calibration=few_bits.calibration,
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
    return wrap(model, "positions"), describe(model, "eager", "positions", TORCH)
