"""Families of 2023 to 2025: one attention node for each layer, refusals, and the effect of each
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

from posenc_export import export_model, load
from posenc_export.models import families
from posenc_export.models.parts import build
from posenc_export.models.pretrained import from_pretrained

pytest.importorskip("transformers", reason="transformers is not installed")
from posenc_export.export.expected import eager_session  # noqa: E402
from tests.models.checkpoints import LLAMA3, MODELS, YARN, described, saved  # noqa: E402
from tests.models.patterns import share, theirs, tokens_of  # noqa: E402

RECENT = ("qwen3", "gemma3_text", "gpt_oss", "llama4_text")

# A family, a change of its config.json that is not supported, and a part of the message.
REFUSED: Dict[str, Tuple[str, Dict[str, Any], str]] = {
    **{
        f"{name}: an unknown key": (name, {"attention_sigmoid": True}, "got attention_sigmoid=True")
        for name in RECENT
    },
    "qwen3: a size of transformers' own": (
        "qwen3",
        {"head_dim": ...},
        "expected head_dim in config.json, got none",
    ),
    "gemma3_text: attention both ways": (
        "gemma3_text",
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention to be false or null, got True",
    ),
    "gemma3_text: a cap that nobody reads": (
        "gemma3_text",
        {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping to be false or null, got 50.0",
    ),
    "gemma3_text: one rotation": (
        "gemma3_text",
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
        "rope_parameters to be nested by layer type",
    ),
    "gemma3_text: part of a head": (
        "gemma3_text",
        {"partial_rotary_factor": 0.5},
        "rotation of whole heads",
    ),
    "gemma3_text: two periods": (
        "gemma3_text",
        {"sliding_window_pattern": 2, "_sliding_window_pattern": 3},
        "or _sliding_window_pattern, got 2 and 3",
    ),
    "gpt_oss: another rotation": (
        "gpt_oss",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "expected rope_type yarn, got rope",
    ),
    "gpt_oss: another activation": (
        "gpt_oss",
        {"hidden_act": "relu"},
        "hidden_act to be silu, got relu",
    ),
    "gpt_oss: two numbers of experts": (
        "gpt_oss",
        {"experts_per_token": 3},
        "experts_per_token to be 2, got 3",
    ),
    "llama4_text: windows": (
        "llama4_text",
        {"layer_types": ["sliding_attention"] * 4},
        "layer_types to be full_attention, or chunked_attention",
    ),
    "llama4_text: chunks without a size": (
        "llama4_text",
        {"attention_chunk_size": None},
        "chunked_attention with attention_chunk_size",
    ),
    "llama4_text: a longer rotation": (
        "llama4_text",
        {"rope_parameters": YARN},
        "keeps the lengths of queries and keys with use_qk_norm, got yarn",
    ),
    "llama4_text: too few layers": (
        "llama4_text",
        {"no_rope_layers": [1]},
        "no_rope_layers with an entry for each of 4 layers, got 1",
    ),
}


def config_of(name: str, folder: Path, changes: Dict[str, Any]) -> Dict[str, Any]:
    """Return config.json of a test model with changed values; `...` removes a key."""
    values = {**json.loads((saved(name, folder)[1] / "config.json").read_text()), **changes}
    return {key: value for key, value in values.items() if value is not ...}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_configs_are_refused_by_name(case: str, tmp_path: Path) -> None:
    name, changes, named = REFUSED[case]
    with pytest.raises(ValueError) as refusal:
        families.read(config_of(name, tmp_path, changes))
    assert str(refusal.value).startswith(f"{name.split()[0]}: ") and named in str(refusal.value)


@pytest.mark.parametrize("first", [-1, 0, 1, 2, 9])
@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_layers_from_max_window_layers_on_have_a_window(
    name: str, used: bool, first: int, tmp_path: Path
) -> None:
    windows = {"use_sliding_window": used, "sliding_window": 8, "max_window_layers": first}
    theirs_of = described(name)
    result = type(theirs_of)(**{**theirs_of.to_dict(), **windows, "layer_types": None})
    config = {key: value for key, value in result.to_dict().items() if key != "layer_types"}
    assert list(families.read(config | windows)[0].order) == result.layer_types


# Faults: a model, and wrong values in its config.
FELT: Dict[str, Tuple[str, Dict[str, Any]]] = {
    "gemma3_text: the window elsewhere": (
        "gemma3_text",
        {"layer_types": ["full_attention", "sliding_attention"]},
    ),
    "gemma3_text: no cap of logits": ("gemma3_text plain", {"final_logit_softcapping": None}),
    "qwen3: a longer window": ("qwen3 with windows", {"sliding_window": 9}),
    "gpt_oss: another limit": ("gpt_oss", {"swiglu_limit": 7.0}),
    "gpt_oss: another slope": ("gpt_oss", {"swiglu_alpha": 1.0}),
    "gpt_oss: a longer window": ("gpt_oss", {"sliding_window": 9}),
    "gpt_oss: a ramp on whole pairs": (
        "gpt_oss",
        {"rope_parameters": {**MODELS["gpt_oss"]["rope_parameters"], "truncate": True}},
    ),
    "llama4_text: other chunks": ("llama4_text", {"attention_chunk_size": 11}),
    "llama4_text: no norms": ("llama4_text", {"use_qk_norm": False}),
    "llama4_text: another temperature": ("llama4_text with temperatures", {"attn_scale": 0.4}),
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


# Keys of older versions in configs on the hub, and the equivalent keys of today.
OLDER: Dict[str, Tuple[str, Dict[str, Any], Dict[str, Any]]] = {
    "gemma3_text": (
        "gemma3_text",
        {
            "rope_parameters": ..., "layer_types": ..., "sliding_window_pattern": 2,
            "_sliding_window_pattern": ..., "rope_theta": 100000.0, "rope_local_base_freq": 1000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "cache_implementation": "hybrid",
        },
        {},
    ),
    "gemma3_text without a pattern": ("gemma3_text plain",
        {"layer_types": ..., "_sliding_window_pattern": ...}, {}),
    "gpt_oss": (
        "gpt_oss",
        {
            "rope_parameters": ..., "rope_theta": 150000.0,
            "rope_scaling": {**YARN, "truncate": False, "rope_theta": 150000.0},
            "experts_per_token": 2, "initial_context_length": 128, "swiglu_alpha": ...,
        },
        {},
    ),
    "llama4_text": (
        "llama4_text",
        {"rope_parameters": ..., "rope_theta": 500000.0, "rope_scaling": LLAMA3,
            "no_rope_layers": [], "layer_types": ..., "moe_layers": ...},
        {},
    ),
    "gpt_oss without layer types": ("gpt_oss", {"layer_types": ...}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", OLDER)
def test_older_key_names_give_the_same_description(case: str, tmp_path: Path) -> None:
    name, older, today = OLDER[case]
    assert (
        families.read(config_of(name, tmp_path, older))[0]
        == families.read(config_of(name, tmp_path, today))[0]
    )


@pytest.mark.parametrize(
    "target", [pytest.param("ort", marks=pytest.mark.exhaustive), "torchscript"]
)
def test_temperatures_of_llama4_count_positions_where_transformers_counts_columns(
    target: str, tmp_path: Path
) -> None:
    peer, folder = saved("llama4_text with temperatures", tmp_path / "checkpoint")
    export_model(from_pretrained(folder), target, tmp_path / "exported", verify=False)
    session, tokens = load(tmp_path / "exported", threads=1, provider="cpu").session(), tokens_of(1)
    wanted = theirs(peer, tokens)
    padded = np.concatenate((np.zeros((1, 6), np.int64), tokens), 1)
    mask = (np.arange(padded.shape[1]) >= 6).astype(np.int64)[None]
    assert share([(session.prefill(padded, attention_mask=mask)[:, 6:], wanted)]) <= 1


def test_layers_for_multi_token_prediction_are_ignored(tmp_path: Path) -> None:
    peer, folder = saved("deepseek_v3", tmp_path)
    weights = load_file(folder / "model.safetensors")
    behind = {"model.layers.61.eh_proj.weight": torch.zeros(64, 128)}  # of the published model
    save_file({**weights, **behind}, folder / "model.safetensors", {"format": "pt"})
    with torch.no_grad():
        logits = from_pretrained(folder)(torch.from_numpy(tokens_of())).numpy()
    assert share([(logits, theirs(peer, tokens_of()))]) <= 1


@pytest.mark.parametrize("target", ["pt2", "ort-cuda"])
def test_experts_and_norms_behind_products_are_exported(target: str, tmp_path: Path) -> None:
    _, folder = saved("deepseek_v3", tmp_path)
    export_model(from_pretrained(folder), target, tmp_path / "artefact", verify="quick")


@pytest.mark.parametrize("weights", ["chosen", "sigmoid"])
@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"on": "input", "shared": 12},
        {"on": "input", "bias": True},
        {"bias": True, "unit": {"name": "clamped", "limit": 0.4}},
        {"chosen": 5, "unit": {"name": "gated", "activation": "relu"}},
    ],
    ids=["plain", "shared", "biases", "clamped", "all chosen"],
)
def test_experts_match_their_oracle(weights: str, parts: Dict[str, Any]) -> None:
    torch.manual_seed(0)
    result = build(
        "mlp",
        {"name": "experts", "experts": 5, "chosen": 2, "hidden": 8, "weights": weights, **parts},
        16,
    )
    for parameter in result.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 7, 16)
    with torch.no_grad():
        given = result(x).numpy()
    for row in range(2):
        assert np.allclose(given[row], result.exact(x[row].double().numpy()), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"chosen": 6}, "chosen to be 1 .. experts"),
        ({"weights": "best"}, "weights to be one of chosen, sigmoid"),
        ({"on": "both"}, "on one of output, input"),
        ({"unit": {"name": "clamped", "limit": -1.0}}, "limit to be above 0, got -1.0"),
        ({"unit": {"name": "glu"}}, "expected name to be one of gated, clamped, got 'glu'"),
    ],
)
def test_invalid_parameters_of_experts_are_refused(parts: Dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        build("mlp", {"name": "experts", "experts": 5, "chosen": 2, "hidden": 8, **parts}, 16)
