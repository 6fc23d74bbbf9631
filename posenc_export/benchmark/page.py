"""The report as one self-contained HTML page with plots as SVG images in data URIs."""

import base64
import html
import io
import itertools
import math
from functools import partial
from typing import Any, Callable, Mapping, Sequence

from posenc_export.benchmark.ratios import Spread, ratios
from posenc_export.benchmark.report import LOAD_HEADS, ROW_HEADS, Report, duration, filled, median
from posenc_export.benchmark.results import Row

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff; max-width: 66rem;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.1rem; font-weight: 400; color: #57606a; margin-bottom: .5rem }
h2 { font-size: 1.1rem; margin-top: 2rem } .note { color: #57606a }
.result { font-size: clamp(1.1rem, 4vw, 1.45rem); line-height: 1.35; font-weight: 600;
  margin: .3rem 0 }
.mark { background: #fff1d6; color: #7a4d00; border-radius: 1rem; padding: .15rem .7rem;
  font-size: .9rem; display: inline-block }
.plots { display: grid; gap: 0 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)) }
.plots h2 { margin-bottom: .3rem } .scroll { overflow-x: auto } img { width: 100%; height: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .7rem; text-align: right; vertical-align: top; white-space: nowrap;
  border-bottom: 1px solid #d8dee4 }
th { font-weight: 600; border-bottom-color: #57606a; white-space: normal; vertical-align: bottom;
  min-width: 5rem }
.text { text-align: left } .best { font-weight: 700 }
.dot { display: inline-block; width: .7rem; height: .7rem; border-radius: 50%; margin-right: .5rem }
details { margin-top: 1rem } summary { cursor: pointer; font-weight: 600 }
"""
READING = "A range in brackets holds the ratio to {} with 95 % confidence."
DRAWN = "Points are medians, bands hold the middle 80 % of the samples."
TEXT_HEADS = ("phase", "contestant", "model", "target", "provider")
# Distinguishable with colour vision deficiency (Okabe and Ito 2008).
COLOURS = "#0072b2 #d55e00 #009e73 #cc79a7 #56b4e9 #e69f00 #444444 #8c510a #999933".split()
LINES = ("-", "--", ":")  # line styles; the next one is used when all colours are taken
ANSWER = 128  # steps after a prompt, whose total time a column has
APART = 0.075  # least distance of two labels, in heights of the axes
Mark = Callable[[Any, list[Row], dict[str, Any]], None]
# Colour and line style of each contestant, the same in every plot.
Styles = Mapping[str, dict[str, Any]]


def render(report: Report) -> str:
    """Return the HTML page of a report. Raise ModuleNotFoundError without matplotlib."""
    looks = [{"color": color, "linestyle": line} for line in LINES for color in COLOURS]
    names = [loaded.contestant for loaded in report.contestants]
    styles = dict(zip(names, itertools.cycle(looks)))
    models = " and ".join(dict.fromkeys(loaded.model for loaded in report.contestants))
    drawn = _plots(report, styles)
    notes = " ".join(
        [
            READING.format(report.baseline or "the fastest"),
            *([DRAWN] if drawn else []),
            *report.unsteady,
        ]
    )
    busy = f'<p><span class="mark">{html.escape(report.busy)}</span></p>' if report.busy else ""
    machine = "".join(f"<li>{html.escape(line)}</li>" for line in report.conditions())
    limit = "".join(f'<p class="note">{line}</p>' for line in report.limit)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width">',
        f"<title>posenc benchmark</title><style>{STYLE}</style></head><body>",
        f"<h1>posenc benchmark of {html.escape(models)}</h1>",
        *(f'<p class="result">{html.escape(line)}</p>' for line in report.headlines),
        busy,
        _medians(report, styles),
        drawn and f'<div class="plots">{drawn}</div>',
        f'<p class="note">{html.escape(notes)}</p>',
        _folded("All rows", _table(*filled(ROW_HEADS, report.row_cells())) + limit),
        _folded("Loading", _table(*filled(LOAD_HEADS, report.load_cells()))),
        _folded("Machine", f"<ul>{machine}</ul>"),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _plots(report: Report, styles: Styles) -> str:
    decode = [row for row in report.rows if row.phase == "decode"]
    prefill = [row for row in report.rows if row.phase == "prefill"]
    shares = [row for row in report.rows if row.share_of_limit is not None]
    held = [row for row in decode if row.resident_bytes is not None]
    cached, prompt = "cached tokens", "tokens of the prompt"
    rates = partial(_band, lambda row, s: row.tokens_per_second * row.median_seconds / s)
    times = partial(_band, lambda row, seconds: 1e3 * seconds)
    percent = partial(_level, lambda row: 100 * (row.share_of_limit or 0.0))
    memory = partial(_level, lambda row: (row.resident_bytes or 0) / 1e6)
    plots = (
        _figure("Decode: tokens per second", decode, cached, "tokens per second", rates, styles),
        _figure("Time to the first token", prefill, prompt, "milliseconds", times, styles),
        _figure("Decode: share of the read bandwidth", shares, cached, "percent", percent, styles),
        _figure("Memory while decoding", held, cached, "megabytes", memory, styles),
    )
    return "".join(f"<section>{plot}</section>" for plot in plots if plot)


def _medians(report: Report, styles: Styles) -> str:
    """A table of median times and ratios: a line for each contestant, the fastest first."""
    columns: dict[tuple[str, int], dict[str, tuple[Row, Spread | None]]] = {}
    for row, slower in zip(report.rows, ratios(report.rows, report.baseline), strict=True):
        columns.setdefault((row.phase, row.tokens), {})[row.contestant] = (row, slower)
    first = {name: row.median_seconds for name, (row, _) in next(iter(columns.values())).items()}
    heads = "".join(f"<th>{phase}, {tokens} tokens</th>" for phase, tokens in columns)
    both = [n for phase, n in columns if phase == "prefill" and ("decode", n) in columns]
    heads += "".join(f"<th>prompt of {n}, then {ANSWER} steps</th>" for n in both[-1:])
    lines = [f'<tr><th class="text">median time</th>{heads}</tr>']
    for name in sorted(styles, key=lambda name: first.get(name, math.inf)):
        dot = f'<span class="dot" style="background:{styles[name]["color"]}"></span>'
        cells = [f'<td class="text">{dot}{html.escape(name)}</td>']
        for column in columns.values():
            if name not in column:
                cells.append("<td></td>")
                continue
            row, slower = column[name]
            fastest = min(other.median_seconds for other, _ in column.values())
            best = " class=best" if row.median_seconds == fastest else ""
            said = "" if slower is None else f'<div class="note">x {slower}</div>'
            cells.append(f"<td{best}>{median(row)}{said}</td>")
        for n in both[-1:]:
            times = [columns[phase, n][name][0].median_seconds for phase in ("prefill", "decode")]
            cells.append(f"<td>{duration(times[0] + ANSWER * times[1])}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table>{chr(10).join(lines)}</table></div>'


def _band(
    value: Callable[[Row, float], float], axes: Any, rows: list[Row], style: dict[str, Any]
) -> None:
    """Draw what belongs to the median time of each row, and the band of the 10th and 90th
    percentile, on a logarithmic axis.
    """
    tokens = [row.tokens for row in rows]
    axes.plot(tokens, [value(row, row.median_seconds) for row in rows], marker="o", **style)
    low, high = (
        [value(r, getattr(r, name)) for r in rows] for name in ("p10_seconds", "p90_seconds")
    )
    axes.fill_between(tokens, low, high, alpha=0.2, linewidth=0, color=style["color"])
    axes.set_yscale("log")
    axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:,g}")


def _level(
    value: Callable[[Row], float], axes: Any, rows: list[Row], style: dict[str, Any]
) -> None:
    """Draw a number of each row, on an axis from 0."""
    values = list(map(value, rows))
    axes.plot([row.tokens for row in rows], values, marker="o", **style)
    axes.set_ylim(0, max(1.1 * max(values), axes.get_ylim()[1]))


def _figure(title: str, rows: list[Row], places: str, unit: str, mark: Mark, styles: Styles) -> str:
    """Return a heading and a plot with a line per contestant; "" with one number of tokens."""
    if len({row.tokens for row in rows}) < 2:
        return ""
    import matplotlib
    from matplotlib.figure import Figure

    tokens = sorted({row.tokens for row in rows})
    fonts: Any = {"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif"}
    with matplotlib.rc_context(fonts):
        figure = Figure(figsize=(5.6, 3.6), layout="constrained")
        axes: Any = figure.subplots()
        ends = []
        for name in dict.fromkeys(row.contestant for row in rows):
            mark(axes, [row for row in rows if row.contestant == name], styles[name])
            ends.append((name, float(axes.lines[-1].get_ydata()[-1])))
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [str(number) for number in tokens])
        axes.minorticks_off()
        axes.set_xlabel(f"{places} (logarithmic)")
        axes.set_ylabel(f"{unit} (logarithmic)" if axes.get_yscale() == "log" else unit)
        axes.grid(color="#d8dee4", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        _label_ends(axes, ends, styles)
        stream, none = io.BytesIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(stream, format="svg", metadata=none)
    image = base64.b64encode(stream.getvalue()).decode()
    image = f'<img alt="{html.escape(title, quote=True)}" src="data:image/svg+xml;base64,{image}">'
    return f"<h2>{html.escape(title)}</h2>\n{image}"


def _label_ends(axes: Any, ends: Sequence[tuple[str, float]], styles: Styles) -> None:
    """Write the name of each line beside its last point. Names that would overlap are moved up."""
    to_axes = axes.transData + axes.transAxes.inverted()
    right = axes.get_xlim()[1]
    heights = [(float(to_axes.transform((right, value))[1]), name) for name, value in ends]
    last = -APART
    for height, name in sorted(heights):
        last = max(height, last + APART)
        how = {"transform": axes.transAxes, "va": "center", "parse_math": False}
        axes.text(1.02, last, name, color=styles[name]["color"], **how)


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>{content}</details>"


def _table(heads: Sequence[str], cells: Sequence[tuple[str, ...]]) -> str:
    lines = [_line("th", heads, heads), *(_line("td", heads, line) for line in cells)]
    return f'<div class="scroll"><table>{chr(10).join(lines)}</table></div>'


def _line(tag: str, heads: Sequence[str], cells: Sequence[str]) -> str:
    kinds = (' class="text"' if head in TEXT_HEADS else "" for head in heads)
    pairs = zip(kinds, cells, strict=True)
    written = (f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for kind, cell in pairs)
    return f"<tr>{''.join(written)}</tr>"
