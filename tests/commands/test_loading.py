"""Commands that run models take checkpoints, too, which they export once into the cache folder."""

import subprocess
import sys
from pathlib import Path
from typing import Iterator

import pytest
import tokenizers

pytest.importorskip("gguf", reason="gguf is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
from posenc_export.commands import loading
from posenc_export.commands.cli import main
from posenc_export.export import artefact
from posenc_export.runtime.artefact import files
from tests.models import gguf_files

WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; from posenc_export.commands.cli import main; "
    "sys.exit(main(sys.argv[1:]))"
)
CONTINUED = ["--prompt", "w5 w6", "--max-tokens", "8"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the same model as `folder`, with a chat template, and `model.gguf`."""
    place = tmp_path_factory.mktemp("checkpoints")
    peer = gguf_files.made("llama")
    peer.save_pretrained(place / "folder")
    gguf_files.write("llama", peer, place / "model.gguf")
    words = {f"w{token}": token for token in range(64)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    for folder in (place, place / "folder"):
        tokenizer.save(str(folder / "tokenizer.json"))
    (place / "folder" / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    return place


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(files.CACHE, str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # which an export sets in its process
    yield tmp_path / "cache" / "artefacts"


def _inside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("name", ["folder", "model.gguf"])
def test_a_checkpoint_is_exported_once_and_then_runs_where_torch_cannot_be_imported(
    name: str, checkpoints: Path, cache: Path, capsys: pytest.CaptureFixture
) -> None:
    command = ["generate", str(checkpoints / name), *CONTINUED]
    assert main(command) == 0
    shown = capsys.readouterr()
    (place,) = cache.iterdir()
    (line,) = [line for line in shown.err.splitlines() if "is exported once" in line]
    assert f"to {place}; with every check: posenc export {checkpoints / name}" in line
    arguments = [sys.executable, "-c", WITHOUT_TORCH, *command]
    again = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert (again.stdout, again.stderr) == (shown.out, "") and _inside(cache) == [place.name]
    assert shown.out.startswith("w5 w6") and len(shown.out.split()) == 10
    assert main(["export", *command[1:2], "--target", "ort", "-o", f"{cache}/whole"]) == 0
    assert main(["generate", f"{cache}/whole", *CONTINUED]) == 0
    printed = capsys.readouterr().out
    proposed = f"posenc {'chat' if name == 'folder' else 'generate'} {cache}/whole"
    assert printed.endswith(shown.out) and proposed in printed


def test_an_interrupted_export_leaves_nothing(
    checkpoints: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, begun = artefact.check_written, []

    def interrupted(folder: Path, *given: object) -> object:
        begun.extend(_inside(folder))
        raise KeyboardInterrupt

    monkeypatch.setattr(artefact, "check_written", interrupted)
    command = ["generate", str(checkpoints / "folder"), *CONTINUED]
    assert main(command) == 130
    assert "model.onnx" in begun and _inside(cache) == []
    monkeypatch.setattr(artefact, "check_written", check)
    assert main(command) == 0 and len(_inside(cache)) == 1


WRONG = {
    "embed {}/folder {}/tokenizer.json": "expected an artefact with output sentence_embedding",
    "generate {}/folder --prompt a --provider cudda": "provider to be one of auto, cpu, cuda",
    "generate {}/folder --prompt a --weights int3": "weights to be one of int8, int8-32, int4",
    "generate tiny-rope --prompt a --weights int8": "--weights with a checkpoint or GGUF file",
    "chat {}/other.gguf": "expected a folder or GGUF file that exists, or a preset: tiny-rope",
}


@pytest.mark.parametrize("command", WRONG)
def test_what_cannot_run_is_refused_before_an_export(
    command: str, checkpoints: Path, cache: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(command.format(checkpoints, checkpoints).split()) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert WRONG[command] in line and _inside(cache) == []


def test_an_artefact_is_named_by_contents_options_and_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "tokenizer.json", "b.gguf"]
    for name in names:
        (tmp_path / name).write_text(name)
    path, places = tmp_path / names[0], []

    def named(**options: str) -> None:
        places.append(loading.place_of(path, **{"target": "ort", **options}))

    named()
    (tmp_path / "b.gguf").write_text("another model")
    named()
    assert places[0] == places[1] == places.pop()
    named(target="onnx")
    named(weights="int8")
    for name in names[:3]:  # of the same size, and at the same time
        (tmp_path / name).write_text(name.upper())
        named()
    monkeypatch.setattr(loading, "VERSION", "9.9")
    named()
    assert len(set(places)) == len(places) == 7
