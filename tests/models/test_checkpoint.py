"""Checkpoint folders are read as they were saved, or refused with a message of one line."""

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from posenc_export.commands.cli import main
from posenc_export.models.checkpoint import Checkpoint
from posenc_export.models.pretrained import from_pretrained

pytest.importorskip("transformers", reason="transformers is not installed")
from tests.models.checkpoints import made, saved
from tests.models.patterns import share, theirs, tokens_of

Q = "model.layers.0.self_attn.q_proj.weight"
K = Q.replace("q_", "k_")
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def _weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    held = load_file(folder / "model.safetensors")
    weights = {name: value.clone() for name, value in held.items()}
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    kept = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in kept.items() if value is not ...}))


def _refusal(folder: Path, **arguments: Any) -> str:
    with pytest.raises(ValueError) as refused:
        from_pretrained(folder, **arguments)
    message = str(refused.value)
    assert "\n" not in message and "got" in message
    return message


def _logits(folder: Path) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(from_pretrained(folder)(torch.from_numpy(tokens_of())))


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    return saved("mistral with a window", tmp_path / "mistral")[1]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return saved("llama", tmp_path / "llama")[1]


def _same(ours: torch.nn.Module, theirs: torch.nn.Module) -> bool:
    """Return whether both models have the same numbers as parameters, in any order."""
    each = ([p.detach().flatten() for p in model.parameters()] for model in (ours, theirs))
    return torch.equal(*(torch.cat(numbers).sort().values for numbers in each))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_of_any_float_dtype_are_loaded_as_float32(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    peer, folder = saved("mistral with a window", tmp_path, dtype)
    ours = from_pretrained(folder)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}
    assert _same(ours, peer)


@pytest.mark.parametrize("name", ["mistral with a window", "llama"])
def test_sharded_weights_are_loaded(name: str, tmp_path: Path) -> None:
    peer, folder = saved(name, tmp_path, shard="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert not (folder / "model.safetensors").exists()
    assert _same(from_pretrained(folder), peer)


def test_pytorch_model_bin_is_refused_and_not_unpickled(llama: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (llama / "sprung",))

    (llama / "model.safetensors").unlink()
    torch.save({Q: Trap()}, llama / "pytorch_model.bin")
    assert "if it has other files, write them with safetensors" in _refusal(llama)
    assert not (llama / "sprung").exists()


def test_a_tied_head_may_be_saved_only_as_a_copy_of_the_token_table(llama: Path) -> None:
    _weights(llama, lambda weights: weights.update({HEAD: weights[TABLE].clone()}))
    model: Any = from_pretrained(llama).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    _weights(llama, lambda weights: weights.update({HEAD: weights[TABLE] + 1}))
    assert "got different tensors" in _refusal(llama)


def test_a_tied_head_saved_without_the_token_table_is_the_table(llama: Path) -> None:
    _weights(llama, lambda weights: weights.update({HEAD: weights.pop(TABLE)}))
    assert _same(from_pretrained(llama), made("llama"))


def test_inv_freq_buffers_of_old_versions_are_ignored(llama: Path) -> None:
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    _weights(llama, lambda weights: weights.update(old))
    assert _same(from_pretrained(llama), made("llama"))


CHANGED: dict[str, Any] = {
    "no tensor": (lambda w: w.pop(Q), f"got no {Q}"),
    "a tensor more": (lambda w: w.update({"score.weight": torch.ones(2)}), "got also score.weight"),
    "another shape": (
        lambda w: w.update({Q: torch.ones(32, 64)}),
        rf"expected {Q} with shape \[64, 64\] by config.json, got \[32, 64\]",
    ),
    "q and k the wrong way round": (
        lambda w: w.update({Q: w[K].clone(), K: w[Q].clone()}),
        "by config.json, got",
    ),
    "another dtype": (lambda w: w.update({Q: w[Q].double()}), f"got F64 in {Q}"),
    "whole numbers": (lambda w: w.update({Q: w[Q].to(torch.int8)}), f"got I8 in {Q}"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_missing_unknown_and_misshapen_tensors_are_refused_by_name(case: str, untied: Path) -> None:
    change, message = CHANGED[case]
    _weights(untied, change)
    with pytest.raises(ValueError, match=message):
        from_pretrained(untied)


def _prefixed(prefix: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda w: [w.update({prefix + name: w.pop(name)}) for name in list(w)]


CAUSES: dict[str, Any] = {
    "torch.compile": (_prefixed("_orig_mod."), "save the state_dict of model._orig_mod$"),
    "DataParallel": (_prefixed("module."), "save the state_dict of model.module$"),
    "peft": (_prefixed("base_model.model."), r"the state_dict of model.merge_and_unload\(\)$"),
    "compiled layers": (
        lambda w: w.update({Q.replace("self_attn", "_orig_mod.self_attn"): w.pop(Q)}),
        f"got no {Q} and also .*; torch.compile adds '_orig_mod' to names",
    ),
    "an adapter": (
        lambda w: w.update({Q.replace("weight", "lora_A.weight"): torch.ones(2, 64)}),
        "lora_ are tensors of an adapter: save the model that merge_and_unload",
    ),
    "no head": (lambda w: w.pop(HEAD), "got no lm_head.weight; set tie_word_embeddings to true"),
    "a head of others": (
        lambda w: w.update({"objective.weight": torch.ones(2)}),
        r"got also objective.weight; if they are a head of \['MistralForCausalLM'\], which is not "
        "read, save the model that AutoModel.from_pretrained loads",
    ),
}


@pytest.mark.parametrize("case", CAUSES)
def test_tensors_of_another_form_of_a_model_are_refused_with_what_to_save(
    case: str, untied: Path
) -> None:
    change, remedy = CAUSES[case]
    _weights(untied, change)
    with pytest.raises(ValueError, match=remedy):
        from_pretrained(untied)


NEUTRAL: dict[str, Any] = {
    "unsloth_version": "2025.3", "neftune_noise_alpha": 5.0, "_flash_attn_2_enabled": True,
    "experts_implementation": "org/kernel", "_attn_implementation": "org/kernel",
    "auto_map": {"AutoModel": "code.Model"}, "license": "mit", "tie_encoder_decoder": False,
    "pruned_heads": {}, "do_sample": False, "max_length": 20, "bad_words_ids": None,
}  # fmt: skip


def test_keys_that_compute_nothing_change_nothing(llama: Path) -> None:
    rotation = json.loads((llama / "config.json").read_text())["rope_parameters"]
    _config(llama, rope_parameters=..., rope_scaling={**rotation, "finetuned": True}, **NEUTRAL)
    assert share([(_logits(llama), theirs(made("llama"), tokens_of()))]) <= 1


def test_describe_names_the_keys_that_transformers_does_not_read(
    llama: Path, capsys: pytest.CaptureFixture
) -> None:
    _config(llama, final_logit_softcapping=30.0, rope_interleaved=False, torch_dtype="float16")
    assert main(["describe", str(llama), "--json"]) == 0
    unread = json.loads(capsys.readouterr().out)["not read"]
    assert unread == ["final_logit_softcapping", "rope_interleaved"]


def test_a_folder_of_links_is_read_within_the_cache_of_the_hub_alone(
    untied: Path, tmp_path: Path
) -> None:
    for place, refused in (("models--org--name/snapshots/1", False), ("other", True)):
        folder, blobs = tmp_path / place, tmp_path / "models--org--name" / "blobs"
        folder.mkdir(parents=True), blobs.mkdir(exist_ok=True)
        for file in untied.iterdir():
            (blobs / file.name).write_bytes(file.read_bytes())
            (folder / file.name).symlink_to(blobs / file.name)
        if refused:
            assert "got config.json, a link that leads out of it; copy the file" in _refusal(folder)
        else:
            assert from_pretrained(folder).width == 61


def test_folders_without_a_checkpoint_are_refused(tmp_path: Path, llama: Path) -> None:
    assert "expected a local folder" in _refusal(tmp_path / "none")
    assert "; hf download org/name --local-dir name" in _refusal(Path("org/name"))
    assert "expected a file config.json" in _refusal(tmp_path)
    (llama / "model.safetensors").write_bytes(b"12345")
    assert "complete safetensors file" in _refusal(llama)
    (llama / "adapter_config.json").write_text("{}")
    assert "got adapter_config.json; save the model that merge_and_unload" in _refusal(llama)
    (llama / "adapter_config.json").unlink()
    (llama / "model.safetensors").unlink()
    assert "expected model.safetensors or model.safetensors.index.json" in _refusal(llama)
    (llama / "config.json").write_text("[]")
    assert "JSON object, got list" in _refusal(llama)
    (llama / "config.json").write_text("{")
    assert "config.json to be JSON" in _refusal(llama)


def test_an_index_that_does_not_match_its_files_is_refused(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path, shard="20KB")[1]
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, other = sorted(set(index["weight_map"].values()))[:2]
    for place, message in (
        ("../weights.safetensors", "in its own folder"),
        ("absent.safetensors", "a file absent.safetensors"),
        (other, "got no lm_head.weight and 1 more"),
    ):
        listed = index["weight_map"].items()
        changed = {name: place if file == first else file for name, file in listed}
        path.write_text(json.dumps({"weight_map": changed}))
        assert message in _refusal(folder)
    path.write_text("{}")
    assert "weight_map" in _refusal(folder)
    path.write_text(json.dumps(index))
    save_file({**load_file(folder / first), TABLE: torch.ones(1), Q: torch.ones(1)}, folder / first)
    assert "expected each tensor in one file" in _refusal(folder)


def test_tensors_are_read_one_at_a_time(llama: Path) -> None:
    with Checkpoint(llama) as checkpoint:
        assert checkpoint.tensor(Q).shape == (64, 64) and Q in checkpoint.names()
    assert not checkpoint.names()


REFUSED: dict[str, Any] = {
    "an unknown activation": ({"hidden_act": "spiral"}, "got an error ('spiral'"),
    "an activation that is a list": ({"hidden_act": ["silu"]}, "to be a name, got ['silu']"),
    "a quantised model": ({"quantization_config": {"bits": 4}}, "expected quant_method in quant"),
    "a size that is no number": ({"hidden_size": "64"}, "Field 'hidden_size' expected int"),
    "a missing size": ({"intermediate_size": ...}, "down_proj.weight with shape [64, 11008]"),
    "an epsilon that is none": ({"rms_norm_eps": None}, "Field 'rms_norm_eps' expected float"),
    "an unknown rotation": ({"rope_parameters": {"rope_type": "spiral"}}, "'spiral'"),
    "no range": ({"max_position_embeddings": 0}, "expected a number of positions, got none"),
    **{
        f"a model_type {kind!r}": ({"model_type": kind}, f"got {kind!r}; ")
        for kind in (None, ["llama"], {"llama": 1})
    },
    "layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers to be at most 1024 (layers)"),
    "a width": ({"hidden_size": 2**20}, "expected weights of at most"),
    "a width above int64": ({"hidden_size": 2**63}, "hidden_size to be at most 1048576 (width)"),
    "a head": ({"head_dim": 10**9}, "head_dim to be at most 16384 (entries of a head)"),
    "ids": ({"vocab_size": 10**9}, "vocab_size to be at most 16777216 (token ids)"),
    "a range above int64": ({"max_position_embeddings": 2**63}, "to be at most 2147483647"),
    "layers of a small model": ({"num_hidden_layers": 1000}, "files with at least 1000 tensors"),
    "nested": (
        {"rope_parameters": json.loads('{"a":' * 50 + "1" + "}" * 50)},
        "at most 8 levels of nested values",
    ),
    "a long list": ({"layer_types": ["full_attention"] * 10**5}, "with at most 16384 entries"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_value_that_cannot_be_right_is_refused_at_once_and_in_little_memory(
    case: str, llama: Path
) -> None:
    change, message = REFUSED[case]
    _config(llama, **change)
    tracemalloc.start()
    begun = time.process_time()
    refused = _refusal(llama)
    seconds, memory = time.process_time() - begun, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert message in refused and seconds < 5 and memory < 200e6, (refused, seconds, memory)


def test_max_positions_is_any_integer(tmp_path: Path) -> None:
    folder = saved("mistral", tmp_path)[1]
    assert from_pretrained(folder, max_positions=100).max_positions == 100
    for wrong in (1.5, 0, -5):
        assert "max_positions to be an integer above 0" in _refusal(folder, max_positions=wrong)
