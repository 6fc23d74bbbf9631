"""The parts that models are made of, by name: one line each brings a part into every description.

Every part has `exact`, which computes the same in float64 numpy, written differently: the oracle of a model is made of these.
"""

from typing import Any, Dict, Type

from posenc_export import registry
from posenc_export.models.parts.experts import Experts
from posenc_export.models.parts.features import Convolutions
from posenc_export.models.parts.head_norms import Each, Heads, NoHeadNorm, Projection
from posenc_export.models.parts.mlps import Gated, NoMLP, Plain
from posenc_export.models.parts.norms import LayerNorm, NoNorm, RMSNorm
from posenc_export.models.parts.projections import Grouped, Latent, Queries
from posenc_export.models.parts.residuals import After, Alone, Parallel, ParallelNorms, Post, Pre, Sandwich
from posenc_export.models.parts.sight import Both, Causal, Chunk, Near, OfEncoder, Window
from posenc_export.registry import Spec

PARTS: Dict[str, Dict[str, Type[Any]]] = {
    "features": {"convolutions": Convolutions},
    "norm": {"rms": RMSNorm, "layer": LayerNorm, "none": NoNorm},
    "head_norm": {"none": NoHeadNorm, "head": Heads, "each": Each, "projection": Projection},
    "projection": {"grouped": Grouped, "latent": Latent, "queries": Queries},
    "sees": {"causal": Causal, "window": Window, "chunk": Chunk, "both": Both, "near": Near, "encoder": OfEncoder},
    "mlp": {"plain": Plain, "gated": Gated, "experts": Experts, "none": NoMLP},
    "residual": {"pre": Pre, "alone": Alone, "post": Post, "after": After, "sandwich": Sandwich, "parallel": Parallel, "parallel_norms": ParallelNorms},
}


def build(kind: str, spec: Spec, *context: Any) -> Any:
    """The part of a kind that a specification {"name": ..., parameter: value} describes, from what its class takes before its parameters.

    Raises:
        ValueError: as registry.build.
    """
    return registry.build(kind, PARTS[kind], spec, *context)
