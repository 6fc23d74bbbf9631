"""Formats in which keys and values are cached beside activations in float32."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheFormat:
    """A format of cached keys and values, named after the dtype of their states.

    Args:
        targets: that write it.
        operators: of attention, that read it.
        scaled: whether channels have scales, which calibration data determines.
        unit: unit roundoff of its numbers, if they have no scales.
    """

    targets: tuple[str, ...]
    operators: tuple[str, ...]
    scaled: bool = False
    unit: float = 0.0


CACHE_FORMATS = {
    "float16": CacheFormat(("ort-native",), ("CachedAttention",), unit=2.0**-11),
    "int8": CacheFormat(
        ("ort", "ort-native"), ("GroupQueryAttention", "CachedAttention"), scaled=True
    ),
}
SCALED = tuple(name for name, format_ in CACHE_FORMATS.items() if format_.scaled)
