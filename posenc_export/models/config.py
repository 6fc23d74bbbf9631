"""Plain descriptions of models: frozen, JSON both ways, unknown keys refused. Parts are named as in parts/__init__.py, encodings as in encodings/__init__.py.

    {"kind": "decoder", "width": 128, "max_positions": 4096,
     "tokens": {"vocabulary": 256},
     "layers": {"layer": {"residual": {"name": "pre"}, "norms": [{"name": "rms"}, {"name": "rms"}],
                          "attention": {"heads": 4, "kv_heads": 2, "head_size": 32, "encodings": [{"name": "rope"}]},
                          "mlp": {"name": "gated", "hidden": 352}}},
     "order": ["layer", "layer"], "norm": {"name": "rms"}, "head": {"tied": true}}
"""

from typing import Any, Dict, Optional, Tuple, Union

import msgspec

from posenc_export.encodings.base import Geometry

LARGEST = 1 << 62  # sums of sizes stay within int64
Named = Dict[str, Any]  # {"name": of a part or encoding, parameter: value}
MECHANISMS = ("softmax", "linear")


def _at_least_one(config: object, *names: str) -> None:
    for name in names:
        if not 1 <= getattr(config, name) < LARGEST:
            raise ValueError(f"config: {name} is at least 1 and below 2^62, got {getattr(config, name)}")


def _finite_above_zero(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"config: {name} is a finite number above 0, got {value}")


class AttentionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The attention of a layer.

    Args:
        heads: query heads H.
        kv_heads: key and value heads K, a divisor of H.
        head_size: head size D.
        encodings: what acts on queries, keys and scores, in this order.
        sees: what a query sees of the keys: "causal", "window", "chunk" with a cache; "both", "near" without, where every call is a whole sequence; "encoder":
            keys and values of another sequence, which are given (cross-attention; projection "queries", no encodings).
        projection: from hidden states to queries, keys, values and back.
        head_norm: of projected queries and keys.
        scale: factor on q k, 1 for scores without one; the encodings', which is 1/sqrt(D) for most, where None. Encodings that make scores of content
            have one of their own.
        softcap: scores are softcap tanh(s / softcap), before biases and masks.
        sinks: a trained score for each head that takes its share of the softmax and brings no value.
        mechanism: "softmax", or "linear" (models/linear_attention.py), where a query sees "causal" or "both".

    Raises:
        ValueError: a size below 1, heads not divisible by kv_heads, an unknown mechanism, a scale or softcap that is not a finite number above 0, parts that do
            not go with attention to an encoder.
    """

    heads: int
    kv_heads: int
    head_size: int
    encodings: Tuple[Named, ...] = ()
    sees: Named = msgspec.field(default_factory=lambda: {"name": "causal"})
    projection: Named = msgspec.field(default_factory=lambda: {"name": "grouped"})
    head_norm: Optional[Named] = None
    scale: Optional[float] = None
    softcap: Optional[float] = None
    sinks: bool = False
    mechanism: str = "softmax"

    def __post_init__(self) -> None:
        _at_least_one(self, "heads", "kv_heads", "head_size")
        _finite_above_zero(self, "scale", "softcap")
        if self.heads % self.kv_heads:
            raise ValueError(f"config: heads are divisible by kv_heads, got {self.heads} and {self.kv_heads}")
        if self.mechanism not in MECHANISMS:
            raise ValueError(f"config: mechanism is one of {', '.join(MECHANISMS)}, got {self.mechanism!r}")
        if self.reads_encoder != (self.projection.get("name") == "queries"):
            raise ValueError(f"config: projection queries and sees encoder go together, got {self.projection.get('name')} and {self.sees.get('name')}")
        if self.reads_encoder and (self.encodings or self.head_norm or self.mechanism != "softmax"):
            raise ValueError("config: attention to an encoder is softmax without encodings and head_norm, got one of them; leave it out")

    @property
    def reads_encoder(self) -> bool:
        """Whether keys and values are those of an encoder."""
        return self.sees.get("name") == "encoder"

    @property
    def causal(self) -> bool:
        """Whether a query sees nothing behind it, so that keys can be kept from call to call."""
        return self.sees.get("name") not in ("both", "near")

    def geometry(self, width: int, max_positions: int) -> Geometry:
        """What encodings may know of a model of that width and range."""
        return Geometry(width, self.heads, self.head_size, max_positions, self.causal, self.kv_heads)


class BlockConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One attention with its encodings, from hidden states to hidden states.

    Args:
        width: model width E.
        max_positions: positions 0 .. max_positions - 1 are the range.
        attention: of the block.
        encodings: what acts on hidden states before it.

    Raises:
        ValueError: a size below 1.
    """

    width: int
    max_positions: int
    attention: AttentionConfig
    encodings: Tuple[Named, ...] = ()

    def __post_init__(self) -> None:
        _at_least_one(self, "width", "max_positions")


class TokensConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """From token ids, or from features, to hidden states: table or features, factor, encodings, segments, norm, in this order.

    Args:
        vocabulary: number of token ids V; 0 beside features.
        features: what makes hidden states of features in the place of a table.
        scale: factor on rows of the table.
        encodings: what acts on embedded tokens.
        segments: number of token types; 0 for none.
        norm: over what comes out.

    Raises:
        ValueError: neither a vocabulary nor features, or both; segments beside features, or fewer than 0; a scale that is not a finite number above 0.
    """

    vocabulary: int = 0
    features: Optional[Named] = None
    scale: float = 1.0
    encodings: Tuple[Named, ...] = ()
    segments: int = 0
    norm: Optional[Named] = None

    def __post_init__(self) -> None:
        if self.features is None:
            _at_least_one(self, "vocabulary")
        elif self.vocabulary or self.segments:
            raise ValueError(f"config: features have no vocabulary and no segments, got {self.vocabulary} and {self.segments}; leave them out")
        _finite_above_zero(self, "scale")
        if not 0 <= self.segments < LARGEST:
            raise ValueError(f"config: segments is at least 0 and below 2^62, got {self.segments}")


class LayerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A kind of layer.

    Args:
        residual: where norms and sums stand.
        norms: as many as that needs, in the order in which they are met.
        attention, mlp: its two halves.
    """

    residual: Named
    norms: Tuple[Named, ...]
    attention: AttentionConfig
    mlp: Named


class HeadConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """From hidden states to logits.

    Args:
        tied: the weights are those of the token table.
        bias: one number for each token id.
        scale: factor on logits.
        softcap: logits are softcap tanh(l / softcap), after the factor.

    Raises:
        ValueError: a scale or softcap that is not a finite number above 0.
    """

    tied: bool = True
    bias: bool = False
    scale: float = 1.0
    softcap: Optional[float] = None

    def __post_init__(self) -> None:
        _finite_above_zero(self, "scale", "softcap")


class KeyValuesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """From hidden states of an encoder to the keys and values of a decoder that reads it.

    Args:
        size: numbers N of a token: for each layer of the decoder that sees an encoder, in order, K*D of its key and K*D of its value.
        bias: one number for each.

    Raises:
        ValueError: a size below 1.
    """

    size: int
    bias: bool = False

    def __post_init__(self) -> None:
        _at_least_one(self, "size")


class StackConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Layers between tokens and a head: a decoder; without a head, an encoder; without layers, the embedded tokens.

    Args:
        width: model width E.
        max_positions: positions 0 .. max_positions - 1 are the range.
        tokens: what stands before the layers.
        layers: kinds of layers by name.
        order: the name of the kind of each layer; empty, as `layers`, for the embedding part alone.
        norm: behind the last layer; None for none.
        head: to logits; where None, hidden states come out.
        key_values: of an encoder, what comes out in the place of hidden states, for a decoder that reads them.

    Raises:
        ValueError: a size below 1, a name in `order` that `layers` has not or the other way round, causal layers beside others, layers that see an encoder
            without causal ones beside them, key_values or features of a decoder, a head or key_values without layers.
    """

    width: int
    max_positions: int
    tokens: TokensConfig
    layers: Dict[str, LayerConfig] = msgspec.field(default_factory=dict)
    order: Tuple[str, ...] = ()
    norm: Optional[Named] = None
    head: Optional[HeadConfig] = None
    key_values: Optional[KeyValuesConfig] = None

    def __post_init__(self) -> None:
        _at_least_one(self, "width", "max_positions")
        if set(self.order) != set(self.layers):
            found = ", ".join(sorted(set(self.order))) or "none"
            raise ValueError(f"config: order names each kind of layers and no other, got {found} of {', '.join(sorted(self.layers)) or 'none'}")
        if not self.order and (self.head is not None or self.key_values is not None):
            raise ValueError("config: a head and key_values stand behind layers, got one of them without layers; add layers or leave it out")
        attentions = [kind.attention for kind in self.layers.values()]
        own = {attention.causal for attention in attentions if not attention.reads_encoder}
        if len(own) > 1:
            raise ValueError("config: all layers are causal or none is, got both; describe the two as models of their own")
        if own != {True} and any(attention.reads_encoder for attention in attentions):
            raise ValueError("config: layers that see an encoder stand beside causal ones, got none; add them")
        if self.tokens.features is not None and (self.head is not None or own == {True}):
            raise ValueError("config: features are read by an encoder without a head, got a decoder; give a vocabulary")
        if self.key_values is not None and (self.head is not None or own == {True}):
            raise ValueError("config: key_values come from an encoder without a head, got a decoder; leave them out")

    @property
    def kinds(self) -> Tuple[LayerConfig, ...]:
        """The kind of each layer."""
        return tuple(self.layers[name] for name in self.order)

    @property
    def token_geometry(self) -> Geometry:
        """What encodings on tokens may know: the geometry of the first layer; without layers, that of one head, which sees both ways."""
        kinds = self.kinds
        return kinds[0].attention.geometry(self.width, self.max_positions) if kinds else Geometry(self.width, 1, self.width, self.max_positions, causal=False)


class ModuleConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is known of a module of the user's own beside its code.

    Args:
        name: of its class, with that of its Python module.
        inside: the description of the block or stack in it, as `to_json` gives it.
        width: of the hidden states that it reads; 0 where it reads token ids.
        tokens: {"vocabulary": number of token ids, "segments": 0} where it reads them.
        outputs: numbers that it gives for each token.
        max_positions: positions 0 .. max_positions - 1 are the range.
    """

    name: str
    inside: Dict[str, Any]
    width: int
    tokens: Dict[str, int]
    outputs: int
    max_positions: int


AnyConfig = Union[BlockConfig, StackConfig]
