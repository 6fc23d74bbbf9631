"""Compare every row of the tables of positions with their formulas in float64."""

from typing import Any, Dict, Iterator, Optional, Tuple

import numpy as np

from posenc_export.encodings.shared.base import PositionEncoding, Rows, Table
from posenc_export.export.describe import Model
from posenc_export.export.read_module import ReadModule
from posenc_export.runtime.artefact.certificate import Check

CHUNK = 1 << 14  # rows that are compared at once
OF_ANGLE = 1e-15  # relative rounding error of an angle in float64, which frequencies share
SMALLEST = 1e-300  # bound of a number that is exactly 0, and of no error
NEAR = 16  # rows whose largest number bounds what an error of their angles changes


def compare(model: Model) -> Check:
    """Compare the tables of the encodings of a model, those that layers share once."""
    failures: Dict[str, str] = {}
    skipped: Dict[str, str] = {}
    if isinstance(model, ReadModule):
        skipped["tables"] = "numbers of a module that was read as it is, which states no formula"
    compared, worst = 0, 0.0
    for name, table, rows in _tables(model):
        numbers = table.rows.numpy()
        if rows is None:
            if len(numbers) > 1:
                skipped[name] = "its encoding states no formula of rows; its outputs are sampled"
            continue
        error, at = _worst(numbers, rows)
        compared += len(numbers)
        worst = max(worst, min(error, 1.0))
        if not error <= 1:
            failures[name] = f"expected {rows(np.array([[float(at)]]))[0].tolist()[:4]} in row {at}"
            failures[name] += f", got {numbers[at].tolist()[:4]}"
    return Check(compared, "rows", worst, failures, skipped)


def _tables(model: Any) -> Iterator[Tuple[str, Table, Optional[Rows]]]:
    """Yield the tables of encodings by name, with the function of their rows."""
    for name, encoding in model.named_modules():
        if isinstance(encoding, PositionEncoding):
            stated = encoding.oracle().tables()
            for part, table in encoding.named_children():
                if isinstance(table, Table):
                    yield f"{name}.{part}", table, stated.get(part)


def _worst(numbers: np.ndarray, rows: Rows) -> Tuple[float, int]:
    """Return the largest error of a row relative to its bound, and the row."""
    worst, at = 0.0, 0
    for first in range(0, len(numbers), CHUNK):
        part = numbers[first : first + CHUNK]
        positions = np.arange(first, first + len(part), dtype=np.float64)[:, None]
        wanted = rows(positions)
        if wanted.shape != part.shape:
            return np.inf, first
        size = np.abs(wanted)
        unit = np.spacing(size.astype(np.float32)).astype(np.float64)
        largest = np.maximum.reduceat(size.max(1), np.arange(0, len(part), NEAR))
        scale = np.repeat(largest, NEAR)[: len(part), None]
        bound = np.maximum(unit / 2 + OF_ANGLE * (positions + 8) * scale, SMALLEST)
        errors = (np.abs(part - wanted) / bound).max(1)
        row = int(np.argmax(errors))
        if not errors[row] <= worst:
            worst, at = float(np.nan_to_num(errors[row], nan=np.inf)), first + row
    return worst, at
