"""Run a command while a pickled module is loaded that has the suffix of TorchScript."""

from pathlib import Path

from tests.attacks.grammar import pickled


def write(folder: Path, trace: Path) -> Path:
    path = folder / "model.pt"
    path.write_bytes(pickled(trace))
    return path
