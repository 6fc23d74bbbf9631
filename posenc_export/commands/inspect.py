"""`posenc inspect`: print the contents of an artefact, or a program that runs it."""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from posenc_export.clients.programs import groups, program
from posenc_export.commands.options import Table, folder_of, option
from posenc_export.commands.terminal import summary
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.certificate import format_unproved, format_unreached
from posenc_export.runtime.artefact.files import locate
from posenc_export.runtime.artefact.graph_inputs import meanings_of
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.rules import graph_file
from posenc_export.runtime.artefact.summary import lines as lines_of
from posenc_export.runtime.artefact.summary import summary as described
from posenc_export.runtime.graphs import cuda_placement
from posenc_export.runtime.graphs.providers import threads_text
from posenc_export.shared.tables import WIDTH, aligned

Line = tuple[str, str]
OPTIONS: Table = {
    **folder_of(),
    "--runtime": option(
        "print a program that runs this artefact without posenc: python, node, web or c (ONNX "
        "Runtime), libtorch (C++), openvino, tract, reference (of onnx)"
    ),
}


def run(options: argparse.Namespace) -> int:
    manifest = manifests.read(options.folder)
    if options.runtime is not None:
        print(program(manifest, options.runtime), end="")
    elif options.json:
        values = {**manifest.to_json(), "digest": manifest.digest}
        print(json.dumps(values, indent=1, sort_keys=True))
    else:
        parts = (_model(manifest), _operators(manifest), _values(manifest), _states(manifest))
        lines = [*itertools.chain(*parts), *_cuda(options.folder, manifest), *_proof(manifest)]
        layers = aligned(None, lines_of(manifest.config), WIDTH)
        print("\n".join([*aligned(None, lines, WIDTH), "", *layers]))
    return 0


def _model(manifest: Manifest) -> list[Line]:
    packages = []
    for name, origin in manifest.packages.items():
        version = origin.version or "(no version)"
        packages.append(("package", f"{name}, from {origin.name} {version}"))
    return [*described(manifest).items(), *packages]


def _operators(manifest: Manifest) -> list[Line]:
    stated = str(manifest.interface or "not stated, written by an earlier version")
    interface = ("interface", stated)
    if not manifest.operators:
        return [interface]
    operators = [f"{name} {count}" for name, count in manifest.operators.items()]
    opset = [f"{domain or 'ai.onnx'} {number}" for domain, number in manifest.opset.items()]
    return [interface, ("operators", ", ".join(operators)), ("opset", ", ".join(opset))]


def _values(manifest: Manifest) -> list[Line]:
    meanings, lines = meanings_of(manifest), []
    titles = {"input": manifest.inputs, "encoder": manifest.encoder, "output": manifest.outputs}
    for title, values in titles.items():
        for value in values:
            text = f"{value.name} {value.dtype} {_axes(value.axes)}. {meanings.get(value.name, '')}"
            lines.append((title, text.rstrip()))
    return lines


def _states(manifest: Manifest) -> list[Line]:
    meanings, lines = meanings_of(manifest), []
    for group in groups(manifest):
        state = group.example
        name = f"{state.past} -> {state.present}"
        if group.layers:
            parts = "|".join(group.parts)
            name = f"past_key_values.N.{parts} -> present.N..., {len(group.layers)} layers,"
        lines.append(("state", f"{name} {state.dtype} {_axes(state.axes)}. {meanings[state.past]}"))
    return lines


def _cuda(folder: Path, manifest: Manifest) -> list[Line]:
    """Line for what the CUDA provider would make of an ONNX graph."""
    if graph_file(manifest) != "model.onnx":
        return []
    grows = any(state.grows for state in manifest.states)
    placed = cuda_placement.placed(locate(folder) / graph_file(manifest)).said(grows)
    version = cuda_placement.table()[0]
    said = f"{placed} (from the kernels of onnxruntime-gpu {version}; this proves no value)"
    return [("on CUDA", said)]


def _axes(axes: tuple[object, ...]) -> str:
    return "[" + ",".join(map(str, axes)) + "]"


def _proof(manifest: Manifest) -> list[Line]:
    sizes = ", ".join(f"{name} {file.bytes}" for name, file in manifest.files.items())
    proof: Any = manifest.certificate or {}
    figures = summary(proof) if proof else {}
    errors = ", ".join(f"{name} {value}" for name, value in figures.items())
    lines = [
        ("files", f"{sizes} bytes"),
        ("threads", threads_text(manifest)),
        ("digest", manifest.digest),
        ("certificate", errors or "none: not verified"),
        ("not proved", format_unproved(proof)),
        ("oracle", proof.get("against")),
        ("not reached", format_unreached(proof)),
    ]
    return [(name, text) for name, text in lines if text]
