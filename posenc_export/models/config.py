"""Descriptions of models: immutable, convertible to and from JSON, unknown keys refused. Parts are
named as in parts/__init__.py, encodings as in encodings/__init__.py.

{"kind": "decoder", "width": 128, "max_positions": 4096,
 "tokens": {"vocabulary": 256},
 "layers": {"layer": {"residual": {"name": "pre"}, "norms": [{"name": "rms"}, {"name": "rms"}],
                      "attention": {"heads": 4, "kv_heads": 2, "head_size": 32, "encodings":
                      [{"name": "rope"}]}, "mlp": {"name": "gated", "hidden": 352}}},
 "order": ["layer", "layer"], "norm": {"name": "rms"}, "head": {"tied": true}}
"""

from typing import Any, Dict, Optional, Tuple, Union

import msgspec

from posenc_export.encodings.shared.base import Geometry

LARGEST = 1 << 62  # keeps sums of sizes within int64
Named = Dict[str, Any]  # {"name": name of a part or encoding, parameter: value}
MECHANISMS = ("softmax", "linear")


def _at_least_one(config: object, *names: str) -> None:
    for name in names:
        if not 1 <= getattr(config, name) < LARGEST:
            raise ValueError(
                f"config: expected {name} to be at least 1 and below 2^62, got "
                f"{getattr(config, name)}"
            )


def _finite_above_zero(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"config: expected {name} to be a finite number above 0, got {value}")


class AttentionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The attention of a layer.

    Args:
        heads: number of query heads H.
        kv_heads: number of key and value heads K, a divisor of H.
        head_size: head size D.
        encodings: encodings of queries, keys and scores, in the order in which they are applied.
        sees: which keys a query attends to. "causal", "window" and "chunk" use a cache. "both" and
            "near" have no cache: every call is a whole sequence. "encoder" is cross-attention to
            keys and values of another sequence; it needs projection "queries" and takes no
            encodings.
        projection: from hidden states to queries, keys and values, and from attention outputs to
            hidden states.
        head_norm: norm of projected queries and keys.
        scale: factor on q k. None: the encodings' scale, 1/sqrt(D) for most. Must be None for
            encodings that compute scores themselves.
        softcap: scores become softcap tanh(s / softcap), before biases and masks.
        sinks: each head has a trained logit that takes part in the softmax and has no value.
        mechanism: "softmax", or "linear" (models/linear_attention.py) with sees "causal" or "both".

    Raises:
        ValueError: a size below 1, heads not divisible by kv_heads, an unknown mechanism, a scale
            or softcap that is not a finite number above 0, parts that cross-attention does not
            support.
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
            raise ValueError(
                f"config: expected heads to be divisible by kv_heads, got {self.heads} and "
                f"{self.kv_heads}"
            )
        if self.mechanism not in MECHANISMS:
            raise ValueError(
                f"config: expected mechanism to be one of {', '.join(MECHANISMS)}, got "
                f"{self.mechanism!r}"
            )
        if self.reads_encoder != (self.projection.get("name") == "queries"):
            found = f"{self.projection.get('name')} and {self.sees.get('name')}"
            raise ValueError(
                "config: expected projection queries if and only if sees is encoder, got "
                f"{found}; change one of them"
            )
        if self.reads_encoder and (self.encodings or self.head_norm or self.mechanism != "softmax"):
            rule = (
                "config: expected attention to an encoder to be softmax without encodings and "
                "head_norm"
            )
            raise ValueError(
                f"{rule}, got mechanism {self.mechanism}, {len(self.encodings)} encodings, "
                f"head_norm {self.head_norm}; remove what is not allowed"
            )

    @property
    def reads_encoder(self) -> bool:
        """Whether keys and values come from an encoder (cross-attention)."""
        return self.sees.get("name") == "encoder"

    @property
    def causal(self) -> bool:
        """Whether no query attends to later tokens, so that keys can be cached between calls."""
        return self.sees.get("name") not in ("both", "near")

    def geometry(self, width: int, max_positions: int) -> Geometry:
        """Return the sizes that encodings are built from, for a model of this width and range."""
        return Geometry(
            width, self.heads, self.head_size, max_positions, self.causal, self.kv_heads
        )


class BlockConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One attention with its encodings: hidden states in, hidden states out.

    Args:
        width: model width E.
        max_positions: number of positions; the range is 0 .. max_positions - 1.
        attention: the attention of the block.
        encodings: encodings of hidden states, applied before the attention.

    Raises:
        ValueError: a size below 1.
    """

    width: int
    max_positions: int
    attention: AttentionConfig
    encodings: Tuple[Named, ...] = ()

    def __post_init__(self) -> None:
        _at_least_one(self, "width", "max_positions")


HIDDEN_STATES = "hidden_states"  # the only features that a model with a cache may read


class TokensConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The embedding part: token ids or features to hidden states, by table or features, factor,
    encodings, segments and norm, in this order.

    Args:
        vocabulary: number of token ids V; 0 with features.
        features: part that computes hidden states from features, in place of a token table;
            hidden_states takes them as they are.
        scale: factor on embedded tokens or features.
        encodings: encodings of embedded tokens.
        segments: number of token types; 0 for none.
        norm: norm of the result.

    Raises:
        ValueError: neither a vocabulary nor features, or both; segments with features, or below 0;
            a scale that is not a finite number above 0.
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
            raise ValueError(
                "config: expected no vocabulary and no segments with features, got "
                f"{self.vocabulary} and {self.segments}; leave them out"
            )
        _finite_above_zero(self, "scale")
        if not 0 <= self.segments < LARGEST:
            raise ValueError(
                f"config: expected segments to be at least 0 and below 2^62, got {self.segments}"
            )


class LayerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of layer.

    Args:
        residual: arrangement of norms and residual sums.
        norms: norms of the layer in the order of computation; `residual` determines their number.
        attention, mlp: the two sublayers.
    """

    residual: Named
    norms: Tuple[Named, ...]
    attention: AttentionConfig
    mlp: Named

    def with_attention(self, **changes: Any) -> "LayerConfig":
        """Return the layer with changed fields of its attention."""
        attention = msgspec.structs.replace(self.attention, **changes)
        return msgspec.structs.replace(self, attention=attention)

    def with_mlp(self, **changes: Any) -> "LayerConfig":
        """Return the layer with changed parameters of its MLP."""
        return msgspec.structs.replace(self, mlp={**self.mlp, **changes})


class HeadConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The output head: hidden states to logits.

    Args:
        tied: use the token table as weights.
        bias: add a trained number for each token id.
        scale: factor on logits.
        softcap: logits become softcap tanh(l / softcap), after the factor.

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
    """Projection of an encoder's hidden states to the keys and values of a decoder's
    cross-attention layers.

    Args:
        size: output size N for each token. For each cross-attention layer of the decoder, in order:
            K*D for the key, then K*D for the value.
        bias: add a bias.

    Raises:
        ValueError: a size below 1.
    """

    size: int
    bias: bool = False

    def __post_init__(self) -> None:
        _at_least_one(self, "size")


class ReadoutConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A second output of an encoder, computed from its hidden states, such as a sentence embedding.

    Args:
        output: name of the output.
        pooling: ways to reduce the hidden states of a sequence to one (parts/readout.py), whose
            results are concatenated; empty for an output for each token.
        layers: layers after the pooling, in the order of computation.
        labels: names of the numbers of the output, or none.

    Raises:
        ValueError: no pooling and no layers; labels of another number than the outputs of the last
            dense layer.
    """

    output: str
    pooling: Tuple[str, ...] = ()
    layers: Tuple[Named, ...] = ()
    labels: Tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.pooling and not self.layers:
            raise ValueError(
                f"config: expected pooling or layers in readout {self.output}, got neither; add one"
            )
        if self.labels and len(self.labels) != self.size(0):
            raise ValueError(
                f"config: expected a label for each of the {self.size(0)} outputs of readout "
                f"{self.output}, got {len(self.labels)}; correct labels"
            )

    def size(self, width: int) -> int:
        """Return the size N of the output, for hidden states of a width."""
        sizes = [spec["size"] for spec in self.layers if "size" in spec]
        return int(sizes[-1]) if sizes else width * max(len(self.pooling), 1)


class StackConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model of tokens, layers and head: a decoder; without a head, an encoder; without layers,
    the embedding part alone.

    Args:
        width: model width E.
        max_positions: number of positions; the range is 0 .. max_positions - 1.
        tokens: the embedding part.
        layers: kinds of layers by name.
        order: kind of each layer, by name. Empty, like `layers`, for the embedding part alone.
        norm: norm after the last layer; None for none.
        head: output head; None returns hidden states.
        key_values: for an encoder, return keys and values for a decoder in place of hidden states.
        readout: for an encoder, a second output beside the hidden states.

    Raises:
        ValueError: a size below 1, names in `order` that differ from those in `layers`, causal and
            bidirectional layers in one model, cross-attention layers without causal layers,
            key_values or features in a decoder, a head or key_values without layers, a readout in a
            model other than an encoder.
    """

    width: int
    max_positions: int
    tokens: TokensConfig
    layers: Dict[str, LayerConfig] = msgspec.field(default_factory=dict)
    order: Tuple[str, ...] = ()
    norm: Optional[Named] = None
    head: Optional[HeadConfig] = None
    key_values: Optional[KeyValuesConfig] = None
    readout: Optional[ReadoutConfig] = None

    def __post_init__(self) -> None:
        _at_least_one(self, "width", "max_positions")
        if set(self.order) != set(self.layers):
            found = ", ".join(sorted(set(self.order))) or "none"
            raise ValueError(
                "config: expected order to name each kind in layers "
                f"({', '.join(sorted(self.layers)) or 'none'}) and no other, got {found}"
            )
        if not self.order and (self.head is not None or self.key_values is not None):
            raise ValueError(
                "config: expected layers before a head or key_values, got none; add layers, "
                "or leave out head and key_values"
            )
        attentions = [kind.attention for kind in self.layers.values()]
        own = {attention.causal for attention in attentions if not attention.reads_encoder}
        if len(own) > 1:
            raise ValueError(
                "config: expected all layers to be causal or none, got both; describe them "
                "as two models"
            )
        if own != {True} and any(attention.reads_encoder for attention in attentions):
            raise ValueError(
                "config: expected causal layers in a decoder that reads an encoder, got "
                "none; add them"
            )
        if self.tokens.features is not None and (
            self.head is not None
            or own == {True}
            and self.tokens.features.get("name") != HIDDEN_STATES
        ):
            raise ValueError(
                "config: expected features only in an encoder without a head, got a decoder; "
                "give a vocabulary, or hidden_states as features and no head"
            )
        if self.key_values is not None and (self.head is not None or own == {True}):
            raise ValueError(
                "config: expected key_values only in an encoder without a head, got a "
                "decoder; leave them out"
            )
        if self.readout is not None and (
            self.head is not None or self.key_values is not None or own != {False}
        ):
            raise ValueError(
                "config: expected readout only in an encoder with hidden states as output, "
                "got another model; leave it out"
            )

    @property
    def kinds(self) -> Tuple[LayerConfig, ...]:
        """The kind of each layer."""
        return tuple(self.layers[name] for name in self.order)

    @property
    def token_geometry(self) -> Geometry:
        """Sizes that token encodings are built from: those of the first layer, or without layers
        those of one bidirectional head of size E.
        """
        kinds = self.kinds
        return (
            kinds[0].attention.geometry(self.width, self.max_positions)
            if kinds
            else Geometry(self.width, 1, self.width, self.max_positions, causal=False)
        )


class ModuleConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Description of a user's own module.

    Args:
        name: qualified name of the class.
        inside: description of the block or stack inside the module, from `to_json`.
        width: width of the hidden states that the module takes; 0 if it takes token ids.
        tokens: {"vocabulary": number of token ids, "segments": 0} if the module takes token ids,
            else {}.
        outputs: number of outputs N for each token.
        max_positions: number of positions; the range is 0 .. max_positions - 1.
    """

    name: str
    inside: Dict[str, Any]
    width: int
    tokens: Dict[str, int]
    outputs: int
    max_positions: int


AnyConfig = Union[BlockConfig, StackConfig]
