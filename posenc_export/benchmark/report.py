"""The report of a benchmark: as JSON with units in field names, and as a table."""

from itertools import compress
from typing import Any, Sequence

import msgspec
from msgspec import Struct

from posenc_export.benchmark.ratios import FEWEST, headlines, ratios
from posenc_export.benchmark.results import BUSY, Limits, Loaded, Machine, Row
from posenc_export.runtime.artefact.destinations import Form
from posenc_export.shared.tables import aligned, counted

SCHEMA = 6
# How files begin that a report may replace: JSON with these keys, or a page with this title.
JSON = Form("bench", b'"machine": {\n  "processor": ')
HTML = Form("bench", b"<title>posenc benchmark</title>")
UNSTEADY = 3.0  # p90 / p10, above which a time is marked
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
ROW_HEADS = (
    *("phase", "tokens", "contestant", "model", "median", "p10", "p90", "tokens/s", "ratio"),
    *("of limit", "samples"),
)
OF_LIMIT = (
    "Column of limit: the bytes that a step must read (weights and valid cache), as a share of "
    "those that the machine reads in the same time."
)
LOAD_HEADS = (
    *("contestant", "model", "target", "provider", "perplexity", "load", "first call"),
    "peak memory",
)
Cells = list[tuple[str, ...]]


class Report(Struct, frozen=True, forbid_unknown_fields=True):
    """One run: decode, then prefill, each with ascending tokens, the fastest contestant first."""

    machine: Machine
    limits: Limits
    contestants: list[Loaded]
    rows: list[Row]
    batch_rows: int  # rows of the batch
    # Cores that other processes used while samples were taken, on average; 0 on systems without
    # /proc/stat, None in results of earlier versions
    other_cores: float | None
    schema: int = SCHEMA
    date: str = ""  # of the run, YYYY-MM-DD; as the next two empty in results of earlier versions
    baseline: str = ""  # the contestant to which ratios are relative; empty for the fastest
    command: str = ""  # command line

    @property
    def headlines(self) -> list[str]:
        """The result of each phase in one sentence."""
        return headlines(self.rows, self.baseline)

    def to_json(self) -> dict[str, Any]:
        """Return the report as dicts, lists, strings and numbers."""
        return {**msgspec.to_builtins(self), "headlines": self.headlines}

    def table(self) -> str:
        """Return the report as plain text: aligned tables, headlines, and remarks."""
        loading = aligned(*filled(LOAD_HEADS, self.load_cells()))
        times = aligned(*filled(ROW_HEADS, self.row_cells()))
        how, *others = self.conditions()
        how = f"{how} {self.busy}" if self.busy else how
        remarks = [how, *others, *self.limit, *self.unsteady]
        return "\n".join([*loading, "", *times, "", *self.headlines, *remarks]) + "\n"

    def row_cells(self) -> Cells:
        cells: Cells = []
        for row, slower in zip(self.rows, ratios(self.rows, self.baseline), strict=True):
            work = (row.phase, str(row.tokens), row.contestant, row.model)
            times = (median(row), duration(row.p10_seconds), duration(row.p90_seconds))
            over = "" if slower is None else str(slower)
            share = "-" if row.share_of_limit is None else f"{row.share_of_limit:.0%}"
            rate, count = row.tokens_per_second, str(len(row.samples_seconds))
            speed = f"{rate:.{1 if rate < 100 else 0}f}"
            cells.append((*work, *times, speed, over, share, count))
        return cells

    def load_cells(self) -> Cells:
        cells: Cells = []
        for own in self.contestants:
            names = own.contestant, own.model, own.target, own.provider
            loss = "" if own.perplexity is None else f"x {own.perplexity:.3f}"
            times = duration(own.load_seconds), duration(own.first_calls_seconds)
            cells.append((*names, loss, *times, size(own.peak_memory_bytes)))
        return cells

    @property
    def limit(self) -> list[str]:
        """A sentence on the column `of limit`, if it is filled."""
        return [OF_LIMIT] if any(row.share_of_limit is not None for row in self.rows) else []

    @property
    def unsteady(self) -> list[str]:
        """A sentence on marked times, if there are any."""
        remedy = "; --threads 1 needs only one free core" if self.machine.threads > 1 else ""
        marked = f"times whose 90th percentile is more than {UNSTEADY:.0f} times the 10th"
        said = f"~ marks {marked}, and whose ratio is uncertain{remedy}."
        return [said] if any(unsteady(row) for row in self.rows) else []

    @property
    def busy(self) -> str:
        """A sentence on other processes that used the machine; empty if they used little of it."""
        cores = self.other_cores or 0.0
        text = f"Measured on a busy machine: other processes used {cores:.1f} cores."
        # They spin by default, and take the core that the awaited thread needs.
        remedy = " Threads of torch wait for free cores with OMP_WAIT_POLICY=PASSIVE."
        return text + remedy * (self.machine.threads > 1) if cores > BUSY else ""

    def conditions(self) -> list[str]:
        """Return sentences on machine and contestants, limits, versions, and the command line."""
        machine = self.machine
        threads, cores = counted(machine.threads, "thread"), counted(machine.cores, "core")
        cores = f"{threads} on {cores} ({machine.processor})"
        memory = f", {machine.memory_bytes / 2**30:.0f} GiB" if machine.memory_bytes else ""
        how = f"{cores}{memory}, {counted(self.batch_rows, 'row')}, one contestant at a time."
        rates = ((work.bytes, work.read_bytes_per_second / 1e9) for work in self.limits.read)
        read = ", ".join(f"{size(count)} at {rate:.1f} GB/s" for count, rate in rates)
        versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
        run = [f"{self.date}: {self.command}"] if self.command else []
        return [how, f"Reads {read}.", f"{versions}.", *run]


def duration(seconds: float) -> str:
    """Format a duration with three significant digits or more, in the largest fitting unit."""
    factor, unit = next((pair for pair in UNITS if seconds >= pair[0]), UNITS[-1])
    value = seconds / factor
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def size(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count < 1e8 else f"{count / 1e6:.0f} MB"


def unsteady(row: Row) -> bool:
    """Return whether the times of a row vary so much that they are marked."""
    return len(row.samples_seconds) >= FEWEST and row.p90_seconds > UNSTEADY * row.p10_seconds


def median(row: Row) -> str:
    """Format the median time of a row, with its mark."""
    return f"~ {duration(row.median_seconds)}" if unsteady(row) else duration(row.median_seconds)


def filled(heads: Sequence[str], cells: Cells) -> tuple[Sequence[str], Cells]:
    """Return heads and cells without columns that are empty in all rows."""
    kept = [any(line[at] not in ("", "-") for line in cells) for at in range(len(heads))]
    return tuple(compress(heads, kept)), [tuple(compress(line, kept)) for line in cells]
