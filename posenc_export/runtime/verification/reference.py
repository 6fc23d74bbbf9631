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
    column = 4 * sum(math.prod(shape) for shape in _shapes(manifest, edges))
    reference = Reference(
        max(1, min(int(manifest.outputs[0].axes[-1]), LARGEST // column)),
        accuracy.tolerance,
        edges is not None,
        accuracy.noise,
        accuracy.float32,
        edges or {},
    )
    parts, cases = [], expected.cases.values()
    for case in cases:
        parts += [case.full, case.other_full[:, case.fork_at :]]
    parts += [full for _, full in expected.attribute_cases.values()]
    if expected.long is not None:
        stored = np.isin(expected.long.compared, _places(manifest, expected.long.edges))
        parts.append(expected.long.outputs[:, stored])
    parts += [case.readout for case in cases if case.readout is not None]
    layout = _layout(manifest, reference)
    pairs = zip(parts, layout, strict=True)
    content = b"".join(part[..., columns].astype("<f4").tobytes() for part, (_, columns) in pairs)
    (folder / FILE_NAME).write_bytes(content)
    return reference


def read(manifest: Manifest, folder: Path) -> Expected:
    """Read the reference file of an artefact whose files were checked. Raise ValueError if it has
    none, or one of another size or with numbers that are not finite.
    """
    if manifest.reference is None or FILE_NAME not in manifest.files:
        remedy = "verify it against its module, or export again"
        raise refusal(f"artefact {folder}", "a reference", "none", remedy)
    layout = _layout(manifest, manifest.reference)
    ends = np.cumsum([math.prod(shape) * len(columns) for shape, columns in layout])
    size = (folder / FILE_NAME).stat().st_size
    if size != 4 * ends[-1]:
        rule = f"expected {FILE_NAME} with {4 * ends[-1]} bytes"
        raise ValueError(f"artefact {folder}: {rule}, got {size}; export again")
    split = np.split(np.fromfile(folder / FILE_NAME, "<f4"), ends[:-1])
    pairs = zip(split, layout, strict=True)
    parts = iter([part.reshape(*shape, len(columns)) for part, (shape, columns) in pairs])
    expected = _expected(manifest, layout[0][1], parts)
    if len(manifest.outputs) < 2:
        return expected
    cases = zip(expected.cases.items(), parts, strict=True)
    known = {start: replace(case, readout=readout) for (start, case), readout in cases}
    return replace(expected, cases=known, readout_columns=layout[-1][1])


def _layout(manifest: Manifest, reference: Reference) -> List[Tuple[Tuple[int, ...], np.ndarray]]:
    """Return the shape of each stored part without its last axis, and the indices of the stored
    numbers of an output: all, or a pseudo-random selection of LARGEST bytes.
    """
    columns = _drawn(int(manifest.outputs[0].axes[-1]), reference.columns)
    edges = reference.edges if reference.filled else None
    layout = [(shape, columns) for shape in _shapes(manifest, edges)]
    for value in manifest.outputs[1:]:
        starts = grid_inputs.starts(manifest)
        tokens = () if len(value.axes) == 2 else (grid_inputs.length_of(manifest),)
        shape, size = (max(grid_inputs.BATCHES), *tokens), int(value.axes[-1])
        count = max(1, min(size, LARGEST // (4 * len(starts) * math.prod(shape))))
        layout += [(shape, _drawn(size, count))] * len(starts)
    return layout


def _drawn(size: int, count: int) -> np.ndarray:
    drawn = np.argsort(grid_inputs.numbers((size,), "columns", 2**31), kind="stable")[:count]
    return np.sort(drawn)


def _places(manifest: Manifest, edges: Mapping[str, int]) -> np.ndarray:
    return grid_inputs.places(edges, grid_inputs.length_for(manifest, edges))


def _shapes(manifest: Manifest, edges: Optional[Mapping[str, int]]) -> List[Tuple[int, ...]]:
    """Return the shapes of the parts of the first output; edges: None without a long sequence."""
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
    edges, long = manifest.reference.edges, None
    if manifest.reference.filled:
        length = grid_inputs.length_for(manifest, edges)
        tokens, places = grid_inputs.tokens_of(manifest, length), _places(manifest, edges)
        long = grid_inputs.LongSequence(tokens, places, next(parts), edges)
    return Expected(columns, cases, attribute_cases, long)
