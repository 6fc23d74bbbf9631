"""Run a command while the sample inputs of a program of torch.export are unpickled."""

from pathlib import Path

from tests.attacks.grammar import pickled, pt2


def write(folder: Path, trace: Path) -> Path:
    path = folder / "model.pt2"
    path.write_bytes(pt2({"data/sample_inputs/model.pt": pickled(trace)}))
    return path
