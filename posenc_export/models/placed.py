"""The encodings of a model with their places, specifications and sizes."""

from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from posenc_export.encodings.shared.base import Geometry, PositionEncoding
from posenc_export.encodings.shared.combined import parts_of
from posenc_export.models.config import BlockConfig, ModuleConfig

PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True)
class Placed:
    """An encoding at its place in a model."""

    # Specifications that it was built from (encodings.build_all).
    specs: Sequence[Mapping[str, Any]]
    geometry: Geometry  # sizes that it was built for
    encoding: PositionEncoding  # the encoding, which several layers may share

    @property
    def parts(self) -> List[Tuple[Mapping[str, Any], PositionEncoding]]:
        """Each specification with the encoding built from it; none without encodings."""
        return list(zip(self.specs, parts_of(self.encoding), strict=True)) if self.specs else []


def from_outside(model: Any) -> Dict[str, str]:
    """Return the class names of encodings from other packages, by registered name."""
    parts = [(spec, type(part)) for place in placed(model) for spec, part in place.parts]
    outside = [pair for pair in parts if pair[1].__module__.partition(".")[0] != PACKAGE]
    return {spec["name"]: kind.__name__ for spec, kind in outside}


def placed(model: Any) -> List[Placed]:
    """Return the encoding of tokens, then that of each layer; none of a module that was read."""
    config = model.config
    if isinstance(config, ModuleConfig):
        return []
    width, length = config.width, config.max_positions
    in_layers = [
        Placed(of.encodings, of.geometry(width, length), built.encoding)
        for of, built in zip(config.attentions, model.attentions(), strict=True)
    ]
    if isinstance(config, BlockConfig):
        specs, geometry = config.encodings, in_layers[0].geometry
    else:
        specs, geometry = config.tokens.encodings, config.token_geometry
    return [Placed(specs, geometry, model.token_encoding), *in_layers]
