"""`posenc conformance`: try kernels of this machine against their contracts."""

import argparse
import json
from pathlib import Path
from typing import Any, Iterator

from posenc_export.commands.options import Table, option
from posenc_export.commands.terminal import FAILED_CHECK, show
from posenc_export.runtime import load
from posenc_export.runtime.artefact import files, machine
from posenc_export.shared.progress import Steps
from posenc_export.shared.tables import counted

OPTIONS: Table = {
    "folders": option(
        "folders of artefacts whose kernels are tried (default: a list of small geometries of all "
        "operators)",
        type=Path,
        nargs="*",
        metavar="folder",
    ),
    "--again": option("try those, too, of which a result is kept", action="store_true"),
}


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 0, or 1 if a kernel breaks its contract."""
    from posenc_export.runtime.verification.conformance import geometry, suite

    contracts = dict.fromkeys(() if options.folders else suite.listed())
    for folder in options.folders:
        manifest = load(folder, "cpu", 1).manifest
        contracts |= dict.fromkeys(geometry.kernels(files.locate(folder), manifest).contracts)
    steps = Steps(options.say, "trying kernels", len(contracts), "contracts")
    rows, broken, new = [], 0, 0
    for result in suite.results(contracts, options.again):
        broken, new = broken + bool(result.failure), new + (not result.known)
        kernel = result.kernel
        row = {
            "operator": " ".join(step.operator for step in kernel.nodes),
            "geometry": ", ".join(_geometry(kernel)),
            "error / bound": result.failure or result.missing or f"{result.worst:.2g}",
            "run": "known" if result.known else f"{result.seconds:.2f} s",
        }
        rows.append(row)
        steps.advance()
    options.say.close()
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        if rows:
            show(rows)
        tried = f"{counted(len(rows), 'contract')} of kernels on {machine.processor()}"
        print(f"{tried}, {new} of them new: {f'{broken} BROKEN' if broken else 'none broken'}")
    return FAILED_CHECK if broken else 0


def _geometry(kernel: Any) -> Iterator[str]:
    """Yield what determines a kernel: attributes, sizes and constants."""
    attributes = (pair for step in kernel.nodes for pair in step.attributes)
    for name, value in (*attributes, *kernel.sizes):
        if value:
            yield f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
    for stored in kernel.constants:
        yield f"{stored.element} [{','.join(map(str, stored.shape))}]"
    if any(step.domain == "" for step in kernel.nodes):
        yield f"opset {kernel.opset}"
