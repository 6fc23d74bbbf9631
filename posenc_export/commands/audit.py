"""`posenc audit`: compare a graph that others exported with its checkpoint or module."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from posenc_export.commands.options import Table, option
from posenc_export.commands.terminal import FAILED_CHECK, note, show

if TYPE_CHECKING:
    from posenc_export.auditing import Audit

SHOWN = 10  # cells that are printed
REPEATS, PAGE = b"Written by posenc audit", b"<!-- posenc audit -->"  # marks of written files
OPTIONS: Table = {
    "graph": option(
        "ONNX file of a decoder, an encoder or a block, of any exporter; or a program of "
        "torch.export (.pt2)",
        type=Path,
    ),
    "--reference": option(
        "what the graph should compute: a checkpoint folder, a GGUF file, the folder of an "
        "artefact, transformers:FOLDER, or package.module:name of a torch.nn.Module or of a "
        "function that returns one",
        required=True,
    ),
    "--inputs": option(
        "JSON or TOML file that says what inputs mean whose names do not: "
        '{"inputs": {NAME: MEANING}, "caches": {PAST: {"present": NAME, "slots": AXIS}}}',
        type=Path,
        metavar="FILE",
    ),
    "--repeat": option(
        "where to write a program that repeats the first wrong token with onnxruntime and numpy "
        "alone (default: GRAPH-repeat.py in the working folder, if the graph is wrong)",
        type=Path,
        metavar="FILE",
    ),
    "--html": option("write a page with errors over positions", type=Path, metavar="FILE"),
    "--quick": option("run one scenario of each kind of call", action="store_true"),
    "--all": option("print every cell", action="store_true"),
}


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 0, or 1 if the graph is wrong or refuses a call."""
    from posenc_export.auditing import audit
    from posenc_export.runtime.artefact.places import Form, check_file, write_file

    file = options.repeat or Path(f"{options.graph.stem}-repeat.py")
    of_program, of_page = Form("audit", REPEATS), Form("audit", PAGE)
    for path, form in ((options.repeat, of_program), (options.html, of_page)):
        if path is not None:
            check_file(path, form)
    result = audit(
        options.graph, options.reference, options.inputs, options.quick, progress=options.say
    )
    options.say.close()
    if options.html:
        from posenc_export.auditing.page import render

        write_file(options.html, render(result, options.graph.name).encode(), of_page)
    if options.json:
        print(json.dumps(result.as_json(), indent=1, sort_keys=True))
    else:
        _print(result, options.all)
    if result.program:
        write_file(file, result.program.encode(), of_program)
        note(f"python {file} repeats the first wrong token")
    return 0 if result.right else FAILED_CHECK


def _print(result: "Audit", every: bool) -> None:
    show(list(result.inputs))
    print()
    worse = [cell for cell in result.cells if cell.status in ("wrong", "refused")]
    shown = result.cells if every else worse[:SHOWN]
    rows = []
    for cell in shown:
        row = {"cell": cell.name, "result": cell.status, "error": f"{cell.error:.1e}"}
        row["tolerance"] = f"{cell.tolerance:.1e}"
        row["first wrong"] = str(cell.first) if cell.first >= 0 else "-"
        rows.append({**row, "": cell.message})
    if rows:
        show(rows)
    if len(shown) < len(result.cells):
        print(f"{len(result.cells)} cells; --all prints all\n")
    print(result.sentence)
