"""Each message of docs/refused.md is one that a call really gives."""

import json
import re
import sys
from pathlib import Path
from typing import Any, Callable

import pytest
import torch

from posenc_export import load
from posenc_export.commands.cli import main
from posenc_export.export import ReadAs, Sources
from tests.reading.refused_modules import MOST, WORDS, Reversed
from tests.tiny import decoder
from tests.traces import exported

pytest.importorskip("gguf", reason="gguf is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
from tests.models.checkpoints import saved

PAGE = (Path(__file__).parents[1] / "docs/refused.md").read_text(encoding="utf-8")
BEHIND = PAGE.index("## A checkpoint")  # the messages about modules
BLOCK = ("block", "--width", "32", "--heads", "2", "--max-positions", "64")


def rows(text: str) -> list[str]:
    """Return the messages in the tables of a page as regular expressions."""
    shown = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    return [re.escape(message).replace(re.escape("..."), ".+") for message in shown]


def test_a_module_that_mixes_tokens_is_refused_in_the_words_of_the_page() -> None:
    with pytest.raises(ValueError, match="|".join(row for row in rows(PAGE) if "mixes" in row)):
        Sources(Reversed(), how=ReadAs(torch.arange(33).view(3, 11) % WORDS, MOST))


def test_every_message_about_files_targets_and_calls_is_a_real_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    said: list[str] = []

    def export(*arguments: object) -> None:
        assert main(["export", *map(str, arguments)]) == 2
        said.append(capsys.readouterr().err)

    def refused(call: Callable[[], Any]) -> None:
        with pytest.raises((ValueError, ModuleNotFoundError)) as error:
            call()
        said.append(str(error.value))

    to = ("--target", "ort", "-o", tmp_path / "new")
    checkpoint = saved("llama", tmp_path / "llama")[1]
    export(tmp_path, *to)
    config = json.loads((checkpoint / "config.json").read_text())
    for key, value in (("model_type", "other"), ("num_hidden_layers", 3)):
        (checkpoint / "config.json").write_text(json.dumps({**config, key: value}))
        export(checkpoint, *to)
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    export(tmp_path / "cut.gguf", *to)
    export(*BLOCK, "--weights", "int8", "--target", "torchscript", *to[2:])
    export(*BLOCK, "--encoding", "rop", *to)
    export(*BLOCK, *to[:2], "-o", tmp_path)

    folder = exported(tmp_path / "a", decoder("rope"), "ort")
    model = load(folder, provider="cpu")
    refused(lambda: model.session().prefill([[1, 2]], start=model.manifest.max_positions))
    refused(lambda: model.session().prefill([[1, 2, 1000]]))
    refused(lambda: model.session().step([1]))
    refused(lambda: model.session(capacity=4).prefill([[1] * 9]))
    refused(lambda: model.chat("a"))
    refused(lambda: load(folder, provider="cuda"))
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["inspect", str(folder), "--runtime", "python"]) == 2
    said.append(capsys.readouterr().err)
    (folder / "model.onnx").write_bytes(b"changed")
    refused(lambda: load(folder))

    known = rows(PAGE[BEHIND:])
    found = [[row for row in known if re.search(row, message)] for message in said]
    assert [message for message, of_page in zip(said, found, strict=True) if not of_page] == []
    assert {row for of_page in found for row in of_page} == set(known)
