"""Model descriptions that other libraries and hand-written graphs can build. Every part is
compared, so that a model with any other part is refused.
"""

from typing import Any, Dict, Sequence

NONE: Dict[str, Any] = {
    "head_norm": None,
    "scale": None,
    "softcap": None,
    "sinks": False,
    "mechanism": "softmax",
}
ATTENTION = {
    "sees": {"name": "causal"},
    "projection": {"name": "grouped", "bias": False, "output_bias": False},
    **NONE,
}
SIZES = ("heads", "kv_heads", "head_size")
TOKENS: Dict[str, Any] = {
    "features": None,
    "scale": 1.0,
    "encodings": [],
    "segments": 0,
    "norm": None,
}
HEAD = {"bias": False, "scale": 1.0, "softcap": None}
MLP = {"name": "gated", "activation": "silu", "bias": False}
ROTATED = ("rope", "nope")
DEFAULTS: Dict[str, Dict[str, Any]] = {
    "rope": {"theta": 10000.0, "layout": "half", "rotary": None, "numerics": "exact"}
}  # which a description may spell out


def is_plain_block(config: Dict[str, Any], encodings: Sequence[str] = ROTATED) -> bool:
    """Return whether config describes a causal block without biases and with at most one
    encoding, one of `encodings` with default parameters.
    """
    return (
        config.get("kind") == "block"
        and config.get("encodings") == []
        and _plain(config.get("attention", {}), encodings)
    )


def is_llama(config: Dict[str, Any], encodings: Sequence[str] = ROTATED) -> bool:
    """Return whether config describes a decoder of Llama's architecture (Touvron et al. 2023,
    LLaMA, 2.2) with one of `encodings`, with default parameters.
    """
    kinds = list(config.get("layers", {}).values())
    if config.get("kind") != "decoder" or len(kinds) != 1:
        return False
    (layer,), norm = kinds, config["norm"]
    parts = (
        layer["residual"] == {"name": "pre"},
        norm is not None and norm["name"] == "rms",
        layer["norms"] == [norm, norm],
        config["key_values"] is None,
    )
    ends = (
        _without(config["tokens"], "vocabulary") == TOKENS,
        config["head"] is not None and _without(config["head"], "tied") == HEAD,
    )
    return (
        all(parts)
        and all(ends)
        and _without(layer["mlp"], "hidden") == MLP
        and _plain(layer["attention"], encodings)
    )


def _plain(attention: Dict[str, Any], encodings: Sequence[str]) -> bool:
    names = [
        _default(spec, attention.get("head_size")) for spec in attention.get("encodings", [])
    ] or ["nope"]
    return (
        _without(attention, *SIZES, "encodings") == ATTENTION
        and len(names) == 1
        and names[0] in encodings
    )


def _default(spec: Dict[str, Any], head_size: Any) -> str:
    """Return the name of an encoding whose parameters are the defaults, given or left out; empty
    for other parameters.
    """
    defaults = DEFAULTS.get(spec["name"], {})
    same = [
        name in defaults and value in (defaults[name], *([head_size] if name == "rotary" else []))
        for name, value in spec.items()
        if name != "name"
    ]
    return str(spec["name"]) if all(same) else ""


def _without(part: Dict[str, Any], *names: str) -> Dict[str, Any]:
    return {name: value for name, value in part.items() if name not in names}
