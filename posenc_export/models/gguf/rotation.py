"""The rotation that a GGUF file describes, as rope_theta and rope_scaling of a config.json."""

import math
from typing import Any, Callable, Dict, Optional

import numpy as np

from posenc_export.models.gguf.metadata import AGAIN, SAFETENSORS, Metadata, present
from posenc_export.shared.refusal import refusal

FACTORS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
# Original length and bounds of Llama 3.1 to 3.3. A file holds the factors that follow from them in
# place of these three.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
CLOSE = 1e-5  # relative error of factors in float32 that were computed in float32
YARN = {
    "factor": "factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "original_max_position_embeddings": "original_context_length",
}
Read = Callable[[str], np.ndarray]


def rotation(metadata: Metadata, head_size: int, read: Read) -> Dict[str, Any]:
    """Return rope_theta and, if needed, rope_scaling, original_max_position_embeddings and
    partial_rotary_factor.

    Args:
        head_size: D.
        read: returns a tensor of the file by name.

    Raises:
        ValueError: a kind of scaling, or factors of frequencies, that no kind of rope_scaling has.
    """
    base = metadata.number("rope.freq_base", 10000.0)
    turned = metadata.whole("rope.dimension_count", head_size)
    if base <= 0:
        raise refusal("gguf", "rope.freq_base to be above 0", base, AGAIN)
    keys: Dict[str, Any] = {"rope_theta": float(base)}
    if turned != head_size:
        keys["partial_rotary_factor"] = turned / head_size
    kind, linear = metadata.take("rope.scaling.type"), metadata.take("rope.scale_linear")
    if metadata.holds(SHORT) and metadata.holds(LONG):
        return {**keys, **_longrope(metadata, read, turned)}
    if metadata.holds(FACTORS):
        factors = _factors(FACTORS, read, turned)
        if factors.max() != 1:  # if all are 1, nothing is scaled
            return {**keys, "rope_scaling": _llama3(factors, float(base), turned)}
    if kind == "yarn":
        return {**keys, "rope_scaling": _yarn(metadata)}
    if kind == "linear" or linear is not None:
        factor = float(metadata.number("rope.scaling.factor", linear))
        scaling = {"rope_type": "linear", "factor": factor}
        return keys if factor == 1 else {**keys, "rope_scaling": scaling}
    if kind not in (None, "none"):
        rule = "rope.scaling.type to be none, linear, yarn or longrope with its factors"
        raise refusal("gguf", rule, repr(kind), SAFETENSORS)
    return keys


def _yarn(metadata: Metadata) -> Dict[str, Any]:
    yarn = {key: metadata.take(f"rope.scaling.{name}") for key, name in YARN.items()}
    # llama.cpp takes the length of the context if there is no other.
    trained = metadata.values.get(f"{metadata.architecture}.context_length")
    yarn["original_max_position_embeddings"] = yarn["original_max_position_embeddings"] or trained
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if metadata.take(f"rope.scaling.{key}", 1.0) != 1.0:
            rule = f"rope.scaling.{key} to be 1 for yarn"
            raise refusal("gguf", rule, "another value", SAFETENSORS)
    return {"rope_type": "yarn", **present(**yarn)}


def _factors(name: str, read: Read, turned: int) -> np.ndarray:
    """Return a table of factors of frequencies [D/2], one for each of `turned` / 2 pairs."""
    factors, shape = read(name), (turned // 2,)
    if factors.shape != shape or not np.isfinite(factors).all() or factors.min() <= 0:
        got = "others" if factors.shape == shape else f"shape {list(factors.shape)}"
        raise refusal("gguf", f"{name} to hold {turned // 2} numbers above 0", got, SAFETENSORS)
    return factors


def _longrope(metadata: Metadata, read: Read, turned: int) -> Dict[str, Any]:
    # The range over the original length, which max_position_embeddings gives.
    metadata.take("rope.scaling.factor")
    original = metadata.whole("rope.scaling.original_context_length")
    tables = [_factors(name, read, turned) for name in (SHORT, LONG)]
    short, long = ([float(str(factor)) for factor in table] for table in tables)
    magnitude = present(attention_factor=metadata.take("rope.scaling.attn_factor"))
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long, **magnitude}
    return {"original_max_position_embeddings": original, "rope_scaling": scaling}


def _llama3(factors: np.ndarray, theta: float, turned: int) -> Dict[str, Any]:
    """Return the parameters of rope_type llama3 from which factors of frequencies follow.

    The reciprocals of factors are 1 for short waves and 1 / factor for long ones, and between them
    a linear function of the frequency.
    """
    frequencies = theta ** (-np.arange(0, turned, 2) / turned)
    if factors.min() < 1 - CLOSE:
        rule = f"{FACTORS} to hold numbers of 1 or more"
        raise refusal("gguf", rule, factors.min(), SAFETENSORS)
    greatest = float(factors.max())
    keys: Dict[str, Any] = {"rope_type": "llama3", "factor": float(round(greatest, 4))}
    if _follow({**keys, **LLAMA3}, factors, frequencies):
        return {**keys, **LLAMA3}
    fitted = _fitted(factors, frequencies, greatest)
    if fitted is not None and _follow({**keys, **fitted}, factors, frequencies):
        return {**keys, **fitted}
    rule = f"{FACTORS} to be factors of Llama 3's scaling"
    raise refusal("gguf", rule, "others", SAFETENSORS)


def _fitted(
    factors: np.ndarray, frequencies: np.ndarray, greatest: float
) -> Optional[Dict[str, Any]]:
    """Return parameters fitted to two or more factors between the bounds, else None."""
    between = (factors > 1 + CLOSE) & (factors < greatest * (1 - CLOSE))
    if between.sum() < 2:
        return None
    smooth = (1 / factors[between].astype(np.float64) - 1 / greatest) / (1 - 1 / greatest)
    slope, start = np.polyfit(frequencies[between], smooth, 1)
    width = float(-1 / start)  # high_freq_factor - low_freq_factor
    return {
        "low_freq_factor": 1.0,
        "high_freq_factor": float(round(1 + width, 3)),
        "original_max_position_embeddings": round(float(slope) * 2 * math.pi * width),
    }


def _follow(scaling: Dict[str, Any], factors: np.ndarray, frequencies: np.ndarray) -> bool:
    """Whether factors are those of a scaling (as in transformers.modeling_rope_utils)."""
    original, high = scaling["original_max_position_embeddings"], scaling["high_freq_factor"]
    if original < 1 or high <= 1:
        return False
    low, least = scaling["low_freq_factor"], 1 / scaling["factor"]
    smooth = (original * frequencies / (2 * math.pi) - low) / (high - low)
    wanted = 1 / ((1 - least) * np.clip(smooth, 0, 1) + least)
    return bool(np.abs(wanted / factors - 1).max() < CLOSE)
