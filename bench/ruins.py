"""Ruin artefacts and the exporter's stages, and write which part of the proof finds each ruin.

    python -m bench.ruins [--depth N ...] [--format NAME ...]

A ruin of a graph is planted twice: in a published artefact, whose digests are written anew and
which `posenc verify` then checks, and in what the exporter writes, while `export` verifies it. A
ruin of a stage is planted in a function of the exporter, and one of the runtime in a function that
runs the artefact. Every correct artefact must pass. The table of docs/proof-results.md names the
parts that find a ruin, of the rows of RESULTS, where other depths and formats keep theirs.
"""

import argparse
import contextlib
import dataclasses
import itertools
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, ContextManager, Iterator, Mapping, Sequence
from unittest import mock

import numpy as np
import onnx
import onnx_ir as ir
from msgspec.structs import replace

from bench import json_rows, marked
from bench.ruined_graphs import CACHES, FEW_BITS, FORMATS, NATIVE, ORIGINAL, RUINS, Graph, Ruin
from bench.ruined_stages import STAGE_RUINS, StageRuin
from posenc_export.export import Sources, VerificationError, export
from posenc_export.export.quantization.rounding import rounded
from posenc_export.export.targets import WRITERS, onnx_file
from posenc_export.models.config import StackConfig
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.models.weight_blocks import Blocks
from posenc_export.runtime import verify
from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.certificate import bound_of
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.shared.progress import Steps, silent

DEPTHS = (2, 12, 32)
# Targets of formats; others have `ort`.
TARGET = {"float16": "ort-cuda", **dict.fromkeys(NATIVE, "ort-native")}
RANGE, WINDOW = 1024, 512
PAGE, RESULTS = Path("docs/proof-results.md"), Path("bench/results/ruins.json")
# Encodings whose models have another name. Keys of LongRoPE are cached with both sets of factors.
ENCODINGS: dict[str, Any] = {
    "longrope": {
        "name": "rope_longrope",
        "short_factor": ";".join(str(1 + 0.1 * n) for n in range(8)),
        "long_factor": ";".join(str(2 + 0.3 * n) for n in range(8)),
        "original_max_positions": ORIGINAL,
    }
}
MODELS = ("rope", "alibi", "longrope", "shaw", "fox")


def decoder(name: str, layers: int, longest: int = RANGE, window: int = WINDOW) -> StackConfig:
    """A byte-level decoder of width 64 with grouped heads; "rope" has a window, too."""
    spec = ENCODINGS.get(name, {"name": name})
    block = block_config(64, 4, longest, kv_heads=2, encoding=spec)
    if name == "rope":
        sees = {"name": "window", "size": window}
        block = replace(block, attention=replace(block.attention, sees=sees))
    return decoder_config(256, layers, 128, block, tied=False)


def source_of(name: str, layers: int, format_: str) -> Sources:
    """Return a decoder; for "keep" with weights of a checkpoint of 4 bits with offsets."""
    model = seeded(decoder(name, layers))
    if format_ != "keep":
        return Sources(model)
    model.stored = {}
    for weight, (grid, codes) in rounded(model, "int4").weights.items():
        blocks = Blocks(codes.codes, codes.scales, codes.scales * np.float32(0.37), grid.bits)
        numbers = dataclasses.replace(codes, offsets=blocks.offsets).weight
        parameter = model.get_parameter(weight)
        parameter.data.copy_(parameter.new_tensor(numbers))
        # In place of a matrix of a checkpoint (models.weight_blocks.Matrix)
        model.stored[weight] = SimpleNamespace(blocks=lambda b=blocks: b)
    return Sources(model)


def arguments_of(format_: str, folder: Path) -> dict[str, Any]:
    """Return the arguments of `export` for a format."""
    if format_ in CACHES:
        sample = folder / "sample.txt"
        content = np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint8)
        sample.write_bytes(content.tobytes())
        return {"cache": "int8", "calibrate": sample}
    if format_ in FEW_BITS:
        return {"weights": format_, "max_loss": 10.0}
    return {"dtype": format_} if format_ == "float16" else {}


def ruined(folder: Path, plant: Callable[[Graph], None]) -> dict[str, Any]:
    """Change the graph of an artefact, and return its files with their digests. Weights stay at the
    places of their file that the manifest names.
    """
    proto = onnx.load(str(folder / "model.onnx"))
    plant(proto.graph)
    model = ir.from_proto(proto)
    names = ("model.onnx", onnx_file.WEIGHTS)
    (folder / names[1]).unlink(missing_ok=True)
    onnx_file.move_out(model.graph, folder, partial(Steps, silent, "writing weights"))
    (folder / names[0]).write_bytes(ir.to_proto(model).SerializeToString())
    return {name: files.entry(folder / name) for name in names if (folder / name).is_file()}


@contextlib.contextmanager
def exporting(target: str, plant: Callable[[Graph], None]) -> Iterator[None]:
    """Context in which the exporter writes ruined graphs."""
    right = WRITERS[target]

    def write(source: Any, manifest: Manifest, folder: Path) -> Manifest:
        written = right(source, manifest, folder)
        return written.replace(files={**written.files, **ruined(folder, plant)})

    with mock.patch.dict(WRITERS, {target: write}):
        yield


def finders(certificate: Mapping[str, Any]) -> set[str]:
    """Return the parts of the proof that found something: names of checks, and "grid"."""
    parts = {name for name, check in certificate["checks"].items() if check["failures"]}
    cells = certificate["cells"].items()
    if not all(error <= bound_of(certificate, cell) for cell, error in cells):
        parts.add("grid")
    return parts


def in_file(correct: Path, ruin: Ruin) -> set[str]:
    """Return what `posenc verify` finds in a published artefact with a ruin."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "artefact"
        shutil.copytree(correct, folder)
        manifest, changed = manifests.read(folder), ruined(folder, ruin.plant)
        manifests.write(manifest.replace(files={**manifest.files, **changed}), folder)
        return in_artefact(folder)


def in_artefact(folder: Path) -> set[str]:
    """Return what `posenc verify` finds."""
    try:
        return finders(verify(folder, "cpu", record=False))
    except ValueError:
        return {"load"}


def in_export(write: Callable[[], Any], wrong: ContextManager[Any]) -> set[str]:
    """Return what an export finds in a context that makes it wrong; empty if it publishes."""
    with wrong:
        try:
            write()
        except VerificationError as error:
            return finders(error.certificate)
        except ValueError:
            return {"load"}
    return set()


def rows_of(layers: int, name: str, format_: str) -> Iterator[dict[str, Any]]:
    """Yield one row per ruin of a model and format; ruin "none" is the correct artefact."""
    sources, target = source_of(name, layers, format_), TARGET.get(format_, "ort")
    row = {"layers": layers, "format": format_, "model": name}
    with tempfile.TemporaryDirectory() as temporary:
        correct, how = Path(temporary) / "correct", arguments_of(format_, Path(temporary))
        export(sources, target, correct, **how)
        yield {**row, "ruin": "none", "passed": not in_artefact(correct)}
        for ruin in (*RUINS, *STAGE_RUINS):
            if ruin.model != name or format_ not in ruin.formats:
                continue
            by, source = {}, sources
            if isinstance(ruin, StageRuin):
                source = Sources(sources.model)  # nothing that is known of the correct module
                wrong = ruin.plant(sources.model)
                if ruin.verifies:
                    with ruin.plant(sources.model):
                        by["verify"] = sorted(in_artefact(correct))
            else:
                wrong = exporting(target, ruin.plant)
                by["file"] = sorted(in_file(correct, ruin))
            with tempfile.TemporaryDirectory() as place:
                write = partial(export, source, target, Path(place) / "ruined", **how)
                by["export"] = sorted(in_export(write, wrong))
            yield {**row, "ruin": ruin.name, **by}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the page: per ruin and format, the parts that find it at every depth."""
    formats = [name for name in FORMATS if any(row["format"] == name for row in rows)]
    tried: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        tried.setdefault((row["ruin"], row["format"]), []).append(row)
    names = [ruin.name for ruin in (*RUINS, *STAGE_RUINS)]
    lines = [[name, *(_parts_of(tried.get((name, f), ())) for f in formats)] for name in names]
    return marked.markdown(["ruin", *formats], lines) + "\n"


def _parts_of(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    passed = sorted({row["layers"] for row in rows if not all(_ways(row).values())})
    if passed:
        return f"not found at {', '.join(map(str, passed))} layers"
    always = set.intersection(*(set(parts) for row in rows for parts in _ways(row).values()))
    return ", ".join(sorted(always)) or "found"


def _ways(row: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the parts that find a ruin by the way it was planted."""
    return {way: row[way] for way in ("file", "verify", "export") if way in row}


def undetected(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the ruins that pass, and the correct artefacts that do not."""
    wrong = []
    for row in rows:
        where = f"{row['ruin']} in {row['format']} at {row['layers']} layers ({row['model']})"
        if row["ruin"] == "none":
            wrong += [] if row["passed"] else [f"refused: {where}"]
        else:
            wrong += [f"{where}: passes {way}" for way, by in _ways(row).items() if not by]
    return wrong


def main() -> int:
    """Measure and write. Returns 1 if a ruin is not found or a correct artefact is refused."""
    as_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_is)
    parser.add_argument("--depth", type=int, action="append")
    parser.add_argument("--format", action="append", choices=FORMATS)
    options = parser.parse_args()
    every = itertools.product(options.depth or DEPTHS, MODELS, options.format or FORMATS)
    planted = {(ruin.model, name) for ruin in (*RUINS, *STAGE_RUINS) for name in ruin.formats}
    cases = [case for case in every if case[1:] in planted]
    stored = json_rows.read(RESULTS, [])
    rows = [row for row in stored if (row["layers"], row["model"], row["format"]) not in cases]
    for row in itertools.chain.from_iterable(rows_of(*case) for case in cases):
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    rows.sort(key=lambda row: (row["layers"], FORMATS.index(row["format"])))
    json_rows.write(RESULTS, rows)
    marked.replace(PAGE, "ruins", table(rows))
    wrong = undetected(rows)
    print("\n".join(wrong) or "every ruin was found, every correct artefact passed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
