"""Description of the attention of a layer, and the checks of all descriptions."""

import math
from typing import Any, Dict, Optional, Tuple

import msgspec

from posenc_export.encodings.shared.base import Geometry
from posenc_export.shared.refusal import refusal

LARGEST = 1 << 62  # keeps sums of sizes within int64
Named = Dict[str, Any]  # {"name": name of a part or encoding, parameter: value}
MECHANISMS = ("softmax", "linear")


def check(holds: bool, rule: str, got: object, remedy: str) -> None:
    """Raise ValueError if a description does not follow a rule."""
    if not holds:
        raise refusal("config", rule, got, remedy)


def at_least(least: int, config: object, *names: str) -> None:
    """Check sizes."""
    for name in names:
        size = getattr(config, name)
        rule = f"{name} to be at least {least} and below 2^62"
        check(least <= size < LARGEST, rule, size, "choose another size")


def finite_above_zero(config: object, *names: str) -> None:
    """Check factors, which may be None."""
    for name in names:
        value = getattr(config, name)
        finite = value is None or 0 < value < math.inf
        check(finite, f"{name} to be a finite number above 0", value, "choose another number")


class AttentionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The attention of a layer.

    Args:
        heads: number of query heads H.
        kv_heads: number of key and value heads K, a divisor of H.
        head_size: head size D.
        encodings: encodings of queries, keys and scores, in the order in which they are applied.
        sees: which keys a query attends to. "causal", "window" and "chunk" use a cache. With
            "both" and "near", every call is a whole sequence.
        projection: from hidden states to queries, keys and values, and from attention outputs to
            hidden states.
        scale: factor on q k. None: the encodings' scale, 1/sqrt(D) for most. Must be None for
            encodings that compute scores themselves.
        softcap: scores become softcap tanh(s / softcap), before biases and masks.
        sinks: each head has a trained logit that takes part in the softmax and has no value.
        mechanism: "softmax"; "linear" (models/linear_attention.py) with sees "causal" or "both".

    Raises:
        ValueError: a size below 1, heads not divisible by kv_heads, an unknown mechanism, a
            scale or softcap that is not a finite number above 0.
    """

    heads: int
    kv_heads: int
    head_size: int
    encodings: Tuple[Named, ...] = ()
    sees: Named = msgspec.field(default_factory=lambda: {"name": "causal"})
    projection: Named = msgspec.field(default_factory=lambda: {"name": "grouped"})
    scale: Optional[float] = None
    softcap: Optional[float] = None
    sinks: bool = False
    mechanism: str = "softmax"

    def __post_init__(self) -> None:
        at_least(1, self, "heads", "kv_heads", "head_size")
        finite_above_zero(self, "scale", "softcap")
        divisible = self.heads % self.kv_heads == 0
        got = f"{self.heads} and {self.kv_heads}"
        check(divisible, "heads to be divisible by kv_heads", got, "change one of them")
        choices = f"mechanism to be one of {', '.join(MECHANISMS)}"
        check(self.mechanism in MECHANISMS, choices, repr(self.mechanism), "choose one of these")

    @property
    def causal(self) -> bool:
        """Whether no query attends to later tokens, so that keys can be cached between calls."""
        return self.sees.get("name") not in ("both", "near")

    def geometry(self, width: int, max_positions: int) -> Geometry:
        """Return the sizes that encodings are built from, for a model of this width and range."""
        heads, size = self.heads, self.head_size
        return Geometry(width, heads, size, max_positions, self.causal, self.kv_heads)
