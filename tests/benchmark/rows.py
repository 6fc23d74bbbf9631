"""Rows and reports with artificial samples."""

from typing import Any, Sequence

from posenc_export.benchmark.ratios import spread
from posenc_export.benchmark.report import Report
from posenc_export.benchmark.results import Limits, Loaded, Machine, Row, WorkingSet


def row(
    contestant: str,
    samples: Sequence[float],
    phase: str = "decode",
    tokens: int = 1024,
    **changes: Any,
) -> Row:
    result = spread(samples)
    fields = {
        "model": "rope 2x64 0.06M",
        "tokens_per_second": 1 / result.median,
        "least_bytes": None,
        "read_bytes_per_second": None,
        "share_of_limit": None,
    }
    times = {
        "median_seconds": result.median,
        "p10_seconds": result.low,
        "p90_seconds": result.high,
        "samples_seconds": list(samples),
    }
    return Row(phase=phase, tokens=tokens, contestant=contestant, **times, **{**fields, **changes})


def loaded(contestant: str, runtime: str = "artefact") -> Loaded:
    return Loaded(
        contestant,
        "rope 2x64 0.06M",
        runtime,
        "ort",
        "cpu",
        "float32",
        "ort",
        "0" * 64,
        0.02,
        0.01,
        90_000_000,
    )


def report(rows: Sequence[Row], other_cores: float = 0.0) -> Report:
    machine = Machine("a processor", 2, 2, {"python": "3.11.0", "numpy": "2.0.0"})
    limits = Limits([WorkingSet(1 << 20, 8e10), WorkingSet(1 << 29, 1e10)], 2e11, 2e-6)
    return Report(
        machine,
        limits,
        [loaded(name) for name in dict.fromkeys(each.contestant for each in rows)],
        list(rows),
        1,
        other_cores,
    )
