"""Generation: stop ids, rows that end before others, and the tokenizer in an artefact."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posenc_export import load
from posenc_export.commands.cli import main
from posenc_export.export import export
from posenc_export.models.presets import seeded
from posenc_export.models.stack import Text
from tests.tiny import decoder
from tests.traces import artefact

pytestmark = pytest.mark.xdist_group("alibi")  # one worker, which traces the model once

PROMPTS = [list(range(3, 12)), [40, 41], [7] * 5]


@pytest.fixture(scope="module", params=["ort", "onnx", "torchscript"])
def model(request: pytest.FixtureRequest) -> Any:
    return load(artefact(decoder("alibi"), request.param), provider="cpu", threads=1)


def _alone(model: Any, prompt: list[int], count: int, **given: Any) -> list[int]:
    return [int(ids[0]) for ids in model.session().generate([prompt], count, **given)]


def test_rows_that_end_before_others_give_what_each_gives_alone(model: Any) -> None:
    whole = [_alone(model, prompt, 12) for prompt in PROMPTS]
    stop = [whole[0][3], whole[1][6]]
    cut = [
        row[: next((i + 1 for i, token in enumerate(row) if token in stop), 12)] for row in whole
    ]
    assert len({len(row) for row in cut}) > 1
    result = np.stack(list(model.session().generate(PROMPTS, 12, stop=stop)), axis=1)
    assert result.shape[1] == max(map(len, cut))
    for row, wanted in zip(result, cut, strict=True):
        assert row[: len(wanted)].tolist() == wanted and (row[len(wanted) :] == -1).all()
    assert [_alone(model, prompt, 12, stop=stop) for prompt in PROMPTS] == cut


def test_a_row_that_ended_takes_no_further_position(model: Any) -> None:
    session, whole = model.session(), _alone(model, PROMPTS[1], 1)
    result = list(session.generate(PROMPTS[:2], 6, stop=whole))
    assert session.length[1] == len(PROMPTS[1])
    assert session.length[0] == len(PROMPTS[0]) + len(result) - 1


def test_stop_ids_of_the_artefact_hold_where_none_are_given(tmp_path: Path) -> None:
    stack = seeded(decoder("alibi"))
    first = _alone_of(stack, tmp_path / "free")
    stack.text = Text(stop_ids=(first[2],))
    assert _alone_of(stack, tmp_path / "ending") == first[:3]
    manifest = load(tmp_path / "ending", provider="cpu").manifest
    assert manifest.stop_ids == [first[2]]
    assert len(_alone(load(tmp_path / "ending", provider="cpu"), PROMPTS[0], 8, stop=())) == 8


def _alone_of(stack: Any, folder: Path) -> list[int]:
    export(stack, "torchscript", folder, verify=False)
    return _alone(load(folder, threads=1, provider="cpu"), PROMPTS[0], 8)


def test_the_command_speaks_by_the_tokenizer_that_the_artefact_carries(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    result = tokenizers.Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=61, initial_alphabet=[], special_tokens=["<end>"])
    result.train_from_iterator(["a test of tests and states"] * 9, trainer)
    stack = seeded(decoder("rope"))
    stack.text = Text(result.to_str().encode())
    export(stack, "torchscript", tmp_path / "a", verify=False)
    command = ["generate", str(tmp_path / "a"), "--prompt", "test"]
    assert main([*command, "--max-tokens", "9", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    ids = result.encode("test").ids
    assert answer["tokens"] == _alone(load(tmp_path / "a", provider="cpu"), ids, 9)
    assert "test" + answer["text"] == result.decode(ids + answer["tokens"])
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    assert main(command) == 2
    assert "tokenizer.json" in capsys.readouterr().err


@pytest.mark.parametrize("installed", [False, True])
def test_a_tokenizer_that_cannot_be_read_is_refused_before_the_export(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed:
        pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    else:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    stack = seeded(decoder("rope"))
    stack.text = Text(b"{}" if installed else b"[1")
    with pytest.raises(ValueError, match="text: expected (a )?tokenizer.json .*, got an error"):
        export(stack, "torchscript", tmp_path / "a", verify=False)
    assert not (tmp_path / "a").exists()


def test_a_decoder_of_other_ids_without_a_tokenizer_is_refused_by_name(
    capsys: pytest.CaptureFixture,
) -> None:
    assert main(["generate", str(artefact(decoder("rope"), "torchscript")), "--prompt", "a"]) == 2
    assert (
        "expected an artefact with tokenizer.json or a byte-level decoder (vocabulary 256), "
        "got kind decoder with 61 token ids"
    ) in capsys.readouterr().err
