"""Text models beside a vision tower: where their keys and weights stand, and a rotation by time, height and width (Wang et al. 2024, Qwen2-VL, 2.1)."""

from typing import Any, Dict, Mapping, Sequence

from posenc_export.models.config import Named
from posenc_export.models.families.settings import IGNORED, Settings
from posenc_export.models.hugging_face import rope_spec

BASES = ("model.language_model.", "language_model.")
UNUSED = (r"^(model\.)?visual\.",)
# Of images: what they look like is not the text model's, and where their tokens stand is given with them.
OF_IMAGES = frozenset(
    """image_end_token_id image_start_token_id image_token_id video_end_token_id video_start_token_id video_token_id
    vision_config vision_end_token_id vision_start_token_id vision_token_id""".split()
)
TIED = "tie_word_embeddings"


def text_keys(config: Mapping[str, Any]) -> Dict[str, Any]:
    """The keys of the text model, from text_config or, as configs were before, from beside vision_config. What stands beside text_config says whether heads are tied.

    Raises:
        ValueError: text_config that is no mapping; keys beside it that it has not, which transformers does not read there.
    """
    family, outer = str(config.get("model_type")), {key: value for key, value in config.items() if key not in OF_IMAGES}
    nested = outer.pop("text_config", None)
    if nested is None:
        return outer
    if not isinstance(nested, Mapping):
        raise ValueError(f"{family}: text_config is a mapping, got {nested!r}; correct config.json")
    beside = sorted(set(outer) - set(nested) - IGNORED - {"model_type", TIED})
    if beside:
        raise ValueError(f"{family}: keys of the text model stand in text_config, got {beside[0]}={outer[beside[0]]!r} beside it; remove it or move it there")
    return {**nested, "model_type": family, TIED: outer.get(TIED, False)}


def keys_tied_by_either(config: Mapping[str, Any]) -> Dict[str, Any]:
    """As text_keys; heads are tied where either configuration says so."""
    nested = config.get("text_config")
    tied = isinstance(nested, Mapping) and nested.get(TIED) is True
    return {**text_keys(config), **({TIED: True} if tied else {})}


def rotation_of_axes(config: Settings, theta: float, sections: Sequence[int], partial: bool = False) -> Named:
    """The rotation by time, height and width, scaled by YaRN where config.json says so; to be asked for before sizes are taken.

    Args:
        theta, sections: of the family, where the config names none.
        partial: whether a part of each head may turn.

    Raises:
        ValueError: as rope_spec; a part of a head where heads turn whole.
    """
    keys = {**config.rotation_keys(theta), "model_type": config.family}
    places = [name for name in ("rope_parameters", "rope_scaling") if keys.get(name)] or ["rope_parameters"]
    keys.update({name: {"mrope_section": list(sections), **(keys.get(name) or {})} for name in places})
    spec: Named = rope_spec(keys)
    if "rotary" in spec and not partial:
        raise ValueError(f"{config.family}: whole heads turn, got partial_rotary_factor for {spec['rotary']} entries; correct config.json")
    return spec
