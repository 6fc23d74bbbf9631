"""No command runs, writes or fetches anything that a stranger's file asks for."""

import functools
from pathlib import Path

import numpy as np
import pytest

from posenc_export.auditing import confined
from posenc_export.commands.cli import main  # noqa: F401  imported before the hook listens
from tests.attacks import grammar, harness
from tests.attacks.threats import THREATS


@pytest.mark.parametrize("name", THREATS)
def test_a_threat_is_refused_by_every_command(name: str, tmp_path: Path) -> None:
    threat, wrong = THREATS[name], []
    for command in threat.commands or harness.COMMANDS:
        how = threat.refused, threat.ends
        wrong += harness.tried(threat.write, command, tmp_path / command, *how)
    assert not wrong, "\n".join(wrong)


def test_the_process_of_a_graph_computes_and_its_end_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(grammar.right("onnx"))
    graph = confined.Confined(tmp_path / "model.onnx", 300.0)
    feeds = {"input_ids": np.zeros((2, 3), np.int64)}
    assert not graph.run(feeds)["logits"].any() and graph.outputs[0].axes == ("b", "s", 61)
    graph._child.kill()
    with pytest.raises(ValueError, match="expected a graph .* ended with SIGKILL"):
        graph.run(feeds)


CONFINED = ("endless", "allocation")  # payloads for which threats have a test with the child


@functools.cache
def sample() -> list[grammar.Attack]:
    """Return an attack of each format and payload."""
    attacks = {(attack.format, attack.payload): attack for attack in grammar.attacks()}
    return [attack for attack in attacks.values() if attack.payload not in CONFINED]


TRIED = [
    ("audit", "pt2"),
    ("audit", "pt"),
    ("audit", "onnx"),
    ("verify", "pt2"),
    ("verify", "onnx"),
]


@pytest.mark.parametrize(("command", "format"), TRIED)
def test_no_payload_does_anything_in_a_file_or_in_an_artefact_with_digests_that_agree(
    command: str, format: str, tmp_path: Path
) -> None:
    attacks, wrong = [attack for attack in sample() if attack.format == format], []
    for number, attack in enumerate(attacks if command == "audit" else attacks[::4]):
        write = attack.write if command == "audit" else attack.write_artefact
        found = harness.tried(write, command, tmp_path / str(number))
        wrong += [f"{attack}: {line}" for line in found]
    assert not wrong, "\n".join(wrong)
