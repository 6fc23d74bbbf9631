"""`posenc export`: export a preset, a checkpoint, a block or a function's model."""

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from posenc_export.commands.model_argument import (
    OF_BLOCK,
    OF_CHECKPOINT,
    OF_MODULE,
    arguments_of,
    model_of,
)
from posenc_export.commands.options import Group, Table, option
from posenc_export.commands.terminal import FAILED_CHECK, refuse, show, summary
from posenc_export.runtime.artefact import rules, tokenizer
from posenc_export.runtime.artefact.chat_template import has_template
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.schema import TARGETS
from posenc_export.shared.progress import Step
from posenc_export.shared.suggestion import check_name

# By graph, the runtime of a program that runs it, and the name of its file.
PROGRAMS = {"model.onnx": ("python", "run.py"), "model.pt": ("libtorch", "run.cpp")}
# Options that are fields of ExportOptions with the same meaning.
SETTINGS = "signature dtype weights calibrate cache tolerance text max_loss size".split()
OPTIONS: Table = {
    "model": option(
        "a preset, a folder with a checkpoint, a GGUF file, the word block, or "
        "package.module:name of a torch module or of a function that returns one"
    ),
    "--target": option(
        "see posenc list targets; may be given several times, for one subfolder per target",
        action="append",
        required=True,
    ),
    "-o --output": option("folder of the artefact", type=Path, required=True),
    "--signature": option(
        "positions: the graph takes position_ids; mask: it takes attention_mask and computes "
        "positions from it",
        "positions",
    ),
    "--dtype": option(
        "of weights, activations and caches: float32, float16, or bfloat16 for ort-cuda "
        "(default: float32; float16 for ort-cuda)"
    ),
    "--weights": option(
        "int8, int8-32, int4 or int4-128: format of linear layers and token table in few bits; "
        "keep: the codes of a checkpoint in few bits, on ort, ort-native and ort-cuda",
        metavar="FORMAT",
    ),
    "--cache": option(
        "format of cached keys and values: float16, on target ort-native, or int8, on ort and "
        "ort-native, which needs --calibrate (default: --dtype)",
        metavar="FORMAT",
    ),
    "--calibrate": option(
        "calibration data for weights of 4 bits or int8, and --cache int8: a text; for a block "
        ".npy with hidden states, float32 [tokens,width]",
        type=Path,
        metavar="FILE",
    ),
    "--tolerance": option(
        "largest error that passes, as a share of the largest output (default: by the depth of "
        "the model); of a file that rounds activations, in its float32 form",
        type=float,
        metavar="E",
    ),
    "--text": option(
        "text to measure the loss of few bits on (default: part of --calibrate FILE that weights "
        "are not rounded with, or a text of the package)",
        type=Path,
        metavar="FILE",
    ),
    "--max-loss": option(
        "largest perplexity on that text, relative to float32; an artefact that loses more is "
        "refused",
        1.1,
        metavar="X",
    ),
    "--size": option(
        "most megabytes (10^6 bytes) of graph and weights: 4 or 8 bits for each weight, where "
        "they lose least on the calibration data; on ort and ort-native",
        type=float,
        metavar="MB",
    ),
    "--verify": option(
        "whole: every cell of the parity grid; quick: one scenario for each kind of call",
        "whole",
        choices=("whole", "quick"),
    ),
    "--all-or-none": option(
        "with several targets, publish none if one fails (default: publish those that pass)",
        action="store_true",
    ),
    "--no-verify": option("write without a certificate", action="store_true"),
    "options of a block": Group("", OF_BLOCK),
    "options of a checkpoint": Group("", OF_CHECKPOINT),
    "options of a module of your own": Group(
        "package.module:name, a torch module that is read as it is, with --max-positions N and, "
        "for an encoder, --attention bidirectional",
        OF_MODULE,
    ),
}


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns 0, or 1 if an artefact does not agree, or one of several fails."""
    for target in options.target:
        check_name("export: expected target", target, TARGETS)
    kind, chosen = arguments_of(options)  # before torch is imported, which takes seconds
    from posenc_export import export

    targets = list(dict.fromkeys(options.target))
    settings = export.ExportOptions(
        verify=False if options.no_verify else options.verify == "whole" or "quick",
        progress=options.say,
        **{name: getattr(options, name) for name in SETTINGS},
    )
    export.check_export(targets, options.output, settings)
    options.say(Step(f"reading {options.model}"))
    sources = export.Sources(model_of(kind, options.model, chosen), owned=True)
    failed: dict[str, Exception] = {}
    tolerated = None if options.all_or_none or len(targets) == 1 else failed
    try:
        manifests = export.export_all(sources, targets, options.output, settings, tolerated)
    except export.VerificationError as error:
        refuse(options.say, str(error))
        return FAILED_CHECK
    options.say.close()
    places = dict(zip(targets, export.folders(targets, options.output), strict=True))
    _print(options, {places[manifest.target]: manifest for manifest in manifests})
    for target, reason in failed.items():
        refuse(options.say, f"target {target} failed: {reason}")
    return FAILED_CHECK if failed else 0


def _print(options: argparse.Namespace, manifests: dict[Path, Manifest]) -> None:
    """Print a row for each artefact, and what to run next."""
    rows = []
    for folder, manifest in manifests.items():
        row = {"target": manifest.target, "folder": str(folder)}
        rows.append({**row, **summary(manifest.certificate), **_quality(manifest)})
    if options.json:
        print(json.dumps(rows, indent=1))
    elif rows:
        show(rows)
        if not options.no_verify:
            print("errors are shares of the largest output")
        print("", *_next_steps(manifests), sep="\n")


def _next_steps(manifests: dict[Path, Manifest]) -> list[str]:
    """Return commands for artefacts by folder: look at the last, check and run it, and time all."""
    quoted = [shlex.quote(str(folder)) for folder in manifests]
    manifest = list(manifests.values())[-1]
    cuda = manifest.target.endswith("-cuda")
    lines = [
        f"posenc inspect {quoted[-1]}",
        f"posenc verify {quoted[-1]}{' --provider cuda' if cuda else ''}",
        _running(list(manifests)[-1], manifest),
        f"posenc bench {' '.join(quoted)}",
    ]
    return ["next:", *(f"  {line}" for line in lines if line)]


def _running(path: Path, manifest: Manifest) -> str:
    """Return the command that runs an artefact; empty if no command does."""
    folder = shlex.quote(str(path))
    if "sentence_embedding" in [output.name for output in manifest.outputs]:
        return f"posenc embed {folder} texts.txt"
    if manifest.encoder:
        return f"posenc generate {folder} --encoder FOLDER --prompt 'text for the encoder'"
    readable = manifest.vocabulary == tokenizer.BYTES or "tokenizer.json" in manifest.files
    if manifest.decodes and readable and has_template(path, manifest):
        return f"posenc chat {folder}"
    if manifest.decodes and readable:
        return f"posenc generate {folder} --prompt 'Once upon a time'"
    if rules.graph_file(manifest) in PROGRAMS:
        language, program = PROGRAMS[rules.graph_file(manifest)]
        return f"posenc inspect {folder} --runtime {language} > {program}"
    return ""


def _quality(manifest: Manifest) -> dict[str, Any]:
    """Table cells with the loss of few bits against float32; empty for other artefacts."""
    quality = manifest.quality
    if not quality:
        return {}
    rest = {"first tokens as float32": quality.first_tokens or "-", "measured on": quality.inputs}
    if quality.ratio:
        return {"perplexity relative to float32": f"{quality.ratio:.3f}", **rest}
    return {"from float32": f"{quality.error:.1e}", **rest}
