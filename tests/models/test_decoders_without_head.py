"""Decoders without a head for language: hidden states equal those of transformers, other heads are
refused.
"""

import json
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import pytest
import torch
import transformers

from posenc_export.commands.cli import main
from posenc_export.export import export
from posenc_export.export.expected import eager_session
from posenc_export.export.read_module import as_model
from posenc_export.models.pretrained import from_pretrained
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.shared.numerics import tolerance, worst_error
from tests.models import gguf_files
from tests.models.checkpoints import described, randomised, saved

IDS = torch.randint(3, 61, (3, 14), generator=torch.Generator().manual_seed(0))
PAIRS = [
    ("mistral with a window", "SequenceClassification"),
    *(("mistral", "TokenClassification"), ("llama", "QuestionAnswering")),
]


def _saved(name: str, kind: str, folder: Path) -> Any:
    """Save a model of AutoModel or AutoModelFor..., and return it."""
    config = described(name)
    if kind.endswith("Classification"):
        config.id2label = {0: "good", 1: "bad", 2: "neither"}
    torch.manual_seed(0)
    model = randomised(getattr(transformers, kind).from_config(config))
    model.save_pretrained(folder)
    return model


def _padded() -> Iterator[tuple[torch.Tensor, np.ndarray, torch.Tensor]]:
    """Yield ids, mask and positions: without padding, and with padding of a row on each side."""
    for padding in (slice(0, 0), slice(0, 4), slice(10, 14)):
        ids, mask = IDS.clone(), torch.ones_like(IDS)
        ids[1, padding], mask[1, padding] = 0, 0
        yield ids, mask.numpy(), (mask.cumsum(1) - 1).clamp(min=0)


def _called(peer: Any, ids: torch.Tensor, mask: np.ndarray, positions: torch.Tensor) -> Any:
    with torch.no_grad():
        return peer(ids, attention_mask=torch.from_numpy(mask), position_ids=positions)


def _close(actual: np.ndarray, expected: np.ndarray) -> bool:
    return worst_error(actual, expected) < tolerance("float32", 2, 64)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("mistral with a window", "AutoModel"), ("llama with biases", "AutoModelForCausalLM")],
)
def test_hidden_states_of_a_decoder_equal_those_of_transformers(
    name: str, kind: str, tmp_path: Path
) -> None:
    peer = _saved(name, kind, tmp_path)
    session = eager_session(as_model(from_pretrained(tmp_path, head=kind == "AutoModel")))
    for ids, mask, positions in _padded():
        states = _called(peer.base_model, ids, mask, positions).last_hidden_state.numpy()
        session.reset()
        read = session.prefill(ids.numpy(), attention_mask=mask)
        assert _close(read[mask == 1], states[mask == 1])
    session.reset()
    states = _called(peer.base_model, *next(_padded())).last_hidden_state.numpy()
    assert _close(session.prefill(IDS[:, :9].numpy()), states[:, :9])
    for place in range(9, 14):
        assert _close(session.step(IDS[:, place].numpy()), states[:, place])


@pytest.mark.parametrize(("name", "task"), PAIRS)
def test_scores_of_a_decoder_equal_those_of_transformers(
    name: str, task: str, tmp_path: Path
) -> None:
    peer = _saved(name, f"AutoModelFor{task}", tmp_path)
    session = eager_session(as_model(from_pretrained(tmp_path)))
    answers, scores = task == "QuestionAnswering", task == "SequenceClassification"
    assert session.manifest.config["labels"] == (
        ["start", "end"] if answers else ["good", "bad", "neither"]
    )
    assert bool(session.manifest.states) != scores
    for ids, mask, positions in _padded():
        outputs = _called(peer, ids, mask, positions)
        logits = outputs.start_logits if answers else outputs.logits
        expected = torch.stack((logits, outputs.end_logits), 2) if answers else logits
        session.reset()
        read = (session.read_out if scores else session.prefill)(ids.numpy(), attention_mask=mask)
        seen = slice(None) if scores else mask == 1
        assert _close(read[seen], expected.numpy()[seen])


@pytest.mark.parametrize("kind", ["AutoModel", "AutoModelForSequenceClassification"])
def test_a_decoder_without_head_is_proved_in_its_artefact(kind: str, tmp_path: Path) -> None:
    _saved("mistral with a window", kind, tmp_path)
    manifest = export(from_pretrained(tmp_path), "ort", tmp_path / "artefact", verify="quick")
    assert manifest.certificate is not None and manifest.certificate["passed"]
    names, cached = [value.name for value in manifest.outputs], kind == "AutoModel"
    assert names == ["last_hidden_state"] + ([] if cached else ["logits"])
    assert bool(manifest.states) == cached


def test_hidden_states_with_caches_get_no_configuration_of_an_encoder(tmp_path: Path) -> None:
    _saved("llama", "AutoModel", tmp_path)
    folder = tmp_path / "artefact"
    export(from_pretrained(tmp_path), "onnx", folder, "mask", verify=False)
    assert not (folder / "config.json").is_file()


def test_no_head_exports_hidden_states_of_a_tied_decoder(tmp_path: Path) -> None:
    saved("mistral with a window", tmp_path)
    folder = tmp_path / "artefact"
    command = ["export", str(tmp_path), "--target", "torchscript", "-o", str(folder)]
    assert main([*command, "--no-head", "--no-verify"]) == 0
    manifest = manifests.read(folder)
    assert [value.name for value in manifest.outputs] == ["last_hidden_state"]
    assert not manifest.stop_ids and manifest.states


def test_a_gguf_file_without_its_head_gives_hidden_states(tmp_path: Path) -> None:
    peer, file = gguf_files.made("llama with biases"), tmp_path / "model.gguf"
    gguf_files.write("llama with biases", peer, file)
    model = from_pretrained(file, head=False)
    states = _called(peer.base_model, *next(_padded())).last_hidden_state.numpy()
    with torch.no_grad():
        assert not model.head and _close(model(IDS).numpy(), states)


@pytest.mark.parametrize("name", ["LlamaForRewardModel", "LlamaBidirectionalModel", "QwenModel"])
def test_a_decoder_with_another_head_is_refused_by_name(name: str, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [name]}))
    with pytest.raises(ValueError, match=f"a class of transformers for llama, got '{name}'"):
        from_pretrained(tmp_path)
    assert not from_pretrained(tmp_path, head=False).head
