"""Checkpoints are computed by the code of transformers, or refused with a message of one line."""

import json
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from safetensors.torch import load_file, save_file

from posenc_export import export_model, ops
from posenc_export.commands.cli import main
from posenc_export.export.read_module import as_model
from posenc_export.models import task_heads
from posenc_export.models.by_transformers import TransformersModel, without_code
from posenc_export.models.checkpoint import Checkpoint, SafetensorsFile
from posenc_export.models.parts.readout import First
from posenc_export.models.pretrained import from_pretrained
from posenc_export.models.replaced_layers import Chosen
from posenc_export.ops import experts
from tests.cases import choice

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "intermediate_size": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8,
}  # fmt: skip
# Settings of each type that differ from SIZES.
TYPES: dict[str, dict[str, Any]] = {
    "granite": {"embedding_multiplier": 2.0, "logits_scaling": 3.0, "tie_word_embeddings": True},
    "olmo3": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4": {"partial_rotary_factor": 0.5},
    "starcoder2": {"sliding_window": 8},
    "nemotron": {"partial_rotary_factor": 0.5},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "internlm3": {},  # its class is that of llama
    "bert-generation": {"is_decoder": True},  # its class has a name of its own
}
Q, LINEAR = "model.layers.0.self_attn.q_proj.weight", "linear_attention"


def _saved(name: str, folder: Path, kind: str = "CausalLM", **how: Any) -> Any:
    """Save a small model with random weights, and return it."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[name](**{**SIZES, **TYPES.get(name, {})})
    auto = getattr(transformers, f"AutoModelFor{kind}" if kind else "AutoModel")
    model = auto.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.eval().save_pretrained(folder, **how)
    return model


def _outputs(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids [2,12], beyond all windows, and a model's outputs for them."""
    ids = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        outputs = model(input_ids=ids)
    return ids, outputs["logits" if "logits" in outputs else "last_hidden_state"]


def _config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = {**load_file(folder / "model.safetensors")}
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _refusal(folder: Path, kind: Any = ValueError, **arguments: Any) -> str:
    with pytest.raises(kind) as refused:
        from_pretrained(folder, **arguments)
    message = str(refused.value)
    assert "\n" not in message and message.startswith("checkpoint: expected ")
    return message


@pytest.fixture
def granite(tmp_path: Path) -> Path:
    _saved("granite", tmp_path / "granite")
    return tmp_path / "granite"


@pytest.mark.parametrize("name", TYPES)
def test_a_checkpoint_is_what_transformers_computes(name: str, tmp_path: Path) -> None:
    ids, expected = _outputs(_saved(name, tmp_path))
    model = from_pretrained(tmp_path)
    assert isinstance(model, TransformersModel) and model.causal and model.head
    assert model.max_positions == 64
    # Experts are read in batches, whose sums are rounded in another order on some processors.
    torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("last", "axes"), [(LINEAR, 0), ("full_attention", 3)])
def test_coordinates_that_no_layer_reads_are_no_input(
    last: str, axes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = dict.fromkeys(("key_head_dim", "value_head_dim", "num_key_heads"), 4)
    rotation = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    settings = {f"linear_{name}": value for name, value in linear.items()}
    settings |= {"linear_num_value_heads": 4, "rope_parameters": rotation}
    monkeypatch.setitem(TYPES, "qwen3_5_text", {**settings, "layer_types": [LINEAR, last]})
    _saved("qwen3_5_text", tmp_path)
    assert from_pretrained(tmp_path).axes == axes


def test_dynamic_rotations_end_at_the_trained_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotation = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    monkeypatch.setitem(
        TYPES, "llama", {"max_position_embeddings": 12, "rope_parameters": rotation}
    )
    ids, expected = _outputs(_saved("llama", tmp_path / "c"))
    model = from_pretrained(tmp_path / "c")
    torch.testing.assert_close(as_model(model).captured.whole(ids), expected, rtol=0, atol=1e-6)
    assert "at most 12 positions, the trained length" in _refusal(tmp_path / "c", max_positions=13)


@pytest.mark.parametrize("weights", choice([None, "int4", "int8"], [None]))
def test_experts_are_one_operation(weights: str | None, tmp_path: Path) -> None:
    _saved("flex_olmo", tmp_path / "checkpoint")
    published = from_pretrained(tmp_path / "checkpoint")
    assert sum(isinstance(part, Chosen) for part in published.modules()) == 2
    manifest = export_model(published, "ort", tmp_path / "a", weights=weights, verify="quick")
    assert manifest.certificate and manifest.certificate["passed"]
    assert manifest.operators["QMoE" if weights else "MoE"] == 2


def test_experts_with_another_unit_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TYPES, "flex_olmo", {**TYPES["flex_olmo"], "hidden_act": "relu"})
    _saved("flex_olmo", tmp_path)
    model: Any = from_pretrained(tmp_path)
    assert not any(isinstance(part, Chosen) for part in model.modules())


@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("biased", [False, True])
def test_the_operator_of_experts_computes_the_operation(rows: int, biased: bool) -> None:
    torch.manual_seed(0)
    x, (gates, ups), downs = torch.randn(rows, 6), torch.randn(2, 4, 6, 5), torch.randn(4, 5, 6)
    weights = torch.rand(rows, 4) * torch.randint(0, 2, (rows, 4))
    biases = [torch.randn(4, 5), torch.randn(4, 5), torch.randn(4, 6)]
    given = [part.double() for part in (x, weights, gates, ups, downs)]
    further = [part.double() if biased else None for part in biases]
    unit = (1.7, 1.0, 0.6)
    expected = ops.weighted_experts(*given, 4, *further, *unit)
    torch.testing.assert_close(experts.RUN(*given, 4, *further, *unit), expected)


def test_weights_in_several_files_are_read(tmp_path: Path) -> None:
    ids, expected = _outputs(_saved("granite", tmp_path, max_shard_size="10KB"))
    assert len([*tmp_path.glob("*.safetensors")]) > 3
    assert torch.equal(from_pretrained(tmp_path)(ids), expected)


def test_weights_in_bfloat16_are_read_as_float32(tmp_path: Path) -> None:
    _saved("granite", tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    ids, expected = _outputs(theirs)
    assert torch.equal(from_pretrained(tmp_path)(ids), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc lists mapped files on Linux")
def test_weights_in_float32_are_mapped_from_their_file(granite: Path) -> None:
    model = from_pretrained(granite)
    maps = Path("/proc/self/maps").read_text().splitlines()
    places = [line.split()[0].split("-") for line in maps if line.endswith(".safetensors")]
    for parameter in model.parameters():
        at = parameter.data_ptr()
        assert any(int(first, 16) <= at < int(end, 16) for first, end in places)


def test_a_tied_head_is_one_tensor(granite: Path) -> None:
    model: Any = from_pretrained(granite)
    assert model.model.lm_head.weight is model.model.model.embed_tokens.weight


def test_a_base_model_gives_hidden_states(tmp_path: Path) -> None:
    ids, expected = _outputs(_saved("granite", tmp_path, kind=""))
    model: Any = from_pretrained(tmp_path)
    assert not model.head and model.causal and torch.equal(model(ids), expected)


def test_without_its_head_a_model_gives_hidden_states(tmp_path: Path) -> None:
    whole = _saved("nemotron", tmp_path)
    ids, expected = _outputs(whole.model)
    assert torch.equal(from_pretrained(tmp_path, head=False)(ids), expected)


@pytest.mark.parametrize("name", ["albert", "convbert"])
def test_an_encoder_is_told_from_a_decoder_by_its_numbers(name: str, tmp_path: Path) -> None:
    ids, expected = _outputs(_saved(name, tmp_path, kind="MaskedLM"))
    model: Any = from_pretrained(tmp_path)
    assert not model.causal and model.text.stop_ids == ()
    torch.testing.assert_close(model(ids), expected, atol=0, rtol=0)


def test_a_model_with_encoder_and_decoder_gives_its_encoder(tmp_path: Path) -> None:
    whole = _saved("bart", tmp_path, kind="Seq2SeqLM")
    ids, expected = _outputs(whole.get_encoder())
    model: Any = from_pretrained(tmp_path)
    assert not model.causal and torch.equal(model(ids), expected)


def test_a_model_for_images_and_text_gives_its_text_model(tmp_path: Path) -> None:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 28}
    vision |= {"model_type": "clip_vision_model", "patch_size": 14, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **SIZES}, vision_config=vision, image_token_index=60
    )
    auto = transformers.AutoModelForImageTextToText
    whole = auto.from_config(config, attn_implementation="eager").eval()
    whole.save_pretrained(tmp_path)
    ids, expected = _outputs(whole)
    model: Any = from_pretrained(tmp_path)
    assert model.causal and model.max_positions == 64 and model.vocabulary == 61
    assert torch.equal(model(ids), expected)


def test_rows_of_a_table_that_belong_to_padding_are_no_positions(tmp_path: Path) -> None:
    _saved("data2vec-text", tmp_path, kind="MaskedLM")
    assert from_pretrained(tmp_path).max_positions == 63


def test_stop_ids_and_tokenizer_are_those_of_the_folder(granite: Path) -> None:
    (granite / "tokenizer.json").write_bytes(b'{"model": {}}')
    (granite / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    text = from_pretrained(granite).text
    assert text.stop_ids == (2, 5) and text.tokenizer == b'{"model": {}}'


def test_code_that_a_folder_names_is_not_run(granite: Path) -> None:
    (granite / "evil.py").write_text("raise SystemExit(7)")
    ids, expected = _outputs(from_pretrained(granite).model)
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    _config(granite, auto_map=names, attn_implementation="org/evil", experts_implementation="x")
    assert torch.equal(from_pretrained(granite)(ids), expected)


def test_a_type_whose_code_is_remote_is_refused(granite: Path) -> None:
    _config(granite, model_type="own", auto_map={"AutoModelForCausalLM": "evil.Model"})
    got = "got 'own', whose code is a file of its own (auto_map) and never runs; build the model"
    assert got in _refusal(granite)


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("granit", "got 'granit'; did you mean granite?"),
        ("LLAMA", "got 'LLAMA'; did you mean llama?"),
        ("settings", "got 'settings'; choose one of these"),
        ("", "got ''; choose one of these"),
    ],
)
def test_a_type_that_nobody_knows_is_refused_with_the_nearest(
    name: str, end: str, granite: Path
) -> None:
    _config(granite, model_type=name)
    assert _refusal(granite).endswith(end)


def test_a_class_that_transformers_lacks_is_refused(granite: Path) -> None:
    _config(granite, architectures=["GraniteForHumor"])
    rule = "architectures to be a class of transformers for granite, got 'GraniteForHumor'"
    assert rule in _refusal(granite)


def test_a_class_of_another_type_is_refused(granite: Path) -> None:
    _config(granite, architectures=["LlamaForCausalLM"])
    assert "class of transformers for granite, got 'LlamaForCausalLM'" in _refusal(granite)


OTHERS = [
    ("wav2vec2", "Wav2Vec2ForCTC", "input_values"),
    ("whisper", "WhisperForConditionalGeneration", "input_features"),
    ("timesfm2_5", "TimesFm2_5ModelForPrediction", "past_values"),
]


@pytest.mark.parametrize(("name", "kind", "read"), OTHERS)
def test_models_of_sound_and_series_are_refused(
    name: str, kind: str, read: str, granite: Path
) -> None:
    values = {"model_type": name, "architectures": [kind]}
    (granite / "config.json").write_text(json.dumps(values))
    refused = _refusal(granite)
    assert f"expected {kind} to read input_ids, got {read}, " in refused
    rule = "sound, images and series are not read; export a layer of it by export_model"
    assert refused.endswith(f"; {rule}")


RELATIVE: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
RELATIVE["position_biased_input"] = False


def test_a_type_whose_code_cannot_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING["deberta"](**SIZES, **RELATIVE)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    model = from_pretrained(tmp_path / "model", max_positions=40)
    with pytest.raises(ValueError, match="item chooses as many tokens") as error:
        export_model(model, "onnx", tmp_path / "artefact")
    assert "\n" not in str(error.value)


def test_a_head_of_a_decoder_that_reads_more_than_one_vector_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _saved("nemotron", tmp_path, "SequenceClassification")
    monkeypatch.setattr(task_heads, "POOLINGS", {name: First for name in task_heads.POOLINGS})
    assert _refusal(tmp_path).endswith("give --no-head, or head=False, for hidden states")
    assert not from_pretrained(tmp_path, head=False).head


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda weights: weights.pop(Q), f"got no {Q}"),
        (lambda weights: weights.update(extra=torch.zeros(2)), "got also extra"),
        (lambda weights: weights.update({Q: torch.zeros(3, 5)}), "got [3, 5]"),
        (lambda weights: weights.update({Q: weights[Q].double()}), "got F64 in "),
    ],
    ids=["missing", "unexpected", "of another shape", "float64"],
)
def test_tensors_other_than_those_of_the_model_are_refused(
    change: Callable[[dict[str, torch.Tensor]], Any], got: str, granite: Path
) -> None:
    _weights(granite, change)
    assert got in _refusal(granite)


def test_a_model_larger_than_its_files_is_refused_before_it_is_made(granite: Path) -> None:
    _config(granite, hidden_size=2**19, intermediate_size=2**20)
    assert "expected weights of at most" in _refusal(granite)


@pytest.mark.parametrize(
    ("values", "got"),
    [
        ({"hidden_size": "wide"}, "expected a config.json that transformers reads as 'granite'"),
        ({"num_attention_heads": 5}, "with shape [32, 40] by config.json, got [32, 32]"),
        ({"num_hidden_layers": 2**20}, "num_hidden_layers to be at most 1024"),
    ],
)
def test_a_config_that_transformers_does_not_take_is_refused(
    values: dict[str, Any], got: str, granite: Path
) -> None:
    _config(granite, **values)
    with pytest.raises(ValueError, match=re.escape(got)):
        from_pretrained(granite)


def test_parts_of_a_decoder_are_refused(granite: Path) -> None:
    got = "with encoder and decoder for part encoder, got GraniteForCausalLM"
    assert got in _refusal(granite, part="encoder")


def test_without_transformers_the_command_that_installs_it_is_given(
    granite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = _refusal(granite, ModuleNotFoundError)
    assert "transformers 5.20 or newer to read model_type 'granite', got none; pip" in message


def test_an_old_transformers_is_refused(granite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "5.9.1")
    assert "5.20 or newer to read model_type 'granite', got 5.9.1; pip install" in _refusal(
        granite, ModuleNotFoundError
    )


def test_describe_says_whose_code_reads_a_type(
    granite: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["describe", str(granite)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "name GraniteForCausalLM max_positions 64 tokens vocabulary 61" in printed
    assert f"by transformers {transformers.__version__}" in printed


def test_closing_a_checkpoint_waits_for_the_thread_that_reads_it(
    granite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers reads in threads, and does not wait for them if one of them fails.
    begun, closed, read = threading.Event(), threading.Event(), SafetensorsFile.tensor

    def slow(file: Any, name: str) -> torch.Tensor:
        begun.set()
        assert not closed.wait(0.2)
        return read(file, name)

    monkeypatch.setattr(SafetensorsFile, "tensor", slow)
    with ThreadPoolExecutor(1) as pool:
        with Checkpoint(granite) as checkpoint:
            tensor = pool.submit(checkpoint.tensor, Q)
            begun.wait()
        closed.set()
        assert tensor.result().shape == (32, 32)
        with pytest.raises(KeyError):
            checkpoint.tensor(Q)


def test_infinities_are_read_as_transformers_writes_them() -> None:
    written = {"limits": [0.0, {"__float__": "Infinity"}], "inner": {"__float__": "evil()"}}
    read = {"limits": [0.0, float("inf")], "inner": {"__float__": "evil()"}}
    assert without_code(written) == read
