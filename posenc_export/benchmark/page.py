"""The report as one self-contained HTML page with plots as SVG images in data URIs."""

import base64
import html
import io
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

from posenc_export.benchmark.report import HTML, LOAD_HEADS, ROW_HEADS, Report
from posenc_export.benchmark.results import Row
from posenc_export.runtime.artefact.places import write_file

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff; max-width: 68rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.scroll { overflow-x: auto } img { max-width: 100%; height: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } th, td { padding: .2rem .7rem }
th, td { text-align: right; border-bottom: 1px solid #d8dee4; white-space: nowrap }
th { font-weight: 600; border-bottom-color: #57606a } .text { text-align: left }
"""
TEXT_HEADS = ("phase", "contestant", "model", "target", "provider")
# Distinguishable with colour vision deficiency (Okabe and Ito 2008).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#444444", "#8c510a", "#999933")
LINES = ("-", "--", ":")  # line styles; the next one is used when all colours are taken
Mark = Callable[[Any, List[Row], Dict[str, Any]], None]


def write(report: Report, path: Path) -> None:
    """Write a report as one self-contained HTML page.

    Raises:
        ValueError: matplotlib is not installed, or the path is that of another file (runtime.artefact.places.check_file).
    """
    write_file(path, render(report).encode(), HTML)


def render(report: Report) -> str:
    """Return the HTML page of a report.

    Raises:
        ValueError: matplotlib is not installed.
    """
    plots = [
        _figure("Decode: time per step", [row for row in report.rows if row.phase == "decode"], "microseconds", _times(1e6)),
        _figure("Decode: share of the read bandwidth", [row for row in report.rows if row.share_of_limit is not None], "percent of limit", _shares),
        _figure("Prefill: time per prompt", [row for row in report.rows if row.phase == "prefill"], "milliseconds", _times(1e3)),
    ]
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>posenc benchmark</title><style>{STYLE}</style></head><body>",
        "<h1>posenc benchmark</h1>",
        f"<p>{html.escape(' '.join(report.remarks()))} Lines are medians, bands the 10th to 90th percentile.</p>",
        _list(report.verdicts),
        *plots,
        "<h2>All rows</h2>",
        _table(ROW_HEADS, report.row_cells()),
        "<h2>Loading</h2>",
        _table(LOAD_HEADS, report.load_cells()),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _times(factor: float) -> Mark:
    def mark(axes: Any, rows: List[Row], style: Dict[str, Any]) -> None:
        tokens = [row.tokens for row in rows]
        axes.plot(tokens, [factor * row.median_seconds for row in rows], marker="o", label=rows[0].contestant, **style)
        axes.fill_between(tokens, [factor * row.p10_seconds for row in rows], [factor * row.p90_seconds for row in rows], alpha=0.2, linewidth=0, **style)
        axes.set_yscale("log")
        axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
        axes.yaxis.set_major_formatter(lambda value, place: f"{value:,g}")

    return mark


def _shares(axes: Any, rows: List[Row], style: Dict[str, Any]) -> None:
    axes.plot([row.tokens for row in rows], [100 * (row.share_of_limit or 0.0) for row in rows], marker="o", label=rows[0].contestant, **style)
    axes.set_ylim(bottom=0, auto=True)  # the top adapts to further contestants


def _figure(title: str, rows: List[Row], unit: str, mark: Mark) -> str:
    """Return a heading and a plot over the number of tokens, with one line per contestant; an empty string if there are no rows."""
    if not rows:
        return ""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("benchmark: expected matplotlib to be installed for an HTML page, got none; pip install 'posenc-export[report]'") from None
    names = list(dict.fromkeys(row.contestant for row in rows))
    tokens = sorted({row.tokens for row in rows})
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif"}):
        figure = Figure(figsize=(9, 4), layout="constrained")
        axes = figure.subplots()
        for index, name in enumerate(names):
            style = {"color": COLOURS[index % len(COLOURS)], "linestyle": LINES[index // len(COLOURS) % len(LINES)]}
            mark(axes, [row for row in rows if row.contestant == name], style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [str(number) for number in tokens])
        axes.minorticks_off()
        axes.set_xlabel("tokens")
        axes.set_ylabel(unit)
        axes.grid(color="#d8dee4", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        stream = io.BytesIO()
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    image = base64.b64encode(stream.getvalue()).decode()
    return f'<h2>{html.escape(title)}</h2>\n<div class="scroll"><img alt="{html.escape(title, quote=True)}" src="data:image/svg+xml;base64,{image}"></div>'


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _table(heads: Sequence[str], cells: Sequence[Tuple[str, ...]]) -> str:
    kinds = [' class="text"' if head in TEXT_HEADS else "" for head in heads]
    lines = ["".join(f"<th{k}>{html.escape(head)}</th>" for head, k in zip(heads, kinds, strict=True))]
    lines += ["".join(f"<td{k}>{html.escape(cell)}</td>" for cell, k in zip(line, kinds, strict=True)) for line in cells]
    return '<div class="scroll"><table>' + "\n".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"
