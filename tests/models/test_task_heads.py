"""Task heads of encoders: their logits equal those of transformers, their labels stand in the
description, other heads are named.
"""

import json
from pathlib import Path
from typing import Any, Dict, Tuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from posenc_export import load
from posenc_export.commands.cli import main
from posenc_export.export import export
from posenc_export.export.expected import eager_session
from posenc_export.export.read_module import as_model
from posenc_export.models.masked_heads import HEADS
from posenc_export.models.pretrained import from_pretrained
from posenc_export.models.task_heads import MASKED, TASKS
from posenc_export.shared.numerics import tolerance, worst_error
from tests.models.encoders import built, described, randomised

IDS = torch.arange(3, 3 + 12)[None].repeat(2, 1)
IDS[1] += 20
PAIRS = [
    *((task, name) for task in TASKS for name in TASKS[task]),
    *((MASKED, name) for name in (*HEADS, "modernbert other", "bert other")),
]
QUICK = [
    *((task, name) for task in TASKS for name in ("bert", "roberta")),
    *((MASKED, name) for name in HEADS),
    ("SequenceClassification", "deberta-v2"),
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


@pytest.mark.parametrize(
    ("task", "name"),
    [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.exhaustive) for pair in PAIRS],
)
def test_logits_of_a_head_equal_those_of_transformers(task: str, name: str, tmp_path: Path) -> None:
    peer = _saved(task, name, tmp_path)
    with torch.no_grad():
        outputs = peer(IDS)  # type: ignore[operator]
    expected = (
        torch.stack((outputs.start_logits, outputs.end_logits), 2)
        if task == "QuestionAnswering"
        else outputs.logits
    )
    model = as_model(from_pretrained(tmp_path))
    logits = eager_session(model).read_out(IDS.numpy())
    assert worst_error(logits, expected.numpy()) < tolerance("float32", 2, 48)
    others = {"QuestionAnswering": ("start", "end"), MASKED: ()}
    assert model.config.readout.labels == others.get(task, ("good", "bad", "neither"))


def test_a_head_is_proved_in_the_artefact_with_its_labels(tmp_path: Path) -> None:
    _saved("SequenceClassification", "bert", tmp_path)
    manifest = export(from_pretrained(tmp_path), "ort", tmp_path / "artefact")
    assert manifest.outputs[1].axes == ("batch_size", 3) and manifest.config["readout"][
        "labels"
    ] == ["good", "bad", "neither"]
    assert (
        manifest.certificate is not None
        and "batch 3, start 0: logits, padding" in manifest.certificate["cells"]
    )


def test_a_head_that_is_not_exported_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    torch.manual_seed(0)
    randomised(built(described("deberta-v2"), "AutoModelForMultipleChoice")).save_pretrained(
        tmp_path
    )
    options = ["--target", "torchscript", "-o", str(tmp_path / "artefact"), "--no-verify"]
    assert main(["export", str(tmp_path), *options]) == 0
    assert "is a model for MultipleChoice, whose head is not exported" in capsys.readouterr().err


def test_a_head_without_its_tensors_is_refused(tmp_path: Path) -> None:
    _saved("SequenceClassification", "bert", tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        config.replace("ForSequenceClassification", "ForQuestionAnswering")
    )
    with pytest.raises(
        ValueError,
        match="expected the tensors of the head that architectures names, qa_outputs.weight",
    ):
        from_pretrained(tmp_path)


def test_a_head_of_masked_language_modelling_reads_the_token_table_and_is_proved_in_the_artefact(
    tmp_path: Path,
) -> None:
    peer = _saved(MASKED, "bert", tmp_path)
    model = as_model(from_pretrained(tmp_path))
    table = model.get_parameter("calls.model.embeddings.word_embeddings.weight")
    assert model.readout is not None and model.readout.layers[-1].linear.weight is table
    manifest = export(model, "ort", tmp_path / "artefact")
    assert manifest.certificate is not None and manifest.certificate["passed"]
    with torch.no_grad():
        expected = peer(IDS).logits.numpy()  # type: ignore[operator]
    assert worst_error(
        load(tmp_path / "artefact", provider="cpu").session().read_out(IDS.numpy()), expected
    ) < tolerance("float32", 2, 48)
    assert (
        len(
            export(
                from_pretrained(tmp_path, head=False),
                "torchscript",
                tmp_path / "without",
                verify=False,
            ).outputs
        )
        == 1
    )


def test_a_head_with_weights_of_its_own_is_not_tied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = randomised(built(described("bert"), "AutoModelForMaskedLM"))
    model.cls.predictions.decoder.weight = torch.nn.Parameter(torch.randn(61, 48))
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(IDS).logits.numpy()
    assert worst_error(
        eager_session(from_pretrained(tmp_path)).read_out(IDS.numpy()), expected
    ) < tolerance("float32", 2, 48)


def _rewritten(folder: Path, tensors: Dict[str, Any], **config: Any) -> None:
    """Change tensors and keys of config.json of a checkpoint; None removes a tensor."""
    path = folder / "model.safetensors"
    held = {**load_file(path), **tensors}
    kept = {name: tensor for name, tensor in held.items() if tensor is not None}
    save_file(kept, path, {"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, **config}))


def _error(task: str, folder: Path) -> float:
    """Return the largest difference between our logits of a checkpoint and transformers'."""
    auto = getattr(transformers, f"AutoModelFor{task}")
    with torch.no_grad():
        expected = auto.from_pretrained(folder).eval()(IDS).logits.numpy()
    return worst_error(eager_session(from_pretrained(folder)).read_out(IDS.numpy()), expected)


SHARED = [name for name, head in HEADS.items() if head.shared_bias]
BIASES = {"both": (True, True), "the last layer's": (True, False), "the shared": (False, True)}


@pytest.mark.parametrize("held", BIASES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", SHARED)
def test_logits_of_masked_tokens_have_the_bias_that_transformers_uses(
    name: str, tied: bool, held: str, tmp_path: Path
) -> None:
    if held == "the shared" and not tied:
        pytest.skip("transformers computes without any bias; refused below")
    _saved(MASKED, name, tmp_path)
    head, biases = HEADS[name], torch.randn(2, 61, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(61, 48, generator=torch.Generator().manual_seed(2))
    last, shared = BIASES[held]
    tensors = {
        f"{head.logits}.weight": None if tied else weight,
        f"{head.logits}.bias": biases[0] if last else None,
        head.shared_bias: biases[1] if shared else None,
    }
    _rewritten(tmp_path, tensors, tie_word_embeddings=tied)
    assert _error(MASKED, tmp_path) < tolerance("float32", 2, 48)


def test_a_head_of_deberta_that_is_always_tied_has_the_bias_beside_it(tmp_path: Path) -> None:
    config = described("deberta-v2")
    config.legacy, config.tie_word_embeddings = False, False
    torch.manual_seed(0)
    randomised(built(config, "AutoModelForMaskedLM")).save_pretrained(tmp_path)
    assert _error(MASKED, tmp_path) < tolerance("float32", 2, 48)


DECODER = "cls.predictions.decoder"
LOST: Dict[str, Tuple[str, Dict[str, Any], Dict[str, Any], str]] = {
    "a shared bias that is not tied": (
        "bert",
        {f"{DECODER}.weight": torch.ones(61, 48), f"{DECODER}.bias": None},
        {"tie_word_embeddings": False},
        f"expected {DECODER}.bias with tie_word_embeddings false, got only cls.predictions.bias",
    ),
    "no weight": (
        "bert",
        {f"{DECODER}.weight": None},
        {"tie_word_embeddings": False},
        f"got no {DECODER}.weight",
    ),
    "a bias of the logits": (
        "modernbert",
        {},
        {"decoder_bias": False},
        "expected no decoder.bias with decoder_bias false, got one",
    ),
    "a bias of the dense layer": (
        "modernbert",
        {"head.dense.bias": torch.ones(48)},
        {},
        "expected no head.dense.bias with classifier_bias false, got one",
    ),
    "a bias of the norm": (
        "modernbert",
        {"head.norm.bias": torch.ones(48)},
        {},
        "expected no head.norm.bias with norm_bias false, got one",
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


@pytest.mark.parametrize("activation", ["tanh", "relu", "gelu_new"])
def test_the_pooler_of_deberta_has_the_activation_of_config_json(
    activation: str, tmp_path: Path
) -> None:
    task = "SequenceClassification"
    _saved(task, "deberta-v2", tmp_path)
    _rewritten(tmp_path, {}, pooler_hidden_act=activation)
    assert _error(task, tmp_path) < tolerance("float32", 2, 48)


def test_an_unknown_activation_of_a_pooler_is_refused(tmp_path: Path) -> None:
    _saved("SequenceClassification", "deberta-v2", tmp_path)
    _rewritten(tmp_path, {}, pooler_hidden_act="quick_gelu")
    message = "expected pooler_hidden_act to be one of .*, got 'quick_gelu'; "
    with pytest.raises(ValueError, match=message):
        from_pretrained(tmp_path)
