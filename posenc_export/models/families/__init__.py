"""The registry of model families: one file each reads its config.json into a description and says where its weights stand."""

import importlib
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Mapping, Optional, Tuple

from posenc_export.models.config import StackConfig
from posenc_export.models.families.rules import Table
from posenc_export.models.families.settings import Settings

EMBEDDINGS = "embeddings"  # the part before the layers, of every family that is read as a whole
# model_type of config.json: the file.
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


def _nothing(description: StackConfig, config: Mapping[str, Any]) -> Table:
    return {}


def _none(description: StackConfig, config: Mapping[str, Any]) -> Tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Family:
    """What is known of a family of checkpoints.

    Args:
        describe: from the keys of config.json to the description of the model.
        weights: our parameters, or the modules they belong to, by rules over tensors of the checkpoint.
        base: what the names of a whole model start with, and those of its base model do not.
        other_bases: what they start with in other versions, the longest first.
        unused: regular expressions of names that take no part: buffers of older versions, heads of other tasks.
        further: from the description and config.json, lines that depend on them; they go before those of `weights`.
        left_out: from the same, what goes to `unused` besides.
        keys: from config.json to what `describe` reads, where that is a part of it.
        parts: of a model in two parts, the encoder that a decoder reads and that decoder.
    """

    describe: Callable[[Settings], StackConfig]
    weights: Table
    base: str = "model."
    other_bases: Tuple[str, ...] = ()
    unused: Tuple[str, ...] = ()
    further: Callable[[StackConfig, Mapping[str, Any]], Table] = _nothing
    left_out: Callable[[StackConfig, Mapping[str, Any]], Tuple[str, ...]] = _none
    keys: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    parts: Mapping[str, "Family"] = field(default_factory=dict)


def parts_of(name: str) -> Tuple[str, ...]:
    """The parts that a known model_type is read in; empty where it is read as a whole, with or without parts."""
    family: Family = importlib.import_module(f"{__name__}.{FILES[name]}").FAMILY
    return () if family.weights else tuple(family.parts)


def read(config: Mapping[str, Any], max_positions: Optional[int] = None, part: Optional[str] = None) -> Tuple[StackConfig, Family]:
    """The description of a config.json, and its family.

    Args:
        config: of a model, as transformers writes it.
        max_positions: range of positions of the model; max_position_embeddings where None.
        part: "encoder" or "decoder" of a model that has both. With "embeddings" the description is that of the whole model.

    Raises:
        ValueError: an unknown model_type; a part of a model that has none; a key that is missing, unknown, or has a value that cannot be exported.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FILES:
        known = ", ".join(FILES)
        raise ValueError(f"checkpoint: model_type is one of {known}, got {name!r}; describe it as a StackConfig, or give AttentionBlock.from_weights its attention")
    family: Family = importlib.import_module(f"{__name__}.{FILES[name]}").FAMILY
    if part is not None and not (part == EMBEDDINGS and family.weights):
        if part not in family.parts:
            known = " or ".join([*family.parts, *([EMBEDDINGS] if family.weights else [])])
            raise ValueError(f"{name}: expected part {known}, got {part!r}; choose one of them, or leave it out for the whole model")
        family = family.parts[part]
    settings = Settings(family.keys(config), max_positions)
    description = family.describe(settings)
    settings.finish()
    weights, unused = {**family.weights, **family.further(description, config)}, (*family.unused, *family.left_out(description, config))
    return description, replace(family, weights=weights, unused=unused)
