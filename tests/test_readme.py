"""README.md is short. Its commands and programs, and the cells of the tour, run in order, from the
top, each in one folder, and print what is shown.
"""

import contextlib
import io
import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import pytest
import tokenizers

from posenc_export import encodings
from posenc_export.benchmark import machine, workers
from posenc_export.commands.cli import main
from posenc_export.export import ExportOptions
from posenc_export.runtime.artefact import files

pytest.importorskip("gguf", reason="gguf is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
from tests.auditing import graphs
from tests.models import gguf_files

TOP = Path(__file__).parents[1]
README = (TOP / "README.md").read_text(encoding="utf-8").replace("\\\n", "")
ELSEWHERE = ("pip", "python3", ".")  # installation, which `make wheels` runs
NUMBER = r"(?<![\w.])-?(?:\d+\.\d+(?:e[-+]\d+)?|\d+e[-+]\d+)(?![\w.])"


def _blocks() -> list[tuple[str, str]]:
    """Language and text of every block of code."""
    return re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def _steps() -> Iterator[tuple[str, str, str]]:
    """Language, text and shown output of each program and command. What a program prints is shown
    in the block after it, without a language.
    """
    blocks = [*_blocks(), ("", "")]
    for (language, text), (other, after) in itertools.pairwise(blocks):
        if language == "console":
            for step in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, _, shown = step.partition("\n")
                yield "", command, shown
        elif language:
            directly = not other and f"{text}```\n```\n{after}" in README
            yield language, text, after if directly else ""
        elif f"```\n```\n{text}" not in README:
            yield from (("", line, "") for line in text.splitlines())


def _run(language: str, text: str, names: dict[str, Any]) -> str:
    """Run a program or a command as a shell would. Return what it prints."""
    if language:
        with io.StringIO() as printed, contextlib.redirect_stdout(printed):
            exec(text, names)
            return printed.getvalue()
    words = shlex.split(text, comments=True)
    if words[0] in ELSEWHERE:
        return ""
    if words[0] == "python":
        done = subprocess.run([sys.executable, *words[1:]], check=True, capture_output=True)
        return done.stdout.decode()
    assert words[0] == "posenc", words
    arguments, target = (words[1:-2], Path(words[-1])) if ">" in words else (words[1:], None)
    with io.StringIO() as printed, contextlib.redirect_stdout(printed):
        assert main(arguments) == (words[1] == "audit"), words
        if target is None:
            return printed.getvalue()
        target.write_text(printed.getvalue(), encoding="utf-8")
        return ""


def _agrees(printed: str, shown: str) -> bool:
    """Whether an output is as shown. `...` stands for any lines; numbers with a point are compared
    as far as processors agree, errors as 5.2e-07 by their size.
    """
    parts = re.split(f"({NUMBER})", shown)
    texts = [re.escape(text).replace(re.escape("..."), "(?s:.*)") for text in parts[::2]]
    pattern = f"({NUMBER})".join(texts).replace(re.escape("AMD EPYC"), ".*")
    match = re.fullmatch(pattern, printed)
    return match is not None and all(
        0.1 < float(printed) / float(shown) < 10
        if "e" in shown
        else np.isclose(float(printed), float(shown), 0.1, 1e-4)
        for printed, shown in zip(match.groups(), parts[1::2], strict=True)
    )


@pytest.fixture
def registered() -> Iterator[None]:
    """Forget the encodings that the test registers."""
    before = set(encodings.KNOWN.registered)
    yield
    for name in set(encodings.KNOWN.registered) - before:
        encodings.KNOWN.registered.pop(name)


def _made(folder: Path) -> None:
    """Write what the commands read: a checkpoint, the graph of an exporter that ignores its window,
    and a GGUF file with a chat template.
    """
    graphs.model_of("mistral").save_pretrained(folder / "checkpoint")
    graphs.exported(graphs.model_of("mistral", sliding_window=None), folder / "theirs.onnx")
    template = {"tokenizer.chat_template": "{{ messages[-1].content }}"}
    peer = gguf_files.made("llama")
    gguf_files.write("llama", peer, folder / "model.gguf", metadata=template)
    words = tokenizers.models.WordLevel({f"w{token}": token for token in range(64)}, "w0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))


def test_every_block_runs_from_the_top_and_prints_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registered: None
) -> None:
    _made(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(files.CACHE, str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # which an export sets in its process
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    for name, value in (("WORKING_SETS", (1 << 16,)), ("DURATION", 0.001), ("TIMES", 1)):
        monkeypatch.setattr(machine, name, value)
    monkeypatch.setattr(
        workers, "COMMAND", [sys.executable, str(TOP / "tests/benchmark/fake_worker.py")]
    )  # no measurement in a test
    names: dict[str, Any] = {"__name__": "__main__"}
    for language, text, shown in _steps():
        # tests/export runs the whole grid
        monkeypatch.setattr(ExportOptions, "quick", not shown)
        printed = _run(language, text, names)
        assert not shown or _agrees(printed, shown), printed
    assert names["logits"].shape == (1, 3, 256)
    written = ["bench.html", *(f"{name}/posenc.json" for name in ("alibi/ort", "decay", "gpt"))]
    assert [name for name in written if not (tmp_path / "build" / name).stat().st_size] == []


def test_every_cell_of_the_tour_runs_and_shows_what_it_prints_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registered: None
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed").use("agg")
    from matplotlib import pyplot

    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads((TOP / "docs/tour.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            printed = _run("python", "".join(cell["source"]), names)
            printed += "".join(repr(pyplot.figure(number)) for number in pyplot.get_fignums())
            pyplot.close("all")
            shown = (out.get("text") or out["data"]["text/plain"] for out in cell["outputs"])
            assert _agrees(printed, "".join(map("".join, shown))), printed
    assert max(names["errors"]["exact"]) < max(names["errors"]["float32"])
    assert (tmp_path / "build/tour/alibi.svg").is_file()


def test_the_readme_has_at_most_800_words() -> None:
    assert len(README.split()) <= 800


def test_every_link_and_picture_of_the_readme_is_a_file() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if not link.startswith("http")]
    assert links and [link for link in links if not (TOP / link).exists()] == []


def test_the_readme_counts_the_encodings_of_the_gallery() -> None:
    assert f"all {len(encodings.REGISTRY)} encodings" in README
