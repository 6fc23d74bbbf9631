"""Write docs/speed.md and its chart from results of bench/speed.py."""

from pathlib import Path
from typing import Any

from bench import json_rows, marked
from bench.compact_svg import save
from posenc_export.benchmark.ratios import Spread
from posenc_export.benchmark.ratios import ratio as ratio_of
from posenc_export.benchmark.report import Report, duration
from posenc_export.benchmark.results import BUSY, Row
from posenc_export.catalogue.waves import COLOURS

TITLES = {
    "block": "A block of width 512 with 8 heads",
    "layers": "A decoder of 4 layers of width 256",
    "model": (
        "A decoder of 134 million parameters (Llama's architecture: vocabulary 49152, width 576, "
        "30 layers, 9 heads, 3 kv heads, MLP 1536)"
    ),
    "bits": "The same decoder with quantized weights",
    "cache": "The block of width 512 with 8-bit caches",
}


CONTEXTS = (128, 1024)
OURS = "rope-ort"
QUALITY = Path(__file__).parent / "results" / "bits.json"
# Rows of the summary: part, contestant, description, name of the weights in QUALITY.
SUMMARY = (
    ("model", "openvino on rope-onnx-mask", "OpenVINO", "float32"),
    ("bits", "transformers", "transformers, eager PyTorch", "float32"),
    ("bits", "llama.cpp", "llama.cpp, float32", "float32"),
    ("bits", "rope-ort", "target `ort`, float32", "float32"),
    ("bits", "llama.cpp-q8_0", "llama.cpp, Q8_0", ""),
    ("bits", "llama.cpp-q4_0", "llama.cpp, Q4_0", ""),
    ("bits", "rope-ort-int8", "target `ort`, `int8`", "int8"),
    ("bits", "rope-ort-int4", "target `ort`, `int4`", "int4"),
    ("bits", "rope-ort-native-int8", "target `ort-native`, `int8`", "int8"),
    ("bits", "rope-ort-native-int4", "target `ort-native`, `int4`", "int4"),
)
SUMMARIZED = {part for part, *_ in SUMMARY}
Reports = dict[str, Report]  # by part


def perplexities() -> dict[str, str]:
    """Return perplexities relative to float32, by the name of the weights in QUALITY."""
    rows = json_rows.read(QUALITY)["rows"]
    return {r["weights"]: f"{r['perplexity']:.2f}" for r in rows if "perplexity" in r}


def summary(reports: Reports) -> str:
    """Return a table of ratios of the decoder with 134 million parameters."""
    title = "time of a step, relative to target `ort` in float32"
    heads = [title, *(f"{n} cached tokens" for n in CONTEXTS), "relative perplexity"]
    lines, quality = [], perplexities()
    for part, contestant, description, weights in SUMMARY:
        spreads = [ratio(reports[part], tokens, contestant) for tokens in CONTEXTS]
        lines.append([description, *map(_interval, spreads), quality.get(weights, "")])
    return marked.markdown(heads, lines)


def _interval(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median:.2f} ({spread.low:.2f} .. {spread.high:.2f})"


def figure(reports: Reports) -> Any:
    """Return a matplotlib figure of the summary."""
    from matplotlib.figure import Figure

    drawing, quality = Figure(figsize=(7.6, 2.8), layout="constrained"), perplexities()
    drawn = drawing.subplots(1, len(CONTEXTS), sharey=True)
    for axes, tokens in zip(drawn, CONTEXTS, strict=True):
        _draw(axes, reports, tokens)
    labels = []
    for *_, description, weights in SUMMARY:
        rounds = weights in quality and weights != "float32"
        costs = f", perplexity x {quality[weights]}" if rounds else ""
        labels.append(description.replace("`", "") + costs)
    drawn[0].set_yticks(range(len(SUMMARY)), labels, fontsize=8)
    drawn[0].invert_yaxis()
    return drawing


def _draw(axes: Any, reports: Reports, tokens: int) -> None:
    """Draw a bar for each ratio, with its interval as a line."""
    for place, (part, contestant, *_) in enumerate(SUMMARY):
        spread = ratio(reports[part], tokens, contestant)
        if spread is None:
            continue
        colour = COLOURS[0] if contestant.startswith(OURS) else "#b8bec6"
        axes.barh(place, spread.median, height=0.72, color=colour)
        axes.hlines(place, spread.low, spread.high, color="#222222", linewidth=1)
        how = {"textcoords": "offset points", "va": "center", "fontsize": 7}
        axes.annotate(f"{spread.median:.2f}", (spread.high, place), xytext=(3, 0), **how)
    own = _row(reports["model"], "decode", tokens, OURS)
    assert own is not None
    axes.axvline(1, color=COLOURS[0], linewidth=1.5)
    title = f"{tokens} cached tokens; 1 is target ort, {duration(own.median_seconds)}"
    axes.set_title(title, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)


def write(reports: Reports, folder: Path) -> None:
    """Write the page, and the chart if its parts are measured."""
    (folder / "speed.md").write_text(page(reports), encoding="utf-8")
    if reports.keys() >= SUMMARIZED:
        save(figure(reports), folder / "speed.svg")


def page(reports: Reports) -> str:
    """Return the page, with the parts in the order of TITLES."""
    measured = [name for name in TITLES if name in reports]
    parts = [f"## {TITLES[name]}\n\n{_part(reports[name])}\n" for name in measured]
    of = next(iter(reports.values())).machine
    versions = ", ".join(f"{name} {version}" for name, version in of.versions.items())
    return marked.text("speed").format(
        machine=f"{of.cores} cores of an {of.processor}",
        summary=summary(reports) if reports.keys() >= SUMMARIZED else "",
        parts="\n".join([*parts, f"Versions: {versions}."]),
    )


def ratio(report: Report, tokens: int, contestant: str) -> Spread | None:
    """Return the ratio of times of a step, of a contestant to OURS; None without them, or with too
    few rounds.
    """
    theirs, ours = (_row(report, "decode", tokens, name) for name in (contestant, OURS))
    return ours and theirs and ratio_of(theirs.samples_seconds, ours.samples_seconds)


def _row(report: Report, *wanted: Any) -> Row | None:
    """Return the row of a phase, a number of tokens and a contestant."""
    rows = (row for row in report.rows if (row.phase, row.tokens, row.contestant) == wanted)
    return next(rows, None)


def _part(report: Report) -> str:
    busy = " Measured on a busy machine." if (report.other_cores or 0.0) > BUSY else ""
    machine = report.machine
    said = f"{machine.processor}, {machine.threads} threads on {machine.cores} cores.{busy}"
    works = list(dict.fromkeys((row.phase, row.tokens) for row in report.rows))
    cells = {}
    for row in report.rows:
        # The first row of a phase and a number of tokens is the fastest.
        fastest = next(r for r in report.rows if (r.phase, r.tokens) == (row.phase, row.tokens))
        times = ratio_of(row.samples_seconds, fastest.samples_seconds)
        against = "" if times is None else f" ({times.median:.2f})"
        cells[row.contestant, row.phase, row.tokens] = duration(row.median_seconds) + against
    names = dict.fromkeys(row.contestant for row in report.rows)
    lines = [[name, *(cells.get((name, *work), "") for work in works)] for name in names]
    heads = ["contestant", *(f"{phase} {tokens}" for phase, tokens in works)]
    return f"{said}\n\n{marked.markdown(heads, lines)}"
