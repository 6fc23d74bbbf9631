"""Descriptions as JSON, and what follows from them."""

from typing import Any, Dict, Mapping, Optional, Tuple, Type, Union

import msgspec

from posenc_export.models.config import AnyConfig, BlockConfig, ModuleConfig, StackConfig

KINDS: Dict[str, Type[Any]] = {"block": BlockConfig, "decoder": StackConfig, "encoder": StackConfig}


def kind_of(config: Union[AnyConfig, ModuleConfig]) -> str:
    """ "block", "decoder", "encoder" or "module"."""
    if isinstance(config, (BlockConfig, ModuleConfig)):
        return "block" if isinstance(config, BlockConfig) else "module"
    return "encoder" if config.head is None else "decoder"


def to_json(config: Union[AnyConfig, ModuleConfig]) -> Dict[str, Any]:
    """Plain JSON values, "kind" first; what stands at its default is named too."""
    return {"kind": kind_of(config), **msgspec.json.decode(msgspec.json.encode(config))}


def from_json(values: Mapping[str, Any]) -> AnyConfig:
    """The config that `to_json` wrote.

    Raises:
        ValueError: unknown kind, unknown or missing keys, values that a config refuses, a module of the user's own.
    """
    rest = dict(values)
    kind: Optional[str] = rest.pop("kind", None)
    if kind == "module":
        raise ValueError(f"config: expected a model that a description builds, got the user's own {rest.get('name')}; pass the module, as verify(folder, module)")
    if kind not in KINDS:
        raise ValueError(f"config: kind is one of {', '.join(KINDS)}, got {kind!r}")
    try:
        config: AnyConfig = msgspec.convert(rest, KINDS[kind])
    except msgspec.ValidationError as error:
        said = str(error)
        rule = f"config: kind {kind} is described as in posenc_export.models.config"
        raise ValueError(said if said.startswith("config: ") else f"{rule}, got another description: {said}") from None
    if kind_of(config) != kind:
        raise ValueError(f"config: a decoder has a head and an encoder none, got kind {kind} with head={rest.get('head')!r}")
    return config


def encodings_of(config: AnyConfig) -> Tuple[str, ...]:
    """Names of the encodings of a model, each once."""
    attentions = [config.attention] if isinstance(config, BlockConfig) else [kind.attention for kind in config.kinds]
    on_tokens = config.encodings if isinstance(config, BlockConfig) else config.tokens.encodings
    return tuple(dict.fromkeys(spec["name"] for spec in (*on_tokens, *(spec for attention in attentions for spec in attention.encodings))))


def widest(config: AnyConfig) -> int:
    """The longest sum that a model forms over activations: its width, or that of an MLP."""
    hidden = [] if isinstance(config, BlockConfig) else [int(kind.mlp.get("hidden", 0)) for kind in config.layers.values()]
    return max(config.width, *hidden) if hidden else config.width
