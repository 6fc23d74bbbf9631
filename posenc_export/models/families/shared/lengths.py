"""The factors of LongRoPE in a decoder: one set for all positions, or by each position."""

from typing import Optional

import msgspec

from posenc_export.models.config import Named, StackConfig
from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import check_name

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
    if lengths is not None:
        check_name("checkpoint: expected lengths", lengths, LENGTHS)
    used = [spec["name"] for read in config.attentions for spec in read.encodings]
    if LONGROPE not in used or config.head is None:
        if lengths is not None:
            got = f"{lengths!r} for another model"
            rule = "lengths only for a decoder with LongRoPE"
            raise refusal("checkpoint", rule, got, "leave it out")
        return config
    layers = {}
    for name, kind in config.layers.items():
        chosen = (_chosen(s, lengths, config.max_positions) for s in kind.attention.encodings)
        layers[name] = kind.with_attention(encodings=tuple(chosen))
    return msgspec.structs.replace(config, layers=layers)


def _chosen(spec: Named, lengths: Optional[str], max_positions: int) -> Named:
    """Return the specification of an encoding with the choice of factors."""
    if spec["name"] != LONGROPE:
        return spec
    trained = int(spec["original_max_positions"])
    if lengths == "short" and max_positions > trained:
        rule = f"max_positions of at most the trained length {trained} with lengths short"
        remedy = f"give max_positions {trained}, or lengths by_position"
        raise refusal("checkpoint", rule, max_positions, remedy)
    return {**spec, "lengths": lengths or ("long" if max_positions > trained else "short")}
