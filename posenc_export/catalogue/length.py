"""docs/length.md: a table and a figure of the study of length extrapolation."""

from typing import Any, List, Mapping, Sequence, Tuple

from posenc_export.catalogue.waves import COLOURS, MARKERS

PAGE = """# Length extrapolation

How well small decoders predict text that is longer than in training, by encoding. Lower is better.

![bits per byte against context](length.svg)

Without a scaling, `alibi` alone predicts equally well at every length, and `fire` and `t5` lose slowly. Scalings of rope help
after further training; YaRN then loses least.

{table}

An empty cell was not measured. Rows of `learned` beyond 255 were never trained.

## How it was measured

One decoder of 0.33 million parameters per encoding, all trained in the same way: {training[steps]} steps of
{training[batch]} x {training[length]} bytes of Python source, learning rate {training[rate]:g}, seed {training[seed]}. The
exported `ort` artefact reads each context in chunks of {chunk} bytes. Numbers are bits per byte of held-out text, over the
last {tail} bytes of {windows} contexts, which end at the same bytes for every length. Each row is one run.

Scalings of rope use the weights of rope with factor {factor:g}, the longest context divided by the trained length. Decoders
called *tuned* were trained further with their scaling: {tuning[steps]} steps of {tuning[batch]} x {tuning[length]} bytes,
learning rate {tuning[rate]:g} after {tuning[warm_up]} steps of warm-up, seed {tuning[seed]}. *rope, unscaled, tuned* had the
same further training without a scaling.

Python {versions[python]} and its source, torch {versions[torch]}, ONNX Runtime {versions[onnxruntime]}. Measured by
`bench/length_study.py` of commit 8419f2b, written by `python -m posenc_export.catalogue.pages`.
"""
GAP = 0.17  # bits per byte between two labels at the end of their lines


def page(study: Mapping[str, Any]) -> str:
    """The page, as Markdown; it shows the figure length.svg of the same folder."""
    contexts = _contexts(study["rows"])
    rows = [["encoding", *map(str, contexts)], ["---"] * (len(contexts) + 1)]
    for row in study["rows"]:
        bits = [row["bits"].get(str(context)) for context in contexts]
        rows.append([row["encoding"], *("" if bit is None else f"{bit:.2f}" for bit in bits)])
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    return PAGE.format(**study, table=table)


def _contexts(rows: Sequence[Mapping[str, Any]]) -> List[int]:
    return sorted({int(context) for row in rows for context in row["bits"]})


def figure(study: Mapping[str, Any]) -> Any:
    """A matplotlib figure: encodings on the left, scalings of rope on the right, before and
    after the further training.
    """
    from matplotlib.figure import Figure

    rows = study["rows"]
    drawing = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = drawing.subplots(1, 2, sharey=True)
    _lines(left, [row for row in rows if not row["scaling"]], "encoding")
    _lines(right, [row for row in rows if row["scaling"]], "scaling")
    left.set_title(f"trained at {study['training']['length']} bytes", fontsize=9)
    right.set_title(
        f"rope scaled by {study['factor']:g}: as trained (dashed), after "
        f"{study['tuning']['steps']} further steps (solid)",
        fontsize=9,
    )
    left.set_ylabel("bits per byte")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        ticks = [context for context in _contexts(rows) if context not in (288, 320)]
        axes.set_xticks(ticks, [str(context) for context in ticks], fontsize=8)
        axes.set_xticks([], minor=True)
        axes.set_xlim(right=1.9 * max(ticks))  # room for labels
        axes.set_xlabel("bytes of context")
    return drawing


def _lines(axes: Any, rows: Sequence[Mapping[str, Any]], by: str) -> None:
    """Draw a line for each row with a label at its end; rows with the same value of the key `by`
    share colour and marker.
    """
    place = {name: index for index, name in enumerate(dict.fromkeys(row[by] for row in rows))}
    ends: List[Tuple[float, str, str]] = []
    for row in rows:
        color, marker = COLOURS[place[row[by]]], MARKERS[place[row[by]]]
        contexts, values = zip(
            *sorted((int(context), value) for context, value in row["bits"].items()), strict=True
        )
        axes.plot(
            contexts,
            values,
            "--" if row["scaling"] and not row["tuned"] else "-",
            marker=marker,
            markersize=4,
            linewidth=1.2,
            color=color,
        )
        ends.append((values[-1], row[by] + (", tuned" if row["tuned"] else ""), color))
    at, last = float("-inf"), max(_contexts(rows))
    for value, label, color in sorted(ends):
        at = max(value, at + GAP)
        axes.annotate(
            label, (last, value), xytext=(1.06 * last, at), fontsize=8, color=color, va="center"
        )
