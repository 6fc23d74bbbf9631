"""Families of 2023 to 2025: that each layer is one node, what is refused, and that their parts are felt."""

import json
from pathlib import Path
from typing import Any, Dict, Tuple

import pytest

from posenc_export import export_model
from posenc_export.models import families
from posenc_export.models.pretrained import from_pretrained

pytest.importorskip("transformers", reason="transformers is not installed")
from posenc_export.export.expected import eager_session  # noqa: E402
from tests.models.checkpoints import CONFIGS, MODELS, saved  # noqa: E402
from tests.models.test_families import _close, _theirs, _tokens  # noqa: E402

RECENT = [name for name in CONFIGS if name in ("qwen3", "olmo2", "gemma", "gemma2", "gemma3_text", "cohere", "cohere2", "glm", "stablelm")]
NAMES = [name for name in MODELS if name.split()[0] in RECENT]


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_is_one_node_on_ort(name: str, tmp_path: Path) -> None:
    model = from_pretrained(saved(name, tmp_path / "checkpoint")[1])
    manifest = export_model(model, "ort", tmp_path / "exported", verify=False)
    assert manifest.operators["GroupQueryAttention"] == len(model.config.order)


# Of a family, what a config.json may say that is not understood, and what the refusal names.
REFUSED: Dict[str, Tuple[str, Dict[str, Any], str]] = {
    **{f"{name}: an unknown key": (name, {"attention_sigmoid": True}, "got attention_sigmoid=True") for name in RECENT},
    "qwen3: a size of transformers' own": ("qwen3", {"head_dim": ...}, "config.json has head_dim, got none"),
    "gemma: attention both ways": ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is false or null, got True"),
    "gemma: two activations": ("gemma", {"hidden_activation": "relu"}, "hidden_activation is null or gelu_pytorch_tanh"),
    "gemma2: attention both ways": ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is false or null, got True"),
    "gemma2: a cap below 0": ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping is a number above 0, got -1.0"),
    "gemma2: no scale": ("gemma2", {"query_pre_attn_scalar": ...}, "config.json has query_pre_attn_scalar, got none"),
    "gemma2: no window": ("gemma2", {"sliding_window": None}, "sliding_attention without one"),
    "gemma3_text: attention both ways": ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is false or null, got True"),
    "gemma3_text: a cap that nobody reads": ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is false or null, got 50.0"),
    "gemma3_text: one rotation": ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, "rope_parameters is nested by layer type"),
    "gemma3_text: part of a head": ("gemma3_text", {"partial_rotary_factor": 0.5}, "whole heads turn"),
    "gemma3_text: two periods": ("gemma3_text", {"sliding_window_pattern": 2, "_sliding_window_pattern": 3}, "are one thing, got 2 and 3"),
    "cohere: no scale": ("cohere", {"logit_scale": None}, "logit_scale is a number above 0, got None"),
    "cohere2: norms of queries": ("cohere2", {"use_qk_norm": True}, "use_qk_norm is False, got True"),
    "cohere2: chunks": ("cohere2", {"layer_types": ["chunked_attention"] * 5}, "got 'chunked_attention'"),
    "stablelm: another head size": ("stablelm", {"head_dim": 32}, "head_dim is 16, got 32"),
}


def config_of(name: str, folder: Path, changes: Dict[str, Any]) -> Dict[str, Any]:
    """The config.json of a test model with other values; `...` removes a key."""
    values = {**json.loads((saved(name, folder)[1] / "config.json").read_text()), **changes}
    return {key: value for key, value in values.items() if value is not ...}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused_by_name(case: str, tmp_path: Path) -> None:
    name, changes, named = REFUSED[case]
    with pytest.raises(ValueError) as refusal:
        families.read(config_of(name, tmp_path, changes))
    assert str(refusal.value).startswith(f"{name}: ") and named in str(refusal.value)


# A model read as if its config said something else.
FELT: Dict[str, Tuple[str, Dict[str, Any]]] = {
    "gemma2: a longer window": ("gemma2", {"sliding_window": 9}),
    "gemma2: no cap of scores": ("gemma2", {"attn_logit_softcapping": None}),
    "gemma2: no cap of logits": ("gemma2", {"final_logit_softcapping": None}),
    "gemma2: another scale": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3_text: the window elsewhere": ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"]}),
    "gemma3_text: no cap of logits": ("gemma3_text plain", {"final_logit_softcapping": None}),
    "cohere: another scale": ("cohere", {"logit_scale": 0.3}),
    "cohere: another theta": ("cohere", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "cohere2: a longer window": ("cohere2", {"sliding_window": 9}),
    "glm: less turns": ("glm", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}}),
    "qwen3: a longer window": ("qwen3 with windows", {"sliding_window": 9}),
    "stablelm: another epsilon": ("stablelm in parallel", {"layer_norm_eps": 0.1}),
}


@pytest.mark.parametrize("case", FELT)
def test_a_config_read_wrongly_would_be_seen(case: str, tmp_path: Path) -> None:
    name, changes = FELT[case]
    peer, folder = saved(name, tmp_path)
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    assert not _close(eager_session(from_pretrained(folder)).prefill(_tokens()), _theirs(peer, _tokens()))


# What configs on the hub say in words of older versions, and the same in today's.
OLDER: Dict[str, Tuple[str, Dict[str, Any], Dict[str, Any]]] = {
    "gemma3_text": (
        "gemma3_text",
        {
            "rope_parameters": ..., "layer_types": ..., "sliding_window_pattern": 2, "_sliding_window_pattern": ..., "rope_theta": 100000.0,
            "rope_local_base_freq": 1000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "cache_implementation": "hybrid",
        },
        {},
    ),
    "gemma3_text without a pattern": ("gemma3_text plain", {"layer_types": ..., "_sliding_window_pattern": ...}, {}),
    "gemma2": ("gemma2", {"rope_parameters": ..., "layer_types": ..., "rope_theta": 10000.0, "hidden_act": "gelu_pytorch_tanh"}, {}),
    "cohere2": (
        "cohere2",
        {"rope_parameters": ..., "layer_types": ..., "sliding_window_pattern": 4, "layer_switch": 4, "position_embedding_type": "rope_gptj", "rotary_pct": 1.0},
        {},
    ),
    "cohere": ("cohere", {"rope_parameters": ...}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "glm": ("glm", {"rope_parameters": ..., "rope_theta": 10000.0}, {}),
    "stablelm": ("stablelm", {"rope_parameters": ..., "rope_theta": 10000.0}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", OLDER)
def test_older_words_say_the_same(case: str, tmp_path: Path) -> None:
    name, older, today = OLDER[case]
    assert families.read(config_of(name, tmp_path, older))[0] == families.read(config_of(name, tmp_path, today))[0]
