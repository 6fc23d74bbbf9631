"""Text models of vision-language models: nested keys, rotation by axes (Wang et al. 2024, 2.1)."""

from typing import Any, Callable, Dict, Mapping, Sequence

from posenc_export.models.families.shared.family import Family, Named, Settings, StackConfig
from posenc_export.models.families.shared.keys import IGNORED
from posenc_export.models.families.shared.rules import Table
from posenc_export.models.hugging_face import rope_spec
from posenc_export.shared.refusal import refusal

# Keys about images. The text model does not need them: positions of image tokens are an input.
IMAGE_KEYS = frozenset(
    """image_end_token_id image_start_token_id image_token_id video_end_token_id
    video_start_token_id video_token_id vision_config vision_end_token_id vision_start_token_id
    vision_token_id""".split()
)
TIED = "tie_word_embeddings"


def text_keys(config: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the keys of the text model: text_config, or all keys but those about images in older
    configs without it. tie_word_embeddings is read outside text_config, as in transformers.
    """
    family = str(config.get("model_type"))
    outer = {key: value for key, value in config.items() if key not in IMAGE_KEYS}
    nested = outer.pop("text_config", None)
    if nested is None:
        return outer
    if not isinstance(nested, Mapping):
        rule = "text_config to be a mapping"
        raise refusal(family, rule, repr(nested), "correct config.json")
    if outside := sorted(set(outer) - set(nested) - IGNORED - {"model_type", TIED}):
        got = f"{outside[0]}={outer[outside[0]]!r} outside"
        rule = "keys of the text model inside text_config"
        raise refusal(family, rule, got, "remove it or move it there")
    return {**nested, "model_type": family, TIED: outer.get(TIED, False)}


def keys_tied_by_either(config: Mapping[str, Any]) -> Dict[str, Any]:
    """Return text_keys(config), tied if tie_word_embeddings is true inside or outside."""
    nested = config.get("text_config")
    tied = isinstance(nested, Mapping) and nested.get(TIED) is True
    return {**text_keys(config), **({TIED: True} if tied else {})}


def rotation_of_axes(
    config: Settings,
    theta: float,
    sections: Sequence[int],
    partial: bool = False,
    share: float = 1.0,
) -> Named:
    """Return the rotation by time, height and width, scaled by YaRN if config.json says so; call
    this before head_dim is taken. theta, sections, share: defaults; partial: as in `rotation`.
    """
    keys = config.rotation_keys(theta, share)
    places = [name for name in ("rope_parameters", "rope_scaling") if keys.get(name)]
    for name in places or ["rope_parameters"]:
        keys[name] = {"mrope_section": list(sections), **(keys.get(name) or {})}
    spec: Named = rope_spec(keys)
    config.whole_heads(spec, partial)
    return spec


def text_model(
    describe: Callable[[Settings], StackConfig],
    weights: Table,
    keys: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> Family:
    """Return the family of a text model, whose tensors may have either of two prefixes."""
    unused = (r"^(model\.)?visual\.",)
    bases = ("model.language_model.", "language_model.")
    return Family(describe, weights, other_bases=bases, unused=unused, keys=keys)
