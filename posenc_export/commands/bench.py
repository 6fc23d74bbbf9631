"""`posenc bench`: prefill and decode of artefacts and other runtimes, timed in turn."""

import argparse
import json
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from posenc_export import benchmark
from posenc_export.benchmark import measurement, page
from posenc_export.benchmark.report import HTML, JSON
from posenc_export.benchmark.runtimes import RUNTIMES
from posenc_export.commands.options import Table, option
from posenc_export.runtime.artefact.destinations import check_file, write_file

# Options that are arguments of benchmark.run with the same meaning.
SETTINGS = ("contexts", "batch", "threads", "rounds", "seconds", "baseline")


def _numbers(text: str) -> tuple[int, ...]:
    if text != "none" and not re.fullmatch("[0-9]+(,[0-9]+)*", text):
        rule = "whole numbers with commas between, or none"
        raise argparse.ArgumentTypeError(f"expected {rule}, got {text!r}")
    return () if text == "none" else tuple(map(int, text.split(",")))


OPTIONS: Table = {
    "folders": option("folders of artefacts or presets", type=Path, nargs="+"),
    "--runtime": dict(
        action="append",
        default=[],
        metavar="NAME",
        help="another runtime to time with the same model: "
        f"{', '.join(RUNTIMES)}; may be given several times",
    ),
    "--contexts": option(
        "numbers of cached tokens at which a decode step is timed; numbers beyond the range of a "
        f"model are skipped (default: {', '.join(map(str, measurement.CONTEXTS))}, or the range if "
        "it is shorter)",
        type=_numbers,
        metavar="N,N,...",
    ),
    "--prefill": option(
        "numbers of tokens of the timed prompts, or none for no prompts (default: the contexts)",
        type=_numbers,
        metavar="N,N,...",
    ),
    "--batch": option("rows of every call", 1, metavar="ROWS"),
    "--threads": option("threads of each contestant; one contestant runs at a time", 2),
    "--rounds": option(
        "samples of each contestant and number of tokens, in turns; a ratio needs 5", 10
    ),
    "--seconds": option("measuring time in seconds for each contestant and number of tokens", 1.5),
    "--baseline": option(
        "the contestant to which times are relative (default: the fastest)", "", metavar="NAME"
    ),
    "-o --output": option("write the report to this file, as JSON", type=Path),
    "--html": option("write an HTML page with plots to this file", type=Path),
}


def run(options: argparse.Namespace) -> int:
    # Checked before the measurement, which takes minutes.
    if options.html and find_spec("matplotlib") is None:
        raise ModuleNotFoundError(name="matplotlib")
    for path, form in ((options.output, JSON), (options.html, HTML)):
        if path:
            check_file(path, form)
    report = benchmark.run(
        options.folders,
        runtimes=tuple(options.runtime),
        prompts=options.prefill,
        progress=options.say,
        command=shlex.join(["posenc", *sys.argv[1:]]),
        **{name: getattr(options, name) for name in SETTINGS},
    )
    options.say.close()
    text = json.dumps(report.to_json(), indent=1)
    print(text if options.json else report.table())
    if options.output:
        write_file(options.output, f"{text}\n".encode(), JSON)
    if options.html:
        write_file(options.html, page.render(report).encode(), HTML)
    return 0
