"""The number of threads that load chooses."""

from pathlib import Path
from typing import Any

import pytest

from posenc_export.commands.cli import main
from posenc_export.export import export
from posenc_export.runtime import load
from posenc_export.runtime.artefact.manifest import File
from posenc_export.runtime.graphs import threads
from tests.tiny import decoder
from tests.traces import sources

pytestmark = pytest.mark.xdist_group("alibi")  # one worker, which traces the model once


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("threads") / "a"
    export(sources(decoder("alibi")), "ort", folder, verify=False)
    return folder


@pytest.mark.parametrize(
    ("cores", "megabytes", "count"),
    [(1, 0, None), (2, 0, None), (64, 0, 2), (64, 40, 15), (64, 4000, None), (8, 40, None)],
)
def test_a_small_model_takes_two_threads_and_a_large_one_all_cores(
    cores: int, megabytes: int, count: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = load(folder, provider="cpu", threads=1).manifest
    monkeypatch.setattr(threads, "cores", lambda: cores)
    manifest.files["model.onnx.data"] = File("0" * 64, megabytes << 20)
    assert (
        sum(count for name, count in manifest.operators.items() if name in threads.PRODUCTS) == 11
    )  # 5 for each layer, and the head
    chosen = threads.chosen(threads.AUTO, manifest)
    assert chosen == count if megabytes != 40 or count is None else 10 <= chosen <= 20
    assert threads.chosen(3, manifest) == 3 and threads.chosen(None, manifest) is None


def test_load_uses_the_number_that_inspect_prints(
    folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 64)
    options = load(folder, provider="cpu").graph.session.get_session_options()
    assert options.intra_op_num_threads == 2
    assert main(["inspect", str(folder)]) == 0
    assert "2 of 64 cores, by the size of its products" in capsys.readouterr().out


def test_another_word_than_auto_is_refused(folder: Path) -> None:
    with pytest.raises(
        ValueError,
        match="expected threads to be a whole number 1 .. 1024, got 'all'; leave it out for the default",
    ):
        load(folder, threads="all")
