"""What the description of a model says about attention and its nodes (docs/models.md)."""

import math
from typing import Annotated, Any, Dict, List, Mapping, Optional, Required, TypedDict

import msgspec
from msgspec import Meta

from posenc_export.runtime.artefact.schema import Manifest
from posenc_export.runtime.graphs import kernel_library, onnx_nodes

Described = Mapping[str, Any]
# Of a module that was read, the graph is proved, and the reading compared with calls of the module.
UNDECLARED = "read as it is: which keys it sees was found in its calls, and it declares no rows"
# Attributes of attention nodes that follow from others, or from the shapes of inputs.
FREE = {"do_rotary", "rotary_interleaved", "qk_output", "k_quant_type"}
FREE |= {"v_quant_type", "kv_cache_bit_width"}
Count = Annotated[int, Meta(ge=1, le=1 << 24)]
Extent = Annotated[int, Meta(ge=0, le=1 << 31)]


class _Sees(TypedDict, total=False):
    name: Required[str]
    size: Count
    reach: Extent


class _Encoding(TypedDict, total=False):
    name: Required[str]


class _Attention(TypedDict):
    heads: Count
    kv_heads: Count
    head_size: Count
    scale: Optional[float]
    softcap: Optional[float]
    sees: _Sees
    encodings: List[_Encoding]


def is_read(manifest: Manifest) -> bool:
    """Return whether an artefact is of a module that was read as it is, which describes nothing."""
    return manifest.kind == "module" and "inside" not in manifest.config


def attentions(manifest: Manifest) -> List[Described]:
    """Return the description of each layer's attention. Raise ValueError for another config."""
    config = _mapping(manifest.config)
    config = _mapping(config.get("inside", config))
    if "attention" in config:
        return [_convert(config["attention"], _Attention)]
    layers = _convert(config.get("layers", {}), Dict[str, Dict[str, Any]])
    order = _convert(config.get("order", []), List[str])
    if not set(order) <= set(layers):
        raise ValueError(f"manifest: expected layers {order} in config, got {sorted(layers)}")
    return [_convert(layers[name].get("attention"), _Attention) for name in order]


def encodings(manifest: Manifest) -> List[Described]:
    """Return all encodings, those of tokens first. Raise ValueError for another config."""
    config = _mapping(manifest.config)
    config = _mapping(config.get("inside", config))
    tokens = _mapping(config.get("tokens", {})).get("encodings", []) or config.get("encodings", [])
    parts = [*_convert(tokens, List[_Encoding])]
    parts += (part for attention in attentions(manifest) for part in attention["encodings"])
    return parts


def _mapping(value: Any) -> Dict[str, Any]:
    return _convert(value, Dict[str, Any])


def _convert(value: Any, kind: Any) -> Any:
    """Return a part of a config that has a type, with its other keys."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        rule = "expected the config of a model"
        raise ValueError(f"manifest: {rule}, got another: {error}") from None
    return value


def causal(manifest: Manifest) -> bool:
    """Return whether no query attends to later tokens."""
    return all(part["sees"]["name"] not in ("both", "near") for part in attentions(manifest))


def has_cache(manifest: Manifest) -> bool:
    """Return whether keys of earlier calls are kept."""
    cached = (state for state in manifest.states if not state.holds_positions)
    return any(state.grows or state.in_place for state in cached)


def scale(attention: Described) -> float:
    """Return the factor on q k: the stated one, that of an encoding, or 1 / sqrt(D)."""
    size = attention["head_size"]
    if attention["scale"] is not None:
        return float(attention["scale"])
    for encoding in attention["encodings"]:
        name, scores = encoding["name"], encoding.get("scores")
        if name == "deberta":
            terms = 1 if encoding.get("terms") in ("c2p", "p2c") else 2
            return float(1 / math.sqrt((1 + terms) * size))
        if name == "inkling" and scores == "by_size":
            return float(1 / size)
        if name == "t5" and scores in (None, "unscaled"):
            return 1.0
    return float(1 / math.sqrt(size))


def attributes(attention: Described, node: onnx_nodes.Node, masked: bool) -> Dict[str, Any]:
    """Return the attributes of an attention node that the description determines, by name; None for
    those that it must not have. masked: whether the node is given a mask that hides keys.
    """
    expected = {"scale": scale(attention), "softcap": attention["softcap"]}
    heads, kv_heads = attention["heads"], attention["kv_heads"]
    if node.operator == "Attention":
        packed = "q_num_heads" in node.attributes  # otherwise heads are an axis of the inputs
        counts = {"q_num_heads": heads, "kv_num_heads": kv_heads} if packed else {}
        return {**expected, **counts, "is_causal": None}
    rule = attention["sees"]
    window = rule["size"] if rule["name"] == "window" and not masked else None
    counts = {"num_heads": heads, "kv_num_heads": kv_heads}
    if node.operator == kernel_library.OPERATOR:
        counts["chunk_size"] = rule["size"] if rule["name"] == "chunk" else None
    return {**expected, **counts, "local_window_size": window, "smooth_softmax": None}
