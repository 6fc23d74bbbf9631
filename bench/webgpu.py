"""Compare decoders of one layer with each encoding on ONNX Runtime's WebGPU provider with their
references, and write the errors to docs/runtimes/webgpu.md.

    python -m bench.webgpu export FOLDER [--target TARGET ...] [--encoding NAME ...]
    python -m bench.webgpu run FOLDER --adapter NAME [--json FILE]
    python -m bench.webgpu page --json FILE

`export` runs where torch is installed. `run` runs in an environment with onnxruntime-webgpu, numpy
and msgspec, without torch; it appends to FILE as results come, and skips artefacts that FILE
already has.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, Sequence

from bench import marked
from posenc_export.runtime import load
from posenc_export.runtime.artefact.certificate import bound_of, worst_cell
from posenc_export.runtime.verification import forms
from posenc_export.shared import json_rows
from posenc_export.shared.tables import markdown

RESULTS = Path("bench/results/webgpu.json")
PAGE = Path("docs/runtimes/webgpu.md")


def write_artefacts(folder: Path, targets: Sequence[str], names: Sequence[str]) -> None:
    """Export a small decoder of one layer with each encoding."""
    from posenc_export.encodings import REGISTRY
    from posenc_export.export import Sources, export
    from posenc_export.models.presets import seeded
    from posenc_export.models.short_forms import block_config, decoder_config

    for name in names or REGISTRY:
        form: Dict[str, Any] = {
            "encoding": {"name": name},
            "causal": "causal" in REGISTRY[name].works_in,
        }
        block = block_config(48, 6, 1100, kv_heads=3, head_size=16, **form)
        sources = Sources(seeded(decoder_config(61, 1, 40, block, tied=name != "complex_order")))
        for target in targets:
            if not (folder / f"{name}-{target}").exists():
                export(sources, target, folder / f"{name}-{target}")


def measured(folder: Path, adapter: str) -> Dict[str, Any]:
    """Load an artefact on WebGPU and compare it with its reference. Return one row."""
    name, _, target = folder.name.partition("-")
    row: Dict[str, Any] = {"encoding": name, "target": target, "adapter": adapter}
    try:
        model = load(folder, provider="webgpu", check=False)
        proof = forms.few_cells(model, folder)
    except ValueError as error:
        return {**row, "refused": str(error)}
    worst = worst_cell(proof)
    return {
        **row,
        "passed": proof["passed"],
        "worst": proof["cells"][worst],
        "tolerance": bound_of(proof, worst),
        "at": worst,
        "failure": proof["failures"].get(worst, ""),
        "on_cpu": on_cpu(folder),
        "library": proof["machine"].rpartition(", ")[2],
    }


def on_cpu(folder: Path) -> Dict[str, int]:
    """Count the nodes by operator that run on the CPU, since WebGPU has no kernel for them."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = onnxruntime.InferenceSession(
        folder / "model.onnx", options, providers=["WebGpuExecutionProvider"], enable_fallback=0
    )
    parts = session.get_provider_graph_assignment_info()
    on_host = [part for part in parts if part.ep_name == "CPUExecutionProvider"]
    counts = Counter(node.op_type for part in on_host for node in part.get_nodes())
    return dict(sorted(counts.items()))


def run(folder: Path, adapter: str, results: Path) -> None:
    """Measure every artefact of a folder that the results lack, and write them after each."""
    rows = json.loads(results.read_text()) if results.exists() else []
    known = {f"{row['encoding']}-{row['target']}" for row in rows}
    for artefact in sorted(path for path in folder.iterdir() if (path / "posenc.json").exists()):
        if artefact.name not in known:
            rows.append(row := measured(artefact, adapter))
            json_rows.write(results, rows)
            print(json.dumps(row), flush=True)


def table(rows: List[Dict[str, Any]]) -> str:
    """Return the Markdown table of the results: the worst encoding of each target, and artefacts
    that are wrong, refused or fail.
    """
    lines = []
    for target in sorted({row["target"] for row in rows}):
        of_target = [row for row in rows if row["target"] == target]
        right = [row for row in of_target if row.get("passed")]
        worst = max(right, key=lambda row: float(row["worst"]))
        error = f"{worst['worst']:.1e} (`{worst['encoding']}`)"
        tolerance = f"{worst['tolerance']:.1e}"
        lines.append([f"`{target}`", len(of_target), len(right), error, tolerance])
    others = [row for row in rows if not row.get("passed")]
    said = [f"- `{row['encoding']}` on `{row['target']}`: {_failure(row)}" for row in others]
    heads = ["target", "encodings", "right", "largest error", "tolerance"]
    return "\n".join([markdown(heads, lines), *([""] if said else []), *said])


def _failure(row: Dict[str, Any]) -> str:
    """Return why an artefact is not right."""
    if "refused" in row:
        return f"refused: {row['refused']}"
    return str(row["failure"] or f"wrong by {row['worst']:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=("export", "run", "page"))
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--target", action="append", help="target to export (default: onnx)")
    what = "encoding to export (default: all)"
    parser.add_argument("--encoding", action="append", default=[], help=what)
    what = "name of the GPU adapter, for the results"
    parser.add_argument("--adapter", default="unnamed", help=what)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.task == "page":
        marked.replace(PAGE, "results", table(json.loads(options.json.read_text())) + "\n")
    elif options.folder is None:
        parser.error(f"{options.task} needs a folder")
    elif options.task == "export":
        write_artefacts(options.folder, options.target or ["onnx"], options.encoding)
    else:
        run(options.folder, options.adapter, options.json)


if __name__ == "__main__":
    main()
