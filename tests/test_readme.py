"""README.md is short, and its commands and programs run in order, from the top, in one folder."""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import pytest

from posenc_export import encodings
from posenc_export.benchmark import machine, workers
from posenc_export.commands.cli import main
from posenc_export.export import ExportOptions
from tests.models.checkpoints import saved

TOP = Path(__file__).parents[1]
README = (TOP / "README.md").read_text(encoding="utf-8")
ELSEWHERE = ("pip", "make")  # installations, which `make wheels` and `make demo` run


def _blocks() -> List[Tuple[str, str]]:
    """Language and text of every block of code."""
    return re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def _command(words: List[str]) -> None:
    """Run a line of a block as a shell would."""
    if words[0] in ELSEWHERE:
        return
    if words[0] == "python":
        subprocess.run([sys.executable, *words[1:]], check=True, capture_output=True)
        return
    assert words[0] == "posenc", words
    arguments, target = (words[1:-2], Path(words[-1])) if ">" in words else (words[1:], None)
    with io.StringIO() as printed, contextlib.redirect_stdout(printed):
        assert main(arguments) == 0, words
        if target is not None:
            target.write_text(printed.getvalue(), encoding="utf-8")


@pytest.fixture
def registered() -> Iterator[None]:
    """Forget the encodings that the test registers."""
    before = set(encodings.KNOWN.registered)
    yield
    for name in set(encodings.KNOWN.registered) - before:
        encodings.KNOWN.registered.pop(name)


def test_every_block_runs_from_the_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registered: None
) -> None:
    saved("llama", tmp_path / "checkpoint")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ExportOptions, "quick", True)  # tests/export runs the whole grid
    for name, value in (
        ("WORKING_SETS", (1 << 16,)),
        ("SQUARE", 16),
        ("DURATION", 0.001),
        ("TIMES", 1),
    ):
        monkeypatch.setattr(machine, name, value)
    monkeypatch.setattr(
        workers, "COMMAND", [sys.executable, str(TOP / "tests/benchmark/fake_worker.py")]
    )  # no measurement in a test
    names: Dict[str, Any] = {"__name__": "__main__"}
    for language, text in _blocks():
        if language == "python":
            exec(text, names)
        else:
            for line in text.splitlines():
                _command(shlex.split(line, comments=True))
    assert names["logits"].shape == (1, 61)
    programs = ["decode.c", "decode.mjs", "mine.c", "mine.mjs", "run.py"]
    written = [
        "alibi/ort/posenc.json",
        "bench.html",
        "decay/posenc.json",
        "mine/posenc.json",
        "same/posenc.json",
        *programs,
    ]
    assert [name for name in written if not (tmp_path / "build" / name).stat().st_size] == []


def test_every_link_and_picture_of_the_readme_is_a_file() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if not link.startswith("http")]
    assert links and [link for link in links if not (TOP / link).exists()] == []


def test_the_readme_counts_the_encodings_of_the_gallery() -> None:
    assert f"of {len(encodings.REGISTRY)} encodings" in README
