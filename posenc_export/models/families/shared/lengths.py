"""The factors of LongRoPE in a decoder: one set for all positions, or by each position."""

from typing import Dict, Optional

import msgspec

from posenc_export.models.config import LayerConfig, Named, StackConfig
from posenc_export.shared.suggestion import suggestion

LONGROPE = "rope_longrope"
LENGTHS = ("long", "short", "by_position")


def with_lengths(config: StackConfig, lengths: Optional[str]) -> StackConfig:
    """Return the description with the choice of factors in each LongRoPE. Encoders keep that of the
    encoding.

    Args:
        lengths: one of LENGTHS; None for "long" if the range of positions is longer than the
            trained length, otherwise "short".

    Raises:
        ValueError: unknown lengths, lengths for a model that is no decoder with LongRoPE, short
            factors for a range beyond the trained length.
    """
    if lengths is not None and lengths not in LENGTHS:
        raise ValueError(
            f"checkpoint: expected lengths to be one of {', '.join(LENGTHS)}, got "
            f"{lengths!r}; {suggestion(lengths, LENGTHS)}"
        )
    scaled = [
        name
        for name, kind in config.layers.items()
        if any(spec["name"] == LONGROPE for spec in kind.attention.encodings)
    ]
    if not scaled or config.head is None:
        if lengths is not None:
            raise ValueError(
                "checkpoint: expected lengths only for a decoder with LongRoPE, got "
                f"{lengths!r} for another model; leave it out"
            )
        return config
    changed: Dict[str, LayerConfig] = {
        **config.layers,
        **{name: _chosen(config.layers[name], lengths, config.max_positions) for name in scaled},
    }
    return msgspec.structs.replace(config, layers=changed)


def _chosen(kind: LayerConfig, lengths: Optional[str], max_positions: int) -> LayerConfig:
    """Return a kind of layers with the choice of factors."""

    def fixed(spec: Named) -> Named:
        if spec["name"] != LONGROPE:
            return spec
        trained = int(spec["original_max_positions"])
        if lengths == "short" and max_positions > trained:
            rule = (
                f"expected max_positions of at most the trained length {trained} with lengths short"
            )
            raise ValueError(
                f"checkpoint: {rule}, got {max_positions}; give max_positions {trained}, or "
                "lengths by_position"
            )
        return {**spec, "lengths": lengths or ("long" if max_positions > trained else "short")}

    encodings = tuple(fixed(spec) for spec in kind.attention.encodings)
    return msgspec.structs.replace(
        kind, attention=msgspec.structs.replace(kind.attention, encodings=encodings)
    )
