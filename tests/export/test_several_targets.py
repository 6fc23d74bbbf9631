"""Several targets of one export: those that pass are published, those that fail are named."""

import json
from pathlib import Path
from typing import Any

import pytest

from posenc_export.commands.cli import main
from posenc_export.export import artefact

GIVEN = (
    "export block --encoding nope --width 16 --heads 2 --max-positions 64 --target ort "
    "--target onnx --no-verify"
).split()
REASON = (
    "export: expected a block that this target can represent, got another; choose another target"
)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make target ort refuse its module after it has begun to write."""
    make = artefact._written

    def written(source: Any, described: Any, folder: Path, *rest: Any) -> Any:
        result = make(source, described, folder, *rest)
        if described.target == "ort":
            raise ValueError(REASON)
        return result

    monkeypatch.setattr(artefact, "_written", written)


@pytest.mark.parametrize("before", [[], ["kept"]])
def test_a_target_that_fails_is_named_and_the_others_are_published(
    before: Any, refusing: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in before:  # the parent exists, so that each artefact is published alone
        (tmp_path / "all" / name).mkdir(parents=True)
    assert main([*GIVEN, "-o", str(tmp_path / "all"), "--json"]) == 1
    output = capsys.readouterr()
    assert [row["target"] for row in json.loads(output.out)] == ["onnx"]
    assert output.err.splitlines()[-1] == f"posenc: target ort failed: {REASON}"
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == [*before, "onnx"]


def test_all_or_none_publishes_nothing_if_one_target_fails(
    refusing: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GIVEN, "-o", str(tmp_path / "all"), "--all-or-none"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"posenc: {REASON}"
    assert not (tmp_path / "all").exists()


def test_an_interrupted_export_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(artefact.proof, "write", interrupted)  # after graph and weights
    assert main([*GIVEN, "-o", str(tmp_path / "all")]) == 130
    assert not list(tmp_path.iterdir())
