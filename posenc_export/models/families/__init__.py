"""Registry of model families. The file of a family reads its config.json and maps its weights."""

import importlib
from dataclasses import replace
from typing import Any, Mapping, Optional, Tuple

import msgspec

from posenc_export.models.config import Named, StackConfig
from posenc_export.models.families.shared.family import Family
from posenc_export.models.families.shared.limits import check_values
from posenc_export.models.families.shared.settings import Settings
from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import check_name, suggestion

# Name of the part before the layers, in every family.
EMBEDDINGS = "embeddings"
# Model types whose family has their name: decoders, those with experts, older ones.
OWN_NAME = """llama mistral qwen2 qwen3 phi3 gemma3_text gpt_oss llama4_text
    gpt2 bloom mpt falcon""".split()
# Module of the family for each model_type.
FILES = {name: name for name in OWN_NAME}
LONGROPE = "rope_longrope"  # with one set of factors for all positions, or by each position
LENGTHS = ("long", "short", "by_position")


def lacks(config: Mapping[str, Any]) -> bool:
    """Whether a config.json names a type that has no family (models/by_transformers.py)."""
    name = config.get("model_type")
    return isinstance(name, str) and name not in FILES


def _family(name: str) -> Family:
    family: Family = importlib.import_module(f"{__name__}.{FILES[name]}").FAMILY
    return family


def read(
    config: Mapping[str, Any],
    max_positions: Optional[int] = None,
    lengths: Optional[str] = None,
) -> Tuple[StackConfig, Family]:
    """Convert a config.json to a description.

    Args:
        config: contents of config.json, as transformers writes it.
        max_positions: number of positions; None for max_position_embeddings.
        lengths: as for `with_lengths`.

    Returns:
        The description, and the family with all rules for this config.

    Raises:
        ValueError: an unknown model_type; a key that is missing, unknown or has a value that cannot
            be exported.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FILES:
        rule = f"model_type to be one of {', '.join(FILES)}"
        raise refusal("checkpoint", rule, f"{name!r:.80}", suggestion(name, FILES))
    family = _family(name)
    check_values(name, config)
    settings = Settings(config, max_positions)
    description = with_lengths(family.describe(settings), lengths)
    settings.finish()
    weights = {**family.weights, **family.further_weights(description, config)}
    return description, replace(family, weights=weights)


def with_lengths(config: StackConfig, lengths: Optional[str]) -> StackConfig:
    """Return the description with the choice of factors in each LongRoPE. Encoders keep that of the
    encoding.

    Args:
        lengths: one of LENGTHS; None for "long" if the range of positions is longer than the
            trained length, otherwise "short".

    Raises:
        ValueError: unknown lengths, lengths for a model that is no decoder with LongRoPE, short
            factors for a range beyond the trained length.
    """
    if lengths is not None:
        check_name("checkpoint: expected lengths", lengths, LENGTHS)
    used = [spec["name"] for read in config.attentions for spec in read.encodings]
    if LONGROPE not in used or config.head is None:
        if lengths is not None:
            got = f"{lengths!r} for another model"
            rule = "lengths only for a decoder with LongRoPE"
            raise refusal("checkpoint", rule, got, "leave it out")
        return config
    layers = {}
    for name, kind in config.layers.items():
        chosen = (_chosen(s, lengths, config.max_positions) for s in kind.attention.encodings)
        layers[name] = kind.with_attention(encodings=tuple(chosen))
    return msgspec.structs.replace(config, layers=layers)


def _chosen(spec: Named, lengths: Optional[str], max_positions: int) -> Named:
    """Return the specification of an encoding with the choice of factors."""
    if spec["name"] != LONGROPE:
        return spec
    trained = int(spec["original_max_positions"])
    if lengths == "short" and max_positions > trained:
        rule = f"max_positions of at most the trained length {trained} with lengths short"
        remedy = f"give max_positions {trained}, or lengths by_position"
        raise refusal("checkpoint", rule, max_positions, remedy)
    return {**spec, "lengths": lengths or ("long" if max_positions > trained else "short")}
