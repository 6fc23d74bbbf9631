"""The result of an audit as one HTML page: errors over positions, cells, the repeating program."""

import base64
import html
import io
from dataclasses import asdict
from typing import Any, Sequence

import numpy as np

from posenc_export.auditing.answer import Audit

STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto;
padding: 0 1rem } .sentence { font-size: 1.3rem; font-weight: 600 } img { width: 100% }
table { border-collapse: collapse; display: block; overflow-x: auto }
td { white-space: nowrap } td:last-child { min-width: 11rem } td:first-child { min-width: 8rem }
td, th { padding: .2rem .7rem; text-align: left; border-bottom: 1px solid #d8dee4 }
td:first-child, td:last-child { white-space: normal } .wrong, .refused { color: #b3261e }
pre { overflow: auto; max-height: 30rem; background: #f6f8fa; padding: 1rem }"""
MARK = b"<!-- posenc audit -->"
LOSS = {
    "format": "format of the weights",
    "error": "largest error of a full pass, relative to the largest output",
    "activations": "largest error with the weights of the graph in the reference",
    "cosine": "cosine of the outputs, on average",
    "lowest": "lowest cosine of the outputs",
    "divergence": "Kullback-Leibler divergence of the next token in nats, on average",
    "agreement": "part of tokens with the same most probable next token",
}
LEAST = 1e-9  # errors below are drawn here


def render(audit: Audit, name: str) -> str:
    """Return the page of the audit of a graph."""
    inputs = [(row["name"], row["type"], row["meaning"]) for row in audit.inputs]
    cells = [
        (c.name, c.status, *(f"{x:.1e}" if c.tolerance else "" for x in (c.error, c.tolerance)),
         str(c.first) if c.first >= 0 else "", c.message)
        for c in audit.cells
    ]  # fmt: skip
    heads = ("cell", "result", "error", "tolerance", "first wrong token", "reason")
    parts = [
        f"<p class='sentence'>{html.escape(audit.sentence)}</p>",
        f'<img alt="error over position" src="data:image/svg+xml;base64,{_chart(audit)}">',
        f"<h2>Inputs and outputs</h2>{_table(('name', 'type', 'meaning'), inputs)}",
        f"<h2>Cells</h2>{_table(heads, cells)}",
    ]
    if audit.loss is not None:
        rows = [(LOSS[name], f"{number}") for name, number in asdict(audit.loss).items()]
        parts.append(f"<h2>Rounding</h2>{_table(('what it costs', ''), rows)}")
    if audit.program:
        parts.append(f"<h2>The first wrong token</h2><pre>{html.escape(audit.program)}</pre>")
    title = f"Audit of {html.escape(name)}"
    head = f"<!doctype html>{MARK.decode()}<meta charset='utf-8'><title>{title}</title>"
    return f"{head}<style>{STYLE}</style><h1>{title}</h1>{''.join(parts)}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines: list[str] = [f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>"]
    for row in rows:
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        lines.append(f"<tr class='{row[1] if row[1] in ('wrong', 'refused') else ''}'>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _chart(audit: Audit) -> str:
    """Return the largest right and the largest wrong error at each position, as SVG in base64."""
    from matplotlib.figure import Figure

    observed, columns, wrong = audit.observed, audit.observed.columns, audit.observed.wrong
    positions, errors = columns["start"] + columns["index"], columns["error"].clip(LEAST, 10.0)
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes: Any = figure.subplots()
    for of, label, colour in ((~wrong, "right", "#0072b2"), (wrong, "wrong", "#b3261e")):
        at = np.unique(positions[of])
        largest = [errors[of & (positions == position)].max() for position in at]
        axes.plot(at, largest, ".", label=label, color=colour)
    axes.set(xlabel="position (logarithmic)", ylabel="error (logarithmic)", yscale="log")
    axes.set_xscale("symlog")
    axes.set_xlim(left=-0.5)
    axes.xaxis.set_major_formatter(lambda value, place: f"{value:g}")
    if len(observed.limit):
        axes.axhline(observed.limit.min(), color="black", lw=0.8, ls="--", label="tolerance")
    figure.legend(fontsize="small", ncols=3, loc="outside upper center", frameon=False)
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return base64.b64encode(stream.getvalue()).decode()
