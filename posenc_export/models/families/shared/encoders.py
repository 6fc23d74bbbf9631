"""Layers of decoders that read an encoder."""

from typing import Dict, Optional, Tuple

from posenc_export.models.config import AttentionConfig, LayerConfig, Named
from posenc_export.models.families.shared.family import layer_of


def reading_layers(
    kind: LayerConfig, layers: int, projection: Named, scale: Optional[float] = None
) -> Tuple[Dict[str, LayerConfig], Tuple[str, ...]]:
    """Return kinds and order of the layers of a decoder that reads an encoder. Each of its layers
    becomes two: the self-attention of `kind`, then cross-attention with its MLP.
    """
    own, norm = kind.attention, kind.norms[0]
    cross = AttentionConfig(
        heads=own.heads,
        kv_heads=own.heads,
        head_size=own.head_size,
        sees={"name": "encoder"},
        projection=projection,
        scale=scale,
    )
    reading = layer_of(cross, kind.mlp, norm)
    kinds = {"own": layer_of(own, {"name": "none"}, norm, "alone"), "encoder": reading}
    return kinds, ("own", "encoder") * layers
