"""The `posenc` command: list, export, verify, generate, bench, inspect."""

import argparse
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Optional, Sequence

from posenc_export.commands import export, generate
from posenc_export.commands.export import FAILED_CHECK, summary
from posenc_export.terminal import REFUSED, OneLineParser, Progress, refusal, refuse, show

INTERRUPTED = 130


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command; its exit status: 0, 2 for bad input, 1 for a failed check."""
    options = _parser().parse_args(arguments)
    options.say = Progress()
    if sys.stdout is None:  # closed by whoever started us: the next file opened would stand in its place
        return refuse(options.say, "output: stdout is open, got a closed one; send it to a file or a pipe")
    try:
        status = int(options.run(options))
        sys.stdout.flush()  # a reader that left shows here, not at exit
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more to say to it
        return 0
    except KeyboardInterrupt:
        options.say.close()
        return INTERRUPTED
    except REFUSED as error:
        line = refusal(error)
        if line is None:  # a fault of ours, not of the input
            raise
        return refuse(options.say, line)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="posenc", description="Export position encodings as attention blocks and decoders, prove them, run them.")
    commands = parser.add_subparsers(required=True, metavar="command", parser_class=OneLineParser)

    listing = commands.add_parser("list", help="encodings, targets, families of checkpoints and presets")
    listing.set_defaults(run=_list)

    exporting = commands.add_parser("export", help="write an artefact and prove it")
    export.add_arguments(exporting)

    verifying = commands.add_parser("verify", help="prove an artefact on this machine against the reference that it carries; needs no torch")
    verifying.add_argument("folder", type=Path)
    verifying.add_argument("--provider", default="auto", help="auto, cpu or cuda")
    verifying.add_argument("--no-record", action="store_true", help="leave the manifest as it is, where the folder cannot be written")
    verifying.add_argument("--digest", help="the artefact's digest, where it came another way than the files")
    verifying.set_defaults(run=_verify)

    generating = commands.add_parser("generate", help="continue a text with a decoder")
    generate.add_arguments(generating)

    timing = commands.add_parser("bench", help="time prefill and decode of artefacts and runtimes")
    timing.add_argument("folders", type=Path, nargs="+")
    timing.add_argument("--runtime", action="append", default=[], help="eager or torch.compile beside the artefacts")
    timing.add_argument("--contexts", default="128,1024,8192", help="cached tokens, where the model allows them")
    timing.add_argument("--seconds", type=float, default=1.5, help="of measuring per contestant and context")
    timing.add_argument("--json", type=Path, help="write the report there")
    timing.add_argument("--html", type=Path, help="write one page with plots there")
    timing.set_defaults(run=_bench)

    inspecting = commands.add_parser("inspect", help="operators, states, positions, certificate")
    inspecting.add_argument("folder", type=Path)
    inspecting.set_defaults(run=_inspect)

    plotting = commands.add_parser("plot", help="draw an encoding, as PNG or SVG")
    plotting.add_argument("encoding", help="name or name:parameter=value,...")
    plotting.add_argument("-o", "--output", type=Path, help="file ending in .png or .svg (default: NAME.png)")
    plotting.set_defaults(run=_plot)

    for command in (listing, exporting, verifying, generating, inspecting, plotting):
        command.add_argument("--json", action="store_true", help="machine-readable output")
    return parser


def _list(options: argparse.Namespace) -> int:
    from posenc_export.catalogue.listing import encodings, families, presets
    from posenc_export.export import TARGETS

    targets = [{"name": name, "graph": target.graph, "cache": target.cache} for name, target in TARGETS.items()]
    groups = {"encodings": encodings(), "targets": targets, "families": families(), "presets": presets()}
    if options.json:
        print(json.dumps(groups, indent=1))
        return 0
    for index, rows in enumerate(groups.values()):
        print("\n" if index else "", end="")
        show(rows)
    return 0


def _verify(options: argparse.Namespace) -> int:
    from posenc_export.runtime import verify

    certificate = verify(options.folder, options.provider, digest=options.digest, progress=options.say, record=not options.no_record)
    options.say.close()
    if options.json:
        print(json.dumps(certificate, indent=1, sort_keys=True))
    else:
        cells = certificate["cells"].items()
        show([{"cell": name, "worst error": f"{error:.1e}", "": "" if error <= certificate["tolerance"] else "EXCEEDS"} for name, error in cells])
        verdict = "passed" if certificate["passed"] else "FAILED"
        print(f"provider {certificate['provider']} on {certificate['machine']}, tolerance {certificate['tolerance']:.1e}: {verdict}")
    return 0 if certificate["passed"] else FAILED_CHECK


def _bench(options: argparse.Namespace) -> int:
    from posenc_export.benchmark import run

    try:
        contexts = tuple(int(context) for context in options.contexts.split(","))
    except ValueError:
        raise ValueError(f"bench: contexts are numbers with commas between, got {options.contexts!r}") from None
    if options.html and find_spec("matplotlib") is None:  # said before minutes of measuring, not after
        raise ModuleNotFoundError(name="matplotlib")
    for path in filter(None, (options.json, options.html)):
        _check_writable(path)
    report = run(options.folders, runtimes=tuple(options.runtime), contexts=contexts, seconds=options.seconds, progress=options.say)
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
        raise ValueError(f"bench: the report goes to a file that can be written, got {path}; give another path")


def _plot(options: argparse.Namespace) -> int:
    from posenc_export import encodings
    from posenc_export.catalogue.plots import draw

    spec = encodings.parse(options.encoding)
    path = options.output or Path(f"{spec['name']}.png")
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"plot: the file ends in .png or .svg, got {path.name!r}; give -o FILE.svg")
    draw(spec).savefig(path, dpi=150)
    print(json.dumps({"encoding": spec, "file": str(path)}) if options.json else path)
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from posenc_export.runtime import manifest as manifests

    manifest = manifests.read(options.folder)
    if options.json:
        print(json.dumps({**manifest.to_json(), "digest": manifest.digest}, indent=1, sort_keys=True))
        return 0
    print(f"{manifest.kind} for {manifest.target}, {manifest.dtype}, signature {manifest.signature}, positions 0 .. {manifest.max_positions - 1}")
    print("operators  " + ", ".join(f"{name} {count}" for name, count in manifest.operators.items()))
    print("opset      " + ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in manifest.opset.items()))
    for name, package in manifest.packages.items():
        print(f"encoding   {name}, from {package.name} {package.version or '(no version)'}")
    for title, values in (("input", manifest.inputs), ("output", manifest.outputs)):
        for value in values:
            print(f"{title:<10} {value.name} {value.dtype} {list(value.axes)}")
    for state in manifest.states:
        print(f"state      {state.past} -> {state.present} {state.dtype} {list(state.axes)} {state.update}")
    print(f"digest     {manifest.digest}")
    if manifest.certificate and manifest.certificate.get("against"):
        print(f"against    {manifest.certificate['against']}")
    print("certificate " + ", ".join(f"{name} {value}" for name, value in summary(manifest.certificate).items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
