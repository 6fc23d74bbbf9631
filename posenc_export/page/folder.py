"""The folder of a page: model, onnxruntime-web, one document, one script, and what they show as JSON."""

import json
import shutil
from importlib import resources
from pathlib import Path
from typing import Any, Dict, Optional

from posenc_export.page import graph, patterns
from posenc_export.runtime import files
from posenc_export.runtime import manifest as manifests
from posenc_export.runtime.manifest import Manifest
from posenc_export.runtime.rules import B, P
from posenc_export.runtime.summary import summary
from posenc_export.text import BYTES

ASSETS = ("index.html", "page.js", "model.js")
WEB = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")  # the build for WebAssembly alone: 14 MB instead of 27
INPUTS = ("input_ids", "logits_index", "position_ids", "attention_mask")  # that page.js can fill
DISTANCES = 48  # tokens back that a page draws
CONTEXT = 1024  # bytes of text that a page reads at most


def write(folder: Path, output: Path, onnxruntime_web: Optional[Path] = None) -> Manifest:
    """Write the page of an artefact; its manifest.

    Args:
        folder: of a byte-level decoder, target onnx, float32.
        output: folder of the page; files in it are replaced.
        onnxruntime_web: folder of the npm package onnxruntime-web; the nearest node_modules above the working folder where None.

    Raises:
        ValueError: another kind of artefact, no onnxruntime-web.
        ModuleNotFoundError: the extra export is not installed.
    """
    manifest, folder = manifests.read(folder), files.locate(folder)
    _check(manifest)
    web = _web(onnxruntime_web)
    (output / "onnxruntime-web").mkdir(parents=True, exist_ok=True)
    for name in WEB:
        shutil.copyfile(web / "dist" / name, output / "onnxruntime-web" / name)
    shutil.copyfile(folder / "model.onnx.data", output / "model.onnx.data")
    layers = graph.with_attention(folder / "model.onnx", output / "model.onnx")
    graph.check_copy(folder / "model.onnx", output / "model.onnx", manifest)
    for name in ASSETS:
        (output / name).write_bytes(resources.files("posenc_export.page").joinpath("assets", name).read_bytes())
    shown = _shown(str(manifest.source.get("preset", folder.resolve().name)), manifest, layers, json.loads((web / "package.json").read_bytes())["version"])
    (output / "page.json").write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")
    return manifest


def _check(manifest: Manifest) -> None:
    if manifest.target != "onnx" or manifest.kind != "decoder" or manifest.dtype != "float32" or manifest.encoder:
        found = f"{manifest.kind} for target {manifest.target}, {manifest.dtype}"
        raise ValueError(f"page: expected a decoder for target onnx, float32, got {found}; export one with --target onnx")
    if manifest.vocabulary != BYTES or "tokenizer.json" in manifest.files:
        rule = f"page: expected a byte-level decoder (vocabulary {BYTES}), whose text needs no tokenizer"
        raise ValueError(f"{rule}, got {manifest.vocabulary} token ids; transformers.js runs it where it was exported with --signature mask")
    unknown = [value.name for value in manifest.inputs if value.name not in INPUTS]
    if unknown:
        raise ValueError(f"page: expected inputs among {', '.join(INPUTS)}, got {unknown[0]}; use posenc inspect --runtime node")


def _web(given: Optional[Path]) -> Path:
    """The folder of onnxruntime-web.

    Raises:
        ValueError: none, or one without the files that a page needs.
    """
    here = Path.cwd()
    places = [given] if given is not None else [place / "node_modules" / "onnxruntime-web" for place in (here, here / "build", *here.parents)]
    for place in places:
        if all((place / "dist" / name).is_file() for name in WEB):
            return place
    found = "none" if given is None else f"{given} without dist/{WEB[-1]}"
    raise ValueError(f"page: expected the npm package onnxruntime-web, got {found}; npm install onnxruntime-web, or give --onnxruntime-web FOLDER")


def _shown(name: str, manifest: Manifest, layers: Any, version: str) -> Dict[str, Any]:
    """What page.js reads."""
    sizes: Dict[Any, Any] = {B: 1, P: 0}
    states = [
        {"past": state.past, "present": state.present, "dtype": state.dtype, "shape": [sizes.get(axis, axis) for axis in state.axes], "fill": state.fill}
        for state in manifest.states
    ]
    return {
        "name": name,
        "summary": summary(manifest),
        "weights": manifest.step_weights,
        "digest": manifest.digest,
        "onnxruntime_web": version,
        "inputs": [value.name for value in manifest.inputs],
        "output": manifest.outputs[0].name,
        "axes": manifest.axes,
        "states": states,
        "stop_ids": manifest.stop_ids,
        "context": min(manifest.max_positions, CONTEXT),
        "positions": manifest.max_positions,
        "attention": layers,
        "patterns": patterns.of_layers(manifest, min(DISTANCES, manifest.max_positions)),
        "distances": min(DISTANCES, manifest.max_positions),
        "certificate": _certificate(manifest),
    }


def _certificate(manifest: Manifest) -> Optional[Dict[str, Any]]:
    made = manifest.certificate
    if made is None:
        return None
    return {**{key: value for key, value in made.items() if key != "cells"}, "cells": len(made["cells"]), "worst": max(made["cells"].values())}
