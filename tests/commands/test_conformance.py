"""posenc conformance."""

import json
from pathlib import Path
from typing import Any

import pytest

from posenc_export.commands.cli import main
from posenc_export.export import export
from posenc_export.models.short_forms import block_config
from posenc_export.runtime.artefact import files
from posenc_export.runtime.verification.conformance import suite
from tests.traces import sources


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """List two contracts, and keep results in a folder of the test."""
    monkeypatch.setenv(files.CACHE, str(tmp_path / "cache"))
    kernels = suite.listed()
    both = [next(k for k in kernels if k.operator == name) for name in ("CumSum", "QMoE")]
    monkeypatch.setattr(suite, "listed", lambda: both)


def test_it_prints_a_table_and_tries_again_on_request(capsys: Any) -> None:
    for arguments, new in (([], 2), ([], 0), (["--again"], 2)):
        assert main(["conformance", *arguments]) == 0
        *rows, last = capsys.readouterr().out.splitlines()
        assert rows[0].split() == ["operator", "geometry", "error", "/", "bound", "run"]
        assert rows[1].startswith("CumSum ") and rows[1].endswith("s" if new else "known")
        assert any("activation_alpha 1.702" in row for row in rows)
        assert last.startswith("2 contracts of kernels on ")
        assert last.endswith(f", {new} of them new: none broken")


def test_a_broken_contract_is_exit_status_1(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(trial: Any) -> tuple[float, str]:
        sums = trial.nodes[-1].operator == "CumSum"
        return (9.0, "an error of 9 times its bound") if sums else (0.5, "")

    monkeypatch.setattr(suite, "worst", wrong)
    assert main(["conformance"]) == 1
    out = capsys.readouterr().out
    assert "an error of 9 times its bound" in " ".join(out.split()) and "1 BROKEN" in out
    assert main(["conformance", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row["run"] == "known" for row in rows] == [False, True]


def test_it_tries_the_kernels_of_artefacts(capsys: Any, tmp_path: Path) -> None:
    export(sources(block_config(64, 4, 64)), "ort", tmp_path / "made", verify=False)
    assert main(["conformance", str(tmp_path / "made"), "--json"]) == 0
    assert [row["operator"] for row in json.loads(capsys.readouterr().out)] == [
        "GroupQueryAttention"
    ]


def test_a_folder_without_an_artefact_is_refused(capsys: Any, tmp_path: Path) -> None:
    assert main(["conformance", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
