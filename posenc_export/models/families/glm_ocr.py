"""The text model of GLM-OCR (Z.ai 2026, GLM-OCR): that of GLM-4.1V without biases, with any head
size.
"""

from posenc_export.models.families.glm4v import WEIGHTS, rotation, sandwich
from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import alike, decoder
from posenc_export.models.families.shared.vision import BASES, UNUSED, keys_tied_by_either


def describe(config: Settings) -> StackConfig:
    config.needs("num_key_value_heads")
    axes_rotation = rotation(config)
    return decoder(config, *alike(sandwich(config, bias=False), config.layers, [axes_rotation]))


FAMILY = Family(describe, WEIGHTS, unused=UNUSED, other_bases=BASES, keys=keys_tied_by_either)
