"""Tiny models for tests: every registered encoding, in the smallest shape that still has groups, an odd slope count and partial sizes."""

from posenc_export.encodings import REGISTRY
from posenc_export.models.config import AttentionConfig, DecoderConfig

VARIANTS = {
    **{name: {"name": name} for name in REGISTRY},
    "rope-interleaved": {"name": "rope", "layout": "interleaved", "theta": 500000.0},
    "rope-partial": {"name": "rope", "rotary": 8},
    "sinusoidal-fairseq": {"name": "sinusoidal", "layout": "halves", "divisor": "fairseq", "scale": 2.0},
    "learned-offset": {"name": "learned", "offset": 2},
    "alibi-mpt": {"name": "alibi", "max_bias": 16.0},
}


def block(variant: str, max_positions: int = 1100, **overrides: object) -> AttentionConfig:
    values = {"width": 48, "heads": 6, "kv_heads": 3, "head_size": 16, "max_positions": max_positions, "encoding": VARIANTS[variant], **overrides}
    return AttentionConfig(**values)  # type: ignore[arg-type]


def decoder(variant: str, **overrides: object) -> DecoderConfig:
    tied = VARIANTS[variant]["name"] != "complex_order"  # its token table is wider than the model
    return DecoderConfig(vocabulary=61, layers=2, hidden=40, attention=block(variant, **overrides), tied=tied)
