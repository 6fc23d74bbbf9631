"""Configs: conversion to and from JSON, refusals."""

import json
from typing import Any, Callable

import pytest
from msgspec.structs import replace

from posenc_export.encodings.boxes import Boxes
from posenc_export.models.block import AttentionBlock
from posenc_export.models.config_json import from_json, to_json
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.models.stack import Stack
from tests.tiny import VARIANTS, block, decoder

HEADS = {"heads": 6, "kv_heads": 3, "head_size": 16}


def _stack(encodings: list[Any], layers: int = 2, plain: str = "nope") -> Stack:
    """Build a decoder whose layers have these encodings in turn."""
    return Stack(decoder_config(61, layers, 40, block(plain), layer_encodings=encodings))


@pytest.mark.parametrize("variant", VARIANTS)
def test_configs_survive_json(variant: str) -> None:
    for config in (block(variant), decoder(variant)):
        assert from_json(json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wdith": 3}, "wdith"),
        ({"attention": {**HEADS, "kv_heads": 4}}, "divisible by kv_heads"),
        ({"attention": {**HEADS, "heads": 0}}, "at least 1"),
        ({"attention": {**HEADS, "softcap": -1.0}}, "softcap to be a finite number above 0"),
        ({"attention": {"heads": 6, "kv_heads": 3}}, "head_size"),
        ({"width": "48"}, "width"),
        ({"width": 0}, "width to be a whole number of at least 1"),
        ({"kind": "transducer"}, "kind to be one of block, decoder, encoder"),
    ],
)
def test_bad_configs_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json({**to_json(block("rope")), **change})


def test_width_that_heads_do_not_divide_needs_a_head_size() -> None:
    with pytest.raises(ValueError, match="give head_size"):
        block_config(width=10, heads=4, max_positions=8)
    assert block_config(width=10, heads=4, head_size=8, max_positions=8).attention.head_size == 8


@pytest.mark.parametrize(
    ("on_tokens", "in_layers"),
    [("nope", "sinusoidal"), ("alibi", "nope"), ("t5", "rope"), ("sinusoidal", "learned")],
)
def test_encodings_at_a_place_where_they_have_no_effect_are_refused_by_name(
    on_tokens: str, in_layers: str
) -> None:
    plain = decoder("nope")
    kind = plain.layers["layer"]
    changed = replace(kind, attention=replace(kind.attention, encodings=(VARIANTS[in_layers],)))
    tokens = replace(plain.tokens, encodings=(VARIANTS[on_tokens],))
    said = "encodings at the place where they act, got .* (on tokens|in layers); put it"
    with pytest.raises(ValueError, match=said):
        Stack(replace(plain, tokens=tokens, layers={"layer": changed}))


def test_encodings_with_different_numbers_of_coordinates_are_refused() -> None:
    with pytest.raises(ValueError, match="same coordinates, got encodings of 0 axes and 3 axes"):
        _stack(["rope", "mrope"])
    assert _stack(["nope", "mrope"]).axes == 3


def test_a_refusal_of_coordinates_says_who_reads_the_position() -> None:
    plain, layout = block("nope"), {"name": "layout_bias", "size": 9}
    attention = replace(plain.attention, sees={"name": "both"}, encodings=(layout,))
    got = "4 axes below 9 and 4 axes below 9 behind the position"
    with pytest.raises(ValueError, match=got):
        AttentionBlock(
            replace(plain, encodings=({"name": "boxes", "size": 9},), attention=attention)
        )


def test_coordinates_of_a_range_of_their_own_are_refused_in_causal_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Boxes, "works_in", ("causal", "bidirectional"))
    plain = replace(block("nope"), encodings=({"name": "boxes"},))
    assert Stack(decoder_config(61, 1, 40, plain)).axes == 4
    own = replace(block("nope"), encodings=({"name": "boxes", "size": 90},))
    with pytest.raises(ValueError, match="expected bidirectional attention for Boxes, got causal"):
        Stack(decoder_config(61, 1, 40, own))


def test_layers_share_the_tables_of_equal_encodings() -> None:
    stack = _stack(["rope", "nope", "rope"], 5, "learned")
    assert len({id(attention.encoding) for attention in stack.attentions()}) == 2
    assert len(stack.masks) == 1


GATED = {"name": "gated", "hidden": 8}
BAD_PARTS = {
    "norm": (
        {"norms": ({"name": "batch"}, {"name": "rms"})},
        "norm: expected name to be one of rms, layer, none, got 'batch'",
    ),
    "one norm too few": ({"norms": ({"name": "rms"},)}, "expected 2 norms of a layer, got 1"),
    "residual": ({"residual": {"name": "highway"}}, "expected name to be one of pre, post"),
    "activation": (
        {"mlp": {**GATED, "activation": "step"}},
        "activation to be one of silu, gelu, got .step.",
    ),
    "parameter": (
        {"mlp": {**GATED, "depth": 2}},
        "mlp gated: expected parameter to be one of hidden, activation, bias, got 'depth'",
    ),
    "missing parameter": ({"mlp": {"name": "gated"}}, "mlp gated: expected hidden to be given"),
    "no whole number": ({"mlp": {**GATED, "hidden": 8.5}}, "hidden to be a whole number"),
    "no flag": ({"mlp": {**GATED, "bias": 1}}, "expected bias to be true or false"),
    "no name": ({"residual": {}}, "residual: expected a specification with a name"),
}


@pytest.mark.parametrize("part", BAD_PARTS)
def test_unknown_parts_are_refused_by_name(part: str) -> None:
    change, message = BAD_PARTS[part]
    plain = decoder("nope")
    with pytest.raises(ValueError, match=message):
        Stack(replace(plain, layers={"layer": replace(plain.layers["layer"], **change)}))


LINEAR: dict[str, Any] = {"mechanism": "linear", "kv_heads": 6}


def _with(*names: str, **others: Any) -> dict[str, Any]:
    return {"encodings": tuple({"name": name} for name in names), **others}


BAD_ATTENTION: dict[str, tuple[dict[str, Any], str]] = {
    "window of nothing": ({"sees": {"name": "window", "size": 0}}, "size of at least 1, got 0"),
    "sight": (
        {"sees": {"name": "dilated"}},
        "sees: expected name to be one of causal, window, chunk, both, near",
    ),
    "capped content": (_with("cope", softcap=5.0), "expected no softcap with cope"),
    "two that score": (
        _with("shaw", "cope"),
        "at most one encoding that overrides rescore, got Shaw and CoPE",
    ),
    "scaled beside content": (
        _with("t5", "shaw"),
        "no encoding that scales scores with Shaw, which computes them itself, got T5",
    ),
    "rows beside longer keys": (
        _with("deberta", "rope_longrope"),
        "no encoding with RoPELongRoPE that needs its size of keys, got DeBERTa",
    ),
    "backward only": (
        _with("cope", sees={"name": "both"}),
        "expected causal attention for CoPE, got bidirectional",
    ),
    "linear window": (
        {**LINEAR, "sees": {"name": "window", "size": 4}},
        "linear attention: expected sees causal or both",
    ),
    "linear scores": (_with("alibi", **LINEAR), "since there are no scores, got alibi"),
}


@pytest.mark.parametrize("case", BAD_ATTENTION)
def test_unsupported_combinations_in_attention_are_refused_by_name(case: str) -> None:
    change, message = BAD_ATTENTION[case]
    plain = block("nope")
    with pytest.raises(ValueError, match=message):
        AttentionBlock(replace(plain, attention=replace(plain.attention, **change)))


def test_short_forms_refuse_unknown_parts() -> None:
    plain, wrong, unnamed = block("nope"), ["sinusoidal"], {"nam": "rope"}
    text: Any = "rope"
    calls: dict[str, Callable[[], Any]] = {
        "norm to be one of": lambda: decoder_config(8, 1, 8, plain, norm="batch"),
        "layers to be a whole number of at least 1": lambda: decoder_config(8, 0, 8, plain),
        "hidden to be a whole number of .*, got -8": lambda: decoder_config(8, 1, -8, plain),
        "width to be a whole number of .*, got 'rope'": lambda: block_config(text, 4, 8),
        "heads to be a whole number of .*, got 0": lambda: block_config(64, 0, 64),
        "max_positions to be a whole number of .*, got 'rope'": lambda: block_config(64, 4, text),
        "block to be a description of a block, got 'ro": lambda: decoder_config(8, 1, 8, text),
        "a dict with a name, got {'nam'": lambda: block_config(64, 4, 8, encoding=unnamed),
        "a description, as of decoder_config, got 'rope'": lambda: seeded(text),
        "seed to be .*, got 'rope'": lambda: seeded(plain, text),
        "got sinus": lambda: decoder_config(8, 1, 8, plain, layer_encodings=wrong),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_a_mixture_of_causal_and_bidirectional_layers_is_refused() -> None:
    plain = decoder("nope")
    layer, sees = plain.layers["layer"], {"name": "near", "reach": 3}
    near = replace(layer, attention=replace(layer.attention, sees=sees))
    with pytest.raises(ValueError, match="all layers to be causal or none"):
        replace(plain, layers={**plain.layers, "near": near}, order=("layer", "near"))
    with pytest.raises(ValueError, match="order to name each kind in layers"):
        replace(plain, order=("layer", "deep"))


def test_an_encoding_is_given_as_text_too() -> None:
    specs: Any = ("rope:theta=500", {"name": "rope", "theta": 500.0})
    as_text, as_spec = (block_config(64, 4, 256, encoding=spec) for spec in specs)
    assert as_text == as_spec
    short, long = (
        decoder_config(9, 2, 96, as_text, layer_encodings=[alibi])
        for alibi in ("alibi", {"name": "alibi"})
    )
    assert short == long
