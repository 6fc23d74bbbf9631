"""Generate docs/speed.md, its chart, and docs/speed-targets.md from the results of
bench/speed.py.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from posenc_export.benchmark.report import BUSY, Report, duration, size
from posenc_export.benchmark.results import Row
from posenc_export.benchmark.spread import Spread
from posenc_export.benchmark.spread import ratio as ratio_of
from posenc_export.catalogue.compact_svg import save
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
HEAD = """# Speed

Time of one decode step of a decoder with 134 million parameters, relative to target `ort` in float32, on {machine}. Lower is faster. Numbers in parentheses, and
lines on bars, are 95 % intervals. Perplexities are those of [SmolLM2-135M-Instruct](fewer-bits.md#a-checkpoint-in-each-format), which has this architecture,
relative to float32.

![time of a step relative to target ort](speed.svg)

"""

READING = """## How to read the tables

- Decode is one step of one row with about the given number of cached tokens, in a run of 16 steps. Prefill is one prompt from an empty cache.
- Each contestant runs in its own process, in turn, while the others are stopped. All have the same random weights, in float32 unless a name says otherwise.
- Times are medians, with the ratio to the fastest contestant in parentheses: the median of ratios round by round in the same run, blank with fewer than 5 rounds.
  `bench/results/speed.json` has all samples, from which spreads and intervals follow.
- Artefacts are named by encoding and target of `posenc export`: `ort`, `onnx`, `onnx-static`, `torchscript` or `pt2`; `aotinductor` is the artefact of `pt2` after
  `posenc compile`. `int8`, `int4`, `int4-128` and `cache-int8` are [formats of weights and caches](fewer-bits.md). A provider stands in parentheses.
- `hand-written` is a hand-written graph of the fused operators of ONNX Runtime, `hand-written-torchscript` a scripted module with caches written in place, and
  `transformers` is LlamaForCausalLM in eager mode.
- `genai` (onnxruntime-genai) and `openvino` load an artefact of signature `mask`, which computes the logits of every token of a prompt; the others compute only those
  of the last one. `genai-int4` is the model that the model builder of onnxruntime-genai writes in 4 bits, with its default blocks of 32.
- `genai` and `genai-int4` ran with the number of threads that onnxruntime-genai chooses itself, with which a step takes as long as with one thread. With two, its steps
  take about as long as those of target `ort` ([in 4 bits](fewer-bits.md#a-checkpoint-in-each-format)).

[Targets of these figures and the cost of a session](speed-targets.md) are on a page for developers. `posenc bench` compares your own artefacts in the same way.
"""

DEVELOPERS = """# Targets of speed

For developers: ratios that must not grow, what a session adds to its graph, and how the figures of [speed](speed.md) were measured.
`python -m bench.speed` measures all parts and writes both pages, or with `--only PART` one part.

In all parts but the first, each step was followed by a rewind, which is not timed, and prompts had fewer rounds: they were measured with an earlier version of the
benchmark. Other processes disturbed more than half of the samples of the first two parts. The hand-written contestants are posenc_export/benchmark/peers/hand_graph.py
and hand_torchscript.py. `openvino` keeps the caches as state of the graph.

"""

SESSION = """Steps of the block of width 512, two at a time in one process (`bench/hand_graph.py` of commit dc58e7a). `hand` and `artefact` are the hand-written graph
and the graph of target `ort`, run with bound inputs and outputs and without a session; `raw` is the artefact run in that way with the session's threads.
A session checks its inputs, counts its tokens and can be rewound; the contestant `hand-written` above runs its graph from a few lines of Python, which do
nothing of this."""


@dataclass(frozen=True)
class Target:
    """A ratio of times that the page reports: that of contestant `ours` to that of `theirs`,
    with its upper bound `most`, or None for no bound.
    """

    part: str
    phase: str
    tokens: int
    ours: str
    theirs: str
    most: Optional[float] = None


TARGETS = (
    *(
        Target("block", "decode", tokens, "rope-ort", "hand-written rope", 1.0)
        for tokens in (128, 1024, 8192)
    ),
    *(
        Target("block", "decode", tokens, "rope-torchscript", "hand-written-torchscript rope", 1.1)
        for tokens in (128, 1024, 8192)
    ),
    *(
        Target("block", "decode", tokens, "rope-aotinductor", "hand-written-torchscript rope")
        for tokens in (128, 1024, 8192)
    ),
    *(
        Target("layers", "decode", tokens, "rope-ort", "hand-written rope")
        for tokens in (128, 1024)
    ),
    *(Target("model", "decode", tokens, "rope-ort", "hand-written rope") for tokens in (128, 1024)),
    Target("model", "prefill", 1024, "rope-ort", "hand-written rope", 1.02),
    Target("model", "prefill", 1024, "alibi-ort", "rope-ort", 1.05),
    *(
        Target("bits", "prefill", 1024, "rope-ort-int8", theirs, 0.5)
        for theirs in ("rope-ort", "hand-written")
    ),
    *(
        Target("bits", "decode", tokens, "rope-ort-int8", theirs, 0.45)
        for tokens in (128, 1024)
        for theirs in ("rope-ort", "hand-written")
    ),
    *(
        Target("cache", "decode", tokens, "rope-ort-cache-int8", theirs, most)
        for tokens, most in ((1024, None), (8192, 0.55))
        for theirs in ("rope-ort", "hand-written")
    ),
)

CONTEXTS, SUMMARIZED = (128, 1024), {"model", "bits"}
OURS = "rope-ort"
QUALITY = Path(__file__).parent / "results" / "bits.json"  # of bench.bits
# Rows of the summary: part, contestant, description, name of the weights in QUALITY.
SUMMARY = (
    ("model", "hand-written rope", "hand-written graph of the same operators", "float32"),
    ("model", "openvino on rope-onnx-mask", "OpenVINO", "float32"),
    ("model", "transformers rope", "transformers, eager PyTorch", "float32"),
    ("bits", "rope-ort-int8", "target `ort`, `int8`", "int8"),
    ("bits", "rope-ort-int4", "target `ort`, `int4`", "int4"),
)


def perplexities() -> Dict[str, str]:
    """Return the perplexity of each format relative to float32, by the name of the weights in
    QUALITY.
    """
    return {
        row["weights"]: f"{row['perplexity']:.2f}"
        for row in json.loads(QUALITY.read_text(encoding="utf-8"))["rows"]
        if "perplexity" in row
    }


def _compared(
    reports: Dict[str, Report], part: str, contestant: str, tokens: int
) -> Optional[Spread]:
    """Return the time of a contestant's decode step relative to that of target `ort` in float32."""
    return ratio(reports[part], Target(part, "decode", tokens, contestant, OURS))


def _said(found: Optional[Spread]) -> str:
    return "" if found is None else f"{found.median:.2f} ({found.low:.2f} .. {found.high:.2f})"


def summary(reports: Dict[str, Report]) -> List[str]:
    """Return a table of ratios of the decoder with 134 million parameters."""
    heads = [f"{tokens} cached tokens" for tokens in CONTEXTS] + ["relative perplexity"]
    lines, quality = (
        [
            f"| time of a step, relative to target `ort` in float32 | {' | '.join(heads)} |",
            "|---|---|---|---|",
        ],
        perplexities(),
    )
    for part, contestant, description, weights in SUMMARY:
        cells = [_said(_compared(reports, part, contestant, tokens)) for tokens in CONTEXTS] + [
            quality[weights]
        ]
        lines.append(f"| {description} | {' | '.join(cells)} |")
    return lines


def figure(reports: Dict[str, Report]) -> Any:
    """Return a matplotlib figure of the summary: a bar for each ratio, with its interval as a
    line.
    """
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(7.6, 2.8), layout="constrained")
    drawn = drawing.subplots(1, len(CONTEXTS), sharey=True)
    for axes, tokens in zip(drawn, CONTEXTS, strict=True):
        for place, (part, contestant, *_) in enumerate(SUMMARY):
            found = _compared(reports, part, contestant, tokens)
            if found is not None:
                axes.barh(
                    place,
                    found.median,
                    height=0.72,
                    color=COLOURS[0] if contestant.startswith(OURS) else "#b8bec6",
                )
                axes.hlines(place, found.low, found.high, color="#222222", linewidth=1)
                axes.annotate(
                    f"{found.median:.2f}",
                    (found.high, place),
                    xytext=(3, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=7,
                )
        own = next(
            row
            for row in reports["model"].rows
            if (row.phase, row.tokens, row.contestant) == ("decode", tokens, OURS)
        )
        axes.axvline(1, color=COLOURS[0], linewidth=1.5)
        axes.set_title(
            f"{tokens} cached tokens; 1 is target ort, {duration(own.median_seconds)}", fontsize=8
        )
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12)
    quality = perplexities()
    said = {
        weights: "" if weights == "float32" else f", perplexity x {quality[weights]}"
        for *_, weights in SUMMARY
    }
    drawn[0].set_yticks(
        range(len(SUMMARY)),
        [description.replace("`", "") + said[weights] for *_, description, weights in SUMMARY],
        fontsize=8,
    )
    drawn[0].invert_yaxis()
    return drawing


def write(reports: Dict[str, Report], overhead: Sequence[Dict[str, Any]], folder: Path) -> None:
    """Write both pages, and the chart if its parts are measured."""
    (folder / "speed.md").write_text(page(reports), encoding="utf-8")
    (folder / "speed-targets.md").write_text(targets_page(reports, overhead), encoding="utf-8")
    if SUMMARIZED <= reports.keys():
        save(figure(reports), folder / "speed.svg")


def page(reports: Dict[str, Report]) -> str:
    """Return the page for users, with the parts in the order of TITLES."""
    lines = [HEAD.format(machine=_machine(next(iter(reports.values())))).rstrip("\n"), ""]
    if SUMMARIZED <= reports.keys():
        lines += [*summary(reports), ""]
    lines += [READING]
    for name, title in TITLES.items():
        if name in reports:
            lines += [f"## {title}", "", *_part(reports[name]), ""]
    return "\n".join(lines)


def targets_page(reports: Dict[str, Report], overhead: Sequence[Dict[str, Any]] = ()) -> str:
    """Return the page for developers. overhead: results of bench/hand_graph.py."""
    lines = [DEVELOPERS.rstrip("\n"), "", *_targets(reports), ""]
    if overhead:
        lines += ["## What the session adds to its graph", "", *_overhead(overhead), ""]
    return "\n".join(lines)


def _machine(report: Report) -> str:
    return f"{report.machine.cores} cores of an {report.machine.processor}"


def ratio(report: Report, target: Target) -> Optional[Spread]:
    """Return the ratio of times, ours to theirs, with its interval; None if a contestant is
    missing or rounds are too few.
    """
    ours, theirs = (_row(report.rows, target, name) for name in (target.ours, target.theirs))
    return (
        None
        if ours is None or theirs is None
        else ratio_of(ours.samples_seconds, theirs.samples_seconds)
    )


def _row(rows: Sequence[Row], target: Target, name: str) -> Optional[Row]:
    return next(
        (
            row
            for row in rows
            if (row.phase, row.tokens, row.contestant) == (target.phase, target.tokens, name)
        ),
        None,
    )


def _targets(reports: Dict[str, Report]) -> List[str]:
    lines = [
        "| part | work | time of | relative to | ratio | interval | at most | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for target in TARGETS:
        found = ratio(reports[target.part], target) if target.part in reports else None
        measured = (
            "| | "
            if found is None
            else f"| {found.median:.2f} | {found.low:.2f} .. {found.high:.2f} "
        )
        verdict = (
            ""
            if found is None or target.most is None
            else "met"
            if found.median <= target.most
            else "missed"
        )
        most = "" if target.most is None else f"{target.most:.2f}"
        lines.append(
            f"| {target.part} | {target.phase} {target.tokens} | `{target.ours}` | "
            f"`{target.theirs}` {measured}| {most} | {verdict} |"
        )
    return lines


def _overhead(found: Sequence[Dict[str, Any]]) -> List[str]:
    lines = [SESSION, ""]
    lines += [
        "| second / first | first | second | ratio | spread | difference |",
        "|---|---|---|---|---|---|",
    ]
    for each in found:
        first, second = (duration(part["median"]) for part in each["seconds"])
        measured = (
            "| | | |"
            if each["ratio"] is None
            else _ratio_and_difference(each["ratio"], each["difference"]["median"])
        )
        lines.append(f"| {each['what']} | {first} | {second} {measured}")
    return lines


def _ratio_and_difference(ratio: Dict[str, float], seconds: float) -> str:
    return (
        f"| {ratio['median']:.2f} | {ratio['low']:.2f} .. {ratio['high']:.2f} | "
        f"{1e6 * seconds:+.1f} us |"
    )


def _part(report: Report) -> List[str]:
    machine, limits = report.machine, report.limits
    libraries = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    read = ", ".join(
        f"{size(each.bytes)} at {each.read_bytes_per_second / 1e9:.0f} GB/s" for each in limits.read
    )
    empty = (
        ""
        if limits.empty_run_seconds is None
        else f" An empty run of ONNX Runtime takes {duration(limits.empty_run_seconds)}."
    )
    busy = " Measured on a busy machine." if (report.other_cores or 0.0) > BUSY else ""
    lines = [
        (
            f"{machine.processor}, {machine.threads} threads on {machine.cores} cores; "
            f"{libraries}.{busy}"
        ),
        "",
    ]
    lines += [
        (
            f"Limits of the machine in the same run: reads {read}; multiplies at "
            f"{limits.gemm_flops_per_second / 1e9:.0f} GFLOP/s.{empty}"
        ),
        "",
    ]
    works = list(dict.fromkeys((row.phase, row.tokens) for row in report.rows))
    heads = " | ".join(f"{phase} {tokens}" for phase, tokens in works)
    lines += [f"| contestant | {heads} |", "|---|" + "---|" * len(works)]
    cells = {(row.contestant, row.phase, row.tokens): _cell(row) for row in report.rows}
    for name in dict.fromkeys(row.contestant for row in report.rows):
        row = " | ".join(cells.get((name, *work), "") for work in works)
        lines.append(f"| {name} | {row} |")
    return lines


def _cell(row: Row) -> str:
    """Return the median time of a row, and its ratio to the fastest contestant."""
    against = "" if row.ratio_to_fastest is None else f" ({row.ratio_to_fastest:.2f})"
    return f"{duration(row.median_seconds)}{against}"
