"""Plant faults in artefacts of several depths and formats, and write which are found to docs/planted-faults.md.

    python -m bench.planted_faults [--json FILE] [--depth N ...] [--format NAME ...]

Every artefact is the decoder of `described` with that number of layers. A fault counts as found if the artefact with the fault does not pass `posenc verify`, or if the
float32 graph of the same rounded numbers, which every export verifies too, does not pass with it. Every correct artefact must pass.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np

from posenc_export.export import Sources, export
from posenc_export.models.config import StackConfig
from posenc_export.models.presets import seeded
from posenc_export.models.short import block_config, decoder_config
from posenc_export.runtime import verify
from posenc_export.runtime.manifest import Manifest
from posenc_export.runtime.schema import bound_of
from tests.export.artefact_faults import FAULTS, measured, on_cpu

DEPTHS = (2, 12, 32, 48)
FORMATS = ("float32", "float16", "bfloat16", "int8", "int4", "int4-128", "cache int8")
VARIANTS = ("rope", "alibi")


def described(variant: str, layers: int) -> StackConfig:
    """A byte-level decoder of width 64 with grouped heads."""
    return decoder_config(256, layers, 128, block_config(64, 4, 96, kv_heads=2, encoding={"name": variant}))


def arguments_of(format_: str, folder: Path) -> Dict[str, Any]:
    """Return the arguments of `export` for a format; bfloat16 is that of a provider."""
    if format_ == "cache int8":
        sample = folder / "sample.txt"
        sample.write_bytes(np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint8).tobytes())
        return {"cache": "int8", "calibrate": sample}
    if format_.startswith("int"):
        return {"weights": format_}
    return {"dtype": "float16"} if format_ == "float16" else {}


def openers(format_: str) -> Tuple[str, Any]:
    """Return the provider of a format and the function that loads a graph with it."""
    if format_ != "bfloat16":
        return "cpu", on_cpu
    from posenc_export.runtime.openvino_graph import OpenVinoGraph

    return "openvino-bf16", lambda path, manifest: OpenVinoGraph(path, manifest, "openvino-bf16", 1)


def rows_of(layers: int, formats: List[str]) -> Iterator[Dict[str, Any]]:
    """Yield one row per format and fault: {"layers", "format", "fault", "found": name of the graph, cell, "error", "tolerance"}."""
    for variant in VARIANTS:
        sources = Sources(seeded(described(variant, layers)))
        with tempfile.TemporaryDirectory() as temporary:
            plain = Path(temporary) / "plain"
            exact = export(sources, "ort", plain, verify=False)
            for format_ in formats:
                folder = Path(temporary) / format_.replace(" ", "-")
                folder.mkdir()
                made = export(sources, "ort", folder / "artefact", verify=False, **arguments_of(format_, folder))
                provider, opener = openers(format_)
                correct = verify(folder / "artefact", provider)
                row = {"layers": layers, "format": format_, "variant": variant}
                yield {**row, "fault": "none", **_worst(correct), "graph": "" if correct["passed"] else "the artefact"}
                for name, fault in FAULTS.items():
                    if fault.variant == variant:
                        graphs = [("the artefact", folder / "artefact", made, opener)]
                        if format_ != "float32" and not fault.quantized_only:
                            graphs.insert(0, ("float32", plain, exact, on_cpu))
                        yield {**row, "fault": name, **_found(graphs, name, Path(temporary))}


def _found(graphs: List[Tuple[str, Path, Manifest, Any]], name: str, temporary: Path) -> Dict[str, Any]:
    for graph, folder, manifest, opener in graphs:
        with tempfile.TemporaryDirectory(dir=temporary) as scratch:
            made, tolerance = measured(folder, manifest, FAULTS[name], Path(scratch), opener)
        if made.exceeds(tolerance):
            return {"graph": graph, **_worst({"cells": made.cells, "bounds": made.bounds, "tolerance": tolerance})}
    return {"graph": "", **_worst({"cells": made.cells, "bounds": made.bounds, "tolerance": tolerance})}


def _worst(certificate: Any) -> Dict[str, Any]:
    cell = max(certificate["cells"], key=lambda name: certificate["cells"][name] / bound_of(certificate, name))
    return {"cell": cell, "error": certificate["cells"][cell], "tolerance": bound_of(certificate, cell)}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("bench/results/planted_faults.json"))
    parser.add_argument("--depth", type=int, action="append")
    parser.add_argument("--format", action="append", choices=FORMATS)
    options = parser.parse_args()
    rows: List[Dict[str, Any]] = []
    for layers in options.depth or DEPTHS:
        for row in rows_of(layers, options.format or list(FORMATS)):
            rows.append(row)
            print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
