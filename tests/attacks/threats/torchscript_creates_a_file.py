"""Create a file by an operator of TorchScript that maps one."""

from pathlib import Path

import torch

from tests.attacks.grammar import scripted


class Writing(torch.nn.Module):
    path: str

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.from_file(self.path, shared=True, size=8) + input_ids


def write(folder: Path, trace: Path) -> Path:
    path = folder / "model.pt"
    path.write_bytes(scripted(Writing(str(trace))))
    return path
