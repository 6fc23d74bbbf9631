"""Compare families of checkpoints with transformers: small random models, on every target and with
every call pattern.

    python -m bench.families [--only NAME] [--json docs/families.json] [--markdown docs/families.md]
    [--jobs N]

Needs transformers. Each model is saved by transformers, read by from_pretrained, exported with its
certificate, and called in every pattern.
"""

import argparse
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Dict, List, Sequence

from bench import marked
from posenc_export import export_model, from_pretrained, load
from posenc_export.export import Sources, VerificationError
from posenc_export.shared import json_rows
from posenc_export.shared.tables import markdown

DECODER_TARGETS = ("ort", "onnx", "onnx-static", "torchscript")
SHOWN = 5  # models of the table, besides those that fail


def measured(name: str) -> List[Dict[str, Any]]:
    """Return one row per target: {"model", "kind", "target", "certified", "layers", "fused",
    "differences": {pattern: worst}, "share": worst difference / allowed}.
    """
    from tests.models import checkpoints, encoders, patterns

    ways = patterns.ENCODER if name in encoders.MODELS else patterns.DECODER
    used = {key: way for key, way in ways.items() if key not in checkpoints.WITHOUT.get(name, ())}
    rows = []
    with tempfile.TemporaryDirectory() as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.onnx and torch.jit warn at every export
        tests: Any = encoders if name in encoders.MODELS else checkpoints
        peer, folder = tests.saved(name, Path(temporary) / "theirs")
        sources = Sources(from_pretrained(folder))
        for target in DECODER_TARGETS:
            try:
                manifest = export_model(sources, target, Path(temporary) / target)
            except VerificationError:  # the row shows it in "certified"
                manifest = export_model(sources, target, Path(temporary) / target, verify=False)
            model = load(Path(temporary) / target, provider="cpu", threads=1)
            pairs = {pattern: way(peer, model.session()) for pattern, way in used.items()}
            row = {"model": name, "kind": manifest.kind, "target": target}
            row["layers"] = len(manifest.config.get("order", ()))  # a module declares none
            row["fused"] = patterns.fused_layers(manifest)
            row["certified"] = bool(manifest.certificate and manifest.certificate["passed"])
            row["differences"] = {pattern: patterns.worst(pair) for pattern, pair in pairs.items()}
            row["share"] = max(map(patterns.share, pairs.values()))
            rows.append(row)
    return rows


def passes(row: Dict[str, Any]) -> bool:
    """Return whether an artefact is certified and agrees with transformers."""
    return bool(row["certified"] and row["share"] <= 1)


def table(rows: Sequence[Dict[str, Any]]) -> str:
    """Return the page as Markdown, with the models that fail or differ most."""
    models: Dict[str, List[Dict[str, Any]]] = {}
    for row in rows:
        models.setdefault(row["model"], []).append(row)
    names = sorted(models, key=lambda name: -max(row["share"] for row in models[name]))
    failed = [name for name in names if not all(map(passes, models[name]))]
    lines = []
    for name in dict.fromkeys([*failed, *names[:SHOWN]]):
        by_target = {row["target"]: row for row in models[name]}
        cells = (by_target[target] for target in DECODER_TARGETS)
        shares = (f"{row['share']:.2f}{'' if passes(row) else ' FAILED'}" for row in cells)
        lines.append([name, *shares])
    heads = ["model", *(f"`{target}`" for target in DECODER_TARGETS)]
    counts = {"passed": len(names) - len(failed), "models": len(names)}
    return marked.text("families").format(**counts, table=markdown(heads, lines))


def main() -> int:
    """Measure the models and write the results; return exit status 0, or 1 if a row fails."""
    from tests.models import checkpoints, encoders

    names = [*checkpoints.OURS, *encoders.MODELS]
    parser = argparse.ArgumentParser(description=__doc__)
    what = "measure only this model and print its rows; may be given several times"
    parser.add_argument("--only", action="append", choices=names, help=what)
    parser.add_argument("--json", type=Path, default=Path("docs/families.json"))
    parser.add_argument("--markdown", type=Path, default=Path("docs/families.md"))
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    rows: List[Dict[str, Any]] = []
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for of_model in pool.map(measured, options.only or names):
            rows += of_model
            share = max(row["share"] for row in of_model)
            text = f"{of_model[0]['model']}: {share:.2f} of the allowed difference"
            print(text, file=sys.stderr, flush=True)
    if options.only:
        print(table(rows))
    else:
        json_rows.write(options.json, rows)
        options.markdown.write_text(table(rows), encoding="utf-8")
    return 0 if all(map(passes, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
