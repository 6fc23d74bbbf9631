"""The rotation that a GGUF file describes, as rope_theta and rope_scaling of a config.json."""

import math
from typing import Any, Callable, Dict, List, Optional

import numpy as np

from posenc_export.models.gguf.metadata import Metadata

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


def rotation(
    metadata: Metadata, head_size: int, read: Read, theta: float = 10000.0
) -> Dict[str, Any]:
    """Return rope_theta and, if needed, rope_scaling, original_max_position_embeddings and
    partial_rotary_factor.

    Args:
        head_size: D.
        read: returns a tensor of the file by name.
        theta: base if the file has none.

    Raises:
        ValueError: a kind of scaling, or factors of frequencies, that no kind of rope_scaling has.
    """
    base = metadata.number("rope.freq_base", theta)
    turned = metadata.whole("rope.dimension_count", head_size)
    if base <= 0:
        raise ValueError(
            f"gguf: expected rope.freq_base to be above 0, got {base}; convert the model again"
        )
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
        factor = metadata.number("rope.scaling.factor", linear)
        return {
            **keys,
            **(
                {}
                if factor == 1
                else {"rope_scaling": {"rope_type": "linear", "factor": float(factor)}}
            ),
        }
    if kind not in (None, "none"):
        raise ValueError(
            "gguf: expected rope.scaling.type to be none, linear, yarn or longrope with its "
            f"factors, got {kind!r}; convert the model to safetensors"
        )
    return keys


def _yarn(metadata: Metadata) -> Dict[str, Any]:
    yarn = {key: metadata.take(f"rope.scaling.{name}") for key, name in YARN.items()}
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if metadata.take(f"rope.scaling.{key}", 1.0) != 1.0:
            raise ValueError(
                f"gguf: expected rope.scaling.{key} to be 1 for yarn, got another value; "
                "convert the model to safetensors"
            )
    return {
        "rope_type": "yarn",
        **{key: value for key, value in yarn.items() if value is not None},
    }


def _factors(name: str, read: Read, turned: int) -> np.ndarray:
    """Return a table of factors of frequencies [D/2], one for each of `turned` / 2 pairs."""
    factors = read(name)
    if factors.shape != (turned // 2,) or not np.isfinite(factors).all() or factors.min() <= 0:
        rule = f"expected {name} to hold {turned // 2} numbers above 0"
        got = "others" if factors.shape == (turned // 2,) else f"shape {list(factors.shape)}"
        raise ValueError(f"gguf: {rule}, got {got}; convert the model to safetensors")
    return factors


def _longrope(metadata: Metadata, read: Read, turned: int) -> Dict[str, Any]:
    # The range over the original length, which max_position_embeddings gives.
    metadata.take("rope.scaling.factor")
    original = metadata.whole("rope.scaling.original_context_length")
    magnitude = metadata.take("rope.scaling.attn_factor")
    scaling = {
        "rope_type": "longrope",
        "short_factor": _numbers(_factors(SHORT, read, turned)),
        "long_factor": _numbers(_factors(LONG, read, turned)),
    }
    return {
        "original_max_position_embeddings": original,
        "rope_scaling": {**scaling, **metadata.given(attention_factor=magnitude)},
    }


def _numbers(factors: np.ndarray) -> List[float]:
    return [float(str(factor)) for factor in factors]


def _llama3(factors: np.ndarray, theta: float, turned: int) -> Dict[str, Any]:
    """Return the parameters of rope_type llama3 from which factors of frequencies follow.

    The reciprocals of factors are 1 for short waves and 1 / factor for long ones, and between them
    a linear function of the frequency.
    """
    frequencies = theta ** (-np.arange(0, turned, 2) / turned)
    greatest = float(factors.max())
    keys: Optional[Dict[str, Any]] = {
        "rope_type": "llama3",
        "factor": float(round(greatest, 4)),
        **LLAMA3,
    }
    if factors.min() < 1 - CLOSE:
        raise ValueError(
            f"gguf: expected {FACTORS} to hold numbers of 1 or more, got {factors.min()}; "
            "convert the model to safetensors"
        )
    if not _follow(keys, factors, frequencies):
        keys = _fitted(factors, frequencies, greatest)
    if not _follow(keys, factors, frequencies):
        raise ValueError(
            f"gguf: expected {FACTORS} to be factors of Llama 3's scaling, got others; "
            "convert the model to safetensors"
        )
    assert keys is not None
    return keys


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
    original = round(float(slope) * 2 * math.pi * width)
    return {
        "rope_type": "llama3",
        "factor": float(round(greatest, 4)),
        "low_freq_factor": 1.0,
        "high_freq_factor": float(round(1 + width, 3)),
        "original_max_position_embeddings": original,
    }


def _follow(
    scaling: Optional[Dict[str, Any]], factors: np.ndarray, frequencies: np.ndarray
) -> bool:
    """Whether factors are those of a scaling (as in transformers.modeling_rope_utils)."""
    if (
        scaling is None
        or scaling["original_max_position_embeddings"] < 1
        or scaling["high_freq_factor"] <= 1
    ):
        return False
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = (scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi) - low) / (
        high - low
    )
    wanted = 1 / ((1 - 1 / scaling["factor"]) * np.clip(smooth, 0, 1) + 1 / scaling["factor"])
    return bool(np.abs(wanted / factors - 1).max() < CLOSE)
