"""No command runs, writes or fetches anything that a stranger's file asks for."""

from pathlib import Path

import pytest

from posenc_export.commands.cli import main  # noqa: F401  imported before the hook listens
from tests.attacks import harness
from tests.auditing.graphs import model_of

THREATS = harness.threats()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("right")
    model_of("llama").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", THREATS)
def test_a_threat_is_refused_by_every_command(name: str, checkpoint: Path, tmp_path: Path) -> None:
    threat, wrong = THREATS[name], []
    ends = getattr(threat, "ENDS", False)
    for command in getattr(threat, "COMMANDS", harness.COMMANDS):
        folder, own = tmp_path / command / "attack", tmp_path / command / "own"
        folder.mkdir(parents=True)
        own.mkdir()
        trace = tmp_path / command / "trace"
        path = threat.write(folder, trace)
        refused = getattr(threat, "REFUSED", True)
        wrong += harness.findings(command, path, trace, checkpoint, own, refused, ends)
    assert not wrong, f"{threat.__doc__}\n" + "\n".join(wrong)
