"""The `posenc` command: list, export, verify, generate, bench, inspect."""

import argparse
import codecs
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, NoReturn, Optional, Sequence

import numpy as np

BAD_INPUT, FAILED_CHECK, INTERRUPTED = 2, 1, 130


class OneLineParser(argparse.ArgumentParser):
    """Errors in one line, like every other error of the command."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


class Progress:
    """A line on stderr for each stage, with the seconds since the start."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def __call__(self, line: str) -> None:
        print(f"[{time.monotonic() - self.start:5.1f} s] {line}", file=sys.stderr, flush=True)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command; its exit status: 0, 2 for bad input, 1 for a failed check."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (ValueError, ModuleNotFoundError) as error:
        print(f"posenc: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left; nothing more to say to it
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="posenc", description="Export position encodings as attention blocks and decoders, prove them, run them.")
    commands = parser.add_subparsers(required=True, metavar="command", parser_class=OneLineParser)

    listing = commands.add_parser("list", help="encodings, targets and presets")
    listing.set_defaults(run=_list)

    exporting = commands.add_parser("export", help="write an artefact and prove it")
    exporting.add_argument("model", help="a preset, or 'block'")
    exporting.add_argument("--target", action="append", required=True, help="may be given several times: one subfolder each")
    exporting.add_argument("-o", "--output", type=Path, required=True, help="folder of the artefact")
    exporting.add_argument("--encoding", default="rope", help="of a block: name or name:parameter=value,...")
    for name, default in (("width", 512), ("heads", 8), ("kv-heads", 0), ("head-size", 0), ("max-positions", 4096), ("seed", 0)):
        exporting.add_argument(f"--{name}", type=int, default=default, help=f"of a block (default {default or 'from the others'})")
    exporting.add_argument("--signature", default="positions", help="positions or mask")
    exporting.add_argument("--dtype", default="float32", help="float32 or float16")
    exporting.add_argument("--no-verify", action="store_true", help="write without a certificate")
    exporting.set_defaults(run=_export)

    verifying = commands.add_parser("verify", help="run the parity grid on an artefact and renew its certificate")
    verifying.add_argument("folder", type=Path)
    verifying.set_defaults(run=_verify)

    generating = commands.add_parser("generate", help="continue a text with a byte-level decoder")
    generating.add_argument("folder", type=Path)
    generating.add_argument("--prompt", required=True)
    generating.add_argument("--tokens", type=int, default=64)
    generating.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    generating.add_argument("--top-k", type=int, default=0, help="0 keeps all")
    generating.add_argument("--top-p", type=float, default=1.0)
    generating.add_argument("--seed", type=int, default=0)
    generating.add_argument("--provider", default="auto", help="auto, cpu or cuda")
    generating.set_defaults(run=_generate)

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

    for command in (listing, exporting, verifying, generating, inspecting):
        command.add_argument("--json", action="store_true", help="machine-readable output")
    return parser


def _show(rows: List[Dict[str, Any]], as_json: bool) -> None:
    """Rows of equal keys as a table, or as JSON."""
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _list(options: argparse.Namespace) -> int:
    from posenc_export.export import TARGETS
    from posenc_export.models.catalogue import encodings, presets

    groups = {"encodings": encodings(), "targets": [{"name": n, "graph": t.graph, "cache": t.cache} for n, t in TARGETS.items()], "presets": presets()}
    if options.json:
        print(json.dumps(groups, indent=1))
        return 0
    for index, rows in enumerate(groups.values()):
        print("\n" if index else "", end="")
        _show(rows, False)
    return 0


def _export(options: argparse.Namespace) -> int:
    from posenc_export import encodings
    from posenc_export.export import VerificationError, export
    from posenc_export.models.config import AttentionConfig
    from posenc_export.models.presets import load_preset, seeded

    if options.model == "block":
        spec = encodings.parse(options.encoding)
        config = AttentionConfig(options.width, options.heads, options.max_positions, options.kv_heads, options.head_size, spec)
        model: Any = seeded(config, options.seed)
    else:
        model = load_preset(options.model)
    single, say = len(options.target) == 1, Progress()
    rows = []
    for target in options.target:
        folder = options.output if single else options.output / target
        try:
            manifest = export(model, target, folder, options.signature, options.dtype, not options.no_verify, say)
        except VerificationError as error:
            print(f"posenc: {error}", file=sys.stderr)
            return FAILED_CHECK
        rows.append({"target": target, "folder": str(folder), **_summary(manifest.certificate)})
    _show(rows, options.json)
    return 0


def _summary(certificate: Optional[Dict[str, Any]]) -> Dict[str, Any]:
    if certificate is None:
        return {"cells": 0, "worst error": "not verified", "tolerance": "-", "passed": False}
    worst = max(certificate["cells"].values())
    return {"cells": len(certificate["cells"]), "worst error": f"{worst:.1e}", "tolerance": f"{certificate['tolerance']:.1e}", "passed": certificate["passed"]}


def _verify(options: argparse.Namespace) -> int:
    from posenc_export.export import verify

    certificate = verify(options.folder, progress=Progress())
    if options.json:
        print(json.dumps(certificate, indent=1, sort_keys=True))
    else:
        cells = certificate["cells"].items()
        _show([{"cell": name, "worst error": f"{error:.1e}", "": "" if error <= certificate["tolerance"] else "EXCEEDS"} for name, error in cells], False)
        print(f"tolerance {certificate['tolerance']:.1e}: {'passed' if certificate['passed'] else 'FAILED'}")
    return 0 if certificate["passed"] else FAILED_CHECK


def _generate(options: argparse.Namespace) -> int:
    from posenc_export.runtime import load

    session = load(options.folder, options.provider)
    if session.manifest.config.get("vocabulary") != 256:
        raise ValueError(f"generate: the artefact is a byte-level decoder (vocabulary 256), got a {session.manifest.kind}; drive it through posenc_export.load")
    prompt = list(options.prompt.encode())
    if not prompt:
        raise ValueError("generate: the prompt has a character, got an empty one")
    made = []
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    if not options.json:
        print(options.prompt, end="", flush=True)
    for token in session.generate([np.array(prompt)], options.tokens, options.temperature, options.top_k, options.top_p, options.seed):
        made.append(int(token[0]))
        if not options.json:
            print(decoder.decode(bytes(made[-1:])), end="", flush=True)
    print(json.dumps({"prompt": options.prompt, "text": bytes(made).decode(errors="replace"), "tokens": made}) if options.json else "")
    return 0


def _bench(options: argparse.Namespace) -> int:
    from posenc_export.benchmark import run

    try:
        contexts = tuple(int(context) for context in options.contexts.split(","))
    except ValueError:
        raise ValueError(f"bench: contexts are numbers with commas between, got {options.contexts!r}") from None
    report = run(options.folders, runtimes=tuple(options.runtime), contexts=contexts, seconds=options.seconds, progress=Progress())
    print(report.table())
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
    if options.html:
        options.html.parent.mkdir(parents=True, exist_ok=True)
        report.html(options.html)
    return 0


def _inspect(options: argparse.Namespace) -> int:
    import dataclasses

    from posenc_export.runtime import manifest as manifests

    manifest = manifests.read(options.folder)
    if options.json:
        print(json.dumps(dataclasses.asdict(manifest), indent=1, sort_keys=True))
        return 0
    print(f"{manifest.kind} for {manifest.target}, {manifest.dtype}, signature {manifest.signature}, positions 0 .. {manifest.max_positions - 1}")
    print("operators  " + ", ".join(f"{name} {count}" for name, count in manifest.operators.items()))
    print("opset      " + ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in manifest.opset.items()))
    for title, values in (("input", manifest.inputs), ("output", manifest.outputs)):
        for value in values:
            print(f"{title:<10} {value.name} {value.dtype} {list(value.axes)}")
    for state in manifest.states:
        print(f"state      {state.past} -> {state.present} {state.dtype} {list(state.axes)} {state.update}")
    print("certificate " + ", ".join(f"{name} {value}" for name, value in _summary(manifest.certificate).items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
