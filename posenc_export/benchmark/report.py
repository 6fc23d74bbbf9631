"""What was measured: as JSON, as a table for the terminal, as one HTML page."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union

from posenc_export.benchmark.spread import Spread
from posenc_export.tables import aligned

SCHEMA = 1
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
ROW_HEADS = ("phase", "context", "contestant", "median", "p10", "p90", "ratio", "bytes/step", "of limit", "samples", "redone", "disturbed")
LOAD_HEADS = ("contestant", "target", "provider", "load", "first call", "peak memory")
Cells = List[Tuple[str, ...]]


@dataclass(frozen=True)
class Loaded:
    """One contestant: seconds to load (imports excluded) and for the first calls, most memory resident in bytes."""

    contestant: str
    runtime: str
    target: str
    provider: str
    load: float
    warm_up: float
    peak: int


@dataclass(frozen=True)
class Row:
    """One contestant at one context.

    Args:
        phase: "decode" (seconds per step) or "prefill" (seconds per prompt).
        ratio: median against that of the fastest contestant of phase and context.
        moved: bytes a step must read; None where no limit applies, as for prefill.
        bandwidth: bytes per second that a plain read of as many bytes reached on this machine.
        share: moved / median / bandwidth.
        redone: samples thrown away as disturbed and taken again.
        left: samples kept although disturbed, patience having run out.
    """

    phase: str
    context: int
    contestant: str
    seconds: Spread
    ratio: float
    moved: Optional[int]
    bandwidth: Optional[float]
    share: Optional[float]
    redone: int
    left: int


@dataclass(frozen=True)
class Report:
    """All rows of one run."""

    loads: List[Loaded]
    rows: List[Row]
    threads: int
    cores: int

    def to_json(self) -> Dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    def table(self) -> str:
        """Aligned columns of plain text."""
        return "\n".join([*aligned(LOAD_HEADS, self.load_cells()), "", *aligned(ROW_HEADS, self.row_cells()), "", self.remark()]) + "\n"

    def html(self, path: Union[str, Path]) -> None:
        """Write one self-contained page.

        Raises:
            ValueError: matplotlib is missing.
        """
        from posenc_export.benchmark.page import render

        Path(path).write_text(render(self), encoding="utf-8")

    def row_cells(self) -> Cells:
        return [_row(row) for row in self.rows]

    def load_cells(self) -> Cells:
        return [(e.contestant, e.target if e.runtime == "artefact" else "-", e.provider, duration(e.load), duration(e.warm_up), size(e.peak)) for e in self.loads]

    def remark(self) -> str:
        redone, left = sum(row.redone for row in self.rows), sum(row.left for row in self.rows)
        trust = f"{left} disturbed samples could not be redone: run again on a quiet machine." if left else "No disturbed sample was kept."
        return f"{self.threads} threads on {self.cores} cores, one contestant at a time. {redone} disturbed samples redone. {trust}"


def duration(seconds: float) -> str:
    """Three or more significant digits, in the largest unit that leaves 1 or more."""
    factor, unit = next((pair for pair in UNITS if seconds >= pair[0]), UNITS[-1])
    value = seconds / factor
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def size(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count < 1e8 else f"{count / 1e6:.0f} MB"


def _row(row: Row) -> Tuple[str, ...]:
    times = (duration(row.seconds.median), duration(row.seconds.low), duration(row.seconds.high))
    moved = "-" if row.moved is None else size(row.moved)
    share = "-" if row.share is None else f"{row.share:.0%}"
    return (row.phase, str(row.context), row.contestant, *times, f"{row.ratio:.2f}", moved, share, str(row.seconds.samples), str(row.redone), str(row.left))
