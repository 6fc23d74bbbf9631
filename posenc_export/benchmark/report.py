"""What was measured: as JSON with units in its names, as a table for the terminal, as one HTML page."""

from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union

import msgspec
from msgspec import Struct

from posenc_export.benchmark.verdicts import Verdict, verdicts
from posenc_export.tables import aligned

SCHEMA = 2
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
ROW_HEADS = ("phase", "tokens", "contestant", "model", "median", "p10", "p90", "tokens/s", "ratio", "of limit", "samples", "redone", "disturbed")
LOAD_HEADS = ("contestant", "model", "target", "provider", "load", "first call", "peak memory")
Cells = List[Tuple[str, ...]]


class Machine(Struct, frozen=True, forbid_unknown_fields=True):
    """Where it was measured.

    Args:
        threads: of one contestant; one contestant runs at a time.
        versions: of Python and of the libraries that contestants use.
    """

    processor: str
    cores: int
    threads: int
    versions: Dict[str, str]


class WorkingSet(Struct, frozen=True, forbid_unknown_fields=True):
    """How fast so many bytes are read again and again."""

    bytes: int
    read_bytes_per_second: float


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """What this machine reached in the same run.

    Args:
        read: by working set, ascending.
        gemm_flops_per_second: float32 products of square matrices, by numpy.
        empty_run_seconds: a graph of one Identity node through ONNX Runtime with everything bound; None without the packages onnx and onnxruntime.
    """

    read: List[WorkingSet]
    gemm_flops_per_second: float
    empty_run_seconds: Optional[float]


class Loaded(Struct, frozen=True, forbid_unknown_fields=True):
    """One contestant.

    Args:
        artefact: name of its folder, or of the one whose description it built anew.
        artefact_digest: of that folder, as `posenc inspect` prints it.
        weights: where they come from: {"preset": name}, {"seed": number}, or empty for a model of the user's own.
        load_seconds: imports excluded.
        first_calls_seconds: a short prompt and a step.
        peak_memory_bytes: most memory that was resident.
    """

    contestant: str
    model: str
    runtime: str
    target: str
    provider: str
    dtype: str
    artefact: str
    artefact_digest: str
    weights: Dict[str, Union[str, int]]
    load_seconds: float
    first_calls_seconds: float
    peak_memory_bytes: int


class Row(Struct, frozen=True, forbid_unknown_fields=True):
    """One contestant at one number of tokens.

    Args:
        phase: "decode" (seconds of a step) or "prefill" (seconds of a prompt from an empty cache).
        tokens: in the cache at decode, of the prompt at prefill, in each row of the batch.
        samples_seconds: in the order of the rounds; in each round all contestants take their turn.
        tokens_per_second: of all rows of the batch together.
        ratio_to_fastest: median against that of the fastest; None where samples of one of the two stayed disturbed.
        least_bytes: what a step must read, weights and valid cache; None at prefill and on CUDA.
        read_bytes_per_second: that a plain read of as many bytes reached in the same rounds.
        share_of_limit: least_bytes / median / read_bytes_per_second.
        samples_redone: thrown away as disturbed and taken again.
        samples_disturbed: kept although disturbed, patience having run out.
    """

    phase: str
    tokens: int
    contestant: str
    model: str
    median_seconds: float
    p10_seconds: float
    p90_seconds: float
    samples_seconds: List[float]
    tokens_per_second: float
    ratio_to_fastest: Optional[float]
    least_bytes: Optional[int]
    read_bytes_per_second: Optional[float]
    share_of_limit: Optional[float]
    samples_redone: int
    samples_disturbed: int


class Report(Struct, frozen=True, forbid_unknown_fields=True):
    """All rows of one run, in the order prefill after decode, ascending tokens, fastest first.

    Args:
        batch_rows: rows of the batch.
        token_values: what prompts hold: the same token everywhere, since the cost of a call does not depend on values.
    """

    machine: Machine
    limits: Limits
    contestants: List[Loaded]
    rows: List[Row]
    batch_rows: int
    token_values: str = "token id 0, or 0.5 in every hidden state"
    schema: int = SCHEMA

    @property
    def verdicts(self) -> List[Verdict]:
        """For each phase and number of tokens, the fastest against the next."""
        return verdicts(self.rows)

    @property
    def disturbed(self) -> int:
        """Samples that stayed disturbed."""
        return sum(row.samples_disturbed for row in self.rows)

    def to_json(self) -> Dict[str, Any]:
        """Dicts, lists, strings and numbers only; `Report.from_json` reads it back."""
        return {**msgspec.to_builtins(self), "verdicts": [verdict.text for verdict in self.verdicts]}

    @staticmethod
    def from_json(content: Dict[str, Any]) -> "Report":
        """The report that `to_json` wrote.

        Raises:
            ValueError: another schema, fields that are missing or of another type.
        """
        if content.get("schema") != SCHEMA:
            raise ValueError(f"report: expected schema {SCHEMA}, got {content.get('schema')!r}; measure again with this version")
        try:
            return msgspec.convert({name: value for name, value in content.items() if name != "verdicts"}, Report)
        except msgspec.ValidationError as error:
            raise ValueError(f"report: expected the fields of schema {SCHEMA}, got another: {error}; measure again") from None

    def table(self) -> str:
        """Aligned columns of plain text, and a verdict for each phase and number of tokens."""
        lines = [*aligned(LOAD_HEADS, self.load_cells()), "", *aligned(ROW_HEADS, self.row_cells()), ""]
        return "\n".join([*lines, *(verdict.text for verdict in self.verdicts), *self.remarks()]) + "\n"

    def html(self, path: Union[str, Path]) -> None:
        """Write one self-contained page.

        Raises:
            ValueError: matplotlib is missing.
        """
        from posenc_export.benchmark.page import render

        Path(path).write_text(render(self), encoding="utf-8")

    def row_cells(self) -> Cells:
        return [_cells(row) for row in self.rows]

    def load_cells(self) -> Cells:
        return [
            (e.contestant, e.model, e.target, e.provider, duration(e.load_seconds), duration(e.first_calls_seconds), size(e.peak_memory_bytes))
            for e in self.contestants
        ]

    def remarks(self) -> List[str]:
        """How it was measured, the limits of the machine, and how far the numbers can be trusted."""
        batch = "1 row" if self.batch_rows == 1 else f"{self.batch_rows} rows"
        redone = sum(row.samples_redone for row in self.rows)
        trust = f"{self.disturbed} disturbed samples could not be redone: run again on a quiet machine." if self.disturbed else "No disturbed sample was kept."
        how = f"{self.machine.threads} threads on {self.machine.cores} cores ({self.machine.processor}), {batch}, one contestant at a time."
        read = ", ".join(f"{size(each.bytes)} at {each.read_bytes_per_second / 1e9:.1f} GB/s" for each in self.limits.read)
        empty = "" if self.limits.empty_run_seconds is None else f"; an empty run takes {duration(self.limits.empty_run_seconds)}"
        return [f"{how} {redone} disturbed samples redone. {trust}", f"Reads {read}; multiplies at {self.limits.gemm_flops_per_second / 1e9:.0f} GFLOP/s{empty}."]


def duration(seconds: float) -> str:
    """Three or more significant digits, in the largest unit that leaves 1 or more."""
    factor, unit = next((pair for pair in UNITS if seconds >= pair[0]), UNITS[-1])
    value = seconds / factor
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def size(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count < 1e8 else f"{count / 1e6:.0f} MB"


def rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:.{1 if tokens_per_second < 100 else 0}f}"


def _cells(row: Row) -> Tuple[str, ...]:
    times = (duration(row.median_seconds), duration(row.p10_seconds), duration(row.p90_seconds))
    ratio = "" if row.ratio_to_fastest is None else f"{row.ratio_to_fastest:.2f}"
    share = "-" if row.share_of_limit is None else f"{row.share_of_limit:.0%}"
    counts = (str(len(row.samples_seconds)), str(row.samples_redone), str(row.samples_disturbed))
    return (row.phase, str(row.tokens), row.contestant, row.model, *times, rate(row.tokens_per_second), ratio, share, *counts)
