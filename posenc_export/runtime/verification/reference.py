"""The expected outputs stored in an artefact: one file of float32 numbers.

Inputs and shapes are not stored: grid_inputs.py generates inputs from names, and shapes follow from
the manifest.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Dict, Iterator, List, Mapping, Optional, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.records import Reference
from posenc_export.runtime.verification import grid_inputs
from posenc_export.runtime.verification.case import Case
from posenc_export.runtime.verification.proof import Accuracy, Expected
from posenc_export.shared.refusal import refusal

FILE_NAME = "reference.bin"
LARGEST = 1_000_000  # limit of the file's size in bytes


def write(manifest: Manifest, expected: Expected, accuracy: Accuracy, folder: Path) -> Reference:
    """Write the reference file, of all numbers of expected outputs that fit, into a folder."""
    edges = None if expected.long is None else dict(expected.long.edges)
    reference = Reference(
        _columns(manifest, edges),
        accuracy.tolerance,
        edges is not None,
        accuracy.noise,
        accuracy.float32,
        edges or {},
    )
    columns = columns_of(manifest, reference)
    parts, readouts = [], []
    for case in expected.cases.values():
        parts += [case.full, case.other_full[:, case.fork_at :]]
        if case.readout is not None:
            readouts.append(case.readout[..., readout_columns(manifest)])
    parts += [full for _, full in expected.attribute_cases.values()]
    if expected.long is not None:
        stored = np.isin(expected.long.compared, _places(manifest, expected.long.edges))
        parts.append(expected.long.outputs[:, stored])
    stored_parts = [*(part[..., columns] for part in parts), *readouts]
    content = b"".join(part.astype("<f4").tobytes() for part in stored_parts)
    (folder / FILE_NAME).write_bytes(content)
    return reference


def read(manifest: Manifest, folder: Path) -> Expected:
    """Read the reference file of an artefact whose files were checked. Raise ValueError if it has
    none, or one of another size or with numbers that are not finite.
    """
    if manifest.reference is None or FILE_NAME not in manifest.files:
        remedy = "verify it against its module, or export again"
        raise refusal(f"artefact {folder}", "a reference", "none", remedy)
    columns = columns_of(manifest, manifest.reference)
    shapes = _shapes(manifest, _edges(manifest.reference))
    stored = len(columns) * sum(math.prod(shape) for shape in shapes)
    readouts = _readout_shape(manifest)
    wanted = 4 * (stored + math.prod(readouts))
    size = (folder / FILE_NAME).stat().st_size
    if size != wanted:
        rule = f"expected {FILE_NAME} with {wanted} bytes"
        raise ValueError(f"artefact {folder}: {rule}, got {size}; export again")
    whole = np.fromfile(folder / FILE_NAME, "<f4")
    ends = np.cumsum([len(columns) * math.prod(shape) for shape in shapes])
    split = zip(np.split(whole[:stored], ends[:-1]), shapes, strict=True)
    parts = iter([part.reshape(*shape, len(columns)) for part, shape in split])
    expected = _expected(manifest, columns, parts)
    if len(manifest.outputs) < 2:
        return expected
    cases = zip(expected.cases.items(), whole[stored:].reshape(readouts), strict=True)
    known = {start: replace(case, readout=readout) for (start, case), readout in cases}
    return replace(expected, cases=known, readout_columns=readout_columns(manifest))


def columns_of(manifest: Manifest, reference: Reference) -> np.ndarray:
    """Return the indices of the stored numbers of an output: all, or a pseudo-random selection."""
    return _drawn(int(manifest.outputs[0].axes[-1]), reference.columns)


def readout_columns(manifest: Manifest) -> np.ndarray:
    """Return those of the second output: all, or a selection of LARGEST bytes."""
    return _drawn(int(manifest.outputs[-1].axes[-1]), _readout_shape(manifest)[-1])


def _drawn(size: int, count: int) -> np.ndarray:
    drawn = np.argsort(grid_inputs.numbers((size,), "columns", 2**31), kind="stable")[:count]
    return np.sort(drawn)


def _readout_shape(manifest: Manifest) -> Tuple[int, ...]:
    if len(manifest.outputs) < 2:
        return (0,)
    axes = manifest.outputs[1].axes
    tokens = () if len(axes) == 2 else (grid_inputs.length_of(manifest),)
    rows = (len(grid_inputs.starts(manifest)), max(grid_inputs.BATCHES), *tokens)
    return (*rows, max(1, min(int(axes[-1]), LARGEST // (4 * math.prod(rows)))))


def _edges(reference: Reference) -> Optional[Mapping[str, int]]:
    return reference.edges if reference.filled else None


def _places(manifest: Manifest, edges: Mapping[str, int]) -> np.ndarray:
    return grid_inputs.places(edges, grid_inputs.length_for(manifest, edges))


def _columns(manifest: Manifest, edges: Optional[Mapping[str, int]]) -> int:
    column = 4 * sum(math.prod(shape) for shape in _shapes(manifest, edges))
    return max(1, min(int(manifest.outputs[0].axes[-1]), LARGEST // column))


def _shapes(manifest: Manifest, edges: Optional[Mapping[str, int]]) -> List[Tuple[int, ...]]:
    length, rows = grid_inputs.length_of(manifest), max(grid_inputs.BATCHES)
    shapes: List[Tuple[int, ...]] = []
    for _ in grid_inputs.starts(manifest):
        shapes += [(rows, length), (rows, length - length // 2)]
    shapes += [(2, length)] * len(grid_inputs.attribute_inputs(manifest))
    return shapes if edges is None else [*shapes, (1, len(_places(manifest, edges)))]


def _expected(manifest: Manifest, columns: np.ndarray, parts: Iterator[np.ndarray]) -> Expected:
    """Return the expected outputs of `parts`, which are in the order of `_shapes`."""
    cases: Dict[int, Case] = {}
    for start in grid_inputs.starts(manifest):
        tokens, other, fork_at = grid_inputs.case_inputs(manifest)
        full, ending = next(parts), next(parts)
        other_full = np.concatenate((full[:, :fork_at], ending), axis=1)
        encoder = grid_inputs.encoder_rows(manifest, len(tokens))
        cases[start] = Case(tokens, full, start, fork_at, other, other_full, encoder)
    inputs = grid_inputs.attribute_inputs(manifest).items()
    attribute_cases = {name: (case, next(parts)) for name, case in inputs}
    assert manifest.reference is not None  # checked by `read`
    edges, long = _edges(manifest.reference), None
    if edges is not None:
        length = grid_inputs.length_for(manifest, edges)
        tokens = grid_inputs.tokens_of(manifest, length)
        places = grid_inputs.places(edges, length)
        long = grid_inputs.LongSequence(tokens, places, next(parts), edges)
    return Expected(columns, cases, attribute_cases, long)
