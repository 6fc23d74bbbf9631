"""The user's own models, exported by the command and by the programs of the pages about them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from posenc_export import from_pretrained, load
from posenc_export.commands.cli import main
from posenc_export.commands.model_argument import checkpoint_name
from posenc_export.export import export
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config

pytest.importorskip("transformers", reason="transformers is not installed")
from tests.models.checkpoints import saved
from tests.models.pairs import Peer, made

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("own") / "checkpoint")[1]


def _exported(arguments: list[str], capsys: pytest.CaptureFixture) -> Any:
    assert main(["export", *arguments, "--target", "ort", "--json"]) == 0
    return json.loads(capsys.readouterr().out)[0]


def test_a_checkpoint_is_exported_and_verified_in_another_process(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = str(tmp_path / "model")
    assert _exported([str(checkpoint), "-o", folder, "--max-positions", "300"], capsys)["passed"]
    hidden = (
        "import sys; sys.modules['torch'] = None; from posenc_export.commands.cli import main; "
        "sys.exit(main(['verify', sys.argv[1], '--json']))"
    )
    command = [sys.executable, "-c", hidden, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["passed"]
    tokens = np.arange(3, 43)[None]
    with torch.no_grad():
        wanted = from_pretrained(checkpoint)(torch.from_numpy(tokens)).numpy()
    model = load(folder, provider="cpu")
    assert np.allclose(model.session().prefill(tokens, chunk=9), wanted, atol=2e-5)
    assert model.manifest.max_positions == 300
    assert model.manifest.source == {"checkpoint": "checkpoint"}


def test_the_name_of_a_checkpoint_is_that_of_its_folder_file_or_hub() -> None:
    names = {
        "a/b": "b",
        "a/b.Q4_1.gguf": "b.Q4_1",
        "hub/models--org--name-1--2/snapshots/12ab": "org/name-1--2",
        "hub/models--org--n/snapshots/12ab/q.gguf": "org/n",
    }
    assert {path: checkpoint_name(Path(path)) for path in names} == names


WRONG = {
    "a path that is none": (["./checkpont"], "expected model to be block, a folder with a check"),
    "a width beside a checkpoint": (
        ["{checkpoint}", "--width", "64"], "expected options of a checkpoint, got --width"
    ),
    "a part of a preset": (
        ["tiny-rope", "--part", "encoder"],
        "expected no options of a block or checkpoint for tiny-rope, got --part",
    ),
    "the part of a block": (["block", "--part", "encoder"], "options of a block, got --part"),
}  # fmt: skip


def _run(*pages: str) -> Any:
    """Run the programs of pages one after the other, and return the names that they define."""
    names: Any = {}
    for page in pages:
        for program in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
            exec(program, names)
    return names


@pytest.mark.parametrize("case", WRONG)
def test_an_invalid_export_is_one_line_status_2_and_nothing_written(
    case: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    arguments, message = WRONG[case]
    given = [part.format(checkpoint=checkpoint) for part in arguments]
    assert main(["export", *given, "--target", "ort", "-o", str(tmp_path / "artefact")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and message in errors[0] and not (tmp_path / "artefact").exists()


def _give_text(checkpoint: Path) -> None:
    """Write a tokenizer of one word and a chat template into a checkpoint."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[unk]": 0, "Paris": 1}, "[unk]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (checkpoint / "tokenizer.json").write_text(words.to_str())
    (checkpoint / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    )


@pytest.mark.exhaustive
def test_the_programs_of_the_pages_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _give_text(saved("llama", tmp_path / "checkpoint")[1])
    Peer(made("mt5 both parts")).save_pretrained(tmp_path / "translator")
    monkeypatch.chdir(tmp_path)
    names = _run("own-model.md", "checkpoints.md", "checkpoint-parts.md")
    assert names["translated"].shape[0] == 2
    assert names["following"].shape[0] == 1 and names["seen"].shape == (1, 1, 100)


def test_the_program_of_the_page_of_sessions_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(block_config(512, 8, 2048, kv_heads=2))
    export(model, "ort", tmp_path / "build/block", verify=False)
    monkeypatch.chdir(tmp_path)
    names = _run("sessions.md")
    assert names["output"].shape == (1, 512) and names["session"].length.tolist() == [8]
    assert names["outputs"].shape == (2, 30, 512) and names["rows"].length.tolist() == [30, 12]


def test_the_description_in_the_page_of_models_builds_a_model() -> None:
    names = _run("models.md")
    assert names["model"].config == names["config"] and len(names["model"].layers) == 4
