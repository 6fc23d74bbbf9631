"""Task heads of encoders: their logits equal those of transformers, their labels stand in the description, other heads are named."""

from pathlib import Path

import pytest
import torch

from posenc_export import load
from posenc_export.commands.cli import main
from posenc_export.export import export
from posenc_export.export.expected import eager_session
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
    model = from_pretrained(tmp_path)
    assert worst_error(eager_session(model).read_out(IDS.numpy()), expected.numpy()) < tolerance(
        "float32", 2, 48
    )
    assert model.config.readout.labels == {"QuestionAnswering": ("start", "end"), MASKED: ()}.get(
        task, ("good", "bad", "neither")
    )


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
    randomised(built(described("bert"), "AutoModelForMultipleChoice")).save_pretrained(tmp_path)
    assert (
        main(
            [
                "export",
                str(tmp_path),
                "--target",
                "torchscript",
                "-o",
                str(tmp_path / "artefact"),
                "--no-verify",
            ]
        )
        == 0
    )
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
    model = from_pretrained(tmp_path)
    assert (
        model.readout is not None
        and model.readout.layers[-1].linear.weight is model.tokens.embedding.weight
    )
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
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(IDS).logits.numpy()
    assert worst_error(
        eager_session(from_pretrained(tmp_path)).read_out(IDS.numpy()), expected
    ) < tolerance("float32", 2, 48)
