"""Checkpoints whose models are built from parts of this package: decoders with RMSNorm, grouped
heads and a gated MLP (Touvron et al. 2023, LLaMA, 2.2). A function for each model_type describes
the decoder that its config.json names; all have the same table of weights.
"""

import re
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple

from posenc_export.models.config import (
    AttentionConfig,
    HeadConfig,
    LayerConfig,
    Named,
    StackConfig,
    TokensConfig,
)
from posenc_export.models.config_limits import TABLE, check_values
from posenc_export.models.family_settings import ROTATION, Settings
from posenc_export.models.tensor_files import Shape
from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import suggestion

# Name of the part before the layers.
EMBEDDINGS = "embeddings"
# Prefix of tensor names that models with a head have and base models do not have.
BASE = "model."
OF_LAYER = re.compile(r"(?<=layers\.)\d+")
OURS, THEIRS = "layers.{layer}.", "model.layers.{layer}."
# For each module of ours, those of a checkpoint whose weights form its weight, one after the other.
WEIGHTS: Dict[str, Tuple[str, ...]] = {
    "tokens.embedding": ("model.embed_tokens",),
    f"{OURS}residual.attention_norm": (f"{THEIRS}input_layernorm",),
    f"{OURS}attention.projection.qkv": tuple(f"{THEIRS}self_attn.{part}_proj" for part in "qkv"),
    f"{OURS}attention.projection.output": (f"{THEIRS}self_attn.o_proj",),
    f"{OURS}residual.mlp_norm": (f"{THEIRS}post_attention_layernorm",),
    f"{OURS}mlp.gate": (f"{THEIRS}mlp.gate_proj",),
    f"{OURS}mlp.up": (f"{THEIRS}mlp.up_proj",),
    f"{OURS}mlp.down": (f"{THEIRS}mlp.down_proj",),
    "norm": ("model.norm",),
    "head.linear": ("lm_head",),
}


def lacks(config: Mapping[str, Any]) -> bool:
    """Whether a config.json names a type, or LongRoPE, that no family reads
    (models/by_transformers.py).
    """
    name, scaled = config.get("model_type"), (config.get(key) for key in ROTATION[:2])
    longrope = any(isinstance(keys, Mapping) and "long_factor" in keys for keys in scaled)
    return isinstance(name, str) and (name not in DESCRIBED or longrope)


def read(config: Mapping[str, Any], max_positions: Optional[int] = None) -> StackConfig:
    """Convert a config.json to a description.

    Args:
        config: contents of config.json, as transformers writes it.
        max_positions: number of positions; None for max_position_embeddings.

    Raises:
        ValueError: an unknown model_type; a key that is missing, unknown or has a value that cannot
            be exported.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in DESCRIBED:
        rule = f"model_type to be one of {', '.join(DESCRIBED)}"
        raise refusal("checkpoint", rule, f"{name!r:.80}", suggestion(name, DESCRIBED))
    check_values(name, config)
    settings = Settings(config, max_positions)
    description = DESCRIBED[name](settings)
    settings.finish()
    return description


def _llama(config: Settings) -> StackConfig:
    """Llama 1 to 3 (Touvron et al. 2023; Grattafiori et al. 2024), and others saved as Llama."""
    # A key of SmolLM2; transformers always turns pairs of two halves.
    config.only("rope_interleaved", False)
    return _decoder(
        config, config.flag("attention_bias", False), config.flag("mlp_bias", False), None
    )


def _mistral(config: Settings) -> StackConfig:
    """Mistral (Jiang et al. 2023): Llama's architecture; older models have an attention window."""
    # Keys whose defaults in transformers may not be those of the model.
    config.needs("num_key_value_heads", "sliding_window")
    window = config.window("sliding_window")
    config.layer_types("full_attention" if window is None else "sliding_attention")
    return _decoder(config, False, False, window)


# What describes the decoder of each model_type.
DESCRIBED: Dict[str, Callable[[Settings], StackConfig]] = {"llama": _llama, "mistral": _mistral}


def _decoder(config: Settings, bias: bool, mlp_bias: bool, window: Optional[int]) -> StackConfig:
    """Describe the decoder. bias: of all four projections; window: None for all earlier tokens."""
    sees: Named = {"name": "causal"} if window is None else {"name": "window", "size": window}
    attention = AttentionConfig(
        heads=config.heads,
        kv_heads=config.whole("num_key_value_heads", config.heads),
        head_size=config.whole("head_dim", config.width // config.heads),
        projection={"name": "grouped", "bias": bias, "output_bias": bias},
        encodings=(config.rotation(),),
        sees=sees,
    )
    norm: Named = {"name": "rms", "epsilon": config.number("rms_norm_eps")}
    mlp: Named = {"name": "gated", "hidden": config.whole("intermediate_size")}
    mlp = {**mlp, "activation": config.activation("hidden_act"), "bias": mlp_bias}
    layer = LayerConfig(residual={"name": "pre"}, norms=(norm, norm), attention=attention, mlp=mlp)
    return StackConfig(
        width=config.width,
        max_positions=config.max_positions,
        tokens=TokensConfig(vocabulary=config.whole("vocab_size")),
        layers={"layer": layer},
        order=("layer",) * config.layers,
        norm=norm,
        head=HeadConfig(tied=config.flag("tie_word_embeddings", False)),
    )


def tensors_of(name: str, shape: Shape, attention: AttentionConfig, base: str) -> Dict[str, Shape]:
    """Return the tensors of a checkpoint that form a parameter of ours, one after the other in
    their first axis, with their shapes.

    Args:
        name: name of the parameter, of this shape.
        attention: that of all layers.
        base: what names in the checkpoint have in place of BASE.
    """
    module, _, kind = name.rpartition(".")
    layer = OF_LAYER.search(module)
    modules = WEIGHTS[OF_LAYER.sub("{layer}", module)]
    keys = attention.kv_heads * attention.head_size
    rows = (shape[0],) if len(modules) == 1 else (shape[0] - 2 * keys, keys, keys)
    named = (theirs.format(layer=layer[0] if layer else "") for theirs in modules)
    theirs = [base + each.removeprefix(BASE) if each.startswith(BASE) else each for each in named]
    return {f"{each}.{kind}": (count, *shape[1:]) for each, count in zip(theirs, rows, strict=True)}


def check_sizes(family: str, config: StackConfig, sizes: Sequence[int]) -> None:
    """Check that files with tensors of these numbers of entries can hold a model: its token table,
    and a tensor and an MLP for each layer; and that no table of positions exceeds TABLE.
    """
    layers, vocabulary = config.kinds, config.tokens.vocabulary
    numbers = config.width * (vocabulary + sum(int(kind.mlp["hidden"]) for kind in layers))
    if len(layers) > len(sizes) or numbers > sum(sizes):
        rule = f"files with at least {len(layers)} tensors and {numbers} numbers for the sizes in "
        remedy = "download all weights again, or use the config.json that belongs to them"
        raise refusal(family, f"{rule}config.json", f"{len(sizes)} and {sum(sizes)}", remedy)
    size = layers[0].attention.head_size
    if config.max_positions * size > TABLE:
        rule = f"a table of positions with at most {TABLE} numbers"
        got = f"{config.max_positions} positions x {size}"
        raise refusal(family, rule, got, "give a smaller max_positions")
