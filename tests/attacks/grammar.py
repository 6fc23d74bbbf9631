"""Attacks as payload x place x format: every payload, put in every place of a file of every format
where a library reads that kind of payload.
"""

import functools
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any, Mapping

import torch

from posenc_export.runtime.artefact.archive import packed, read_entries


class Command:
    """A pickle of this object runs a command that makes a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        import os

        return os.system, (f"touch '{self.trace}'",)


def pickled(trace: Path, protocol: int = 2) -> bytes:
    """Return a pickle that makes the file `trace`, within an archive as torch.save writes it."""
    buffer = io.BytesIO()
    torch.save(Command(trace), buffer, pickle_protocol=protocol)
    return buffer.getvalue()


class Decoder(torch.nn.Module):
    """Logits of tokens, with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Embedding(61, 61)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(input_ids)


@functools.cache
def _program() -> bytes:
    """Return the archive of a program of torch.export."""
    axes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    ids = torch.zeros(2, 3, dtype=torch.int64)
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(Decoder(), (ids,), dynamic_shapes=(axes,)), buffer)
    return buffer.getvalue()


def pt2(changes: Mapping[str, bytes]) -> bytes:
    """Return a program of torch.export with other content of some entries, or further ones."""
    entries = read_entries(_program())
    root = next(iter(entries)).split("/")[0]
    return packed({**entries, **{f"{root}/{name}": part for name, part in changes.items()}})
