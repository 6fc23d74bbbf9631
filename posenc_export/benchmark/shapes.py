"""Model descriptions that other libraries and hand-written graphs can build, compared whole."""

from typing import Any, Dict, Sequence

ATTENTION: Dict[str, Any] = {
    "sees": {"name": "causal"},
    "projection": {"name": "grouped", "bias": False, "output_bias": False},
    **{"head_norm": None, "scale": None, "softcap": None, "sinks": False, "mechanism": "softmax"},
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
# Parameters that a description may spell out.
DEFAULTS: Dict[str, Dict[str, Any]] = {
    "rope": {"theta": 10000.0, "layout": "half", "rotary": None, "numerics": "exact"}
}


def is_plain_block(config: Dict[str, Any], encodings: Sequence[str] = ROTATED) -> bool:
    """Return whether config describes a causal block without biases and with at most one
    encoding, one of `encodings` with default parameters.
    """
    is_block = config.get("kind") == "block" and config.get("encodings") == []
    return is_block and _plain(config.get("attention", {}), encodings)


def is_llama(config: Dict[str, Any], encodings: Sequence[str] = ROTATED) -> bool:
    """Return whether config describes a decoder of Llama's architecture (Touvron et al. 2023,
    LLaMA, 2.2) with one of `encodings`, with default parameters.
    """
    kinds = list(config.get("layers", {}).values())
    if config.get("kind") != "decoder" or len(kinds) != 1:
        return False
    (layer,), norm = kinds, config["norm"]
    return (
        layer["residual"] == {"name": "pre"}
        and norm is not None
        and norm["name"] == "rms"
        and layer["norms"] == [norm, norm]
        and config["key_values"] is None
        and _without(config["tokens"], "vocabulary") == TOKENS
        and config["head"] is not None
        and _without(config["head"], "tied") == HEAD
        and _without(layer["mlp"], "hidden") == MLP
        and _plain(layer["attention"], encodings)
    )


def _plain(attention: Dict[str, Any], encodings: Sequence[str]) -> bool:
    specs = attention.get("encodings", []) or [{"name": "nope"}]
    plain = len(specs) == 1 and specs[0]["name"] in encodings
    return (
        plain
        and _without(attention, *SIZES, "encodings") == ATTENTION
        and all(
            _default(attention, specs[0]["name"], name, value)
            for name, value in _without(specs[0], "name").items()
        )
    )


def _default(attention: Dict[str, Any], encoding: str, name: str, value: Any) -> bool:
    """Return whether a parameter of an encoding has the value that it has if left out."""
    if name == "rotary" and value == attention.get("head_size"):
        return True
    defaults = DEFAULTS.get(encoding, {})
    return name in defaults and value == defaults[name]


def _without(part: Dict[str, Any], *names: str) -> Dict[str, Any]:
    return {name: value for name, value in part.items() if name not in names}
