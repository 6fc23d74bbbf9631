"""`posenc audit`: compare a graph that others exported with its checkpoint or module."""

import argparse
import json
from pathlib import Path

from posenc_export.commands.options import Table, option
from posenc_export.commands.terminal import FAILED_CHECK, show

SHOWN = 10  # cells that are printed
OPTIONS: Table = {
    "graph": option("ONNX file of a decoder, an encoder or a block, of any exporter", type=Path),
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
    "--quick": option("run one scenario of each kind of call", action="store_true"),
    "--all": option("print every cell", action="store_true"),
}


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 0, or 1 if the graph is wrong or refuses a call."""
    from posenc_export.auditing import audit

    result = audit(
        options.graph, options.reference, options.inputs, options.quick, progress=options.say
    )
    options.say.close()
    if options.json:
        print(json.dumps(result.as_json(), indent=1, sort_keys=True))
        return 0 if result.right else FAILED_CHECK
    show(list(result.inputs))
    print()
    worse = [cell for cell in result.cells if cell.status in ("wrong", "refused")]
    shown = result.cells if options.all else worse[:SHOWN]
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
    print(f"{result.verdict}: {result.sentence}")
    return 0 if result.right else FAILED_CHECK
