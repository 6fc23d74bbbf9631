"""The `posenc` command: list, export, verify, generate, bench, inspect."""

import argparse
import codecs
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from posenc_export.terminal import BAD_INPUT, OneLineParser, Progress, missing, nearest, show

FAILED_CHECK, INTERRUPTED = 1, 130
# What describes a block and its default; a preset brings its own.
BLOCK = {"encoding": "rope", "width": 512, "heads": 8, "kv_heads": 0, "head_size": 0, "max_positions": 4096, "attention": "causal", "seed": 0}


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command; its exit status: 0, 2 for bad input, 1 for a failed check."""
    options = _parser().parse_args(arguments)
    options.say = Progress()
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
    except ModuleNotFoundError as error:
        line = missing(error)
        if line is None:  # no extra brings it: a fault of ours, not of the input
            raise
        return _refuse(options, line)
    except OSError as error:
        return _refuse(options, f"file: it can be read and written, got {error.strerror or error} for {error.filename}; give another path")
    except ValueError as error:
        return _refuse(options, str(error))


def _refuse(options: argparse.Namespace, line: str) -> int:
    options.say.close()
    print(f"posenc: {' '.join(line.split())}", file=sys.stderr)
    return BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="posenc", description="Export position encodings as attention blocks and decoders, prove them, run them.")
    commands = parser.add_subparsers(required=True, metavar="command", parser_class=OneLineParser)

    listing = commands.add_parser("list", help="encodings, targets and presets")
    listing.set_defaults(run=_list)

    exporting = commands.add_parser("export", help="write an artefact and prove it")
    exporting.add_argument("model", help="a preset, or 'block'")
    exporting.add_argument("--target", action="append", required=True, help="may be given several times: one subfolder each")
    exporting.add_argument("-o", "--output", type=Path, required=True, help="folder of the artefact")
    for name, default in BLOCK.items():  # absent is not the default: a preset refuses them
        said = "from heads and width" if name in ("kv_heads", "head_size") else default
        choices = ("causal", "bidirectional") if name == "attention" else None
        exporting.add_argument(f"--{name.replace('_', '-')}", type=type(default), choices=choices, help=f"of a block (default {said})")
    exporting.add_argument("--signature", default="positions", help="positions or mask")
    exporting.add_argument("--dtype", help="float32 or float16 (default: the target's own)")
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

    plotting = commands.add_parser("plot", help="draw an encoding, as PNG or SVG")
    plotting.add_argument("encoding", help="name or name:parameter=value,...")
    plotting.add_argument("-o", "--output", type=Path, help="file ending in .png or .svg (default: NAME.png)")
    plotting.set_defaults(run=_plot)

    for command in (listing, exporting, verifying, generating, inspecting, plotting):
        command.add_argument("--json", action="store_true", help="machine-readable output")
    return parser


def _list(options: argparse.Namespace) -> int:
    from posenc_export.catalogue.listing import encodings, presets
    from posenc_export.export import TARGETS

    groups = {"encodings": encodings(), "targets": [{"name": n, "graph": t.graph, "cache": t.cache} for n, t in TARGETS.items()], "presets": presets()}
    if options.json:
        print(json.dumps(groups, indent=1))
        return 0
    for index, rows in enumerate(groups.values()):
        print("\n" if index else "", end="")
        show(rows)
    return 0


def _export(options: argparse.Namespace) -> int:
    from posenc_export.export import VerificationError, folders

    targets = list(dict.fromkeys(options.target))
    _check_export(targets, options)
    model = _model(options)
    try:
        certificates = _write(model, targets, options)
    except VerificationError as error:
        _refuse(options, str(error))
        return FAILED_CHECK
    options.say.close()
    rows = [{"target": t, "folder": str(f), **_summary(c)} for t, f, c in zip(targets, folders(targets, options.output), certificates, strict=True)]
    print(json.dumps(rows, indent=1)) if options.json else show(rows)
    return 0


def _check_export(targets: List[str], options: argparse.Namespace) -> None:
    """Refuse before any work what needs none to be known."""
    from posenc_export.export import TARGETS, check_export

    for target in targets:
        if target not in TARGETS:
            raise ValueError(f"export: target is one of {', '.join(TARGETS)}, got {target!r}; {nearest(target, TARGETS)}")
    check_export(targets, options.output, options.signature, options.dtype)


def _model(options: argparse.Namespace) -> Any:
    from posenc_export import encodings
    from posenc_export.models.config import AttentionConfig
    from posenc_export.models.presets import PRESETS, load_preset, seeded

    given = {name: getattr(options, name) for name in BLOCK if getattr(options, name) is not None}
    if options.model != "block":
        if options.model not in PRESETS:
            raise ValueError(f"export: model is block or one of {', '.join(PRESETS)}, got {options.model!r}; {nearest(options.model, [*PRESETS, 'block'])}")
        if given:
            raise ValueError(f"export: {options.model} brings its own shape and weights, got --{next(iter(given)).replace('_', '-')}; leave it out or export a block")
        return load_preset(options.model)
    values: Dict[str, Any] = {**BLOCK, **given}
    seed, spec, attention = values.pop("seed"), encodings.parse(values.pop("encoding")), values.pop("attention")
    return seeded(AttentionConfig(encoding=spec, causal=attention == "causal", **values), seed)


def _write(model: Any, targets: List[str], options: argparse.Namespace) -> List[Optional[Dict[str, Any]]]:
    """All artefacts or none. Their certificates."""
    from posenc_export.export import export_all

    return [made.certificate for made in export_all(model, targets, options.output, options.signature, options.dtype, not options.no_verify, options.say)]


def _summary(certificate: Optional[Dict[str, Any]]) -> Dict[str, Any]:
    if certificate is None:
        return {"cells": 0, "worst error": "not verified", "tolerance": "-", "passed": False}
    worst = max(certificate["cells"].values())
    return {"cells": len(certificate["cells"]), "worst error": f"{worst:.1e}", "tolerance": f"{certificate['tolerance']:.1e}", "passed": certificate["passed"]}


def _verify(options: argparse.Namespace) -> int:
    from posenc_export.export import verify

    certificate = verify(options.folder, progress=options.say)
    options.say.close()
    if options.json:
        print(json.dumps(certificate, indent=1, sort_keys=True))
    else:
        cells = certificate["cells"].items()
        show([{"cell": name, "worst error": f"{error:.1e}", "": "" if error <= certificate["tolerance"] else "EXCEEDS"} for name, error in cells])
        print(f"tolerance {certificate['tolerance']:.1e}: {'passed' if certificate['passed'] else 'FAILED'}")
    return 0 if certificate["passed"] else FAILED_CHECK


def _generate(options: argparse.Namespace) -> int:
    from posenc_export.runtime import load

    if options.tokens < 1:
        raise ValueError(f"generate: tokens is at least 1, got {options.tokens}; give --tokens N")
    session = load(options.folder, options.provider).session()
    if session.manifest.config.get("vocabulary") != 256:
        raise ValueError(f"generate: the artefact is a byte-level decoder (vocabulary 256), got kind {session.manifest.kind}; drive it through posenc_export.load")
    prompt = options.prompt.encode("utf-8", "surrogateescape")  # argv carries bytes that are no UTF-8 this way
    if not prompt:
        raise ValueError("generate: the prompt has a character, got an empty one; give --prompt TEXT")
    shown, decoder = prompt.decode(errors="replace"), codecs.getincrementaldecoder("utf-8")(errors="replace")
    made: List[int] = []
    for token in session.generate([np.array(list(prompt))], options.tokens, options.temperature, options.top_k, options.top_p, options.seed):
        if not options.json:  # the prompt comes with the first token: a refusal prints nothing here
            print(("" if made else shown) + decoder.decode(bytes([int(token[0])])), end="", flush=True)
        elif len(made) % 256 == 255:
            options.say(f"{len(made) + 1} of {options.tokens} tokens")
        made.append(int(token[0]))
    options.say.close()
    text = bytes(made).decode(errors="replace")
    print(json.dumps({"prompt": shown, "text": text, "tokens": made}) if options.json else decoder.decode(b"", final=True))
    return 0


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
    for title, values in (("input", manifest.inputs), ("output", manifest.outputs)):
        for value in values:
            print(f"{title:<10} {value.name} {value.dtype} {list(value.axes)}")
    for state in manifest.states:
        print(f"state      {state.past} -> {state.present} {state.dtype} {list(state.axes)} {state.update}")
    print(f"digest     {manifest.digest}")
    print("certificate " + ", ".join(f"{name} {value}" for name, value in _summary(manifest.certificate).items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
