"""Latent attention and experts chosen from groups: oracles, refusals, and the effect of each
setting.
"""

import json
import re
from pathlib import Path
from typing import Any, Dict, Tuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from posenc_export import export_model
from posenc_export.models import families
from posenc_export.models.parts import build
from posenc_export.models.pretrained import from_pretrained

pytest.importorskip("transformers", reason="transformers is not installed")
from posenc_export.export.expected import eager_session  # noqa: E402
from tests.models import latent  # noqa: E402
from tests.models.checkpoints import saved  # noqa: E402
from tests.models.patterns import share, theirs, tokens_of  # noqa: E402
from tests.models.test_recent_families import config_of  # noqa: E402

YARN = latent.MODELS["deepseek_v3"]["rope_parameters"]


@pytest.mark.exhaustive
def test_an_export_is_certified_against_the_oracle(tmp_path: Path) -> None:
    manifest = export_model(
        from_pretrained(saved("deepseek_v3", tmp_path / "checkpoint")[1]),
        "ort",
        tmp_path / "exported",
    )
    assert manifest.certificate is not None and manifest.certificate["passed"]
    assert any(cell.startswith("oracle") for cell in manifest.certificate["cells"])


def test_layers_for_multi_token_prediction_are_ignored(tmp_path: Path) -> None:
    peer, folder = saved("deepseek_v3", tmp_path)
    weights = load_file(folder / "model.safetensors")
    behind = {
        name.replace("layers.2.", "layers.3."): value.clone()
        for name, value in weights.items()
        if "layers.2." in name
    }
    save_file(
        {**weights, **behind, "model.layers.3.eh_proj.weight": torch.zeros(64, 128)},
        folder / "model.safetensors",
    )
    assert (
        share(
            [
                (
                    eager_session(from_pretrained(folder)).prefill(tokens_of()),
                    theirs(peer, tokens_of()),
                )
            ]
        )
        <= 1
    )


# A family, a change of its config.json that is not supported, and a part of the message.
REFUSED: Dict[str, Tuple[str, Dict[str, Any], str]] = {
    "an unknown key": ("deepseek_v3", {"attention_sigmoid": True}, "got attention_sigmoid=True"),
    "shares of all experts": (
        "deepseek_v3",
        {"scoring_func": "softmax"},
        "scoring_func to be 'sigmoid', got 'softmax'",
    ),
    "another choice": (
        "deepseek_v3",
        {"topk_method": "greedy"},
        "topk_method to be 'noaux_tc', got 'greedy'",
    ),
    "experts in every other layer": (
        "deepseek_v3",
        {"moe_layer_freq": 2},
        "moe_layer_freq to be 1, got 2",
    ),
    "fewer key heads": (
        "deepseek_v3",
        {"num_key_value_heads": 2},
        "num_key_value_heads to be 4, got 2",
    ),
    "another head size": ("deepseek_v3", {"head_dim": 16}, "head_dim to be 8, got 16"),
    "part of what turns": (
        "deepseek_v3",
        {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
        "rotation of whole heads",
    ),
    "a spectrum of a whole head": (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}},
        "got proportional",
    ),
    "no rank of queries named": (
        "deepseek_v3",
        {"q_lora_rank": ...},
        "expected q_lora_rank in config.json, got none",
    ),
    "no groups": ("deepseek_v3", {"n_group": None}, "n_group to be an integer above 0, got None"),
    "a negative layer": (
        "deepseek_v3",
        {"first_k_dense_replace": -1},
        "first_k_dense_replace to be an integer of 0 or more, got -1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_configs_are_refused_by_name(case: str, tmp_path: Path) -> None:
    name, changes, named = REFUSED[case]
    with pytest.raises(ValueError) as refusal:
        families.read(config_of(name, tmp_path, changes))
    assert str(refusal.value).startswith(f"{name}: ") and named in str(refusal.value)


# Faults: a model, and wrong values in its config.
FELT: Dict[str, Tuple[str, Dict[str, Any]]] = {
    "no square of the temperature": (
        "deepseek_v3",
        {"rope_parameters": {**YARN, "mscale_all_dim": 0.0, "mscale": 0.0}},
    ),
    "another temperature": ("deepseek_v3", {"rope_parameters": {**YARN, "mscale_all_dim": 1.0}}),
    "halves as pairs": ("deepseek_v3", {"rope_interleave": False}),
    "neighbours as pairs": ("deepseek_v3 without a rank of queries", {"rope_interleave": True}),
    "one group": ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
    "one group more": ("deepseek_v3", {"topk_group": 3}),
    "one expert less": ("deepseek_v3", {"num_experts_per_tok": 2}),
    "weights that are not shares": ("deepseek_v3", {"norm_topk_prob": False}),
    "another factor": ("deepseek_v3", {"routed_scaling_factor": 2.0}),
    "another epsilon": ("deepseek_v3", {"rms_norm_eps": 1e-6}),
}


@pytest.mark.parametrize("case", FELT)
def test_a_wrongly_read_config_is_detected(case: str, tmp_path: Path) -> None:
    name, changes = FELT[case]
    peer, folder = saved(name, tmp_path)
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    assert (
        share(
            [
                (
                    eager_session(from_pretrained(folder)).prefill(tokens_of()),
                    theirs(peer, tokens_of()),
                )
            ]
        )
        > 1
    )


def test_key_names_of_published_configs_give_the_same_description(tmp_path: Path) -> None:
    older = {
        "rope_parameters": ..., "rope_theta": 10000,
        "rope_scaling": {"type": "yarn",
            **{key: YARN[key] for key in YARN if not key.startswith("rope")}},
        "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1,
        "aux_loss_alpha": 0.001, "seq_aux": True, "head_dim": ..., "qk_head_dim": ...,
        "rope_interleave": ...,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    }  # fmt: skip
    assert (
        families.read(config_of("deepseek_v3", tmp_path, older))[0]
        == families.read(config_of("deepseek_v3", tmp_path, {}))[0]
    )


@pytest.mark.parametrize(
    "parts", [{}, {"query_rank": 7, "bias": True}], ids=["plain", "with a rank of queries"]
)
def test_a_latent_projection_matches_its_oracle(parts: Dict[str, Any]) -> None:
    torch.manual_seed(0)
    result = build(
        "projection",
        {"name": "latent", "rotary": 4, "value_size": 6, "rank": 5, **parts},
        16,
        3,
        3,
        10,
    )
    for parameter in result.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(1, 7, 16)
    with torch.no_grad():
        given = result(x)
    for ours, wanted in zip(given, result.exact(x[0].double().numpy()), strict=True):
        assert np.allclose(ours[0].numpy(), wanted.reshape(7, -1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("weights", ["sigmoid", "sigmoid_of_chosen"])
@pytest.mark.parametrize("groups", [(1, 1, 5), (3, 2, 4), (6, 2, 3)], ids=str)
def test_experts_chosen_from_groups_match_their_oracle(
    groups: Tuple[int, int, int], weights: str
) -> None:
    torch.manual_seed(0)
    count, kept, chosen = groups
    choice = {"name": "groups", "groups": count, "kept": kept}
    result = build(
        "mlp",
        {
            "name": "experts",
            "experts": 12,
            "chosen": chosen,
            "hidden": 8,
            "weights": weights,
            "choice": choice,
            "factor": 2.5,
        },
        16,
    )
    for parameter in result.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 7, 16)
    with torch.no_grad():
        given = result(x).numpy()
    for row in range(2):
        assert np.allclose(given[row], result.exact(x[row].double().numpy()), rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize(
    ("kind", "spec", "context", "named"),
    [
        (
            "projection",
            {"name": "latent", "rotary": 4, "value_size": 6, "rank": 5},
            (16, 4, 2, 10),
            "kv_heads to equal heads, got 2 and 4",
        ),
        (
            "projection",
            {"name": "latent", "rotary": 10, "value_size": 6, "rank": 5},
            (16, 4, 4, 10),
            "rotary to be 1 .. 9",
        ),
        (
            "mlp",
            {"choice": {"name": "groups", "groups": 3, "kept": 1}},
            (16,),
            "groups to divide the experts, with at least 2 in each, got 3 groups of 8",
        ),
        (
            "mlp",
            {"choice": {"name": "groups", "groups": 8, "kept": 8}},
            (16,),
            "at least 2 in each, got 8 groups of 8",
        ),
        (
            "mlp",
            {"choice": {"name": "groups", "groups": 4, "kept": 1}},
            (16,),
            "kept to be 1 .. 4 groups with at least 3 experts together, got 1 groups of 2 each",
        ),
        (
            "mlp",
            {"choice": {"name": "best"}},
            (16,),
            "expected name to be one of highest, groups, got 'best'",
        ),
        ("mlp", {"factor": 0.0}, (16,), "factor to be a finite number above 0, got 0.0"),
    ],
)
def test_invalid_parameters_of_parts_are_refused(
    kind: str, spec: Dict[str, Any], context: Tuple[int, ...], named: str
) -> None:
    experts = {"name": "experts", "experts": 8, "chosen": 3, "hidden": 4} if kind == "mlp" else {}
    with pytest.raises(ValueError, match=re.escape(named)):
        build(kind, {**experts, **spec}, *context)
