"""No position encoding: only the causal mask conveys order (Kazemnejad et al. 2023, The Impact
of Positional Encoding on Length Generalization).
"""

from posenc_export.encodings.shared.base import Geometry, PositionEncoding


class NoPE(PositionEncoding):
    """scores = q k."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
