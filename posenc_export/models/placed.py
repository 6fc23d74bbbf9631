"""The encodings of a model with their places, specifications and sizes."""

from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from posenc_export.encodings.shared.base import Geometry, PositionEncoding
from posenc_export.encodings.shared.combined import Combined
from posenc_export.models.config import BlockConfig
from posenc_export.models.user_module import Inner

PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True)
class Placed:
    """An encoding at its place in a model.

    Args:
        layer: index of the layer; None for the encoding of tokens.
        specs: specifications that it was built from (encodings.build_all).
        geometry: sizes that it was built for.
        encoding: the encoding, which several layers may share.
    """

    layer: Optional[int]
    specs: Sequence[Mapping[str, Any]]
    geometry: Geometry
    encoding: PositionEncoding

    @property
    def parts(self) -> List[Tuple[Mapping[str, Any], PositionEncoding]]:
        """Each specification with the encoding built from it; none without encodings."""
        parts: Any = self.encoding.parts if isinstance(self.encoding, Combined) else [self.encoding]
        return list(zip(self.specs, parts, strict=True)) if self.specs else []


def from_outside(model: Inner) -> Dict[str, str]:
    """Return the class names of encodings from other packages, by registered name."""
    parts = [part for place in placed(model) for part in place.parts]
    return {
        spec["name"]: type(part).__name__
        for spec, part in parts
        if type(part).__module__.partition(".")[0] != PACKAGE
    }


def placed(model: Inner) -> List[Placed]:
    """Return the encoding of tokens, then that of each layer."""
    config = model.config
    geometries = [
        attention.geometry(config.width, config.max_positions) for attention in config.attentions
    ]
    on_tokens = (
        (config.encodings, geometries[0])
        if isinstance(config, BlockConfig)
        else (config.tokens.encodings, config.token_geometry)
    )
    built = [attention.encoding for attention in model.attentions()]
    layers = zip(config.attentions, geometries, built, strict=True)
    return [
        Placed(None, *on_tokens, model.token_encoding),
        *(
            Placed(index, attention.encodings, geometry, encoding)
            for index, (attention, geometry, encoding) in enumerate(layers)
        ),
    ]
