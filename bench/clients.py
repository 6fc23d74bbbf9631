"""Compare other runtimes with a posenc session: run the programs of docs/runtimes on newly exported
artefacts.

    python -m bench.clients [--only NAME ...]

Each runtime has its own environment below build/clients, which is created if it does not exist.
The C API needs POSENC_ORT_INCLUDE, the folder of the headers of ONNX Runtime; other programs need
Node or a compiler. Rows of runtimes that cannot run on this machine are kept from the JSON file.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Sequence

import numpy as np

from bench import client_runs as runs
from bench import json_rows, marked
from bench.client_runs import COUNT, PROMPT, TOP, Refused, Trial
from posenc_export.export import Sources, export
from posenc_export.models.presets import load_preset
from posenc_export.runtime import load
from posenc_export.runtime.artefact import manifest as manifests

ENVIRONMENTS, RESULTS = TOP / "build/clients", TOP / "bench/results/clients.json"
PRESETS = ("tiny-rope", "tiny-alibi")
ONNX, BOTH = ("onnx", "onnx-static", "ort"), ("positions", "mask")
Row = dict[str, Any]


@dataclass(frozen=True)
class Client:
    """A runtime to compare."""

    name: str  # name in the table
    # Returns the version in an environment; None if the runtime cannot run on this machine.
    version: Callable[[Path], str | None]
    # Runs a trial and returns its worst error; None if equal tokens are compared in its place.
    run: Callable[[Trial, Path], float | None]
    targets: Sequence[str] = ONNX  # targets of the artefacts to run
    signatures: Sequence[str] = BOTH  # signatures of the artefacts to run


MASK = ("mask",)
CLIENTS = {
    "python": Client("ONNX Runtime, Python", runs.installed("onnxruntime"), runs.probed("python")),
    "node": Client("ONNX Runtime, Node", runs.of_node("onnxruntime-node"), runs.in_node()),
    "c": Client("ONNX Runtime, C API", runs.of_c_api, runs.compiled("c")),
    "genai": Client(
        "onnxruntime-genai",
        runs.installed("onnxruntime-genai"),
        runs.generated("generate_genai.py"),
        signatures=MASK,
    ),
    "optimum": Client(
        "optimum-onnx",
        runs.installed("optimum-onnx[onnxruntime]", "torch==2.13.0"),
        runs.generated("generate_optimum.py"),
        ("onnx", "ort"),
        MASK,
    ),
    "transformers.js": Client(
        "transformers.js, Node",
        runs.of_node("@huggingface/transformers"),
        runs.in_node("generate_transformers.mjs"),
        ("onnx", "ort"),
        MASK,
    ),
    "openvino": Client("OpenVINO, Python", runs.installed("openvino"), runs.probed("openvino")),
    "tract": Client("tract, Python", runs.installed("tract"), runs.probed("tract")),
    "reference": Client(
        "ReferenceEvaluator of onnx", runs.installed("onnx"), runs.probed("reference")
    ),
    "libtorch": Client(
        "libtorch, C++", runs.of_libtorch, runs.compiled("libtorch"), ("torchscript",)
    ),
}


def trials(folder: Path) -> dict[tuple[str, str, str], Trial]:
    """Export every preset in every form; return the trials by preset, target and signature."""
    exported = {}
    for preset in PRESETS:
        sources = Sources(load_preset(preset))
        for target in (*ONNX, "torchscript"):
            for signature in BOTH:
                place = folder / f"{preset}-{target}-{signature}"
                export(sources, target, place, signature=signature, verify=False)
                session = load(place, provider="cpu", threads=1).session()
                prompt = np.frombuffer(PROMPT, np.uint8).astype(np.int64)
                tokens = np.concatenate([prompt, *session.generate([prompt], COUNT)])[None]
                session.reset()
                exported[preset, target, signature] = Trial(
                    place, manifests.read(place), tokens, session.prefill(tokens[:, :-1]), folder
                )
    return exported


def rows_of(
    client: Client, version: str, exported: dict[tuple[str, str, str], Trial], environment: Path
) -> list[Row]:
    """Return one row for each artefact that the client runs or refuses."""
    rows: list[Row] = []
    for (preset, target, signature), trial in exported.items():
        if target not in client.targets or signature not in client.signatures:
            continue
        row: Row = {"client": client.name, "version": version, "preset": preset}
        row |= {"target": target, "signature": signature}
        with tempfile.TemporaryDirectory() as temporary:
            try:
                row["error"] = client.run(replace(trial, folder=Path(temporary)), environment)
            except Refused as refusal:
                row["refused"] = str(refusal)
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown page."""
    targets, lines = (*ONNX, "torchscript"), []
    for name in dict.fromkeys(row["client"] for row in rows):
        own = [row for row in rows if row["client"] == name]
        signatures = " and ".join(dict.fromkeys(row["signature"] for row in own))
        cells = (_cell([row for row in own if row["target"] == target]) for target in targets)
        lines.append([name, own[0]["version"], signatures, *cells])
    heads = ["runtime", "version", "signature", *(f"`{target}`" for target in targets)]
    text = marked.text("clients").format(bytes=len(PROMPT), tokens=COUNT)
    return f"{text}{marked.markdown(heads, lines)}\n"


def _cell(rows: Sequence[Row]) -> str:
    """Return the table cell of a client and a target: the worst error, and refusals."""
    if not rows:
        return "-"
    refusals = dict.fromkeys(row["refused"] for row in rows if "refused" in row)
    errors = [row["error"] for row in rows if row.get("error") is not None]
    ran = f"{max(errors):.1e}" if errors else "equal"
    taken = dict.fromkeys(row["preset"] for row in rows if "refused" not in row)
    if taken and refusals:
        ran = f"{ran} for {' and '.join(taken)}"
    return ", ".join([ran, *refusals] if taken else refusals)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=CLIENTS, help="keep rows of others")
    options = parser.parse_args()
    rows: list[Row] = json_rows.read(RESULTS, [])
    with tempfile.TemporaryDirectory() as temporary:
        exported = trials(Path(temporary))
        for key in options.only or CLIENTS:
            client, environment = CLIENTS[key], ENVIRONMENTS / key
            version = client.version(environment)
            if version is None:
                said = f"{client.name}: cannot run on this machine; its rows are kept"
                print(said, file=sys.stderr)
                continue
            rows = [row for row in rows if row["client"] != client.name]
            rows += rows_of(client, version, exported, environment)
    order = [client.name for client in CLIENTS.values()]
    rows.sort(key=lambda row: order.index(row["client"]))
    json_rows.write(RESULTS, rows)
    (TOP / "docs/runtimes/table.md").write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
