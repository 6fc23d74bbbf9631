"""What the description of a model says about attention (docs/models.md)."""

from typing import Annotated, Any, Mapping, Required, TypedDict

import msgspec
from msgspec import Meta

from posenc_export.runtime.artefact.schema import Manifest
from posenc_export.shared.refusal import refusal

Described = Mapping[str, Any]
# For a module that was read, the graph is proved, and calls of the module are compared.
UNDECLARED = "read as it is: which keys it sees was found in its calls, and it declares no rows"
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
    sees: _Sees
    encodings: list[_Encoding]


def is_read(manifest: Manifest) -> bool:
    """Return whether an artefact is a module that was read as it is, without a description."""
    return manifest.kind == "module"


def attentions(manifest: Manifest) -> list[Described]:
    """Return the description of each layer's attention. Raise ValueError for another config."""
    config = manifest.config
    if "attention" in config:
        return [_convert(config["attention"], _Attention)]
    layers = _convert(config.get("layers", {}), dict[str, dict[str, Any]])
    order = _convert(config.get("order", []), list[str])
    if not set(order) <= set(layers):
        rule = f"layers {order} in config"
        raise refusal("verify", rule, sorted(layers), "export again")
    return [_convert(layers[name].get("attention"), _Attention) for name in order]


def of_tokens(manifest: Manifest) -> list[Described]:
    """Return the encodings of tokens. Raise ValueError for another config."""
    config = manifest.config
    tokens = _convert(config.get("tokens", {}), dict[str, Any]).get("encodings")
    tokens = tokens or config.get("encodings", [])
    return [*_convert(tokens, list[_Encoding])]


def _convert(value: Any, kind: Any) -> Any:
    """Check a part of a config against a type, and return it with its other keys."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        remedy = "export again"
        raise refusal("verify", "the config of a model", f"another ({error})", remedy) from None
    return value


def causal(manifest: Manifest) -> bool:
    """Return whether no query attends to later tokens."""
    return all(part["sees"]["name"] not in ("both", "near") for part in attentions(manifest))


def has_cache(manifest: Manifest) -> bool:
    """Return whether keys of earlier calls are kept."""
    cached = (state for state in manifest.states if not state.holds_positions)
    return any(state.grows or state.in_place for state in cached)
