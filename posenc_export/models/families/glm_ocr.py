"""The text model of GLM-OCR (Z.ai 2026): that of GLM-4.1V without biases, with any head size."""

from posenc_export.models.families.glm4v import WEIGHTS, decoder
from posenc_export.models.families.shared.family import Settings, StackConfig
from posenc_export.models.families.shared.vision import keys_tied_by_either, text_model


def describe(config: Settings) -> StackConfig:
    config.needs("num_key_value_heads")
    return decoder(config, bias=False)


FAMILY = text_model(describe, WEIGHTS, keys_tied_by_either)
