"""Rotations from transformers configurations, compared with transformers' functions."""

import math
from typing import Any, Dict

import numpy as np
import pytest
import torch

from posenc_export import encodings
from posenc_export.encodings.shared.rotary import Rotary
from posenc_export.models.hugging_face import rope_spec

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
utils = pytest.importorskip(
    "transformers.modeling_rope_utils", reason="transformers has no modeling_rope_utils"
)
SIZE, LENGTH = 64, 8192
SHAPE = {
    "hidden_size": 4 * SIZE,
    "num_attention_heads": 4,
    "head_dim": SIZE,
    "max_position_embeddings": LENGTH,
}

CASES: Dict[str, Dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048, "rope_theta": 500000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048,
        "rope_theta": 10000.0},
    "yarn with betas": {
        "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 512,
        "beta_fast": 24.0, "beta_slow": 2.0, "rope_theta": 1e6, "truncate": False,
    },
    "yarn as DeepSeek": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096,
        "mscale": 1.0, "mscale_all_dim": 0.7, "rope_theta": 10000.0,
    },
    "yarn with its factor given": {"rope_type": "yarn", "factor": 2.0,
        "original_max_position_embeddings": 4096, "attention_factor": 1.3, "rope_theta": 10000.0},
}  # fmt: skip


def _theirs(parameters: Dict[str, Any]) -> Any:
    config = transformers.LlamaConfig(**SHAPE, rope_parameters=dict(parameters))
    if parameters["rope_type"] == "default":
        return transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq, 1.0
    return utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))


def _ours(spec: Dict[str, Any], max_positions: int = 16) -> encodings.PositionEncoding:
    return encodings.build(spec, encodings.Geometry(4 * SIZE, 4, SIZE, max_positions))


LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


# Encodings that rotate a part of each head, and the keys of other model types for them.
PARTS: Dict[str, Any] = {
    "proportional": (
        {"name": "rope_proportional", "theta": 1e6, "share": 0.25},
        {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    ),
    "partial yarn": (
        {"name": "rope_yarn", "factor": 4.0, "original_max_positions": 2048, "rotary": SIZE // 2},
        {**CASES["yarn"], "partial_rotary_factor": 0.5},
    ),
}


@pytest.mark.parametrize("case", [*CASES, *PARTS])
def test_frequencies_and_magnitude_match_transformers(case: str) -> None:
    spec, parameters = PARTS.get(case) or ({}, CASES[case])
    frequencies, magnitude = _theirs(parameters)
    encoding = _ours(spec or rope_spec({**SHAPE, "rope_parameters": parameters}))
    assert isinstance(encoding, Rotary)
    ours = [encoding.frequency(k) for k in range(encoding.size // 2)]
    assert np.allclose(ours, frequencies.numpy(), rtol=2e-6, atol=1e-12)
    assert encoding.magnitude == pytest.approx(magnitude, rel=1e-6)


@pytest.mark.parametrize("length", [100, 8192, 8193, 20000])
def test_dynamic_frequencies_match_transformers(length: int) -> None:
    parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    config = transformers.LlamaConfig(**SHAPE, rope_parameters=parameters)
    frequencies, _ = utils.ROPE_INIT_FUNCTIONS["dynamic"](
        config, torch.device("cpu"), seq_len=length
    )
    encoding = _ours(rope_spec({**SHAPE, "rope_parameters": parameters}), 32)
    ours = [encoding.oracle().frequency(k, length) for k in range(SIZE // 2)]  # type: ignore[attr-defined]
    assert np.allclose(ours, frequencies.numpy(), rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    "name", ["rope", "rope_linear", "rope_ntk", "rope_yarn", "rope_llama3", "rope_proportional"]
)
def test_tables_are_exact_up_to_a_million_positions(name: str) -> None:
    encoding: Any = encodings.build({"name": name}, encodings.Geometry(16, 1, 16, 1 << 20))
    for position in (1, 4097, 65537, 1000003 % (1 << 20), (1 << 20) - 1):
        angles = np.array([position * encoding.frequency(k) for k in range(8)], np.longdouble)
        for table, wave in ((encoding.cos, np.cos(angles)), (encoding.sin, np.sin(angles))):
            assert (
                np.abs(table.exact[position] - encoding.magnitude * wave).max()
                <= 1e-7 * encoding.magnitude
            )


def test_older_key_names_give_the_same_specification() -> None:
    new = rope_spec(
        {**SHAPE, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    )
    old = rope_spec({**SHAPE, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert new == old == {"name": "rope_linear", "theta": 5e5, "factor": 2.0}
    assert (
        rope_spec(
            {
                "rope_theta": 1e4,
                "rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 1e4},
            }
        )["theta"]
        == 1e4
    )
    assert rope_spec({"rope_theta": 10000.0, "rope_scaling": None}) == {
        "name": "rope",
        "theta": 10000.0,
    }


def test_the_original_length_outside_rope_parameters_takes_precedence() -> None:
    parameters = {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 1024,
        "rope_theta": 1e4,
    }
    assert (
        rope_spec({"original_max_position_embeddings": 2048, "rope_parameters": parameters})[
            "original_max_positions"
        ]
        == 2048
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"rope_local_base_freq": 1e4},
            "one rotation of whole heads for all layers, got rope_local_base_freq;",
        ),
        ({"rotary_pct": 0.25}, "one rotation of whole heads for all layers, got rotary_pct;"),
        ({"rotary_dim": 64}, "one rotation of whole heads for all layers, got rotary_dim;"),
        ({"partial_rotary_factor": 0.5}, "rotation of whole heads, got partial_rotary_factor 0.5"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": True}},
            "partial_rotary_factor to be a finite number, got True",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
            "no further keys for rope_type default, got mrope_section",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "one rotation for all layers, got rope_parameters for full_attention",
        ),
        ({"rope_parameters": {"rope_type": "proportional"}}, "to be one of .*, got proportional"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
            "expected one rope_theta",
        ),
        (
            {
                "rope_parameters": {"rope_type": "default"},
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            "expected rope_parameters or rope_scaling",
        ),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type to be one of"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "expected max_position_embeddings for rope_type dynamic",
        ),
        (
            {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": math.inf}},
            "to be a finite number",
        ),
    ],
)
def test_unsupported_keys_of_rotations_are_refused(config: Dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_spec(config)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "spiral"}, "rope_type to be one of default, linear"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "rope_type to be one of"),
        (
            {"rope_type": "linear", "factor": 2.0, "beta_fast": 32},
            "expected factor for rope_type linear, got beta_fast",
        ),
        (
            {"rope_type": "default", "factor": 2.0},
            "expected no further keys for rope_type default, got factor",
        ),
        (
            {"rope_type": "llama3", "factor": 8.0},
            "expected low_freq_factor, high_freq_factor, .* for rope_type llama3",
        ),
        ({"rope_type": "linear", "factor": "2"}, "factor to be a finite number, got '2'"),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 10.5},
            "to be an integer",
        ),
        (
            {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 10,
                "truncate": "no",
            },
            "truncate to be true or false",
        ),
    ],
)
def test_unsupported_configs_are_refused_by_name(parameters: Dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_spec({"rope_parameters": parameters})


def test_a_refusal_begins_with_the_model_type() -> None:
    with pytest.raises(ValueError, match="^llama: expected rope_type to be one of .* by hand$"):
        rope_spec({"rope_parameters": {"rope_type": "spiral"}, "model_type": "llama"})


def test_a_share_of_one_is_a_rotation_of_whole_heads() -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    assert rope_spec({"rope_parameters": parameters}) == {"name": "rope", "theta": 1e4}
