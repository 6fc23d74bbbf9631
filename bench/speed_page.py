"""docs/speed.md from what bench/speed.py measured."""

from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence

from posenc_export.benchmark.report import Report, Row, duration, rate, size
from posenc_export.benchmark.spread import Spread, spread

TITLES = {
    "block": "A block of 512 with 8 heads",
    "layers": "A decoder of 4 layers of 256",
    "model": "A decoder of 134 million parameters (Llama's shape: vocabulary 49152, width 576, 30 layers, 9 heads, 3 kv heads, MLP 1536)",
}
HEAD = """# Speed

Decode is one step of one row at so many cached tokens, prefill one prompt from an empty cache. Each contestant runs in a process of its own, in turn, while the
others are stopped; samples that other processes disturbed are taken again. A time is the median, the spread goes from the 10th to the 90th percentile. A ratio is
formed within one run, round by round. It is blank where samples stayed disturbed. Weights are random and float32.

`ort`, `onnx`, `onnx-static` and `torchscript` are targets of `posenc export`, behind the encoding's name. `hand-written` is a graph of the fused operators of ONNX
Runtime written node by node (posenc_export/benchmark/peers/hand_graph.py), `hand-written-torchscript` a scripted module with caches written in place
(hand_torchscript.py there), `transformers` is LlamaForCausalLM in eager mode; all have the same weights.
`genai` (onnxruntime-genai) and `openvino` load an artefact with signature `mask`. Of a prompt, the logits of its last token are
computed; artefacts with signature `mask` compute those of every token.

Written by `python -m bench.speed`, which measures everything again, `--only PART` a part of it. `posenc bench` does the same for artefacts of one's own.
"""


@dataclass(frozen=True)
class Target:
    """What the time of `ours` over that of `theirs` should be at most; no bound where None."""

    part: str
    phase: str
    tokens: int
    ours: str
    theirs: str
    most: Optional[float] = None


TARGETS = (
    *(Target("block", "decode", tokens, "rope-ort", "hand-written rope", 1.0) for tokens in (128, 1024, 8192)),
    *(Target("block", "decode", tokens, "rope-torchscript", "hand-written-torchscript rope", 1.1) for tokens in (128, 1024, 8192)),
    *(Target("layers", "decode", tokens, "rope-ort", "genai on rope-ort-mask", 0.92) for tokens in (128, 1024)),
    *(Target("layers", "decode", tokens, "rope-ort", "hand-written rope") for tokens in (128, 1024)),
    *(Target("model", "decode", tokens, "rope-ort", theirs) for tokens in (128, 1024) for theirs in ("genai on rope-ort-mask", "hand-written rope")),
    Target("model", "prefill", 1024, "rope-ort", "hand-written rope", 1.02),
    Target("model", "prefill", 1024, "alibi-ort", "rope-ort", 1.05),
)


def page(reports: Dict[str, Report]) -> str:
    """The parts in the order of TITLES."""
    lines = [HEAD, "## Targets", "", *_targets(reports), ""]
    for name, title in TITLES.items():
        if name in reports:
            lines += [f"## {title}", "", *_part(reports[name]), ""]
    return "\n".join(lines)


def ratio(report: Report, target: Target) -> Optional[Spread]:
    """Time of ours over theirs, round by round; None where one is missing or stayed disturbed."""
    ours, theirs = (_row(report.rows, target, name) for name in (target.ours, target.theirs))
    if ours is None or theirs is None or ours.samples_disturbed or theirs.samples_disturbed:
        return None
    return spread([a / b for a, b in zip(ours.samples_seconds, theirs.samples_seconds, strict=False)])


def _row(rows: Sequence[Row], target: Target, name: str) -> Optional[Row]:
    return next((row for row in rows if (row.phase, row.tokens, row.contestant) == (target.phase, target.tokens, name)), None)


def _targets(reports: Dict[str, Report]) -> List[str]:
    lines = ["| part | work | time of | over that of | measured | spread | at most | |", "|---|---|---|---|---|---|---|---|"]
    for target in TARGETS:
        found = ratio(reports[target.part], target) if target.part in reports else None
        measured = "| | " if found is None else f"| {found.median:.2f} | {found.low:.2f} .. {found.high:.2f} "
        verdict = "" if found is None or target.most is None else "met" if found.median <= target.most else "missed"
        most = "" if target.most is None else f"{target.most:.2f}"
        lines.append(f"| {target.part} | {target.phase} {target.tokens} | `{target.ours}` | `{target.theirs}` {measured}| {most} | {verdict} |")
    return lines


def _part(report: Report) -> List[str]:
    machine, limits = report.machine, report.limits
    libraries = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    read = ", ".join(f"{size(each.bytes)} at {each.read_bytes_per_second / 1e9:.0f} GB/s" for each in limits.read)
    empty = "" if limits.empty_run_seconds is None else f" An empty run of ONNX Runtime takes {duration(limits.empty_run_seconds)}."
    trust = f" {report.disturbed} samples stayed disturbed." if report.disturbed else ""
    lines = [f"{machine.processor}, {machine.threads} threads on {machine.cores} cores; {libraries}.{trust}", ""]
    lines += [f"Limits of the machine in the same run: reads {read}; multiplies at {limits.gemm_flops_per_second / 1e9:.0f} GFLOP/s.{empty}", ""]
    lines += ["| work | contestant | median | spread | tokens/s | to the fastest | of the read limit |", "|---|---|---|---|---|---|---|"]
    return lines + [_line(row) for row in report.rows]


def _line(row: Row) -> str:
    against = "" if row.ratio_to_fastest is None else f"{row.ratio_to_fastest:.2f}"
    share = "" if row.share_of_limit is None else f"{row.share_of_limit:.0%}"
    between = f"{duration(row.p10_seconds)} .. {duration(row.p90_seconds)}"
    return f"| {row.phase} {row.tokens} | {row.contestant} | {duration(row.median_seconds)} | {between} | {rate(row.tokens_per_second)} | {against} | {share} |"
