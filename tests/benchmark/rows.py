"""Rows and reports with artificial samples."""

from typing import Any, Iterable, Sequence

from posenc_export.benchmark.ratios import spread
from posenc_export.benchmark.report import Report
from posenc_export.benchmark.results import Limits, Loaded, Machine, Row, WorkingSet

MODEL = "rope 2x64 0.06M"


def row(
    contestant: str,
    samples: Sequence[float],
    phase: str = "decode",
    tokens: int = 1024,
    **changes: Any,
) -> Row:
    result, limits = spread(samples), ("least_bytes", "read_bytes_per_second", "share_of_limit")
    fields: dict[str, Any] = {
        **dict.fromkeys(limits),
        "phase": phase,
        "tokens": tokens,
        "contestant": contestant,
        "model": MODEL,
        "tokens_per_second": 1 / result.median,
        "median_seconds": result.median,
        "p10_seconds": result.low,
        "p90_seconds": result.high,
        "samples_seconds": list(samples),
    }
    return Row(**{**fields, **changes})


def loaded(contestant: str, runtime: str = "artefact") -> Loaded:
    of_artefact = ("ort", "cpu", "float32", "ort", "0" * 64)
    return Loaded(contestant, MODEL, runtime, *of_artefact, 0.02, 0.01, 90_000_000)


def report(given: Iterable[Row], other_cores: float = 0.0) -> Report:
    rows = list(given)
    machine = Machine("a processor", 2, 2, {"python": "3.11.0", "numpy": "2.0.0"})
    limits = Limits([WorkingSet(1 << 20, 8e10), WorkingSet(1 << 29, 1e10)])
    contestants = [loaded(name) for name in dict.fromkeys(each.contestant for each in rows)]
    return Report(machine, limits, contestants, rows, 1, other_cores)
