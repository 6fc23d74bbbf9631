"""`posenc bench`: prefill and decode of artefacts and runtimes, timed in turn."""

import argparse
import json
import os
from importlib.util import find_spec
from pathlib import Path


def add_arguments(timing: argparse.ArgumentParser) -> None:
    """What `posenc bench` takes."""
    timing.add_argument("folders", type=Path, nargs="+", help="of artefacts")
    timing.add_argument("--runtime", action="append", default=[], help="eager or torch.compile, beside the artefacts; may be given twice")
    timing.add_argument("--contexts", default="128,1024,8192", help="numbers of cached tokens; those beyond the model's range are left out (default: %(default)s)")
    timing.add_argument("--seconds", type=float, default=1.5, help="of measuring for each contestant and context (default: %(default)s)")
    timing.add_argument("--json", type=Path, help="write the report to this file")
    timing.add_argument("--html", type=Path, help="write one page with plots to this file")
    timing.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The exit status: 0."""
    from posenc_export.benchmark import run as measure

    try:
        contexts = tuple(int(context) for context in options.contexts.split(","))
    except ValueError:
        raise ValueError(f"bench: expected contexts as whole numbers with commas between, got {options.contexts!r}; give --contexts 128,1024") from None
    if options.html and find_spec("matplotlib") is None:  # before minutes of measuring, not after them
        raise ModuleNotFoundError(name="matplotlib")
    for path in filter(None, (options.json, options.html)):
        _check_writable(path)
    report = measure(options.folders, runtimes=tuple(options.runtime), contexts=contexts, seconds=options.seconds, progress=options.say)
    options.say.close()
    print(report.table())
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
    if options.html:
        options.html.parent.mkdir(parents=True, exist_ok=True)
        report.html(options.html)
    return 0


def _check_writable(path: Path) -> None:
    standing = path if path.exists() else next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or not (path.exists() or standing.is_dir()) or not os.access(standing, os.W_OK):
        raise ValueError(f"bench: expected a file that can be written for the report, got {path}; give another path")
