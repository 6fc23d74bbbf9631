"""Registry of model families. Each family has a file that converts its config.json to a description and maps its weights."""

import importlib
from dataclasses import replace
from typing import Any, Mapping, Optional, Tuple

from posenc_export.models.config import StackConfig
from posenc_export.models.families.shared.family import Family
from posenc_export.models.families.shared.limits import check_values
from posenc_export.models.families.shared.settings import Settings

EMBEDDINGS = "embeddings"  # name of the part before the layers, in every family that can be read as a whole model
# Module of the family for each model_type.
FILES = {
    **{name: name for name in ("llama", "mistral", "ministral3", "smollm3", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text", "olmo2", "stablelm")},
    **{name: name for name in ("cohere", "cohere2", "glm", "mixtral", "qwen3_moe", "gpt_oss", "llama4_text", "deepseek_v3")},
    **{name: name for name in ("gpt2", "gpt_neox", "gptj", "phi", "opt", "bloom", "mpt", "falcon", "xglm")},
    **{name: name for name in ("bert", "roberta", "mpnet", "modernbert", "roformer", "electra", "distilbert", "deberta", "xlnet")},
    **{name: "roberta" for name in ("xlm-roberta", "camembert")},
    "deberta-v2": "deberta_v2",  # and v3
    **{name: "t5" for name in ("t5", "mt5")},
    "whisper": "whisper",
    **{name + part: "qwen2_vl" for name in ("qwen2_vl", "qwen2_5_vl") for part in ("", "_text")},
    **{"qwen3_vl" + part: "qwen3_vl" for part in ("", "_text")},
    **{name: "glm4v" for name in ("glm4v", "glm4v_text", "glm46v")},
    **{"glm_ocr" + part: "glm_ocr" for part in ("", "_text")},
}


def parts_of(name: str) -> Tuple[str, ...]:
    """Return the parts in which a known model_type must be read; empty if it can be read as a whole model."""
    family: Family = importlib.import_module(f"{__name__}.{FILES[name]}").FAMILY
    return () if family.weights else tuple(family.parts)


def read(config: Mapping[str, Any], max_positions: Optional[int] = None, part: Optional[str] = None) -> Tuple[StackConfig, Family]:
    """Convert a config.json to a description.

    Args:
        config: contents of config.json, as transformers writes it.
        max_positions: number of positions; None for max_position_embeddings.
        part: "encoder" or "decoder" for a model that has both. "embeddings" and None give the description of the whole model.

    Returns:
        The description, and the family with all rules for this config.

    Raises:
        ValueError: an unknown model_type; a part that the model does not have; a key that is missing, unknown or has a value that cannot be exported.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FILES:
        known = ", ".join(FILES)
        remedy = "describe the model as a StackConfig, or use AttentionBlock.from_weights"
        raise ValueError(f"checkpoint: expected model_type to be one of {known}, got {name!r}; {remedy}")
    family: Family = importlib.import_module(f"{__name__}.{FILES[name]}").FAMILY
    if part is not None and not (part == EMBEDDINGS and family.weights):
        if part not in family.parts:
            known = " or ".join([*family.parts, *([EMBEDDINGS] if family.weights else [])])
            raise ValueError(f"{name}: expected part {known}, got {part!r}; change part, or leave part out for the whole model")
        family = family.parts[part]
    check_values(name, config)
    settings = Settings(family.keys(config), max_positions)
    description = family.describe(settings)
    settings.finish()
    weights, unused = {**family.weights, **family.further_weights(description, config)}, (*family.unused, *family.further_unused(description, config))
    return description, replace(family, weights=weights, unused=unused)
