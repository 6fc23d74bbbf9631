"""Weights keep: the blocks of a GGUF file in an artefact for ort."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="gguf is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
from gguf import GGMLQuantizationType as Types

from posenc_export import export_model, load
from posenc_export.commands.cli import main
from posenc_export.export import sources, verify
from posenc_export.export.quantization.rounding import kept
from posenc_export.export.read_module import as_model
from posenc_export.models.pretrained import from_pretrained
from posenc_export.runtime.artefact.summary import summary
from tests.cases import choice
from tests.models import gguf_files

OF = "calls.model.model."
DOWN = f"{OF}layers.0.mlp.down_proj.weight"
QUERIES = f"{OF}layers.0.self_attn.q_proj.weight"
TABLE = f"{OF}embed_tokens.weight"
OF_PHI = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "dense")]
OF_PHI += ["mlp.fc1", "mlp.fc2"]
ONE_SUM = 2.0**-22  # of two numbers in float32, relative to the largest weight
BITS = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 8, "Q5_1": 8, "Q5_K": 8, "Q8_0": 8, "Q6_K": 8}


def _read(path: Path, kind: str = "F32", name: str = "llama wide", **kinds: str) -> Any:
    others = {end.replace("__", "."): Types[other] for end, other in kinds.items()}
    gguf_files.write(name, gguf_files.made(name), path, Types[kind], kinds=others)
    return from_pretrained(path)


def _exported(model: Any, folder: Path, **how: Any) -> Any:
    return export_model(model, "ort", folder / "artefact", weights="keep", **how)


# A scale alone, one with an offset, those of super-blocks, and the type that is rounded again.
QUICK = ("Q5_0", "Q4_1", "Q4_K", "Q6_K")


@pytest.mark.parametrize("kind", choice(BITS, QUICK))
def test_blocks_are_kept_without_rounding(kind: str, tmp_path: Path) -> None:
    model = as_model(_read(tmp_path / "model.gguf", kind))
    rounded, wanted = kept(model), dict(model.named_parameters())
    assert {grid.bits for grid, _ in rounded.weights.values()} == {BITS[kind]}
    assert {DOWN, QUERIES, TABLE} <= set(rounded.weights)
    for name, (_, codes) in rounded.weights.items():
        weight = wanted[name].detach().numpy()
        bound = {"Q4_0": 0.0, "Q5_0": 0.0, "Q8_0": 0.0, "Q6_K": 1 / 128}.get(kind, ONE_SUM)
        assert np.abs(codes.weight - weight).max() <= bound * np.abs(weight).max()
        held = dict(rounded.model.named_parameters())[name]
        if kind == "Q6_K":  # a second copy in memory only if it differs
            assert np.array_equal(held.detach().numpy(), codes.weight)
        else:
            assert held is wanted[name]


def test_weights_of_several_types_are_kept_each_in_its_own(tmp_path: Path) -> None:
    kinds = {"attn_q__weight": "Q8_0", "attn_output__weight": "F16"}
    rounded = kept(as_model(_read(tmp_path / "model.gguf", "Q4_K", **kinds))).weights
    assert (rounded[QUERIES][0].bits, rounded[DOWN][0].bits) == (8, 4)
    assert f"{OF}layers.0.self_attn.o_proj.weight" not in rounded


CASES = [
    *(("llama", kind) for kind in ("Q4_1", "Q4_0", "Q8_0")),
    *(("qwen2", "Q4_1"), ("phi3 plain", "Q5_1"), ("gemma3", "Q8_0"), ("stablelm", "Q4_1")),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_an_artefact_with_kept_blocks_is_certified_and_near_its_module(
    name: str, kind: str, tmp_path: Path
) -> None:
    manifest = _exported(_read(tmp_path / "model.gguf", kind, name), tmp_path)
    assert manifest.certificate["passed"] and manifest.weights.format == "keep"
    said, matrices = summary(manifest), manifest.weights.matrices
    assert "float32 except weights" in said["model"]
    assert said["weights"].startswith(f"codes of the checkpoint in {matrices} matrices")
    untied = name in ("qwen2", "stablelm")  # files with a matrix of the head beside the table
    assert manifest.operators["MatMulNBits"] == matrices - untied
    assert manifest.operators["GatherBlockQuantized"] == 1
    assert manifest.quality.error < 0.05
    assert manifest.quality.exact <= manifest.quality.exact_tolerance


@pytest.mark.parametrize("kind", choice(["Q4_1", "Q5_1"], ["Q4_1"]))
def test_blocks_with_offsets_are_exact_if_activations_are_not_rounded(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tolerance of float32 then applies.
    monkeypatch.setattr(sources.rounding, "activations_of", lambda model: "float32")
    manifest = _exported(_read(tmp_path / "model.gguf", kind, "llama"), tmp_path)
    assert manifest.certificate["tolerance"] < 1e-4
    # Gate and up share the sums of their input.
    assert manifest.operators["ReduceSum"] < manifest.operators["MatMulNBits"]


def test_blocks_are_kept_by_the_names_of_weights(tmp_path: Path) -> None:
    model = as_model(_read(tmp_path / "model.gguf", "Q6_K", "phi2 wide"))
    rounded, wanted = kept(model), dict(model.named_parameters())
    assert {name.removeprefix("calls.model.") for name in rounded.weights} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        *(f"model.layers.0.{name}.weight" for name in OF_PHI),
    }
    for name, (_, codes) in rounded.weights.items():
        held = dict(rounded.model.named_parameters())[name]
        assert np.array_equal(held.detach().numpy(), codes.weight)
        assert np.abs(codes.weight - wanted[name].detach().numpy()).max() > 0
    x = np.arange(3, 9)
    before, after = (one.exact(x, range(6), range(6)) for one in (model, rounded.model))
    assert 0 < np.abs(after - before).max() < 0.1


REFUSED = [
    ("F32", "llama", "a model from a checkpoint with quantized weights for weights keep"),
    ("Q8_0", "llama with experts", "a model without experts for weights keep"),
]


@pytest.mark.parametrize(("kind", "name", "message"), REFUSED)
def test_what_cannot_be_kept_is_refused(kind: str, name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"expected {message}"):
        kept(as_model(_read(tmp_path / "model.gguf", kind, name)))


def test_keep_is_refused_on_other_targets(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    _read(tmp_path / "model.gguf", "Q8_0", "llama")
    path, place = str(tmp_path / "model.gguf"), str(tmp_path / "artefact")
    assert main(["export", path, "--target", "onnx", "--weights", "keep", "-o", place]) == 2
    said = "expected target ort or ort-native in float32 for weights keep, got onnx"
    assert said in capsys.readouterr().err


def test_the_command_exports_a_gguf_file(tmp_path: Path) -> None:
    path, place = tmp_path / "model.gguf", str(tmp_path / "artefact")
    metadata = {"tokenizer.chat_template": "{{ messages }}", **VOCABULARY}
    gguf_files.write("llama", gguf_files.made("llama"), path, metadata=metadata)
    assert main(["export", str(path), "--target", "ort", "--no-verify", "-o", place]) == 0
    manifest, text = load(place).manifest, "tokenizer.json chat_template.jinja"
    assert {*text.split(), "generation_config.json"} <= set(manifest.files)
    assert manifest.stop_ids == [2]


WORDS = ["<unk>", "<s>", "</s>", "!!", *(chr(33 + index) for index in range(60))]
OF_WORDS = {"model": "gpt2", "pre": "gpt-2", "tokens": WORDS, "merges": ["! !"], "eos_token_id": 2}
VOCABULARY = {f"tokenizer.ggml.{key}": value for key, value in OF_WORDS.items()}


@pytest.mark.exhaustive
def test_an_artefact_with_kept_blocks_is_verified_again_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    _exported(_read(path, "Q4_1", "llama"), tmp_path, verify=False)
    assert verify(tmp_path / "artefact", from_pretrained(path))["passed"]


def test_the_description_of_a_gguf_file_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    _read(tmp_path / "model.gguf", "Q8_0", "gemma2")
    assert main(["describe", str(tmp_path / "model.gguf"), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["name"] == "Gemma2ForCausalLM"
    assert described["read"].startswith("by transformers ")
