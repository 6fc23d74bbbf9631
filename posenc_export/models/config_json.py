"""Conversion of descriptions to and from JSON, and queries on descriptions."""

from typing import Any, Mapping

import msgspec

from posenc_export.models.config import AnyConfig, BlockConfig, ModuleConfig, StackConfig
from posenc_export.shared.refusal import refusal

KINDS: dict[str, type[Any]] = {"block": BlockConfig, "decoder": StackConfig, "encoder": StackConfig}
# Added to descriptions later: omitted if empty, so that older descriptions stay equal.
OMITTED = ("readout", "labels")


def kind_of(config: AnyConfig | ModuleConfig) -> str:
    """Return "block", "decoder", "encoder" or "module"."""
    if isinstance(config, (BlockConfig, ModuleConfig)):
        return "block" if isinstance(config, BlockConfig) else "module"
    return "encoder" if config.head is None else "decoder"


def to_json(config: AnyConfig | ModuleConfig) -> dict[str, Any]:
    """Return a description as JSON values, "kind" first, with defaults except OMITTED."""
    values = msgspec.json.decode(msgspec.json.encode(config))
    kept = {key: value for key, value in values.items() if value or key not in OMITTED}
    return {"kind": kind_of(config), **kept}


def from_json(values: Mapping[str, Any]) -> AnyConfig:
    """Return the config that `to_json` converted. ValueError: an unknown kind, keys or values that
    a config refuses, the description of a module that was read as it is.
    """
    rest = dict(values)
    kind: str | None = rest.pop("kind", None)
    if kind == "module":
        got = f"the name of a module of your own, {rest.get('name')}"
        rule = "a model that can be built from its description"
        raise refusal("config", rule, got, "pass the module, as in verify(folder, module)")
    if kind not in KINDS:
        raise refusal("config", f"kind to be one of {', '.join(KINDS)}", repr(kind))
    try:
        config: AnyConfig = msgspec.convert(rest, KINDS[kind])
    except msgspec.ValidationError as error:
        if str(error).startswith("config: "):
            raise ValueError(str(error)) from None
        rule = f"a description of kind {kind} as in posenc_export.models.config"
        raise refusal("config", rule, f"an error: {error}") from None
    if kind_of(config) != kind:
        got = f"kind {kind} with head={rest.get('head')!r}"
        raise refusal("config", "a head in a decoder and none in an encoder", got)
    return config


def widest(config: AnyConfig) -> int:
    """Return the longest reduction over activations: the width, or the largest hidden width."""
    if isinstance(config, BlockConfig):
        return config.width
    parts = (kind.mlp for kind in config.layers.values())
    return max([config.width, *(int(part.get("hidden", 0)) for part in parts)])
