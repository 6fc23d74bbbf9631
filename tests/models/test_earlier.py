"""The families before Llama: their special settings, and settings that are refused."""

import json
import re
from pathlib import Path
from typing import Any, Dict, Sequence, Tuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file

from posenc_export.models import families
from posenc_export.models.config import StackConfig
from posenc_export.models.config_json import from_json, to_json
from posenc_export.models.pretrained import from_pretrained

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from tests.models import earlier  # noqa: E402
from tests.models.checkpoints import OURS, saved  # noqa: E402

LENGTH = 40


def _config(name: str, **changes: Any) -> Dict[str, Any]:
    """Return config.json of a model with changed values."""
    family = name.split()[0]
    config = getattr(transformers, earlier.CONFIGS[family])(
        **{**earlier.SIZES[family], **earlier.MODELS[name]}
    )
    values = {**json.loads(config.to_json_string()), **changes}
    return {key: value for key, value in values.items() if value is not None}


def _described(name: str, **changes: Any) -> StackConfig:
    return families.read(_config(name, **changes))[0]


def _logits(model: Any) -> Tuple[np.ndarray, np.ndarray]:
    """Return tokens, and the logits of transformers' model."""
    tokens = np.random.default_rng(0).integers(3, 61, (1, LENGTH))
    with torch.no_grad():
        return tokens[0], model(torch.from_numpy(tokens), use_cache=False).logits[0].numpy()


@pytest.mark.parametrize("name", [name for name in earlier.MODELS if name in OURS])
def test_logits_of_the_oracle_match_transformers(name: str, tmp_path: Path) -> None:
    peer, folder = saved(name, tmp_path / "checkpoint")
    tokens, wanted = _logits(peer)
    assert (
        np.abs(from_pretrained(folder).exact(tokens, range(LENGTH), range(LENGTH)) - wanted).max()
        < 2e-5
    )  # type: ignore[operator]


def _rewritten(folder: Path, base: str, buffers: Sequence[str]) -> None:
    """Save the weights under names without prefix, together with buffers."""
    weights = {
        key.removeprefix(base): value.clone()
        for key, value in load_file(folder / "model.safetensors").items()
    }
    save_file(
        {**weights, **{key: torch.zeros(1, 1, 4, 4) for key in buffers}},
        folder / "model.safetensors",
    )


@pytest.mark.parametrize("name", earlier.BARE)
def test_names_and_buffers_of_published_checkpoints_load(name: str, tmp_path: Path) -> None:
    peer, folder = saved(name, tmp_path)
    _rewritten(folder, *earlier.BARE[name])
    tokens, wanted = _logits(peer)
    assert (
        np.abs(from_pretrained(folder).exact(tokens, range(LENGTH), range(LENGTH)) - wanted).max()
        < 2e-5
    )  # type: ignore[operator]


# A model, a regular expression for its description as JSON, and a wrong replacement.
FAULTS = {
    "one norm for both halves of a layer": ("falcon new", "parallel_norms", "parallel"),
    "slopes that are not divided": ("falcon with alibi", r'"added":"before"', '"added":"after"'),
    "no bound": ("mpt clipped", '"clip":0.7', '"clip":70.0'),
    "no factor on scores": ("mpt clipped", '"scale":0.4', '"scale":0.25'),
    "the other GELU": ("bloom", '"gelu_tanh"', '"gelu"'),
    "layers scaled alike": ("gpt2 scaled by layer", r'"layer_[12]"(?!:)', '"layer_0"'),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_description_gives_other_logits(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, right, wrong = FAULTS[fault]
    peer, folder = saved(name, tmp_path)
    tokens, wanted = _logits(peer)
    description, family = families.read(json.loads((folder / "config.json").read_text()))
    text = json.dumps(to_json(description), separators=(",", ":"))
    changed = json.loads(re.sub(right, wrong, text))
    if wrong == "parallel":
        changed["layers"]["layer"]["norms"] = changed["layers"]["layer"]["norms"][:1]
        (folder / "model.safetensors").write_bytes(_without(folder / "model.safetensors", "ln_mlp"))
    changed["layers"] = {
        kind: layer for kind, layer in changed["layers"].items() if kind in changed["order"]
    }
    assert from_json(changed) != description
    monkeypatch.setattr(
        families, "read", lambda config, max_positions, part, lengths: (from_json(changed), family)
    )
    assert (
        np.abs(from_pretrained(folder).exact(tokens, range(LENGTH), range(LENGTH)) - wanted).max()
        > 2e-4
    )  # type: ignore[operator]


def test_slopes_of_mpt_follow_alibi_bias_max(tmp_path: Path) -> None:
    peer, folder = saved("mpt", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["attn_config"]["alibi_bias_max"] = 16
    (folder / "config.json").write_text(json.dumps(config))
    model = from_pretrained(folder)
    of_eight = peer.transformer.build_mpt_alibi_tensor
    peer.transformer.build_mpt_alibi_tensor = lambda heads, length, device=None: of_eight(
        heads, length, alibi_bias_max=16, device=device
    )
    tokens, wanted = _logits(peer)
    assert np.abs(model.exact(tokens, range(LENGTH), range(LENGTH)) - wanted).max() < 2e-5  # type: ignore[operator]


def _without(path: Path, part: str) -> bytes:
    """Return a tensor file without the tensors whose names contain `part`."""
    return save({key: value for key, value in load_file(path).items() if part not in key})


@pytest.mark.parametrize("name", ["gpt2", "bloom", "mpt", "falcon new"])
def test_a_single_layer_is_loaded_with_its_weights(name: str, tmp_path: Path) -> None:
    _, folder = saved(name, tmp_path)
    whole = dict(from_pretrained(folder).layers[1].attention.named_parameters())  # type: ignore[index]
    alone = dict(from_pretrained(folder, layer=1).attention.named_parameters())  # type: ignore[operator]
    assert list(whole) == list(alone) and all(torch.equal(whole[key], alone[key]) for key in whole)


REFUSED: Dict[str, Tuple[str, Dict[str, Any], str]] = {
    "gpt2 unknown": ("gpt2", {"head_dim": 8}, "head_dim=8"),
    "gpt2 cross": ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    "gpt2 rotation": ("gpt2", {"rope_theta": 10000.0}, "rope_theta"),
    "gpt2 activation": ("gpt2", {"activation_function": "quick_gelu"}, "activation_function"),
    "gpt2 epsilon": ("gpt2", {"layer_norm_epsilon": None}, "layer_norm_epsilon"),
    "bloom sums": (
        "bloom",
        {"apply_residual_connection_post_layernorm": True},
        "apply_residual_connection_post_layernorm",
    ),
    "bloom width": ("bloom", {"n_inner": 80}, "n_inner to be null or 256"),
    "bloom range": ("bloom", {"seq_length": None}, "give max_positions"),
    "bloom unknown": ("bloom", {"alibi": False}, "alibi=False"),
    "mpt rows": (
        "mpt",
        {"attn_config": {"alibi": False}},
        "attn_config.alibi to be True, got False",
    ),
    "mpt heads": (
        "mpt",
        {"attn_config": {"attn_type": "multiquery_attention"}},
        "attn_config.attn_type",
    ),
    "mpt norms of heads": ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln"),
    "mpt unknown in attention": ("mpt", {"attn_config": {"rope": True}}, "attn_config.rope=True"),
    "mpt slopes": (
        "mpt",
        {"attn_config": {"alibi_bias_max": 0}},
        "attn_config.alibi_bias_max to be a number above 0, got 0",
    ),
    "mpt attention": ("mpt", {"attn_config": 3}, "attn_config to be a mapping"),
    "mpt clip": (
        "mpt",
        {"attn_config": {"clip_qkv": 0}},
        "attn_config.clip_qkv to be a number above 0, got 0",
    ),
    "mpt norm": ("mpt", {"norm_type": "rmsnorm"}, "norm_type"),
    "mpt biases": ("mpt", {"no_bias": False}, "no_bias"),
    "mpt factor": ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale"),
    "falcon in turn": (
        "falcon new",
        {"parallel_attn": False},
        "parallel_attn to be true with new_decoder_architecture",
    ),
    "falcon heads": (
        "falcon",
        {"multi_query": False, "num_kv_heads": 2},
        "num_kv_heads to be 4 without multi_query",
    ),
    "falcon norms": (
        "falcon",
        {"num_ln_in_parallel_attn": 2},
        "num_ln_in_parallel_attn to be 1 without",
    ),
    "falcon sums": (
        "falcon",
        {"apply_residual_connection_post_layernorm": True},
        "apply_residual_connection_post_layernorm",
    ),
    "falcon share": (
        "falcon",
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "rotation of whole heads",
    ),
    "falcon unknown": ("falcon", {"head_dim": 32}, "head_dim=32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configs_that_cannot_be_exported_are_refused_by_name(case: str) -> None:
    name, changes, said = REFUSED[case]
    with pytest.raises(ValueError, match=said):
        _described(name, **changes)


@pytest.mark.parametrize("name", ["gpt2"])
def test_a_range_unlike_the_position_table_is_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match="max_positions to be 512, the rows of the position table, got 64"
    ):
        families.read(_config(name), 64)


def test_a_bloom_config_without_seq_length_takes_max_positions() -> None:
    config = _config("bloom", seq_length=None)
    assert families.read(config, 300)[0] == _described("bloom", seq_length=300)


def test_keys_of_published_checkpoints_are_understood() -> None:
    for name, changes in earlier.PUBLISHED.items():
        assert _described(name, **changes) == _described(name), name
