"""Text models beside a vision tower: where their keys and weights stand, and a rotation by time, height and width (Wang et al. 2024, Qwen2-VL, 2.1)."""

from typing import Any, Dict, List, Mapping, Sequence, Tuple

from posenc_export.models.families.settings import IGNORED, Settings
from posenc_export.models.hugging_face import rope_spec

BASES = ("model.language_model.", "language_model.")
UNUSED = (r"^(model\.)?visual\.",)
# Of images: what they look like is not the text model's, and where their tokens stand is given with them.
OF_IMAGES = frozenset("image_token_id vision_config vision_end_token_id vision_start_token_id vision_token_id video_token_id".split())
TIED = "tie_word_embeddings"
MROPE = (("rope_type", "mrope"), ("type", "mrope"))  # what transformers reads as "default"


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


def rotation_of_axes(config: Settings, pairs: int, theta: float, sections: Sequence[int], interleaved: bool = False) -> Tuple[float, List[int]]:
    """Theta, and how many pairs turn by time, height and width.

    Args:
        pairs: of a head.
        theta, sections: of the family, where the config names none.
        interleaved: whether axes stand in turn in the family.

    Raises:
        ValueError: a scaled rotation, sections that are not three numbers of pairs, or not all pairs of a head.
    """
    keys = config.rotation_keys(theta)
    found: Any = list(sections)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(keys.get(name), Mapping):
            given = {key: "default" if (key, value) in MROPE else value for key, value in keys[name].items()}
            found, keys[name] = given.pop("mrope_section", found), given
            said = given.pop("mrope_interleaved", interleaved)
            if said is not interleaved:
                raise ValueError(f"{config.family}: mrope_interleaved is {interleaved} whatever config.json says, got {said!r}; correct config.json")
    spec: Dict[str, Any] = rope_spec(keys)
    if set(spec) != {"name", "theta"} or spec["name"] != "rope":
        found = ", ".join(f"{key}={value}" for key, value in spec.items())
        raise ValueError(f"{config.family}: whole heads turn by three axes, not scaled, got {found}; nothing else of them can be exported yet")
    whole = isinstance(found, list) and all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in found)
    if not whole or len(found) != 3 or sum(found) != pairs:
        raise ValueError(f"{config.family}: mrope_section is three numbers above 0 that add up to {pairs} pairs, got {found}; correct config.json")
    return spec["theta"], found
