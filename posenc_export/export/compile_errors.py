"""Errors of torch about foreign code that a target cannot compile, in one line."""

import contextlib
from typing import Iterable, Iterator

import torch

from posenc_export.models.user_module import Model, OwnModule

TAKES = {"torchscript": "TorchScript compiles", "pt2": "torch.export traces with dynamic sizes"}
LONGEST = 300  # characters
# Of TorchScript, about forward(self, x, *where).
VARIABLE = "can't take variable number of arguments"


@contextlib.contextmanager
def explain_errors(target: str, model: Model, packages: Iterable[str]) -> Iterator[None]:
    """Context manager that turns errors of torch about foreign code into a ValueError that names
    the code and the target.

    Errors pass unchanged if the model consists of code of this package only.

    Args:
        packages: packages of the model's foreign encodings, by encoding name.

    Raises:
        ValueError: torch cannot compile the foreign code for the target.
    """
    try:
        yield
    except (RuntimeError, torch.jit.frontend.FrontendError) as error:
        if not packages and not isinstance(model, OwnModule):
            raise
        what = f"encodings {', '.join(packages)}"
        what = model.where if isinstance(model, OwnModule) else what
        takes = TAKES.get(target, "torch.onnx.export traces")
        cause = _cause(error)
        change = "change the code"
        if VARIABLE in cause:
            change = "write forward with the arguments of AttentionBlock.forward, as "
            change += "docs/own-model.md shows,"
        raise ValueError(
            f"export: target {target}: {what}: expected code that {takes}, got {cause}; "
            f"{change} or choose another target"
        ) from error


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = map(str.strip, str(error).partition('File "')[0].splitlines())
    return f"{type(error).__name__}: {' '.join(filter(None, lines))[:LONGEST]}".rstrip(".:; ")
