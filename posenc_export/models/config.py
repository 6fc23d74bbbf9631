"""Plain descriptions of models: frozen, JSON both ways, unknown keys refused."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Dict, Mapping, Optional, Sequence, Type, TypeVar, Union

from posenc_export.encodings.base import Geometry

Config = TypeVar("Config", "AttentionConfig", "DecoderConfig", "EncoderConfig")


LARGEST = 1 << 62  # sums of sizes stay within int64


def _at_least_one(config: object, *names: str) -> None:
    for name in names:
        if not 1 <= getattr(config, name) < LARGEST:
            raise ValueError(f"config: {name} is at least 1 and below 2^62, got {getattr(config, name)}")


@dataclass(frozen=True)
class AttentionConfig:
    """One attention block.

    Args:
        width: model width E.
        heads: query heads H.
        kv_heads: key and value heads K, a divisor of H; H where not given.
        head_size: head size D; E/H where not given.
        max_positions: positions 0 .. max_positions - 1 are the range.
        encoding: {"name": registry key, parameter: value}.
        qkv_bias, output_bias: biases on the projections.
        causal: keys after the query are hidden; where False, every call is a whole sequence and there is no cache.
        mechanism: "softmax", or "linear" (models/linear_attention.py).

    Raises:
        ValueError: an unknown mechanism, a size below 1, heads not divisible by kv_heads, width not divisible by heads where head_size is not given.
    """

    width: int
    heads: int
    max_positions: int
    kv_heads: int = 0
    head_size: int = 0
    encoding: Mapping[str, Any] = field(default_factory=lambda: {"name": "rope"})
    qkv_bias: bool = False
    output_bias: bool = False
    causal: bool = True
    mechanism: str = "softmax"

    def __post_init__(self) -> None:
        if self.mechanism not in ("softmax", "linear"):
            raise ValueError(f"config: mechanism is one of softmax, linear, got {self.mechanism!r}")
        _at_least_one(self, "width", "heads", "max_positions")
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        if not self.head_size:
            if self.width % self.heads:
                raise ValueError(f"config: width is divisible by heads, got {self.width} and {self.heads}; or give head_size")
            object.__setattr__(self, "head_size", self.width // self.heads)
        _at_least_one(self, "kv_heads", "head_size")
        if self.heads % self.kv_heads:
            raise ValueError(f"config: heads are divisible by kv_heads, got {self.heads} and {self.kv_heads}")

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.width, self.heads, self.head_size, self.max_positions, self.causal, self.kv_heads)


@dataclass(frozen=True)
class DecoderConfig:
    """A stack of pre-norm blocks between a token embedding and a head.

    Args:
        vocabulary: number of token ids.
        layers: number of blocks L.
        hidden: inner width of the MLP.
        attention: the block, the same in every layer.
        norm: "rms" or "layer".
        epsilon: added to the variance.
        mlp: "swiglu" or "gelu".
        mlp_bias: biases in the MLP.
        tied: the head reads the embedding's weights.
        layer_encodings: what acts on queries, keys and scores in the layers, in turn and over again, as Llama 4 leaves every fourth layer without rotation;
            attention.encoding then acts on token embeddings only. Empty: attention.encoding everywhere.

    Raises:
        ValueError: a size below 1, an unknown norm or mlp.
    """

    vocabulary: int
    layers: int
    hidden: int
    attention: AttentionConfig
    norm: str = "rms"
    epsilon: float = 1e-5
    mlp: str = "swiglu"
    mlp_bias: bool = False
    tied: bool = True
    layer_encodings: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        _at_least_one(self, "vocabulary", "layers", "hidden")
        for name, choices in (("norm", ("rms", "layer")), ("mlp", ("swiglu", "gelu"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"config: {name} is one of {', '.join(choices)}, got {getattr(self, name)!r}")
        object.__setattr__(self, "layer_encodings", tuple(self.layer_encodings))


@dataclass(frozen=True)
class EncoderConfig:
    """A stack of post-norm bidirectional blocks over tokens, positions and segments, with biases and LayerNorm as BERT has them.

    Args:
        vocabulary: number of token ids.
        layers: number of blocks L.
        hidden: inner width of the MLP.
        attention: the block, the same in every layer, causal=False.
        segments: number of token types.
        epsilon: added to the variance.

    Raises:
        ValueError: a size below 1, a causal or linear attention.
    """

    vocabulary: int
    layers: int
    hidden: int
    attention: AttentionConfig
    segments: int = 2
    epsilon: float = 1e-12

    def __post_init__(self) -> None:
        _at_least_one(self, "vocabulary", "layers", "hidden", "segments")
        if self.attention.causal or self.attention.mechanism != "softmax":
            raise ValueError("config: an encoder's attention is softmax and sees both ways, got another; give causal=False")


AnyConfig = Union[AttentionConfig, DecoderConfig, EncoderConfig]
KINDS: Dict[str, Type[Any]] = {"block": AttentionConfig, "decoder": DecoderConfig, "encoder": EncoderConfig}


def to_json(config: AnyConfig) -> Dict[str, Any]:
    """Plain JSON values, "kind" first: "block", "decoder" or "encoder"."""
    plain: Dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return {"kind": next(kind for kind, cls in KINDS.items() if type(config) is cls), **plain}


def from_json(values: Mapping[str, Any]) -> AnyConfig:
    """The config that `to_json` wrote.

    Raises:
        ValueError: unknown kind, unknown or missing keys, values a config refuses.
    """
    rest = dict(values)
    kind: Optional[str] = rest.pop("kind", None)
    if kind not in KINDS:
        raise ValueError(f"config: kind is one of {', '.join(KINDS)}, got {kind!r}")
    if isinstance(rest.get("attention"), Mapping):
        rest["attention"] = _fill(AttentionConfig, rest["attention"])
    return _fill(KINDS[kind], rest)


def _fill(cls: Type[Config], values: Mapping[str, Any]) -> Config:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ValueError(f"config: keys are {', '.join(fields)}, got {', '.join(unknown)}")
    missing = [n for n, f in fields.items() if n not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    if missing:
        raise ValueError(f"config: {', '.join(missing)} must be given, got {', '.join(sorted(values)) or 'nothing'}")
    return cls(**values)
