"""Registry of model families. The file of a family reads its config.json and maps its weights."""

import importlib
from typing import Any, Mapping, Optional, Tuple

from posenc_export.models.config import StackConfig
from posenc_export.models.families.shared.family import Family
from posenc_export.models.families.shared.limits import check_values
from posenc_export.models.families.shared.settings import ROTATION, Settings
from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import suggestion

# Name of the part before the layers, in every family.
EMBEDDINGS = "embeddings"
# Module of the family for each model_type.
FILES = {name: name for name in ("llama", "mistral")}


def lacks(config: Mapping[str, Any]) -> bool:
    """Whether a config.json names a type, or LongRoPE, that no family reads
    (models/by_transformers.py).
    """
    name, scaled = config.get("model_type"), (config.get(key) for key in ROTATION[:2])
    longrope = any(isinstance(keys, Mapping) and "long_factor" in keys for keys in scaled)
    return isinstance(name, str) and (name not in FILES or longrope)


def _family(name: str) -> Family:
    family: Family = importlib.import_module(f"{__name__}.{FILES[name]}").FAMILY
    return family


def read(
    config: Mapping[str, Any],
    max_positions: Optional[int] = None,
) -> Tuple[StackConfig, Family]:
    """Convert a config.json to a description.

    Args:
        config: contents of config.json, as transformers writes it.
        max_positions: number of positions; None for max_position_embeddings.

    Returns:
        The description, and the family.

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
    description = family.describe(settings)
    settings.finish()
    return description, family
