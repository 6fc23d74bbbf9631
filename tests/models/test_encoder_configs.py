"""Configurations of encoder families: configs that are read, and configs that are refused."""

import json
from typing import Any, Dict

import pytest

from posenc_export.models import families

pytest.importorskip("transformers", reason="transformers is not installed")
from tests.models.encoders import PUBLISHED, WITHOUT_RANGE, described  # noqa: E402


def _config(name: str, **changes: Any) -> Dict[str, Any]:
    """Return config.json of a model with changed values. Keys with the value Ellipsis are
    removed.
    """
    config = {**json.loads(described(name).to_json_string()), **changes}
    return {key: value for key, value in config.items() if value is not ...}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str) -> None:
    config, _ = families.read(PUBLISHED[name], 512 if name.startswith(WITHOUT_RANGE) else None)
    assert (config.width, len(config.order)) == (
        PUBLISHED[name].get("hidden_size", 768),
        len(config.kinds),
    )
    assert config.max_positions == 512


REFUSED = {
    "an unknown key": (
        "layoutlm",
        {"new_key": 1},
        "expected only known keys in config.json, got new_key=1",
    ),
    "a rotation in a family that has none": ("layoutlm", {"rope_theta": 10000.0}, "got rope_theta"),
    "boxes of another width": (
        "layoutlmv3",
        {"coordinate_size": 2},
        "expected 4 coordinate_size \\+ 2 shape_size to be the width 48, got 24",
    ),
    "a decoder": ("layoutlm", {"is_decoder": True}, "is_decoder to be False, got True"),
    "an encoder beside a decoder": (
        "layoutlm",
        {"is_encoder_decoder": True},
        "is_encoder_decoder to be False, got True",
    ),
    "cross-attention": (
        "layoutlmv3",
        {"add_cross_attention": True},
        "add_cross_attention to be False, got True",
    ),
    "relative keys": (
        "layoutlm",
        {"position_embedding_type": "relative_key"},
        "position_embedding_type to be 'absolute', got 'relative_key'",
    ),
    "pruned heads": ("layoutlm", {"pruned_heads": {"0": [1]}}, "pruned_heads to be {}, got"),
    "no epsilon": (
        "layoutlm",
        {"layer_norm_eps": ...},
        "expected layer_norm_eps in config.json, got none",
    ),
    "no number of segments": (
        "layoutlm",
        {"type_vocab_size": -1},
        "type_vocab_size to be an integer of 0 or more, got -1",
    ),
    "an activation": ("layoutlm", {"hidden_act": "mish"}, "hidden_act to be one of .*, got 'mish'"),
    "no padding": (
        "layoutlmv3",
        {"pad_token_id": None},
        "pad_token_id to be an integer of 0 or more, got None",
    ),
    "no distances": (
        "deberta",
        {"relative_attention": False},
        "relative_attention to be True, got False",
    ),
    "no distances by default": (
        "deberta-v2",
        {"relative_attention": ...},
        "relative_attention to be True, got False",
    ),
    "no term": (
        "deberta",
        {"pos_att_type": []},
        "pos_att_type to be c2p, p2c or both, got ..; other values",
    ),
    "another term": (
        "deberta-v2",
        {"pos_att_type": "c2p|p2p"},
        "pos_att_type to be c2p, p2c or both, got 'c2p.p2p'",
    ),
    "absolute positions beside distances": (
        "deberta",
        {"position_biased_input": True},
        "position_biased_input to be False, got True",
    ),
    "heads that are mixed": (
        "deberta",
        {"talking_head": True},
        "talking_head to be False, got True",
    ),
    "a convolution": (
        "deberta-v2",
        {"conv_kernel_size": 3, "conv_act": "gelu"},
        "conv_kernel_size to be 0, got 3",
    ),
    "a norm of distances": (
        "deberta-v2",
        {"norm_rel_ebd": "batch_norm"},
        "norm_rel_ebd to be none or layer_norm, got 'batch_norm'",
    ),
    "odd buckets": (
        "deberta-v2",
        {"position_buckets": 7},
        "position_buckets to be .* even and below max_relative_positions 20, got 7",
    ),
    "attention one way": ("xlnet", {"attn_type": "uni"}, "attn_type to be 'bi', got 'uni'"),
    "two directions of data": ("xlnet", {"bi_data": True}, "bi_data to be False, got True"),
    "distances that are cut off": (
        "xlnet",
        {"clamp_len": "far"},
        "clamp_len to be an integer, got 'far'",
    ),
    "no range": (
        "xlnet",
        {},
        "expected max_position_embeddings in config.json, got none; give max_positions",
    ),
    "adapters": ("wav2vec2", {"add_adapter": True}, "add_adapter to be False, got True"),
    "a norm of batches": (
        "hubert",
        {"conv_pos_batch_norm": True},
        "conv_pos_batch_norm to be False, got True",
    ),
    "an even filter": (
        "wav2vec2-bert",
        {"conv_depthwise_kernel_size": 4},
        "conv_depthwise_kernel_size to be odd, got 4",
    ),
    "rotated inputs": (
        "wav2vec2-bert",
        {"position_embeddings_type": "rotary"},
        "position_embeddings_type to be relative_key, relative or null, got 'rotary'",
    ),
    "lists of two lengths": (
        "wav2vec2",
        {"conv_stride": [5, 2]},
        "conv_dim, conv_kernel, conv_stride to be lists of num_feat_extract_layers numbers, got",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configs_that_cannot_be_exported_are_refused_by_name(case: str) -> None:
    name, changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        families.read(
            _config(name, **changes), 64 if name in WITHOUT_RANGE and case != "no range" else None
        )
