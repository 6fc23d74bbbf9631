"""Qwen3-Next (Qwen 2025): gated delta rules, every fourth layer attention, experts."""

from posenc_export.models.families.shared import delta, gated
from posenc_export.models.families.shared.delta import RULE
from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import LAYER
from posenc_export.models.families.shared.rules import OURS, experts, same


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. Layers have experts as in Qwen3 (qwen3_moe.py), and one that is shared.
    Layers for multi-token prediction are left out.
    """
    config.fixed({"use_sliding_window": False})
    config.ignore(("max_window_layers", "num_nextn_predict_layers"))
    rotation = config.rotation(partial=True, share=0.25)
    dense, types = delta.with_gates(config, rotation), delta.types(config)
    step, dense_at = config.whole("decoder_sparse_step", 1), config.indices("mlp_only_layers", ())
    inner, shared = (config.whole(f"{name}_intermediate_size") for name in ("moe", "shared_expert"))
    count, chosen = config.whole("num_local_experts"), config.whole("num_experts_per_tok")
    weights = "chosen" if config.flag("norm_topk_prob", True) else "all"
    parts = {"shared": shared, "shared_gate": True}
    kinds = dict(dense)
    for name, kind in dense.items():
        inside = kind.with_mlp(hidden=inner)
        kinds[f"{name}_experts"] = gated.with_experts(inside, count, chosen, weights, **parts)
    order = [
        name if index in dense_at or (index + 1) % step else f"{name}_experts"
        for index, name in enumerate(types)
    ]
    return gated.of_kinds(config, kinds, order)


FEED, PARTS = LAYER + "mlp.", ("gate", "up", "down")
EXPERTS = {
    **experts(FEED + "gate", *(FEED + f"experts.{{row}}.{name}_proj.weight" for name in PARTS)),
    **{OURS + f"mlp.shared.{name}": same(FEED + f"shared_expert.{name}_proj") for name in PARTS},
    OURS + "mlp.shared_gate": same(FEED + "shared_expert_gate"),
}
INPUTS = delta.inputs_by_key_head(RULE + "in_proj_qkvz", RULE + "in_proj_ba")
WEIGHTS = {**delta.WITH_GATES, **delta.weights(INPUTS), **EXPERTS}
FAMILY = Family(describe, WEIGHTS, unused=(delta.PREDICTION,))
