"""Registry of the parts of models, by kind and name. Every part has a method `exact` with an
independent implementation in float64 numpy. The oracle of a model is composed of these methods.
"""

from typing import Any

from posenc_export.models.parts import residuals, visibility
from posenc_export.models.parts.mlps import Gated, Plain
from posenc_export.models.parts.norms import NORMS
from posenc_export.models.parts.projections import Grouped
from posenc_export.shared import registry
from posenc_export.shared.registry import Spec

PARTS: dict[str, dict[str, type[Any]]] = {
    "norm": NORMS,
    "projection": {"grouped": Grouped},
    "sees": {
        "causal": visibility.Causal,
        "window": visibility.Window,
        "chunk": visibility.Chunk,
        "both": visibility.Bidirectional,
        "near": visibility.BidirectionalWindow,
    },
    "mlp": {"plain": Plain, "gated": Gated},
    "residual": {"pre": residuals.PreNorm, "post": residuals.PostNorm},
}


def build(kind: str, spec: Spec, *context: Any) -> Any:
    """Build the part of a kind that {"name": key of PARTS[kind], parameter: value} describes, with
    leading arguments such as the width. ValueError: as registry.build.
    """
    return registry.build(kind, PARTS[kind], spec, *context)
