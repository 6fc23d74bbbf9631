"""`posenc export`: export a preset, a checkpoint, a block or the model of a function to
artefacts.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from posenc_export.commands.block_argument import NO_HEADS
from posenc_export.commands.model_argument import CALLABLE, model_of
from posenc_export.commands.next_steps import next_steps, sizes
from posenc_export.commands.options import PART, Table, add_block, add_options
from posenc_export.commands.terminal import FAILED_CHECK, refuse, show, summary
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.rules import GRAPHS
from posenc_export.shared.preset_folders import NAMES
from posenc_export.shared.progress import Step
from posenc_export.shared.suggestion import check_name, download, suggestion

FILES = (".safetensors", ".pt", ".pth", ".bin")
TARGETS = tuple(name for name in GRAPHS if name != "aotinductor")  # which `posenc compile` writes
OPTIONS: Table = {
    "model": dict(
        help="a preset, a folder with a checkpoint, a GGUF file, the word block, or "
        "package.module:name of a model or of a function that returns one"
    ),
    "--target": dict(
        action="append",
        required=True,
        help="see posenc list targets; may be given several times, for one subfolder per target",
    ),
    "-o --output": dict(type=Path, required=True, help="folder of the artefact"),
    "--signature": dict(
        default="positions",
        help="positions: the graph takes position_ids; mask: it takes attention_mask and "
        "computes positions from it (default: positions)",
    ),
    "--dtype": dict(
        help="of weights, activations and caches: float32, float16, or bfloat16 for ort-cuda "
        "(default: float32; float16 for ort-cuda)"
    ),
    "--weights": dict(
        action="append",
        default=[],
        metavar="FORMAT|FILE",
        help="int8, int8-32, int4 or int4-128: format of linear layers and token table in few "
        "bits; keep: the blocks of a GGUF file, on target ort. For a block also a file, with or "
        "without a format, see below; ./int8 is a path",
    ),
    "--cache": dict(
        metavar="FORMAT",
        help="int8: format of cached keys and values, on target ort; needs --calibrate "
        "(default: --dtype)",
    ),
    "--calibrate": dict(
        type=Path,
        metavar="FILE",
        help="calibration data for weights of 4 bits or int8, and --cache int8: a text; for a "
        "block .npy with hidden states, float32 [tokens,width]",
    ),
    "--tolerance": dict(
        type=float,
        metavar="E",
        help="largest error, of the float32 form if activations are rounded, against the "
        "module with the same weights, above 0 and below 1 (default: that of float32)",
    ),
    "--text": dict(
        type=Path,
        metavar="FILE",
        help="text to measure the loss of few bits on (default: part of --calibrate FILE that "
        "weights are not rounded with, or a text of the package)",
    ),
    "--max-loss": dict(
        type=float,
        default=1.10,
        metavar="X",
        help="largest perplexity on that text, relative to float32 (default: 1.10); an "
        "artefact that loses more is refused",
    ),
    "--size": dict(
        type=float,
        metavar="MB",
        help="most megabytes (10^6 bytes) of graph and weights: 4 or 8 bits for each weight, "
        "where they lose least on the calibration data; on target ort",
    ),
    "--verify": dict(
        choices=("whole", "quick"),
        default="whole",
        help="whole: every cell of the parity grid; quick: one scenario for each kind of call "
        "(default: whole)",
    ),
    "--all-or-none": dict(
        action="store_true",
        help="with several targets, publish none if one fails (default: publish those that pass)",
    ),
    "--no-verify": dict(action="store_true", help="write without a certificate"),
}
OF_BLOCK: Table = {
    "--prefix": dict(
        metavar="NAME",
        help="beginning of the names of one attention in --weights, such as "
        "model.layers.0.self_attn.",
    ),
    "--layout": dict(
        choices=("half", "interleaved"),
        help="order of the rotary pairs in --weights (default: that of the encoding)",
    ),
}
WEIGHTS = (
    "--weights FILE.safetensors or FILE.pt (a state_dict) has q, k, v, o or qkv, o, or the "
    "names of common models, which determine the sizes"
)
OF_CHECKPOINT: Table = {
    "--layer": dict(type=int, help="export only the attention of this layer, as a block"),
    "--part": dict(choices=("encoder", "decoder", "embeddings"), help=PART),
    "--longer": dict(
        choices=("copied", "interpolated", "hierarchical"),
        help="how to extend trained positions to --max-positions N: copy rows, interpolate "
        "rows, or use them as rows of the encoding hierarchical",
    ),
    "--lengths": dict(
        choices=("long", "short", "by_position"),
        help="factors of LongRoPE in a decoder (default: long for all positions if the range "
        "is longer than the trained length, otherwise short)",
    ),
    "--no-head": dict(
        action="store_false",
        dest="head",
        default=None,
        help="export an encoder with a task head for its hidden states only",
    ),
}


def add_arguments(exporting: argparse.ArgumentParser) -> None:
    add_options(exporting, OPTIONS)
    block = exporting.add_argument_group("options of a block", WEIGHTS)
    add_block(block)
    add_options(block, OF_BLOCK)
    add_options(exporting.add_argument_group("options of a checkpoint"), OF_CHECKPOINT)


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 0, or 1 if an artefact does not agree with its
    module, or one of several targets fails.
    """
    _check_words(options)
    from posenc_export.export import Sources, VerificationError, check_export, export_all, folders

    targets = list(dict.fromkeys(options.target))
    settings = _settings(options)
    check_export(targets, options.output, settings)
    options.say(Step(f"reading {options.model}"))
    sources = Sources(model_of(options), owned=True)
    failed: Dict[str, Exception] = {}
    tolerated = None if options.all_or_none or len(targets) == 1 else failed
    try:
        manifests = export_all(sources, targets, options.output, settings, tolerated)
    except VerificationError as error:
        refuse(options.say, str(error))
        return FAILED_CHECK
    options.say.close()
    places = dict(zip(targets, folders(targets, options.output), strict=True))
    _print(options, {places[manifest.target]: manifest for manifest in manifests})
    for target, reason in failed.items():
        refuse(options.say, f"target {target} failed: {reason}")
    return FAILED_CHECK if failed else 0


def _settings(options: argparse.Namespace) -> Any:
    """Return the ExportOptions, and leave in `options.weights` the file of weights alone."""
    from posenc_export.export import ExportOptions

    weights_format, options.weights = _weights(options.weights)
    return ExportOptions(
        signature=options.signature,
        dtype=options.dtype,
        verify=False if options.no_verify else options.verify == "whole" or "quick",
        progress=options.say,
        weights=weights_format,
        calibrate=options.calibrate,
        cache=options.cache,
        tolerance=options.tolerance,
        text=options.text,
        max_loss=options.max_loss,
        size=options.size,
    )


def _print(options: argparse.Namespace, manifests: Dict[Path, Manifest]) -> None:
    """Print a row for each artefact, by folder, sizes that were not asked for, and what to run
    next.
    """
    rows = [
        {
            "target": manifest.target,
            "folder": str(folder),
            **summary(manifest.certificate),
            **_quality(manifest),
        }
        for folder, manifest in manifests.items()
    ]
    if options.json:
        print(json.dumps(rows, indent=1))
    elif rows:
        show(rows)
        print("", *sizes(manifests.values()), *next_steps(manifests), sep="\n")


def _check_words(options: argparse.Namespace) -> None:
    """Check what can be checked without torch, whose import takes seconds.

    Raises:
        ValueError: unknown target or model; a block with a file of weights that does not exist, or
            without its number of heads.
    """
    for target in options.target:
        check_name("export: expected target", target, TARGETS)
    if options.model == "block":
        files = [Path(value) for value in options.weights if value.endswith((*FILES, ".py"))]
        _check_files(files)
        if files and options.heads is None:
            raise ValueError(NO_HEADS)
        return
    path = Path(options.model)
    if not (
        options.model in NAMES
        or CALLABLE.match(options.model)
        or path.is_dir()
        or path.suffix == ".gguf"
    ):
        remedy = download(options.model) or (
            "give a folder that exists"
            if os.sep in options.model
            else suggestion(options.model, [*NAMES, "block"])
        )
        known = (
            "block, a folder with a checkpoint, a GGUF file, package.module:function, or one of "
            f"{', '.join(NAMES)}"
        )
        raise ValueError(f"export: expected model to be {known}, got {options.model!r}; {remedy}")


def _check_files(files: List[Path]) -> None:
    for file in files:
        if file.suffix == ".py":
            raise ValueError(
                f"export: expected --weights FILE with tensors, got the Python file {file}; to "
                "export the model of its function, give MODULE:FUNCTION in place of block"
            )
        if not file.is_file():
            raise ValueError(
                f"export: expected a file {file.name} in {str(file.parent)!r}, got none; "
                "check the path"
            )


def _weights(values: List[str]) -> Tuple[Optional[str], Optional[Path]]:
    """Split the values of --weights into the format and the file.

    Raises:
        ValueError: several formats or several files.
    """
    from posenc_export.export.quantization.formats import FORMATS, KEEP

    places = [
        value
        for value in values
        if value not in (*FORMATS, KEEP) and (value.endswith(FILES) or Path(value).exists())
    ]
    formats = [value for value in values if value not in places]
    if len(places) > 1 or len(formats) > 1:
        raise ValueError(
            "export: expected --weights once with a format and once with a file at most, "
            f"got {', '.join(values)}; give each once"
        )
    return next(iter(formats), None), next(map(Path, places), None)


def _quality(manifest: Manifest) -> Dict[str, Any]:
    """Table cells with the loss of quantized weights and caches against float32; empty for other
    artefacts.
    """
    quality = manifest.quality
    if not quality:
        return {}
    loss = (
        {"perplexity relative to float32": f"{quality.ratio:.3f}"}
        if quality.ratio
        else {"from float32": f"{quality.error:.1e}"}
    )
    return {
        **loss,
        "same most probable token": f"{quality.agreement:.0%}" if quality.agreement else "-",
        "measured on": quality.inputs,
    }
