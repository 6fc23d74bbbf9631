"""Checkpoints that the code of transformers reads: forms of published files, and what a mechanism
needs beside equal numbers.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from posenc_export import export_model
from posenc_export.models.by_transformers import TransformersModel
from posenc_export.models.pretrained import from_pretrained

pytest.importorskip("transformers", reason="transformers is not installed")
from tests.models.checkpoints import saved
from tests.models.patterns import share, theirs, tokens_of

# Types whose published checkpoints lack the prefix of names, and buffers that older versions of
# transformers saved.
BARE: dict[str, tuple[str, ...]] = {
    "gpt2": ("h.0.attn.bias", "h.1.attn.masked_bias"),
    "bloom": (),
    "falcon new": (),
}
# Keys of config.json in published models that transformers 5 does not write.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_ctx": 512, "output_past": True, "_num_labels": 1,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "mpt": {
        "init_config": {"name": "kaiming_normal_"}, "tokenizer_name": "EleutherAI/gpt-neox-20b",
        "verbose": 0, "norm_type": "low_precision_layernorm", "attn_config": {
            "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0,
            "attn_type": "multihead_attention", "clip_qkv": 0.7, "prefix_lm": False,
            "softmax_scale": 0.4,
        },
    },
    "falcon new": {"ff_factor": 4, "apply_residual_connection_post_layernorm": False},
    "bloom": {
        "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "n_embed": 64,
        "masked_softmax_fusion": True, "n_inner": None, "offset_alibi": 100,
        "skip_bias_add": True, "skip_bias_add_qkv": False, "num_attention_heads": 4,
    },
}  # fmt: skip


def _equal(folder: Path, peer: Any) -> bool:
    model = from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens_of())).numpy()
    assert isinstance(model, TransformersModel)
    return share([(logits, theirs(peer, tokens_of()))]) <= 1


@pytest.mark.parametrize("name", BARE)
def test_names_and_buffers_of_published_checkpoints_load(name: str, tmp_path: Path) -> None:
    peer, folder = saved(name, tmp_path)
    path = folder / "model.safetensors"
    weights = {n.removeprefix("transformer."): value for n, value in load_file(path).items()}
    weights |= {buffer: torch.zeros(1, 1, 4, 4) for buffer in BARE[name]}
    save_file(weights, path, {"format": "pt"})
    assert _equal(folder, peer)


@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_of_published_checkpoints_are_understood(name: str, tmp_path: Path) -> None:
    peer, folder = saved(name, tmp_path)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **PUBLISHED[name]}))
    assert _equal(folder, peer)


def test_layers_for_multi_token_prediction_are_ignored(tmp_path: Path) -> None:
    peer, folder = saved("deepseek_v3", tmp_path)
    weights = load_file(folder / "model.safetensors")
    behind = {"model.layers.61.eh_proj.weight": torch.zeros(64, 128)}  # of the published model
    save_file({**weights, **behind}, folder / "model.safetensors", {"format": "pt"})
    with torch.no_grad():
        logits = from_pretrained(folder)(torch.from_numpy(tokens_of())).numpy()
    assert share([(logits, theirs(peer, tokens_of()))]) <= 1


@pytest.mark.exhaustive  # tests/export/targets/test_experts.py has small ones
@pytest.mark.parametrize("target", ["pt2", "ort-cuda"])
def test_experts_and_norms_behind_products_are_exported(target: str, tmp_path: Path) -> None:
    _, folder = saved("deepseek_v3", tmp_path)
    export_model(from_pretrained(folder), target, tmp_path / "artefact", verify="quick")
