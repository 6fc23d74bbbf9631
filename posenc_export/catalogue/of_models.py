"""The different encodings of a model, for pictures."""

import json
from typing import Dict, List, Optional, Tuple

import torch

from posenc_export.catalogue.plots import Subject
from posenc_export.encodings import Geometry, PositionEncoding
from posenc_export.models.placed import Described, Placed, placed
from posenc_export.shared.refusal import refusal

Group = List[Tuple[Placed, PositionEncoding]]


def subjects(model: Described, name: str, layer: Optional[int] = None) -> List[Subject]:
    """Return each different encoding of a model, or of one layer, once: those of tokens, then those
    of layers. Of layers with other trained numbers, the first one is drawn. Raise ValueError for a
    model without encodings, or without that layer. name: that of the model, for titles.
    """
    layers = len(model.attentions())
    if layer is not None and not 0 <= layer < layers:
        rule = f"layer 0 .. {layers - 1} of {name}"
        raise refusal("plot", rule, layer, "choose one in that range")
    groups: Dict[Tuple[bool, str, Geometry], Group] = {}
    for place in placed(model):
        for spec, part in place.parts:
            if spec["name"] != "nope":
                key = (place.layer is None, json.dumps(spec, sort_keys=True), place.geometry)
                groups.setdefault(key, []).append((place, part))
    drawn = []
    for (_, text, geometry), group in groups.items():
        pair = next((pair for pair in group if layer is None or pair[0].layer == layer), None)
        if pair is not None:
            title = f"{name}, {_where(pair, group)}"
            drawn.append(Subject(json.loads(text), pair[1], geometry, title))
    if not drawn:
        where = name if layer is None else f"layer {layer} of {name}"
        rule = "a model with encodings of positions"
        raise refusal("plot", rule, f"none in {where}", "posenc inspect prints its layers")
    return drawn


def _where(drawn: Tuple[Placed, PositionEncoding], group: Group) -> str:
    """Return the layers of a group, and the one that is drawn if their trained numbers differ."""
    if drawn[0].layer is None:
        return "tokens"
    numbers = [place.layer for place, _ in group if place.layer is not None]
    ends = [n for n in numbers if n + 1 not in numbers]
    starts = [n for n in numbers if n - 1 not in numbers]
    ranges = zip(starts, ends, strict=True)
    spans = [str(first) if first == last else f"{first} .. {last}" for first, last in ranges]
    where = f"layer{'s' if len(numbers) > 1 else ''} {', '.join(spans)}"
    alike = all(_equal(drawn[1], part) for _, part in group)
    return where if alike else f"layer {drawn[0].layer} of {where}"


def _equal(first: PositionEncoding, second: PositionEncoding) -> bool:
    numbers = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return first is second or all(torch.equal(*pair) for pair in numbers)
