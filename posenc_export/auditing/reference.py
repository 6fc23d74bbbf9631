"""Opening what a graph is compared with."""

import functools
from pathlib import Path
from typing import Any, Optional

import torch

from posenc_export.auditing import exact, facts, modules
from posenc_export.export.read_module import as_model
from posenc_export.models.pretrained import from_pretrained
from posenc_export.runtime.artefact.manifest import FILE_NAME
from posenc_export.shared.refusal import refusal

TRANSFORMERS = "transformers:"


def open_reference(text: Any, hidden: bool, vocabulary: int, features: int) -> facts.Reference:
    """Return what a graph is compared with.

    Args:
        text: a checkpoint folder, a GGUF file, the folder of an artefact, transformers:FOLDER,
            package.module:name, which is imported and run, or a model, a module or a function.
        hidden: whether the graph returns hidden states and not logits.
        vocabulary, features: what the graph reads.

    Raises:
        ValueError: nothing of this kind.
    """
    if isinstance(text, torch.nn.Module) and hasattr(text, "attentions"):
        return exact.Exact(lambda lengths, positions: text, hidden)
    if callable(text):
        return modules.Called(text, vocabulary, features)
    text = str(text)
    if text.startswith(TRANSFORMERS):
        model = modules.of_transformers(text.removeprefix(TRANSFORMERS), hidden)
        return modules.Called(model, vocabulary, features)
    path = Path(text)
    if not path.exists() and ":" in text:
        return open_reference(modules.named(text), hidden, vocabulary, features)
    if (path / FILE_NAME).exists():
        return exact.OfArtefact(path)
    if not text or not path.exists():
        remedy = "give a checkpoint folder, a GGUF file, an artefact, or package.module:name"
        raise refusal("audit", "a reference that exists", repr(text), remedy)
    return exact.Exact(functools.partial(_checkpoint, path, not hidden), hidden)


def _checkpoint(path: Path, head: bool, lengths: Optional[str], positions: Optional[int]) -> Any:
    """Load a checkpoint; one that states no number of positions gets UNSTATED."""
    try:
        return as_model(from_pretrained(path, None, positions, lengths=lengths, head=head))
    except ValueError as error:
        if "give max_positions" not in str(error) or positions is not None:
            raise
        return as_model(from_pretrained(path, None, facts.UNSTATED, lengths=lengths, head=head))
