"""TimesFM 2.5 (Das et al. 2024, A decoder-only foundation model for time-series forecasting):
patches of a series to forecasts; norms before and after sublayers, and of queries and keys.
"""

from typing import Any, Dict, List, Mapping, Tuple

import torch
from torch import Tensor

from posenc_export.models.families.shared import family, gated, plain
from posenc_export.models.families.shared.gated import LAYER
from posenc_export.models.families.shared.rules import OURS, QKV, Rule, Table, joined, same

PATCH, CONTEXT = ("patch_length", 32), ("context_length", 16384)  # keys and their defaults
QUANTILES = [level / 10 for level in range(1, 10)]
LOG2_E = 1.442695041  # factor on queries, as it is written in the model
CONTINUOUS, LONGEST = "use_continuous_quantile_head", ("output_quantile_len", 1024)
MEDIAN = ("decode_index", 5)


def describe(config: family.Settings) -> family.StackConfig:
    """Describe the model from normalised patches to forecasts of the next `horizon_length` values.
    Positions count patches.
    """
    config.needs("num_key_value_heads", "head_dim")
    patch, context = config.whole(*PATCH), config.whole(*CONTEXT)
    if context % patch:
        raise config.refusal(f"context_length to be a multiple of {patch}", context)
    rotation = config.rotation()
    if rotation["name"] != "rope":
        raise config.refusal("rope_type default", rotation["name"], family.UNSUPPORTED)
    bias = config.flag("attention_bias", False)
    norm = {"name": "rms", "epsilon": config.number("rms_norm_eps", 1e-6)}
    attention = gated.attention(config, bias, bias)
    mlp = plain.mlp(config, "activation", "swish", bias=config.flag("use_bias", False))
    kind = family.layer_of(attention, mlp, norm, "sandwich").with_attention(
        encodings=(rotation,),
        projection={**attention.projection, "query_factors": True},
        # Before the rotation as after it: their weights are factors of rotated queries.
        head_norm={"name": "head", "norm": {**norm, "weight": False}},
    )
    block = {"hidden": config.width, "activation": mlp["activation"]}
    features = {"name": "patches", "patch": patch, **block}
    return family.stack(
        config,
        {"layer": kind},
        ["layer"] * config.layers,
        family.TokensConfig(features=features),
        forecast=_forecast(config, block),
    )


def _forecast(config: family.Settings, block: family.Named) -> family.Named:
    quantiles, median = config.take("quantiles", QUANTILES), config.integer(*MEDIAN, least=0)
    levels = isinstance(quantiles, list) and all(type(level) is float for level in quantiles)
    if not levels or not quantiles:
        raise config.refusal("quantiles to be a list of at least one float", quantiles)
    if median > len(quantiles):
        raise config.refusal(f"decode_index to be at most {len(quantiles)}", median)
    symmetric = config.flag("force_flip_invariance", True)
    continuous, _ = config.flag(CONTINUOUS, True), config.integer(*LONGEST, least=1)
    if symmetric and continuous and 2 * median != 1 + len(quantiles):
        rule = "decode_index to be that of the middle quantile with force_flip_invariance"
        raise config.refusal(rule, median, family.UNSUPPORTED)
    return {
        "name": "residual",
        "horizon": config.whole("horizon_length", 128),
        "quantiles": quantiles,
        **block,
        "hidden": block["hidden"] * (2 if continuous else 1),
        "symmetric": symmetric,
        "positive": config.flag("infer_is_positive", True),
    }


def keys(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys with the range of positions, which are those of patches."""
    patch, context = (values.get(*key) for key in (PATCH, CONTEXT))
    whole = type(patch) is int and type(context) is int and patch > 0
    return {**values, "max_position_embeddings": max(1, context // patch) if whole else 1}


def _factors(tensors: List[Tensor], attention: family.AttentionConfig) -> Tensor:
    q_norm, k_norm, scaling = tensors
    return q_norm * k_norm * torch.nn.functional.softplus(scaling) * LOG2_E


def _names_of_factors(kind: str, shape: Tuple[int, ...], layer: Any) -> Dict[str, Tuple[int, ...]]:
    names = ("q_norm.weight", "k_norm.weight", "scaling")
    return {f"{LAYER}self_attn.{name}": shape for name in names}


HEAD = "output_projection_{}."
POINT, SPREAD = HEAD.format("point"), HEAD.format("quantiles")


def of_forecasts(description: family.StackConfig, config: Mapping[str, Any]) -> Table:
    """Return the rules of the forecast: one residual block in place of two, whose sums the forecast
    is. Its quantiles are those of the point forecast's median, plus their distances from the median
    in a second forecast, as far as that reaches.
    """
    if not config.get(CONTINUOUS, True):
        named = {"up": "input_layer", "down": "output_layer", "skip": "residual_layer"}
        return {f"head.{ours}": same(POINT + theirs) for ours, theirs in named.items()}
    forecast = description.forecast or {}
    horizon, count = forecast["horizon"], 1 + len(forecast["quantiles"])
    length, median = config.get(*LONGEST), config.get(*MEDIAN)
    both = min(horizon, length)

    def names(layer: str, rows: Tuple[int, int], columns: int) -> Dict[str, Tuple[int, ...]]:
        named = zip((POINT, SPREAD), rows, strict=True)
        return {f"{module}{layer}.weight": (size, columns) for module, size in named}

    def parts(tensors: List[Tensor]) -> List[Tensor]:
        """Return what the two blocks add to the forecast."""
        levels, places = torch.arange(count), torch.arange(horizon)[:, None]
        moved = (levels != 0) & (levels != median) & (places < both)
        point, spread = (tensor.unflatten(0, (-1, count)) for tensor in tensors)
        spread = torch.nn.functional.pad(spread[:both], (0, 0, 0, 0, 0, horizon - both))
        distances = (spread - spread[:, median, None]) * moved[:, :, None]
        point = torch.where(moved[:, :, None], point[:, median, None], point)
        return [part.flatten(0, 1) for part in (point, distances)]

    width, rows = description.width, (horizon * count, length * count)
    return {
        "head.up": Rule(
            lambda *_: names("input_layer", (width, width), width),
            lambda tensors, _: torch.cat(tensors),
        ),
        "head.down": Rule(
            lambda *_: names("output_layer", rows, width),
            lambda tensors, _: torch.cat(parts(tensors), 1),
        ),
        "head.skip": Rule(
            lambda *_: names("residual_layer", rows, width),
            lambda tensors, _: sum(parts(tensors), torch.zeros(())),
        ),
    }


NORMS = {
    "attention_norm": "input_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
WEIGHTS: Table = {
    "tokens.stem.up": same("model.input_ff_layer.input_layer"),
    "tokens.stem.down": same("model.input_ff_layer.output_layer"),
    "tokens.stem.skip": same("model.input_ff_layer.residual_layer"),
    QKV: joined(LAYER + "self_attn.q_proj", LAYER + "self_attn.k_proj", LAYER + "self_attn.v_proj"),
    OURS + "attention.projection.factors": Rule(_names_of_factors, _factors),
    OURS + "attention.projection.output": same(LAYER + "self_attn.o_proj"),
    **{OURS + "residual." + ours: same(LAYER + theirs) for ours, theirs in NORMS.items()},
    OURS + "mlp.up": same(LAYER + "mlp.ff0"),
    OURS + "mlp.down": same(LAYER + "mlp.ff1"),
}
FAMILY = family.Family(
    describe,
    WEIGHTS,
    keys=keys,
    further_weights=of_forecasts,
    further_unused=lambda _, config: () if config.get(CONTINUOUS, True) else (f"^{SPREAD}",),
)
