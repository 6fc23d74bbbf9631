"""`posenc audit`: compare a graph that others exported with its checkpoint or module."""

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from posenc_export.commands.model_argument import imported
from posenc_export.commands.options import Table, option
from posenc_export.commands.terminal import FAILED_CHECK, note, show
from posenc_export.runtime.artefact.destinations import Form, check_file, write_file
from posenc_export.shared.refusal import refusal
from posenc_export.shared.tables import counted

if TYPE_CHECKING:
    from posenc_export.auditing import Audit

SHOWN = 10  # cells that are printed
OPTIONS: Table = {
    "graph": option(
        "ONNX file of a decoder, an encoder or a block, of any exporter; a program of torch.export "
        "(.pt2); or the folder that an exporter wrote",
        type=Path,
    ),
    "--reference": option(
        "what the graph should compute: a checkpoint folder, a GGUF file, or package.module:name "
        "of a torch.nn.Module, of a function that returns one, or of a function of token ids, for "
        "which the package, your own code, is imported and run",
        required=True,
    ),
    "--inputs": option(
        "JSON or TOML file that says what inputs mean whose names do not: "
        '{"inputs": {NAME: MEANING}, "caches": {PAST: {"present": NAME, "rows": AXIS, "slots": '
        'AXIS}}, "output": NAME, "padding": "left" or "right"}',
        type=Path,
        metavar="FILE",
    ),
    "--repeat": option(
        "where to write a program that repeats the first wrong token with numpy and the library "
        "that runs the graph (default: GRAPH-repeat.py, if it is wrong)",
        type=Path,
        metavar="FILE",
    ),
    "--html": option("write a page with errors over positions", type=Path, metavar="FILE"),
    "--seconds": option(
        "how long the process that runs a graph may take for all calls", 3600.0, metavar="S"
    ),
    "--tolerance": option(
        "largest error of the graph in its own precision that passes, as a share of the largest "
        "output (default: what the rounding of its activations explains)",
        type=float,
        metavar="X",
    ),
    "--quick": option("run one scenario of each kind of call", action="store_true"),
    "--all": option("print every cell", action="store_true"),
}


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 0, or 1 if the graph is wrong or refuses a call."""
    exists = options.reference and Path(options.reference).exists()
    if not exists and ":" not in options.reference:
        remedy = "give a checkpoint folder, a GGUF file or package.module:name"
        raise refusal("audit", "a reference that exists", repr(options.reference), remedy)

    from posenc_export.auditing import audit, page, repeat

    file = options.repeat or Path(f"{options.graph.absolute().stem}-repeat.py")
    of_program, of_page = Form("audit", repeat.MARK.encode()), Form("audit", page.MARK)
    for path, form in ((options.repeat, of_program), (options.html, of_page)):
        if path is not None:
            check_file(path, form)
    reference = options.reference if exists else imported("audit", options.reference)
    given = (reference, options.inputs, options.quick, options.say, options.seconds)
    result = audit(options.graph, *given, tolerance=options.tolerance)
    options.say.close()
    if options.html:
        text = page.render(result, options.graph.name)
        write_file(options.html, text.encode("utf-8", "backslashreplace"), of_page)
    if options.json:
        print(json.dumps(result.as_json(), indent=1, sort_keys=True))
    else:
        _print(result, options.all)
    if result.program:
        write_file(file, result.program.encode(), of_program)
        note(f"python {shlex.quote(str(file))} repeats the first wrong token")
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
        print(f"{counted(len(result.cells), 'cell')}; --all prints all\n")
    print(result.sentence)
