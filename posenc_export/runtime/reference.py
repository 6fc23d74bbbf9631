"""The expected outputs that travel with an artefact, so that it can be proved again where it runs: one file of float32 numbers.

Inputs are not stored: they follow from names (proof.inputs). Neither are shapes: they follow from the manifest.
"""

import math
from pathlib import Path
from typing import Callable, Dict, List, Tuple

import numpy as np

from posenc_export.runtime.manifest import Manifest
from posenc_export.runtime.proof import BATCHES, Expected, beside_inputs, case_inputs, encoder_rows, fill_inputs, fill_length, length_of, numbers, starts
from posenc_export.runtime.scenarios import Case
from posenc_export.runtime.schema import Reference

FILE_NAME = "reference.bin"
LARGEST = 1_000_000  # bytes
LAST = 2  # outputs kept at the end of a filled cache


def write(manifest: Manifest, expected: Expected, tolerance: float, folder: Path) -> Reference:
    """Put the file into folder.

    Args:
        expected: with all numbers of an output.
        tolerance: what the errors of a right artefact stay within.
    """
    reference = Reference(_columns(manifest, expected.filled is not None), tolerance, expected.filled is not None)
    columns = columns_of(manifest, reference)
    parts: List[np.ndarray] = []
    for case in expected.cases.values():
        parts += [case.full, case.other_full[:, case.fork_at :]]
    parts += [full for _, full in expected.beside.values()]
    parts += [expected.filled[1][:, -LAST:]] if expected.filled is not None else []
    content = np.concatenate([part[..., columns].astype("<f4").reshape(-1) for part in parts])
    (folder / FILE_NAME).write_bytes(content.tobytes())
    return reference


def read(manifest: Manifest, folder: Path) -> Expected:
    """What `write` stored, for an artefact whose files were checked.

    Raises:
        ValueError: an artefact without a reference, or one of another size than the manifest says.
    """
    if manifest.reference is None or FILE_NAME not in manifest.files:
        raise ValueError(f"artefact {folder}: expected a reference, got none; verify it against its module, or export again")
    columns = columns_of(manifest, manifest.reference)
    shapes = _shapes(manifest, manifest.reference.filled)
    wanted = 4 * len(columns) * sum(math.prod(shape) for shape in shapes)
    size = (folder / FILE_NAME).stat().st_size
    if size != wanted:
        raise ValueError(f"artefact {folder}: expected {FILE_NAME} with {wanted} bytes, got {size}; export again")
    content, at = np.fromfile(folder / FILE_NAME, "<f4").reshape(-1, len(columns)), 0

    def take(shape: Tuple[int, ...]) -> np.ndarray:
        nonlocal at
        at += math.prod(shape)
        return content[at - math.prod(shape) : at].reshape(*shape, len(columns))

    return _expected(manifest, columns, shapes, take)


def columns_of(manifest: Manifest, reference: Reference) -> np.ndarray:
    """Which numbers of an output are stored: all of them, or so many drawn by a name."""
    size = int(manifest.outputs[0].axes[-1])
    drawn = np.argsort(numbers((size,), "columns", 2**31), kind="stable")[: reference.columns]
    return np.sort(drawn)


def _columns(manifest: Manifest, filled: bool) -> int:
    """How many numbers of an output fit into LARGEST bytes."""
    each = 4 * sum(math.prod(shape) for shape in _shapes(manifest, filled))
    return max(1, min(int(manifest.outputs[0].axes[-1]), LARGEST // each))


def _shapes(manifest: Manifest, filled: bool) -> List[Tuple[int, ...]]:
    length, rows = length_of(manifest), max(BATCHES)
    shapes: List[Tuple[int, ...]] = []
    for _ in starts(manifest):
        shapes += [(rows, length), (rows, length - length // 2)]
    shapes += [(2, length)] * len(beside_inputs(manifest))
    return shapes + ([(1, min(LAST, fill_length(manifest)))] if filled else [])


def _expected(manifest: Manifest, columns: np.ndarray, shapes: List[Tuple[int, ...]], take: Callable[[Tuple[int, ...]], np.ndarray]) -> Expected:
    left = iter(shapes)
    cases: Dict[int, Case] = {}
    for start in starts(manifest):
        tokens, other, fork_at = case_inputs(manifest)
        full, ending = take(next(left)), take(next(left))
        sources = encoder_rows(manifest, len(tokens))
        cases[start] = Case(tokens, full, start, fork_at, other, np.concatenate((full[:, :fork_at], ending), axis=1), sources)
    beside = {name: (fed, take(next(left))) for name, fed in beside_inputs(manifest).items()}
    filled = (fill_inputs(manifest), take(next(left))) if manifest.reference is not None and manifest.reference.filled else None
    return Expected(columns, cases, beside, filled)
