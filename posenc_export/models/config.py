"""Descriptions of models: immutable, convertible to and from JSON, unknown keys refused. Parts are
named as in parts/__init__.py, encodings as in encodings/__init__.py.

{"kind": "decoder", "width": 128, "max_positions": 4096,
 "tokens": {"vocabulary": 256},
 "layers": {"layer": {"residual": {"name": "pre"}, "norms": [{"name": "rms"}, {"name": "rms"}],
                      "attention": {"heads": 4, "kv_heads": 2, "head_size": 32, "encodings":
                      [{"name": "rope"}]}, "mlp": {"name": "gated", "hidden": 352}}},
 "order": ["layer", "layer"], "norm": {"name": "rms"}, "head": {"tied": true}}
"""

import math
from typing import Any

import msgspec

from posenc_export.encodings.shared.base import Geometry
from posenc_export.shared.refusal import refusal

LARGEST = 1 << 62  # keeps sums of sizes within int64
Named = dict[str, Any]  # {"name": name of a part or encoding, parameter: value}
MECHANISMS = ("softmax", "linear")


def require(holds: bool, rule: str, got: object, remedy: str) -> None:
    """Raise ValueError if a description does not follow a rule."""
    if not holds:
        raise refusal("config", rule, got, remedy)


def check_sizes(**sizes: object) -> None:
    for name, size in sizes.items():
        rule = f"{name} to be a whole number of at least 1, below 2^62"
        require(isinstance(size, int) and 1 <= size < LARGEST, rule, repr(size), "choose another")


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
        mechanism: "softmax"; "linear" (LinearAttention) with sees "causal" or "both".

    Raises:
        ValueError: a size below 1, heads not divisible by kv_heads, an unknown mechanism, a
            scale or softcap that is not a finite number above 0.
    """

    heads: int
    kv_heads: int
    head_size: int
    encodings: tuple[Named, ...] = ()
    sees: Named = msgspec.field(default_factory=lambda: {"name": "causal"})
    projection: Named = msgspec.field(default_factory=lambda: {"name": "grouped"})
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    mechanism: str = "softmax"

    def __post_init__(self) -> None:
        check_sizes(heads=self.heads, kv_heads=self.kv_heads, head_size=self.head_size)
        for name in ("scale", "softcap"):
            value = getattr(self, name)
            finite = value is None or 0 < value < math.inf
            require(finite, f"{name} to be a finite number above 0", value, "choose another number")
        divisible = self.heads % self.kv_heads == 0
        got = f"{self.heads} and {self.kv_heads}"
        require(divisible, "heads to be divisible by kv_heads", got, "change one of them")
        choices = f"mechanism to be one of {', '.join(MECHANISMS)}"
        require(self.mechanism in MECHANISMS, choices, repr(self.mechanism), "choose one of these")

    @property
    def causal(self) -> bool:
        """Whether no query attends to later tokens, so that keys can be cached between calls."""
        return self.sees.get("name") not in ("both", "near")

    def geometry(self, width: int, max_positions: int) -> Geometry:
        """Return the sizes that encodings are built from, for a model of this width and range."""
        heads, size = self.heads, self.head_size
        return Geometry(width, heads, size, max_positions, self.causal, self.kv_heads)


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
    encodings: tuple[Named, ...] = ()

    def __post_init__(self) -> None:
        check_sizes(width=self.width, max_positions=self.max_positions)

    @property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        """The attention, as that of each layer of a stack."""
        return (self.attention,)


class TokensConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The embedding part: token ids to hidden states, by table, encodings and norm, in this order.

    Args:
        vocabulary: number of token ids V.
        encodings: encodings of embedded tokens.
        norm: norm of the result.

    Raises:
        ValueError: a vocabulary below 1.
    """

    vocabulary: int
    encodings: tuple[Named, ...] = ()
    norm: Named | None = None

    def __post_init__(self) -> None:
        check_sizes(vocabulary=self.vocabulary)


class LayerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of layer.

    Args:
        residual: arrangement of norms and residual sums.
        norms: that of the attention, then that of the MLP.
        attention, mlp: the two sublayers.
    """

    residual: Named
    norms: tuple[Named, ...]
    attention: AttentionConfig
    mlp: Named


class HeadConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The output head: hidden states to logits. tied: use the token table as weights."""

    tied: bool = True


class ReadoutConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A second output of a model without a cache, computed from its hidden states, such as a
    sentence embedding.

    Args:
        output: name of the output.
        size: number N of its entries.
        pooling: one of parts/readout.py.
        layers: what follows the pooling, by the names of sentence-transformers.
    """

    output: str
    size: int
    pooling: str
    layers: tuple[str, ...] = ()


class StackConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model of tokens, layers and head: a decoder; without a head, an encoder.

    Args:
        width: model width E.
        max_positions: number of positions; the range is 0 .. max_positions - 1.
        tokens: the embedding part.
        layers: kinds of layers by name.
        order: kind of each layer, by name.
        norm: norm after the last layer; None for none.
        head: output head; None returns hidden states.

    Raises:
        ValueError: a size below 1, no layer, names in `order` that differ from those in `layers`,
            causal and bidirectional layers in one model.
    """

    width: int
    max_positions: int
    tokens: TokensConfig
    layers: dict[str, LayerConfig]
    order: tuple[str, ...]
    norm: Named | None = None
    head: HeadConfig | None = None

    def __post_init__(self) -> None:
        check_sizes(width=self.width, max_positions=self.max_positions)
        names, order = sorted(self.layers), sorted(set(self.order))
        rule = f"order to name each kind in layers ({', '.join(names) or 'none'}) and no other"
        require(names == order, rule, ", ".join(order) or "none", "correct order")
        require(bool(order), "at least one layer", "none", "describe one")
        remedy = "describe them as two models"
        directions = {attention.causal for attention in self.attentions}
        require(len(directions) < 2, "all layers to be causal or none", "both", remedy)

    @property
    def kinds(self) -> tuple[LayerConfig, ...]:
        """The kind of each layer."""
        return tuple(self.layers[name] for name in self.order)

    @property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        """The attention of each layer."""
        return tuple(kind.attention for kind in self.kinds)

    @property
    def token_geometry(self) -> Geometry:
        """Sizes of token encodings: those of the first layer."""
        return self.attentions[0].geometry(self.width, self.max_positions)


class CacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cache [B,heads,T,size] of a layer of a module that was read, a state [B,heads,size,values],
    or the last tokens [B,size,values].

    Args:
        layer: number of the layer, in the order of computation.
        name: "key" and "value" of an attention, or what a layer keeps.
        heads: 0 for the last tokens.
        values: 0 for a cache.
    """

    layer: int
    name: str
    heads: int
    size: int
    values: int = 0


class ModuleConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Description of a torch module that was read as it is.

    Args:
        name: qualified name of the class.
        width: width of the hidden states that the module takes; 0 if it takes token ids.
        tokens: {"vocabulary": number of token ids, "segments": number of token types, or 0} if the
            module takes token ids, else {}.
        outputs: number of outputs N for each token.
        max_positions: number of positions; the range is 0 .. max_positions - 1.
        caches: what is kept between calls, in the order of the states.
        edges: constants that the module compares lengths with, and limits in the configuration of
            a model of transformers, by name.
        remedies: what was done so that torch.export takes the module.
        positions: name of the argument of forward that takes positions, or None.
        axes: number of coordinates of each token, if this argument takes them.
        causal: whether no token sees a later one.
        output: name of the output, if forward returns several.
        readout: second output, computed from the outputs of a module without caches.
        labels: names of the logits of a task head, or none.
    """

    name: str
    width: int
    tokens: dict[str, int]
    outputs: int
    max_positions: int
    caches: tuple[CacheConfig, ...] = ()
    edges: dict[str, int] = {}
    remedies: tuple[str, ...] = ()
    positions: str | None = None
    axes: int = 0
    causal: bool = True
    output: str | None = None
    readout: ReadoutConfig | None = None
    labels: tuple[str, ...] = ()

    @property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        """Empty: the description of a module that is read has no attentions."""
        return ()

    @property
    def decodes(self) -> bool:
        """Whether the outputs are logits of token ids."""
        return self.causal and self.outputs == self.tokens.get("vocabulary")


AnyConfig = BlockConfig | StackConfig
