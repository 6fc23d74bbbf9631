"""What torch says of code from outside this package that a target cannot take, in one line."""

import contextlib
from typing import Iterable, Iterator

import torch

from posenc_export.models.own import Model, OwnModule

TAKES = {"torchscript": "TorchScript compiles", "pt2": "torch.export takes with every size free"}
LONGEST = 300  # characters


@contextlib.contextmanager
def named(target: str, model: Model, packages: Iterable[str]) -> Iterator[None]:
    """While open, an error of torch about code from outside is one about the target; of a model all of this package, it stays what it is.

    Args:
        packages: of the model's encodings; empty where all are of this package.

    Raises:
        ValueError: such an error.
    """
    try:
        yield
    except (RuntimeError, torch.jit.frontend.FrontendError) as error:
        if not packages and not isinstance(model, OwnModule):
            raise
        what = f"{model.where}" if isinstance(model, OwnModule) else f"encodings {', '.join(packages)}"
        takes = TAKES.get(target, "torch.onnx.export takes")
        raise ValueError(f"export: target {target}: {what}: expected code that {takes}, got {_cause(error)}; change it, or choose another target") from error


def _cause(error: BaseException) -> str:
    """The first error of a chain, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).partition('File "')[0].splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:LONGEST]}".rstrip(".:; ")
