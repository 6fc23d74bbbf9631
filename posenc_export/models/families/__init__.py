"""The registry of model families: one file each reads its config.json into a description and says where its weights stand."""

import importlib
from typing import Any, Mapping, Optional, Tuple

from posenc_export.models.config import DecoderConfig
from posenc_export.models.families.rules import Table
from posenc_export.models.families.settings import Settings

# model_type of config.json: the file.
FILES = ("llama", "mistral", "qwen2", "smollm3", "phi3")


def read(config: Mapping[str, Any], max_positions: Optional[int] = None) -> Tuple[DecoderConfig, Table]:
    """The description of a config.json, and the table of its weights: our module by a rule over the checkpoint's.

    Args:
        config: of a model, as transformers writes it.
        max_positions: range of positions of the model; max_position_embeddings where None.

    Raises:
        ValueError: an unknown model_type; a key that is missing, unknown, or has a value that cannot be exported.
    """
    name = config.get("model_type")
    if name not in FILES:
        known = ", ".join(FILES)
        raise ValueError(f"checkpoint: model_type is one of {known}, got {name!r}; describe it as a DecoderConfig, or give AttentionBlock.from_weights its attention")
    family = importlib.import_module(f"{__name__}.{name}")
    settings = Settings(config, max_positions)
    description: DecoderConfig = family.describe(settings)
    settings.finish()
    return description, family.WEIGHTS
