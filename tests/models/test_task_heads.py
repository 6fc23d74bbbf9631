"""Task heads of encoders: their logits equal those of transformers, their labels stand in the
description, other heads are named.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from posenc_export.commands.cli import main
from posenc_export.export import export
from posenc_export.export.expected import eager_session
from posenc_export.export.read_module import as_model
from posenc_export.models.pretrained import from_pretrained
from posenc_export.runtime import load
from posenc_export.runtime.session.session import Session
from posenc_export.shared.numerics import tolerance, worst_error
from tests.cases import choice
from tests.models.encoders import built, described, randomised

IDS = torch.arange(3, 3 + 12)[None].repeat(2, 1)
IDS[1] += 20
MASKED, SCORES, ANSWERS = "MaskedLM", "SequenceClassification", "QuestionAnswering"
NAMES = (
    *("bert", "roberta", "mpnet", "electra", "distilbert", "deberta-v2", "roformer", "modernbert"),
)
TASKS = (MASKED, SCORES, ANSWERS, "TokenClassification")
PAIRS = [(task, name) for task in TASKS for name in NAMES]
QUICK = [
    *((task, "bert") for task in TASKS[2:]),  # the others are proved in an artefact
    (SCORES, "distilbert"),
    (MASKED, "modernbert"),
]


def _saved(task: str, name: str, folder: Path) -> object:
    config = described(name)
    config.id2label = (
        {0: "good", 1: "bad", 2: "neither"} if task != "QuestionAnswering" else {0: "a", 1: "b"}
    )
    torch.manual_seed(0)
    model = randomised(built(config, f"AutoModelFor{task}"))
    model.save_pretrained(folder)
    return model


def _expected(peer: Any) -> np.ndarray:
    with torch.no_grad():
        outputs = peer(IDS)
    spans = "start_logits" in outputs
    logits: Tensor = (
        torch.stack((outputs.start_logits, outputs.end_logits), 2) if spans else outputs.logits
    )
    return logits.numpy()


def _logits(session: Session) -> np.ndarray:
    """Return the logits of a head, for each token or for the sequence."""
    pooled = "readout" in session.manifest.config
    return session.read_out(IDS.numpy()) if pooled else session.prefill(IDS.numpy())


def _close(folder: Path, peer: Any) -> bool:
    logits = _logits(eager_session(from_pretrained(folder)))
    return worst_error(logits, _expected(peer)) < tolerance("float32", 2, 48)


@pytest.mark.parametrize(("task", "name"), choice(PAIRS, QUICK))
def test_logits_of_a_head_equal_those_of_transformers(task: str, name: str, tmp_path: Path) -> None:
    peer = _saved(task, name, tmp_path)
    model = as_model(from_pretrained(tmp_path))
    assert worst_error(_logits(eager_session(model)), _expected(peer)) < tolerance("float32", 2, 48)
    others = {ANSWERS: ("start", "end"), MASKED: ()}
    assert model.config.labels == others.get(task, ("good", "bad", "neither"))


def test_a_head_reads_the_mean_of_the_tokens_if_its_class_does(tmp_path: Path) -> None:
    config = described("modernbert")
    config.classifier_pooling = "mean"
    torch.manual_seed(0)
    peer = randomised(built(config, f"AutoModelFor{SCORES}"))
    peer.save_pretrained(tmp_path)
    assert _close(tmp_path, peer)


@pytest.mark.parametrize("task", [SCORES, MASKED])
def test_a_head_is_proved_in_the_artefact(task: str, tmp_path: Path) -> None:
    peer = _saved(task, "bert", tmp_path)
    manifest = export(from_pretrained(tmp_path), "ort", tmp_path / "artefact", verify="quick")
    assert manifest.certificate is not None and manifest.certificate["passed"]
    names = [value.name for value in manifest.outputs]
    assert names == (["last_hidden_state", "logits"] if task == SCORES else ["logits"])
    logits = _logits(load(tmp_path / "artefact", provider="cpu").session())
    assert worst_error(logits, _expected(peer)) < tolerance("float32", 2, 48)


def test_without_its_head_a_model_gives_hidden_states(tmp_path: Path) -> None:
    peer = _saved(MASKED, "bert", tmp_path)
    session = eager_session(from_pretrained(tmp_path, head=False))
    assert [value.name for value in session.manifest.outputs] == ["last_hidden_state"]
    with torch.no_grad():
        states = peer.bert(IDS).last_hidden_state.numpy()
    assert worst_error(session.prefill(IDS.numpy()), states) < tolerance("float32", 2, 48)


@pytest.mark.parametrize(("name", "task"), [("bert", "MultipleChoice"), ("albert", SCORES)])
def test_a_head_that_is_not_exported_is_named_in_one_line(
    name: str, task: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    sizes = {"vocab_size": 61, "hidden_size": 48, "embedding_size": 48, "intermediate_size": 40}
    heads = {"num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 64}
    other = transformers.AlbertConfig(**sizes, **heads)
    torch.manual_seed(0)
    model = built(other if name == "albert" else described(name), f"AutoModelFor{task}")
    randomised(model).save_pretrained(tmp_path)
    options = ["--target", "torchscript", "-o", str(tmp_path / "artefact"), "--no-verify"]
    assert main(["export", str(tmp_path), *options]) == 0
    assert f"is a model for {task}, whose head is not exported" in capsys.readouterr().err


def test_a_head_without_its_tensors_is_refused(tmp_path: Path) -> None:
    _saved(SCORES, "bert", tmp_path)
    labels = {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}
    _rewritten(tmp_path, {}, architectures=[f"BertFor{ANSWERS}"], **labels)
    with pytest.raises(ValueError, match="got no qa_outputs.bias and 1 more"):
        from_pretrained(tmp_path)


def test_poolers_and_other_heads_beside_a_head_are_not_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    peer = randomised(transformers.BertForPreTraining(described("bert")))
    peer.save_pretrained(tmp_path)
    _rewritten(tmp_path, {}, architectures=[f"BertFor{MASKED}"])
    assert _close(tmp_path, transformers.BertForMaskedLM.from_pretrained(tmp_path).eval())
    _rewritten(tmp_path, {"bert.encoder.layer.2.output.dense.bias": torch.ones(48)})
    with pytest.raises(ValueError, match="also bert.encoder.layer.2.output.dense.bias; "):
        from_pretrained(tmp_path)


def _rewritten(folder: Path, tensors: dict[str, Any], **config: Any) -> None:
    """Change tensors and keys of config.json of a checkpoint; None removes a tensor."""
    path = folder / "model.safetensors"
    held = {**load_file(path), **tensors}
    kept = {name: tensor for name, tensor in held.items() if tensor is not None}
    save_file(kept, path, {"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, **config}))


DECODER = "cls.predictions.decoder"
LOST: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "a shared bias that is not tied": (
        "bert",
        {f"{DECODER}.weight": torch.ones(61, 48), f"{DECODER}.bias": None},
        {"tie_word_embeddings": False},
        f"got no {DECODER}.bias; ",
    ),
    "no weight": (
        "bert",
        {f"{DECODER}.weight": None},
        {"tie_word_embeddings": False},
        f"got no {DECODER}.bias and 1 more; ",
    ),
    "a bias of the logits": ("modernbert", {}, {"decoder_bias": False}, "also decoder.bias"),
    "a bias of the dense layer": (
        "modernbert",
        {"head.dense.bias": torch.ones(48)},
        {},
        "also head.dense.bias",
    ),
}


@pytest.mark.parametrize("case", LOST)
def test_tensors_of_a_head_that_contradict_config_json_are_refused(
    case: str, tmp_path: Path
) -> None:
    name, tensors, changes, message = LOST[case]
    _saved(MASKED, name, tmp_path)
    _rewritten(tmp_path, tensors, **changes)
    with pytest.raises(ValueError, match=message):
        from_pretrained(tmp_path)
