"""Configs: JSON both ways, refusals."""

import dataclasses
import json

import pytest

from posenc_export.models.config import AttentionConfig, DecoderConfig, from_json, to_json
from posenc_export.models.decoder import Decoder
from tests.tiny import VARIANTS, block, decoder


@pytest.mark.parametrize("variant", VARIANTS)
def test_configs_survive_json(variant: str) -> None:
    for config in (block(variant), decoder(variant), dataclasses.replace(decoder(variant), layer_encodings=[VARIANTS[variant], {"name": "nope"}])):
        assert from_json(json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wdith": 3}, "wdith"),
        ({"kv_heads": 4}, "divisible by kv_heads"),
        ({"heads": 0}, "at least 1"),
        ({"kind": "transducer"}, "kind is one of block, decoder, encoder"),
    ],
)
def test_bad_configs_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json({**to_json(block("rope")), **change})


def test_width_that_heads_do_not_divide_needs_a_head_size() -> None:
    with pytest.raises(ValueError, match="give head_size"):
        AttentionConfig(width=10, heads=4, max_positions=8)
    assert AttentionConfig(width=10, heads=4, head_size=8, max_positions=8).head_size == 8


@pytest.mark.parametrize(("of_model", "of_layer"), [("nope", "sinusoidal"), ("nope", "alibi"), ("rope", "rope"), ("t5", "rope"), ("nope", "mrope")])
def test_layer_encodings_that_act_elsewhere_are_refused_by_name(of_model: str, of_layer: str) -> None:
    with pytest.raises(ValueError, match="beside layer_encodings .* acts on"):
        Decoder(dataclasses.replace(decoder(of_model), layer_encodings=[VARIANTS[of_layer]]))


def test_decoder_refuses_unknown_parts() -> None:
    with pytest.raises(ValueError, match="norm is one of"):
        DecoderConfig(8, 1, 8, block("nope"), norm="batch")
