"""Load the files that torch writes: model.pt of TorchScript, model.pt2 of torch.export. torch is imported here only when used."""

import io
import logging
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Optional

from posenc_export.runtime import pt2_archive
from posenc_export.runtime.archive import packed, read_entries
from posenc_export.runtime.manifest import Manifest
from posenc_export.runtime.rules import graph_file
from posenc_export.runtime.torch_graph import TorchGraph

# What torch raises while it builds a program from JSON that is not one: its own checks, and the look-ups behind them.
DAMAGED = (RuntimeError, AssertionError, ValueError, TypeError, KeyError, IndexError, AttributeError, SyntaxError, OverflowError)


def load_torch(folder: Path, manifest: Manifest, threads: Optional[int]) -> TorchGraph:
    """A model.pt of TorchScript or a model.pt2 of torch.export, after its hash was compared (files.check).

    TorchScript is a program: it runs what it says. A .pt2 is loaded only where nothing in it is unpickled or evaluated (pt2_archive.py).

    Raises:
        ValueError: a damaged file, or an archive that holds more than tensors and a graph.
        ModuleNotFoundError: torch is not installed.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"runtime: target {manifest.target} needs torch, got none; pip install 'posenc-export[export]'", name="torch") from error
    if threads:
        torch.set_num_threads(threads)
    path = folder / graph_file(manifest)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit announces its retirement at every call
        warnings.simplefilter("ignore", FutureWarning)
        return TorchGraph(_program(path, manifest) if manifest.target == "pt2" else _script(path), manifest)


def _script(path: Path) -> Any:
    import torch

    try:
        return torch.jit.load(str(path))
    except (RuntimeError, ValueError) as error:  # libtorch; the interpreter, for text that is no UTF-8
        raise _damaged(path, error) from None


def _program(path: Path, manifest: Manifest) -> Any:
    import torch

    try:
        entries = read_entries(path.read_bytes())
        pt2_archive.check(entries)
    except ValueError as error:
        raise ValueError(f"runtime: {path.name}: {error}; export again") from None
    verification = torch._export.verifier.SpecViolationError  # its only base is Exception
    with _quiet("torch.export"):
        try:
            # Packed anew: torch reads the entries that were checked, whatever else a zip reader could find in the file.
            program = torch.export.load(io.BytesIO(packed(entries)))
            module = program.module(check_guards=False)
        except (*DAMAGED, verification) as error:
            raise _damaged(path, error) from None
    _check_arguments(path, program, manifest)
    return module.forward  # without the hook in front of it, which compares every size with its range: half of the time of a small model's step


def _check_arguments(path: Path, program: Any, manifest: Manifest) -> None:
    """Compare what a program takes and gives with what the manifest says: how many tensors, and how they are nested.

    Raises:
        ValueError: another nesting.
    """
    from torch.utils import _pytree

    positions = [state for state in manifest.states if state.past == "past_positions"]
    others = [0] * (len(manifest.states) - len(positions))
    taken: Any = ((*[0] * (len(manifest.inputs) + len(positions)), [*others, *[0] * len(manifest.encoder)]), {})
    given = (*[0] * (1 + len(positions)), others)
    for what, found, wanted in (("takes", program.call_spec.in_spec, taken), ("gives", program.call_spec.out_spec, given)):
        if found != _pytree.tree_structure(wanted):
            rule = f"the program {what} {_pytree.tree_structure(wanted).num_leaves} tensors as the manifest says"
            raise ValueError(f"runtime: {path.name}: {rule}, got {found.num_leaves if found is not None else 'no'} or another nesting; export again")


def _damaged(path: Path, error: Exception) -> ValueError:
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ValueError(f"runtime: {path.name} is a file that torch loads, got {reason[:200]}; export again")


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """torch logs a traceback of what it raises."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
