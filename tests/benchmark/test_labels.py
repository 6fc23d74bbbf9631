"""Labels of models and folders, and descriptions that other runtimes support."""

from pathlib import Path

import pytest
from msgspec import structs

from posenc_export.benchmark import contestants
from posenc_export.benchmark.contestants import artefact_labels, model_label, numbered
from posenc_export.benchmark.runtimes import is_llama
from posenc_export.export.describe import eager
from posenc_export.models.config_json import to_json
from posenc_export.models.presets import load_preset, seeded
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.runtime.artefact.records import Weights
from posenc_export.runtime.graphs import cuda

BLOCK = block_config(32, 4, 64, kv_heads=2)
ALIBI = block_config(32, 4, 64, encoding={"name": "alibi"})
OTHERS = {
    "biases in the projection": decoder_config(50, 2, 24, block_config(32, 4, 64, qkv_bias=True)),
    "layer norms": decoder_config(50, 2, 24, BLOCK, norm="layer"),
    "a plain MLP": decoder_config(50, 2, 24, BLOCK, mlp="gelu"),
    "a parameter of rope": decoder_config(
        50, 2, 24, block_config(32, 4, 64, encoding={"name": "rope", "theta": 5e5})
    ),
    "kinds of layers": decoder_config(
        50, 2, 24, BLOCK, layer_encodings=({"name": "rope"}, {"name": "nope"})
    ),
    "no rotation": decoder_config(50, 2, 24, block_config(32, 4, 64, encoding={"name": "nope"})),
    "an encoding on tokens": decoder_config(
        50, 2, 24, block_config(32, 4, 64, encoding={"name": "sinusoidal"})
    ),
    "linear attention": decoder_config(50, 2, 24, block_config(32, 4, 64, mechanism="linear")),
}


def test_a_model_is_named_by_encoding_layers_width_and_parameters():
    assert model_label(eager(load_preset("tiny-rope"))[1]) == "rope 5x128 0.96M"
    assert (
        model_label(eager(seeded(block_config(512, 8, 64, encoding={"name": "alibi"})))[1])
        == "alibi block 512 1.05M"
    )
    module = eager(load_preset("tiny-rope"))[1].replace(kind="module", config={"name": "mine.GPT"})
    assert model_label(module) == "GPT 0.96M"
    odd = module.replace(kind="block", config={"kind": "block", "attention": 5, "order": "x"})
    assert model_label(odd) == "nope block ? 0.96M"


def test_artefacts_are_named_by_what_differs_between_them():
    rope = eager(load_preset("tiny-rope"))[1]
    int8 = structs.replace(rope, target="ort", weights=Weights("int8"), cache="int8")
    half = structs.replace(rope, target="onnx", dtype="float16", signature="mask")
    other = eager(seeded(ALIBI))[1]
    names = ["rope-eager", "rope-ort-int8-cache-int8", "rope-onnx-float16-mask", "alibi-eager"]
    paths = [Path(f"/a/{number}/ort") for number in range(4)]
    assert artefact_labels([rope, int8, half, other], paths) == names


@pytest.mark.parametrize(
    ("paths", "labels"),
    [
        (["/a/ort", "/b/ort"], ["rope-eager in a/ort", "rope-eager in b/ort"]),
        (["/a/x", "/a/y"], ["rope-eager in x", "rope-eager in y"]),
        (["/a/ort", "/a/ort"], ["rope-eager", "rope-eager #2"]),
    ],
)
def test_artefacts_that_are_alike_are_named_by_their_folders(paths, labels):
    rope = eager(load_preset("tiny-rope"))[1]
    assert numbered(artefact_labels([rope] * 2, [Path(path) for path in paths])) == labels


@pytest.mark.parametrize(
    ("target", "more", "providers"),
    [
        ("onnx", {}, ("cpu", "cuda")),
        ("onnx", {"weights": Weights("int8")}, ("cpu",)),
        ("ort", {"operators": {"GroupQueryAttention": 5}}, ("cpu",)),
        ("ort", {"operators": {"GroupQueryAttention": 5}, "dtype": "float16"}, ("cpu", "cuda")),
        ("torchscript", {}, ("cpu",)),
        ("ort-cuda", {}, ("cuda",)),
    ],
)
def test_an_artefact_is_timed_on_every_provider_that_loads_it(target, more, providers, monkeypatch):
    monkeypatch.setattr(cuda, "obstacle", lambda: None)
    manifest = eager(load_preset("tiny-rope"))[1]
    assert contestants._providers(manifest.replace(target=target, **more)) == providers


@pytest.mark.parametrize("name", OTHERS)
def test_a_decoder_does_not_have_llamas_architecture_with(name):
    assert not is_llama(to_json(OTHERS[name]))


def test_a_decoder_of_llamas_architecture_has_any_sizes():
    assert is_llama(to_json(decoder_config(50, 2, 24, BLOCK, epsilon=1e-6, tied=False)))
    assert not is_llama(to_json(BLOCK))
