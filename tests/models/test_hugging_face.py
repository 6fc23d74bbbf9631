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
FACTORS = [1 + 0.05 * k for k in range(SIZE // 2)]

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
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "partial yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048,
        "partial_rotary_factor": 0.5, "rope_theta": 10000.0},
}  # fmt: skip


def _theirs(parameters: Dict[str, Any]) -> Any:
    config = transformers.LlamaConfig(**SHAPE, rope_parameters=dict(parameters))
    if parameters["rope_type"] == "default":
        return transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq, 1.0
    return utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))


def _ours(spec: Dict[str, Any], max_positions: int = 16) -> encodings.PositionEncoding:
    return encodings.build(spec, encodings.Geometry(4 * SIZE, 4, SIZE, max_positions))


LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_magnitude_match_transformers(case: str) -> None:
    frequencies, magnitude = _theirs(CASES[case])
    encoding = _ours(rope_spec({**SHAPE, "rope_parameters": CASES[case]}))  # type: ignore[arg-type]
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
    encoding = _ours(rope_spec({**SHAPE, "rope_parameters": parameters}), 32)  # type: ignore[arg-type]
    ours = [encoding.oracle().frequency(k, length) for k in range(SIZE // 2)]  # type: ignore[attr-defined]
    assert np.allclose(ours, frequencies.numpy(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("length", [4096, 4097])
def test_longrope_matches_transformers_below_and_above_the_original_length(length: int) -> None:
    parameters = {
        "rope_type": "longrope",
        "short_factor": FACTORS,
        "long_factor": [3 * f for f in FACTORS],
        "rope_theta": 10000.0,
    }
    shape = {**SHAPE, "original_max_position_embeddings": 4096, "max_position_embeddings": 131072}
    config = transformers.Phi3Config(
        **shape,
        rope_parameters={**parameters, "original_max_position_embeddings": 4096},
        pad_token_id=0,
    )
    frequencies, magnitude = utils.ROPE_INIT_FUNCTIONS["longrope"](
        config, torch.device("cpu"), seq_len=length
    )
    encoding: Any = _ours(rope_spec({**shape, "rope_scaling": parameters, "rope_theta": 10000.0}))  # type: ignore[arg-type]
    ours = [
        10000.0 ** (-2 * k / SIZE) / encoding.factors[length > 4096][k] for k in range(SIZE // 2)
    ]
    assert np.allclose(ours, frequencies.numpy(), rtol=2e-6, atol=0)
    assert encoding.magnitude == pytest.approx(magnitude, rel=1e-6)


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
    assert rope_spec({"rotary_emb_base": 1e5, "rotary_pct": 0.25, "head_dim": 64}) == {
        "name": "rope",
        "theta": 1e5,
        "rotary": 16,
    }
    assert rope_spec({"rotary_dim": 64, "hidden_size": 4096, "num_attention_heads": 16}) == {
        "name": "rope",
        "theta": 1e4,
        "rotary": 64,
    }
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


MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"head_dim": 128, "model_type": "glm4v", "rope_parameters": MROPE},
            {"name": "mrope", "theta": 1e4, "time": 16, "height": 24},
        ),
        (
            {
                "head_dim": 128,
                "model_type": "qwen3_vl_text",
                "rope_parameters": {**MROPE, "mrope_section": [24, 20, 20]},
            },
            {"name": "mrope_interleaved", "theta": 1e4, "height": 20, "width": 20},
        ),
        (
            {
                "head_dim": 128,
                "model_type": "qwen2_vl",
                "rope_theta": 1e4,
                "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            },
            {"name": "mrope", "theta": 1e4, "time": 16, "height": 24},
        ),
        (
            {
                "head_dim": 128,
                "model_type": "qwen2_5_vl",
                "max_position_embeddings": 128000,
                "rope_theta": 1e6,
                "rope_scaling": {
                    "type": "yarn",
                    "mrope_section": [16, 24, 24],
                    "factor": 4,
                    "original_max_position_embeddings": 32768,
                },
            },
            {
                "name": "mrope",
                "theta": 1e6,
                "time": 16,
                "height": 24,
                "factor": 4.0,
                "original_max_positions": 32768,
            },
        ),
        (
            {
                "head_dim": 256,
                "rope_parameters": {
                    **MROPE,
                    "mrope_section": [11, 11, 10],
                    "mrope_interleaved": True,
                    "partial_rotary_factor": 0.25,
                },
            },
            {"name": "mrope_interleaved", "theta": 1e4, "rotary": 64, "height": 11, "width": 10},
        ),
        (
            {
                "head_dim": 128,
                "model_type": "ernie4_5_vl_moe_text",
                "rope_parameters": {**MROPE, "mrope_section": [22, 22, 20]},
            },
            {"name": "mrope", "theta": 1e4, "time": 20, "height": 22, "order": "alternating"},
        ),
    ],
)
def test_mrope_sections_are_ordered_by_model_type(
    config: Dict[str, Any], expected: Dict[str, Any]
) -> None:
    spec: Any = rope_spec(config)
    assert spec == expected and encodings.build(
        spec, encodings.Geometry(512, 4, config["head_dim"], 16)
    )


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
        ({"rope_local_base_freq": 1e4}, "got rope_local_base_freq"),
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
        (
            {"head_dim": 128, "rope_parameters": MROPE},
            "expected mrope_interleaved beside mrope_section, or a model_type of glm4v,",
        ),
        (
            {
                "head_dim": 128,
                "model_type": "qwen2_vl",
                "rope_parameters": {**MROPE, "mrope_interleaved": True},
            },
            "mrope_interleaved to be False for qwen2_vl",
        ),
        ({"head_dim": 64, "rope_parameters": MROPE}, "three integers above 0 with sum 32"),
        (
            {"head_dim": 128, "rope_parameters": {**MROPE, "rope_type": "linear", "factor": 2.0}},
            "yarn without mscale, with mrope_section, got linear",
        ),
        (
            {"head_dim": 128, "rope_parameters": {**MROPE, "mrope_interleaved": 1}},
            "mrope_interleaved to be true or false",
        ),
        ({"head_dim": 128, "rope_scaling": {"type": "mrope"}}, "rope_type to be one of"),
        (
            {"rotary_pct": 0.5, "partial_rotary_factor": 0.25},
            "expected rotary_pct or partial_rotary_factor",
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


def test_parameters_nested_by_layer_type_give_one_specification_each() -> None:
    nested = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    assert rope_spec({"rope_parameters": nested}) == {
        "sliding_attention": {"name": "rope", "theta": 1e4},
        "full_attention": {"name": "rope_linear", "theta": 1e6, "factor": 8.0},
    }


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
        (
            {"full": {"rope_type": "default"}, "rope_theta": 1.0},
            "nested for all layer types or for none",
        ),
    ],
)
def test_unsupported_configs_are_refused_by_name(parameters: Dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_spec({"rope_parameters": parameters})


def test_a_wrong_mrope_section_is_refused_with_key_value_and_model_type() -> None:
    rotation = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
    config = {**SHAPE, "rope_parameters": {**rotation, "mrope_section": [9, 9, 9]}}
    message = "^qwen2_vl: expected mrope_section to be .* sum 32, got \\[9, 9, 9\\]"
    with pytest.raises(ValueError, match=message):
        rope_spec({**config, "model_type": "qwen2_vl"})
    message = "^llama: expected mrope_interleaved beside mrope_section, .* 'llama'; remove"
    with pytest.raises(ValueError, match=message):
        rope_spec({**SHAPE, "rope_parameters": rotation, "model_type": "llama"})
