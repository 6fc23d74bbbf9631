"""Rotations of images and videos compared with independent implementations."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from posenc_export import encodings
from posenc_export.shared.numerics import tolerance, worst_error

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
FRAMES, ROWS, COLUMNS = 3, 4, 6


def _modeling(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def _build(spec: str, head_size: int = 32) -> Any:
    named = encodings.parse(spec)
    return encodings.build(named, encodings.Geometry(4 * head_size, 4, head_size, 4096, kv_heads=4))


def _differ(ours: encodings.PositionEncoding, x: Tensor, places: Tensor, theirs: Tensor) -> float:
    """Error of queries x [B,S,H,D] rotated at coordinates [axes,B,S] against theirs [B,S,H,D],
    divided by the tolerance, to which their angles in float32 add two roundings of the largest.
    """
    turned, angles = ours.rotate(x, x, places)[0].detach(), float(places.max()) * 2.0**-23
    return worst_error(turned.numpy(), theirs.numpy()) / (tolerance("float32", 1, 1) + angles)


def _vectors(tokens: int, head_size: int = 32) -> Tensor:
    return torch.randn(1, tokens, 4, head_size, generator=torch.Generator().manual_seed(1))


def _grid(*sizes: int) -> Tensor:
    """Coordinates of a whole grid [axes,1,S], the last axis varying fastest."""
    return torch.cartesian_prod(*(torch.arange(size) for size in sizes)).t()[:, None]


def _turned(modeling: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries x [B,S,H,D] rotated by the function of a model with heads before tokens."""
    heads_first = x.transpose(1, 2)
    return modeling.apply_rotary_pos_emb(heads_first, heads_first, cos, sin)[0].transpose(1, 2)


HALF = {"partial_rotary_factor": 0.5}
# Of each family: its class, the sections of its axes, further rope_parameters, and our encoding.
MULTIMODAL: dict[str, tuple[str, list[int], dict[str, Any], str]] = {
    "glm4v": ("Glm4vTextRotaryEmbedding", [2, 3, 3], HALF,
        "mrope:time=2,height=3,rotary=16,layout=interleaved"),
    "ernie4_5_vl_moe": ("Ernie4_5_VLMoeTextRotaryEmbedding", [5, 5, 6], {},
        "mrope:time=6,order=alternating,layout=interleaved"),
    "qwen3_5": ("Qwen3_5TextRotaryEmbedding", [3, 3, 2], HALF,
        "mrope_interleaved:height=3,width=2,rotary=16"),
    "qwen2_vl": ("Qwen2VLRotaryEmbedding", [4, 6, 6], {}, "mrope:time=4,height=6"),
    "qwen3_vl": ("Qwen3VLTextRotaryEmbedding", [6, 5, 5], {},
        "mrope_interleaved:height=5,width=5"),
    "hunyuan_vl": ("HunYuanVLRotaryEmbedding", [5, 4, 4, 3],
        {"rope_type": "ntk_alpha", "alpha": 1000.0}, "xdrope:text=5,width=4,height=4,alpha=1000.0"),
}  # fmt: skip


@pytest.mark.parametrize("family", MULTIMODAL)
def test_multimodal_rotations_match_their_published_models(family: str) -> None:
    rotation, sections, more, spec = MULTIMODAL[family]
    given = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **more}
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32}
    config: Any = SimpleNamespace(rope_parameters=given, max_position_embeddings=4096, **sizes)
    modeling, x = _modeling(family), _vectors(40)
    random = torch.Generator().manual_seed(2)
    places = torch.randint(config.max_position_embeddings, (len(sections), 1, 40), generator=random)
    places = places if family == "hunyuan_vl" else places[:3]
    cos, sin = getattr(modeling, rotation)(config)(x, places)
    if cos.dim() == 4:  # Qwen2-VL selects the axes in apply_rotary_pos_emb
        cos, sin = (part[0] for part in (cos, sin))
    ours = _build(f"{spec},theta=10000.0")
    assert _differ(ours, x, places, _turned(modeling, x, cos, sin)) <= 1


def test_patches_are_rotated_as_in_pixtral() -> None:
    modeling = _modeling("pixtral")
    given = {"rope_type": "axial", "rope_theta": 10000.0}
    config = SimpleNamespace(rope_parameters=given, head_dim=32)
    places, x = _grid(ROWS, COLUMNS), _vectors(ROWS * COLUMNS)
    cos, sin = modeling.PixtralVisionRotaryEmbedding(config)(x, places[:, 0].t())
    theirs = modeling.apply_rotary_pos_emb(x, x, cos, sin)[0]
    ours = _build("rope_axial:theta=10000.0,spectrum=alternating")
    assert _differ(ours, x, places, theirs) <= 1


def test_patches_and_class_token_are_rotated_as_in_llama_4() -> None:
    modeling = _modeling("llama4")
    sizes = {"image_size": 40, "patch_size": 8, "hidden_size": 128, "num_attention_heads": 4}
    config, x = SimpleNamespace(rope_parameters={"rope_theta": 10000.0}, **sizes), _vectors(26)
    angles = modeling.Llama4VisionRotaryEmbedding(config)(x)
    theirs = modeling.vision_apply_rotary_emb(x, x, angles)[0]
    class_token = torch.zeros(2, 1, 1, dtype=torch.int64)
    columns_and_rows = torch.cat((_grid(5, 5).flip(0) + 1, class_token), dim=2)
    ours = _build("rope_axial:theta=10000.0,layout=interleaved")
    assert _differ(ours, x, columns_and_rows, theirs) <= 1


def test_patches_and_tokens_outside_the_grid_are_rotated_as_in_dinov3() -> None:
    modeling, x = _modeling("dinov3_vit"), _vectors(5 + ROWS * COLUMNS)
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
    rotation = modeling.DINOv3ViTRopePositionEmbedding(SimpleNamespace(rope_theta=100.0, **sizes))
    cos, sin = rotation.eval()(torch.zeros(1, 3, 8 * ROWS, 8 * COLUMNS))
    theirs = _turned(modeling, x, cos, sin)
    nowhere = torch.tensor([ROWS, COLUMNS])[:, None, None].expand(2, 1, 5)
    ours = _build(f"rope_normalized:rows={ROWS},columns={COLUMNS}")
    assert _differ(ours, x, torch.cat((nowhere, _grid(ROWS, COLUMNS)), dim=2), theirs) <= 1


PIXELS = f"rope_normalized:points=ends,spectrum=linear,rows={ROWS},columns={COLUMNS}"
AXIAL: dict[str, tuple[str, int, tuple[int, ...], str]] = {
    "pixels of an image": ("pixel", 8, (ROWS, COLUMNS), f"{PIXELS},rotary=16"),
    "pixels of a video": (
        "pixel",
        10,
        (FRAMES, ROWS, COLUMNS),
        f"{PIXELS},frames={FRAMES},rotary=30",
    ),
    "coordinates of an image": ("lang", 8, (ROWS, COLUMNS), "rope_axial:theta=10000.0,rotary=16"),
    "coordinates of a video": (
        "lang",
        10,
        (FRAMES, ROWS, COLUMNS),
        "rope_axial:theta=10000.0,rotary=30,axes=3",
    ),
}


@pytest.mark.parametrize("case", AXIAL)
def test_axes_of_images_and_videos_are_rotated_as_in_rotary_embedding_torch(case: str) -> None:
    peer = pytest.importorskip(
        "rotary_embedding_torch", reason="rotary-embedding-torch is not installed"
    )
    kind, each, sizes, spec = AXIAL[case]
    x = _vectors(_grid(*sizes).size(2))
    angles = peer.RotaryEmbedding(dim=each, freqs_for=kind).get_axial_freqs(*sizes).flatten(0, -2)
    theirs = peer.apply_rotary_emb(angles, x.transpose(1, 2)).transpose(1, 2).detach()
    assert _differ(_build(f"{spec},layout=interleaved"), x, _grid(*sizes), theirs) <= 1


def test_tokens_outside_the_grid_are_not_rotated() -> None:
    ours = _build(f"rope_normalized:rows={ROWS},columns={COLUMNS}", 16)
    x = _vectors(3, 16)
    outside: tuple[Any, ...] = (
        torch.tensor([[ROWS, ROWS + 1, 4095]]),
        torch.tensor([[COLUMNS, COLUMNS + 9, 4095]]),
    )
    assert torch.equal(ours.rotate(x, x, torch.stack(outside))[1], x)


RAMP = {"factor": 4.0, "original_max_position_embeddings": 512}
# Of each encoding with 64 entries: rope_parameters of transformers.
SCALED: dict[str, dict[str, Any]] = {
    "rope_linear:factor=3.0": {"rope_type": "linear", "factor": 3.0},
    "rope_llama3:factor=4.0,original_max_positions=512,theta=10000.0": {
        "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **RAMP},
    "rope_yarn:original_max_positions=512": {"rope_type": "yarn", **RAMP},
    "rope_yarn:original_max_positions=512,beta_slow=2.0,beta_fast=24.0,truncate=no": {
        "rope_type": "yarn", "beta_slow": 2.0, "beta_fast": 24.0, "truncate": False, **RAMP},
    "rope_yarn:original_max_positions=512,mscale=0.8,mscale_all_dim=1.2": {
        "rope_type": "yarn", "mscale": 0.8, "mscale_all_dim": 1.2, **RAMP},
    "rope_proportional:share=0.3,factor=4.0": {
        "rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 4.0},
}  # fmt: skip


@pytest.mark.parametrize("spec", SCALED)
def test_frequencies_and_magnitudes_are_those_of_transformers(spec: str) -> None:
    utils = importlib.import_module("transformers.modeling_rope_utils")
    given, positions = {"rope_theta": 10000.0, **SCALED[spec]}, {"max_position_embeddings": 2048}
    shape = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, **positions}
    config = transformers.LlamaConfig(**shape, rope_parameters=given)
    theirs, magnitude = utils.ROPE_INIT_FUNCTIONS[given["rope_type"]](config, torch.device("cpu"))
    ours = _build(spec, 64)
    frequencies = torch.tensor([ours.frequency(k) for k in range(32)])
    bound = tolerance("float32", 1, 1)
    assert worst_error(frequencies.numpy(), theirs.numpy()) <= bound
    assert abs(ours.magnitude - magnitude) <= bound


def test_ntk_frequencies_are_those_of_rotary_embedding_torch() -> None:
    peer = pytest.importorskip(
        "rotary_embedding_torch", reason="rotary-embedding-torch is not installed"
    )
    theirs = peer.RotaryEmbedding(dim=64, theta_rescale_factor=3.0).freqs.detach()
    ours = _build("rope_ntk:factor=3.0", 64)
    frequencies = torch.tensor([ours.frequency(k) for k in range(32)])
    assert worst_error(frequencies.numpy(), theirs.numpy()) <= tolerance("float32", 1, 1)


def test_a_temperature_with_first_0_and_a_rotation_match_ministral_3() -> None:
    modeling = _modeling("ministral3")
    original = {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}
    given = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, **original}
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.Ministral3Config(**sizes, head_dim=32, rope_parameters=given)
    x, places = _vectors(200, 32), torch.arange(200)[None]
    turned = _turned(modeling, x, *modeling.Ministral3RotaryEmbedding(config)(x, places))
    theirs = turned * modeling.get_llama_4_attn_scale(places, 0.3, 16).transpose(1, 2)
    temperature = encodings.parse("logn:form=steps,temperature=0.3,period=16,first=0")
    rotation = encodings.parse("rope_yarn:factor=8.0,original_max_positions=16")
    geometry = encodings.Geometry(128, 4, 32, 4096, kv_heads=4)
    ours = encodings.build_all([temperature, rotation], geometry)
    assert _differ(ours, x, places, theirs) <= 1
    assert torch.equal(
        ours.rotate(x, x, places)[1], encodings.build(rotation, geometry).rotate(x, x, places)[1]
    )


def test_trained_frequencies_have_outputs_and_gradients_of_rotary_embedding_torch() -> None:
    peer = pytest.importorskip(
        "rotary_embedding_torch", reason="rotary-embedding-torch is not installed"
    )
    theirs = peer.RotaryEmbedding(dim=16, learned_freq=True)
    x = _vectors(40, 32)
    places = torch.arange(40)[None]
    theirs.freqs.data += 0.1 * torch.randn(8, generator=torch.Generator().manual_seed(3))
    ours = encodings.build(
        encodings.parse("rope_trained:rotary=16,layout=interleaved"),
        encodings.Geometry(128, 4, 32, 64),
    )
    ours.load_state_dict({"weight.value": theirs.freqs.data})
    turned = (
        theirs.rotate_queries_or_keys(x.transpose(1, 2)).transpose(1, 2),
        ours.rotate(x, x, places)[0],
    )
    assert worst_error(turned[1].detach().numpy(), turned[0].detach().numpy()) <= 64 * tolerance(
        "float32", 1, 1
    )  # their angles are float32, up to 39
    for y in turned:
        (y * x.flip(1)).sum().backward()
    assert worst_error(ours.weight.value.grad.numpy(), theirs.freqs.grad.numpy()) <= 64 * tolerance(
        "float32", 1, 40
    )
