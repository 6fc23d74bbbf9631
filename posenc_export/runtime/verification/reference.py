"""The expected outputs stored in an artefact, one file of float32 numbers, with which it can be verified on another machine without torch.

Inputs are not stored, since proof.inputs generates them from names. Shapes are not stored, since they follow from the manifest.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Callable, Dict, List, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.schema import Reference
from posenc_export.runtime.verification.proof import (
    BATCHES,
    Accuracy,
    Expected,
    attribute_inputs,
    case_inputs,
    encoder_rows,
    fill_inputs,
    fill_length,
    length_of,
    numbers,
    starts,
)
from posenc_export.runtime.verification.scenarios import Case

FILE_NAME = "reference.bin"
LARGEST = 1_000_000  # limit of the file's size in bytes
LAST = 2  # number of outputs stored for the cell that fills a cache


def write(manifest: Manifest, expected: Expected, accuracy: Accuracy, folder: Path) -> Reference:
    """Write the reference file into a folder.

    Args:
        expected: expected outputs with all their numbers.
        accuracy: of a correct artefact.
    """
    filled = expected.filled is not None
    reference = Reference(
        _columns(manifest, filled), accuracy.tolerance, filled, accuracy.noise, accuracy.float32
    )
    columns = columns_of(manifest, reference)
    parts: List[np.ndarray] = []
    for case in expected.cases.values():
        parts += [case.full, case.other_full[:, case.fork_at :]]
    parts += [full for _, full in expected.attribute_cases.values()]
    parts += [expected.filled[1][:, -LAST:]] if expected.filled is not None else []
    readouts = [
        case.readout[..., readout_columns(manifest)]
        for case in expected.cases.values()
        if case.readout is not None
    ]
    content = np.concatenate(
        [
            part.astype("<f4").reshape(-1)
            for part in (*(part[..., columns] for part in parts), *readouts)
        ]
    )
    (folder / FILE_NAME).write_bytes(content.tobytes())
    return reference


def read(manifest: Manifest, folder: Path) -> Expected:
    """Read the reference file of an artefact whose files were checked.

    Raises:
        ValueError: the artefact has no reference, its size does not match the manifest, or a number in it is not finite.
    """
    if manifest.reference is None or FILE_NAME not in manifest.files:
        raise ValueError(
            f"artefact {folder}: expected a reference, got none; verify it against its module, or export again"
        )
    columns = columns_of(manifest, manifest.reference)
    shapes = _shapes(manifest, manifest.reference.filled)
    stored = len(columns) * sum(math.prod(shape) for shape in shapes)
    readouts = _readout_shape(manifest)
    wanted = 4 * (stored + math.prod(readouts))
    size = (folder / FILE_NAME).stat().st_size
    if size != wanted:
        raise ValueError(
            f"artefact {folder}: expected {FILE_NAME} with {wanted} bytes, got {size}; export again"
        )
    whole = np.fromfile(folder / FILE_NAME, "<f4")
    content, at = whole[:stored].reshape(-1, len(columns)), 0

    def take(shape: Tuple[int, ...]) -> np.ndarray:
        nonlocal at
        at += math.prod(shape)
        return content[at - math.prod(shape) : at].reshape(*shape, len(columns))

    found = _expected(manifest, columns, shapes, take)
    if len(manifest.outputs) < 2:
        return found
    cases = zip(found.cases.items(), whole[stored:].reshape(readouts), strict=True)
    return replace(
        found,
        cases={start: replace(case, readout=readout) for (start, case), readout in cases},
        readout_columns=readout_columns(manifest),
    )


def columns_of(manifest: Manifest, reference: Reference) -> np.ndarray:
    """Return the indices of the stored numbers of an output: all of them, or a pseudo-random selection."""
    return _drawn(int(manifest.outputs[0].axes[-1]), reference.columns)


def readout_columns(manifest: Manifest) -> np.ndarray:
    """Return the indices of the stored numbers of the second output, if there is one: all of them, or a pseudo-random selection that fits into LARGEST bytes."""
    return _drawn(int(manifest.outputs[-1].axes[-1]), _readout_shape(manifest)[-1])


def _drawn(size: int, count: int) -> np.ndarray:
    drawn = np.argsort(numbers((size,), "columns", 2**31), kind="stable")[:count]
    return np.sort(drawn)


def _readout_shape(manifest: Manifest) -> Tuple[int, ...]:
    """Return the shape of the stored second outputs: cases, rows, tokens if each has one, numbers; (0,) if there is no second output."""
    if len(manifest.outputs) < 2:
        return (0,)
    axes = manifest.outputs[1].axes
    rows = (
        len(starts(manifest)),
        max(BATCHES),
        *(() if len(axes) == 2 else (length_of(manifest),)),
    )
    return (*rows, max(1, min(int(axes[-1]), LARGEST // (4 * math.prod(rows)))))


def _columns(manifest: Manifest, filled: bool) -> int:
    """Return how many numbers of each output fit into LARGEST bytes."""
    each = 4 * sum(math.prod(shape) for shape in _shapes(manifest, filled))
    return max(1, min(int(manifest.outputs[0].axes[-1]), LARGEST // each))


def _shapes(manifest: Manifest, filled: bool) -> List[Tuple[int, ...]]:
    length, rows = length_of(manifest), max(BATCHES)
    shapes: List[Tuple[int, ...]] = []
    for _ in starts(manifest):
        shapes += [(rows, length), (rows, length - length // 2)]
    shapes += [(2, length)] * len(attribute_inputs(manifest))
    return shapes + ([(1, min(LAST, fill_length(manifest)))] if filled else [])


def _expected(
    manifest: Manifest,
    columns: np.ndarray,
    shapes: List[Tuple[int, ...]],
    take: Callable[[Tuple[int, ...]], np.ndarray],
) -> Expected:
    remaining = iter(shapes)
    cases: Dict[int, Case] = {}
    for start in starts(manifest):
        tokens, other, fork_at = case_inputs(manifest)
        full, ending = take(next(remaining)), take(next(remaining))
        sources = encoder_rows(manifest, len(tokens))
        cases[start] = Case(
            tokens,
            full,
            start,
            fork_at,
            other,
            np.concatenate((full[:, :fork_at], ending), axis=1),
            sources,
        )
    attribute_cases = {
        name: (case, take(next(remaining))) for name, case in attribute_inputs(manifest).items()
    }
    filled = (
        (fill_inputs(manifest), take(next(remaining)))
        if manifest.reference is not None and manifest.reference.filled
        else None
    )
    return Expected(columns, cases, attribute_cases, filled)
