"""The largest error that rounding can cause in an artefact."""

import math
from typing import Tuple

from posenc_export.export.quantization.formats import format_of
from posenc_export.export.read_module import ReadModule
from posenc_export.export.signatures import Model
from posenc_export.models.config_json import widest
from posenc_export.runtime.artefact.cache_formats import CACHE_FORMATS
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.verification.proof import Accuracy
from posenc_export.shared import numerics

# Error of a weight of few bits that a kernel decodes in half precision: its products with the
# scale and with the zero point, and their difference, are rounded one after the other.
DECODED = 2.0


def accuracy_of(model: Model, manifest: Manifest) -> Accuracy:
    """Return how far a correct artefact may be from the module with the same rounded weights."""
    noise, float32 = _noise(manifest), numerics.tolerance("float32", *extent(model))
    if not noise:
        return Accuracy(float32)
    return Accuracy(numerics.rounding_tolerance(noise), noise, float32)


def _noise(manifest: Manifest) -> float:
    """Return the rounding error of one product, relative to it; 0 in float32."""
    noises = {"float16": numerics.FLOAT16_NOISE, "bfloat16": numerics.BFLOAT16_NOISE}
    of_dtype = noises.get(manifest.dtype, 0.0)
    few_bits, sources = manifest.weights, [of_dtype]
    if few_bits and few_bits.activations == "int8":
        sources.append(numerics.rounding_noise(8, format_of(few_bits.format).shared))
    if few_bits:
        sources.append(DECODED * of_dtype)
    if manifest.cache:
        tokens = manifest.calibration.tokens if manifest.calibration else 0
        sources.append(numerics.cache_noise(CACHE_FORMATS[manifest.cache].unit, tokens))
    return math.hypot(*sources)


def extent(model: Model) -> Tuple[int, int]:
    """How many blocks a value passes, and the longest sum in them."""
    if isinstance(model, ReadModule):
        return model.extent()
    return len(model.attentions()), widest(model.config)
