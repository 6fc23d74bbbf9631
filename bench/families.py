"""Families of checkpoints against transformers: small random models, each way to call them, each target.

    python -m bench.families [--only NAME] [--json docs/families.json] [--markdown docs/families.md] [--jobs N]

Needs transformers. Each model is saved by transformers, read by from_pretrained, exported with its certificate, and called in every pattern.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

from posenc_export import export_model, from_pretrained, load
from posenc_export.export import Sources, VerificationError

DECODER_TARGETS = ("ort", "onnx", "onnx-static", "torchscript")
PATTERNS = ("full", "stepwise", "chunked", "shifted", "left-padded", "ragged")


def measured(name: str) -> List[Dict[str, Any]]:
    """Of every target {"model", "kind", "target", "certified", "nodes", "differences": {pattern: worst}, "share": of what is allowed}."""
    from tests.models import checkpoints, encoders, patterns

    ways = patterns.ENCODER if name in encoders.MODELS else patterns.DECODER
    skipped = patterns.BY_POSITION if name in checkpoints.BY_COLUMN else ()
    rows = []
    with tempfile.TemporaryDirectory() as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries that export
        peer, model_of_ours, opened = _read(name, Path(temporary) / "theirs")
        sources = Sources(model_of_ours)
        for target in DECODER_TARGETS:
            try:
                manifest = export_model(sources, target, Path(temporary) / target)
            except VerificationError:  # said in the row
                manifest = export_model(sources, target, Path(temporary) / target, verify=False)
            model = load(Path(temporary) / target, provider="cpu", threads=1)
            found = {pattern: way(peer, opened(model)) for pattern, way in ways.items() if pattern not in skipped}
            rows.append(
                {
                    "model": name,
                    "kind": manifest.kind,
                    "target": target,
                    "layers": sum(kind["sees"]["name"] != "encoder" for kind in _attentions(manifest.config)),
                    "nodes": manifest.operators.get("GroupQueryAttention", 0),
                    "certified": bool(manifest.certificate and manifest.certificate["passed"]),
                    "differences": {pattern: patterns.worst(pairs) for pattern, pairs in found.items()},
                    "share": max(patterns.share(pairs) for pairs in found.values()),
                }
            )
    return rows


def _attentions(config: Dict[str, Any]) -> List[Dict[str, Any]]:
    """The attention of each layer."""
    return [config["layers"][name]["attention"] for name in config["order"]]


def _read(name: str, folder: Path) -> Tuple[Any, Any, Callable[[Any], Any]]:
    """Transformers' model, ours, and how a loaded artefact of ours is called."""
    from tests.models import checkpoints, encoders, pairs

    if name in pairs.MODELS:
        peer, decoder, encoded = pairs.saved(name, folder)
        return peer, decoder, lambda model: pairs.Reading(model.session(), encoded)
    if name in encoders.MODELS:
        peer, folder = encoders.saved(name, folder)
        return peer, encoders.read(name, folder), lambda model: model.session()
    peer, folder = checkpoints.saved(name, folder)
    return peer, from_pretrained(folder), lambda model: model.session()


def passes(row: Dict[str, Any]) -> bool:
    """Whether an artefact is certified and gives what transformers gives."""
    return bool(row["certified"] and row["share"] <= 1)


def table(rows: Sequence[Dict[str, Any]]) -> str:
    """The rows as a page of Markdown."""
    lines = [
        "# Families of checkpoints",
        "",
        "Small random models of every family that `from_pretrained` reads, saved by transformers, exported with a certificate, and called in every way.",
        "Each cell is the largest difference to the logits (of encoders: the last hidden states) of transformers, in float32, over values of a size of",
        "about 1 to 10. A row passes where all its calls stay within 2e-4 + 1e-4 of the value and its certificate passed. `GQA` counts GroupQueryAttention",
        "nodes and layers on target `ort`, without the layers that read an encoder, which have no cache. A dash: the model has no cache, or transformers",
        "counts columns there and takes no positions.",
        "Written by `python -m bench.families`.",
        "",
        "| model | target | GQA | " + " | ".join(PATTERNS) + " | |",
        "|---|---|---|" + "---|" * (len(PATTERNS) + 1),
    ]
    for row in rows:
        cells = " | ".join(f"{row['differences'][pattern]:.1e}" if pattern in row["differences"] else "-" for pattern in PATTERNS)
        nodes = f"{row['nodes']}/{row['layers']}" if row["target"] == "ort" and row["kind"] == "decoder" else "-"
        lines.append(f"| {row['model']} | {row['target']} | {nodes} | {cells} | {'passed' if passes(row) else 'FAILED'} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str]) -> int:
    """0, or 1 where a row does not pass."""
    from tests.models import checkpoints, encoders, pairs

    names = [*checkpoints.MODELS, *encoders.MODELS, *pairs.MODELS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=names, help="these models, as lines on stdout; nothing is written")
    parser.add_argument("--json", type=Path, default=Path("docs/families.json"))
    parser.add_argument("--markdown", type=Path, default=Path("docs/families.md"))
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    rows: List[Dict[str, Any]] = []
    with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for found in pool.map(measured, options.only or names):
            rows += found
            print(f"{found[0]['model']}: {max(row['share'] for row in found):.2f} of what is allowed", file=sys.stderr, flush=True)
    if options.only:
        print(table(rows))
    else:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        options.markdown.write_text(table(rows), encoding="utf-8")
    return 0 if all(map(passes, rows)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
