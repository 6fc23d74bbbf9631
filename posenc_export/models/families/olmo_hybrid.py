"""OLMo Hybrid (OLMo Team 2026): gated delta rules, and layers of OLMo 2 without positions."""

from posenc_export.models.families.shared import delta, gated
from posenc_export.models.families.shared.delta import ATTENTION, DELTA, FULL, RULE, by_mechanism
from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import LAYER
from posenc_export.models.families.shared.rules import OURS, same

EPSILON = 1e-5  # of the norm of a gated delta rule; rms_norm_eps applies to other norms


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. Rates are at most 2 with linear_allow_neg_eigval, else 1. Attention
    has no rotation if rope_theta in rope_parameters is null, as in published models.
    """
    config.needs("num_key_value_heads", "layer_types", *(f"linear_{name}" for name in delta.SIZES))
    names = ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")
    config.ignore(f"linear_{name}" for name in names)  # of initial weights
    parameters = config.values.get("rope_parameters")
    rotated = not isinstance(parameters, dict) or parameters.get("rope_theta", 0) is not None
    if not rotated:
        config.ignore(("rope_parameters",))
    rotations = (config.rotation(),) if rotated else ()
    bias = config.flag("attention_bias", False)
    full = gated.layer(config, gated.attention(config, bias, bias), residual="after")
    full = gated.head_norm(full, "projection").with_attention(encodings=rotations)
    rate = 2.0 if config.flag("linear_allow_neg_eigval", True) else 1.0
    rule = delta.attention(config, largest_rate=rate, epsilon=EPSILON)
    kinds = {DELTA: delta.beside(config, full, rule), FULL: full}
    return gated.of_kinds(config, kinds, delta.types(config))


INPUTS = {part: f"{RULE}{part}_proj" for part in "qkv"}
INPUTS |= {"z": RULE + "g_proj", "b": RULE + "b_proj", "a": RULE + "a_proj"}
NORMS = {
    OURS + "residual.attention_norm": by_mechanism(
        same(LAYER + "input_layernorm"), same(LAYER + "post_attention_layernorm")
    ),
    OURS + "residual.mlp_norm": by_mechanism(
        same(LAYER + "post_attention_layernorm"), same(LAYER + "post_feedforward_layernorm")
    ),
    **{OURS + f"attention.{name}.norm": same(ATTENTION + name) for name in ("q_norm", "k_norm")},
}
FILTERS = [f"{RULE}{part}_conv1d.weight" for part in "qkv"]
DELTAS = delta.weights(delta.inputs(INPUTS), delta.filters(FILTERS), "o_norm", "o_proj")
# As transformers renames them when it loads a checkpoint. It saves a norm after attention under
# the name of one before the MLP.
RENAMED = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
}
FAMILY = Family(describe, {**gated.WEIGHTS, **DELTAS, **NORMS}, renamed=RENAMED)
