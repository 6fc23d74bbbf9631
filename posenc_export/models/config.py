"""Descriptions of models: immutable, convertible to and from JSON, unknown keys refused. Parts are
named as in parts/__init__.py, encodings as in encodings/__init__.py.

{"kind": "decoder", "width": 128, "max_positions": 4096,
 "tokens": {"vocabulary": 256},
 "layers": {"layer": {"residual": {"name": "pre"}, "norms": [{"name": "rms"}, {"name": "rms"}],
                      "attention": {"heads": 4, "kv_heads": 2, "head_size": 32, "encodings":
                      [{"name": "rope"}]}, "mlp": {"name": "gated", "hidden": 352}}},
 "order": ["layer", "layer"], "norm": {"name": "rms"}, "head": {"tied": true}}
"""

from typing import Dict, Optional, Tuple, Union

import msgspec

from posenc_export.encodings.shared.base import Geometry
from posenc_export.models.attention_config import (
    AttentionConfig,
    Named,
    at_least,
    check,
)

__all__ = ["AttentionConfig", "Named"]


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
        at_least(1, self, "width", "max_positions")

    @property
    def attentions(self) -> Tuple[AttentionConfig, ...]:
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
    encodings: Tuple[Named, ...] = ()
    norm: Optional[Named] = None

    def __post_init__(self) -> None:
        at_least(1, self, "vocabulary")


class LayerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of layer.

    Args:
        residual: arrangement of norms and residual sums.
        norms: that of the attention, then that of the MLP.
        attention, mlp: the two sublayers.
    """

    residual: Named
    norms: Tuple[Named, ...]
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
    layers: Tuple[str, ...] = ()


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
    layers: Dict[str, LayerConfig]
    order: Tuple[str, ...]
    norm: Optional[Named] = None
    head: Optional[HeadConfig] = None

    def __post_init__(self) -> None:
        at_least(1, self, "width", "max_positions")
        names, order = sorted(self.layers), sorted(set(self.order))
        rule = f"order to name each kind in layers ({', '.join(names) or 'none'}) and no other"
        check(names == order, rule, ", ".join(order) or "none", "correct order")
        check(bool(order), "at least one layer", "none", "describe one")
        remedy = "describe them as two models"
        directions = {attention.causal for attention in self.attentions}
        check(len(directions) < 2, "all layers to be causal or none", "both", remedy)

    @property
    def kinds(self) -> Tuple[LayerConfig, ...]:
        """The kind of each layer."""
        return tuple(self.layers[name] for name in self.order)

    @property
    def attentions(self) -> Tuple[AttentionConfig, ...]:
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
    tokens: Dict[str, int]
    outputs: int
    max_positions: int
    caches: Tuple[CacheConfig, ...] = ()
    edges: Dict[str, int] = {}
    remedies: Tuple[str, ...] = ()
    positions: Optional[str] = None
    axes: int = 0
    causal: bool = True
    output: Optional[str] = None
    readout: Optional[ReadoutConfig] = None
    labels: Tuple[str, ...] = ()

    @property
    def attentions(self) -> Tuple[AttentionConfig, ...]:
        """None: a module that is read describes no attention."""
        return ()

    @property
    def decodes(self) -> bool:
        """Whether the outputs are logits of token ids."""
        return self.causal and self.outputs == self.tokens.get("vocabulary")


AnyConfig = Union[BlockConfig, StackConfig]
