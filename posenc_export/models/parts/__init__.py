"""Registry of the parts of models, by kind and name. Every part has a method `exact` with an
independent implementation in float64 numpy. The oracle of a model is composed of these methods.
"""

from typing import Any, Dict, Type

from posenc_export.models.parts import norms, residuals, visibility
from posenc_export.models.parts.mlps import Gated, Plain
from posenc_export.models.parts.norms import NORMS, Identity
from posenc_export.models.parts.projections import Grouped
from posenc_export.shared import registry
from posenc_export.shared.registry import Spec

PARTS: Dict[str, Dict[str, Type[Any]]] = {
    "norm": NORMS,
    "head_norm": {"none": Identity, "head": norms.SharedHeadNorm},
    "projection": {"grouped": Grouped},
    "sees": {
        "causal": visibility.Causal,
        "window": visibility.Window,
        "chunk": visibility.Chunk,
        "both": visibility.Bidirectional,
        "near": visibility.BidirectionalWindow,
    },
    "mlp": {"plain": Plain, "gated": Gated},
    "residual": {
        "pre": residuals.PreNorm,
        "post": residuals.PostNorm,
        "sandwich": residuals.SandwichNorm,
    },
}


def build(kind: str, spec: Spec, *context: Any) -> Any:
    """Build the part of a kind that {"name": key of PARTS[kind], parameter: value} describes, with
    leading arguments such as the width. ValueError: as registry.build.
    """
    return registry.build(kind, PARTS[kind], spec, *context)
