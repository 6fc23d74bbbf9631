"""`posenc export`: export a preset, a checkpoint, a block or the model of a function to
artefacts.
"""

import argparse
import importlib
import inspect
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from posenc_export.commands.options import BLOCK, add_block
from posenc_export.commands.terminal import FAILED_CHECK, note, refuse, show, summary
from posenc_export.runtime.artefact.rules import GRAPHS
from posenc_export.shared.preset_folders import NAMES
from posenc_export.shared.progress import Step
from posenc_export.shared.suggestion import check_name, download, suggestion

OF_CHECKPOINT = ("layer", "max_positions", "part", "longer", "lengths", "head")
LONGER = ("copied", "interpolated", "hierarchical")
LENGTHS = ("long", "short", "by_position")
FACTORS = (
    "factors of LongRoPE in a decoder (default: long for all positions if the range is longer "
    "than the trained length, otherwise short)"
)
PART = (
    "encoder or decoder of a model that has both (T5, Whisper); embeddings: tokens, positions, "
    "segments and norm before the layers, of any model but Whisper"
)
CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")  # package.module:function
FILES = (".safetensors", ".pt", ".pth", ".bin")
# Folders of models in the cache of the hub are models--organization--name/snapshots/revision.
CACHED = "models--"
LONGEST_NAME = 128
NO_HEADS = "export: expected the number of heads with --weights, got none; give --heads H"
TARGETS = tuple(name for name in GRAPHS if name != "aotinductor")  # which `posenc compile` writes
OF_WEIGHTS = (
    "weights",
    "prefix",
    "encoding",
    "heads",
    "kv_heads",
    "max_positions",
    "attention",
    "layout",
)


def add_arguments(exporting: argparse.ArgumentParser) -> None:
    """Add the arguments of `posenc export`."""
    named = "package.module:name of a model or of a function that returns one"
    exporting.add_argument(
        "model",
        help=f"a preset, a folder with a checkpoint, a GGUF file, the word block, or {named}",
    )
    exporting.add_argument(
        "--target",
        action="append",
        required=True,
        help="see posenc list targets; may be given several times, for one subfolder per target",
    )
    exporting.add_argument(
        "-o", "--output", type=Path, required=True, help="folder of the artefact"
    )
    signature = (
        "positions: the graph takes position_ids; mask: it takes attention_mask and computes "
        "positions from it (default: positions)"
    )
    exporting.add_argument("--signature", default="positions", help=signature)
    exporting.add_argument(
        "--dtype",
        help="of weights, activations and caches: float32, float16, or bfloat16 for ort-cuda "
        "(default: float32; float16 for ort-cuda)",
    )
    few = (
        "int8, int8-32, int4 or int4-128: format of linear layers and token table in few bits; "
        "keep: the blocks of a GGUF file, on target ort"
    )
    few += ". For a block also a file, with or without a format, see below; ./int8 is a path"
    exporting.add_argument(
        "--weights", action="append", default=[], metavar="FORMAT|FILE", help=few
    )
    exporting.add_argument(
        "--cache",
        metavar="FORMAT",
        help="int8: format of cached keys and values, on target ort; needs --calibrate (default: "
        "--dtype)",
    )
    sample = (
        "calibration data for weights of 4 bits or int8, and --cache int8: a text; for a block "
        ".npy with hidden states, float32 [tokens,width]"
    )
    exporting.add_argument("--calibrate", type=Path, metavar="FILE", help=sample)
    bound = (
        "largest error, of the float32 form if activations are rounded, against the module with "
        "the same weights, above 0 and below 1 (default: that of float32)"
    )
    exporting.add_argument("--tolerance", type=float, metavar="E", help=bound)
    measured = (
        "text to measure the loss of few bits on (default: part of --calibrate FILE that weights "
        "are not rounded with, or a text of the package)"
    )
    exporting.add_argument("--text", type=Path, metavar="FILE", help=measured)
    largest = (
        "largest perplexity on that text, relative to float32 (default: 1.10); an artefact that "
        "loses more is refused"
    )
    exporting.add_argument("--max-loss", type=float, default=1.10, metavar="X", help=largest)
    size = (
        "most megabytes (10^6 bytes) of graph and weights: 4 or 8 bits for each weight, where "
        "they lose least on the calibration data; on target ort"
    )
    exporting.add_argument("--size", type=float, metavar="MB", help=size)
    grids = (
        "whole: every cell of the parity grid; quick: one scenario for each kind of call "
        "(default: whole)"
    )
    exporting.add_argument("--verify", choices=("whole", "quick"), default="whole", help=grids)
    exporting.add_argument(
        "--all-or-none",
        action="store_true",
        help="with several targets, publish none if one fails (default: publish those that pass)",
    )
    exporting.add_argument("--no-verify", action="store_true", help="write without a certificate")
    weights = (
        "--weights FILE.safetensors or FILE.pt (a state_dict) has q, k, v, o or qkv, o, or the "
        "names of common models, which determine the sizes"
    )
    block = exporting.add_argument_group("options of a block", weights)
    add_block(block)
    block.add_argument(
        "--prefix",
        metavar="NAME",
        help="beginning of the names of one attention in --weights, such as "
        "model.layers.0.self_attn.",
    )
    block.add_argument(
        "--layout",
        choices=("half", "interleaved"),
        help="order of the rotary pairs in --weights (default: that of the encoding)",
    )
    checkpoint = exporting.add_argument_group("options of a checkpoint")
    checkpoint.add_argument(
        "--layer", type=int, help="export only the attention of this layer, as a block"
    )
    checkpoint.add_argument("--part", choices=("encoder", "decoder", "embeddings"), help=PART)
    longer = (
        "how to extend trained positions to --max-positions N: copy rows, interpolate rows, or "
        "use them as rows of the encoding hierarchical"
    )
    checkpoint.add_argument("--longer", choices=LONGER, help=longer)
    checkpoint.add_argument("--lengths", choices=LENGTHS, help=FACTORS)
    checkpoint.add_argument(
        "--no-head",
        action="store_false",
        dest="head",
        default=None,
        help="export an encoder with a task head for its hidden states only",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 0, or 1 if an artefact does not agree with its
    module, or one of several targets fails.
    """
    _check_words(options)
    from posenc_export.export import (
        ExportOptions,
        Sources,
        VerificationError,
        check_export,
        export_all,
        folders,
    )

    targets = list(dict.fromkeys(options.target))
    weights_format, options.weights = _weights(options.weights)
    grid = False if options.no_verify else options.verify == "whole" or "quick"
    settings = ExportOptions(
        options.signature,
        options.dtype,
        grid,
        options.say,
        weights_format,
        options.calibrate,
        options.cache,
        options.tolerance,
        options.text,
        options.max_loss,
        options.size,
    )
    check_export(targets, options.output, settings)
    options.say(Step(f"reading {options.model}"))
    sources = Sources(_model(options), owned=True)
    failed: Dict[str, Exception] = {}
    try:
        manifests = export_all(
            sources,
            targets,
            options.output,
            settings,
            None if options.all_or_none or len(targets) == 1 else failed,
        )
    except VerificationError as error:
        refuse(options.say, str(error))
        return FAILED_CHECK
    options.say.close()
    rows = [
        {
            "target": target,
            "folder": str(folder),
            **summary(manifest.certificate),
            **_quality(manifest),
        }
        for target, folder in zip(targets, folders(targets, options.output), strict=True)
        for manifest in manifests
        if manifest.target == target
    ]
    if rows or options.json:
        print(json.dumps(rows, indent=1)) if options.json else show(rows)
    for target, reason in failed.items():
        refuse(options.say, f"target {target} failed: {reason}")
    return FAILED_CHECK if failed else 0


def _check_words(options: argparse.Namespace) -> None:
    """Check what can be checked without torch, whose import takes seconds.

    Raises:
        ValueError: unknown target or model; a block with a file of weights that does not exist, or
            without its number of heads.
    """
    for target in options.target:
        check_name("export: expected target", target, TARGETS)
    files, path = (
        [Path(value) for value in options.weights if value.endswith(FILES)]
        if options.model == "block"
        else [],
        Path(options.model),
    )
    for file in files:
        if not file.is_file():
            raise ValueError(
                f"export: expected a file {file.name} in {str(file.parent)!r}, got none; "
                "check the path"
            )
    if files and options.heads is None:
        raise ValueError(NO_HEADS)
    if not (
        options.model in (*NAMES, "block")
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


def _weights(given: List[str]) -> Tuple[Optional[str], Optional[Path]]:
    """Split the values of --weights into the format and the file.

    Raises:
        ValueError: several formats or several files.
    """
    from posenc_export.export.quantization.formats import FORMATS, KEEP

    places = [
        value
        for value in given
        if value not in (*FORMATS, KEEP) and (value.endswith(FILES) or Path(value).exists())
    ]
    formats = [value for value in given if value not in places]
    if len(places) > 1 or len(formats) > 1:
        raise ValueError(
            "export: expected --weights once with a format and once with a file at most, "
            f"got {', '.join(given)}; give each once"
        )
    return next(iter(formats), None), next(map(Path, places), None)


def _model(options: argparse.Namespace) -> Any:
    """Build the model that the arguments describe."""
    from posenc_export.models.presets import load_preset

    named = (*BLOCK, "weights", "prefix", "layout", "layer", "part", "longer", "lengths", "head")
    chosen = {name: getattr(options, name) for name in named if getattr(options, name) is not None}
    if options.model == "block":
        return _block_of_weights(chosen) if "weights" in chosen else _seeded_block(chosen)
    if options.model in NAMES:
        _only((), chosen, f"no options of a block or checkpoint for the preset {options.model}")
        return load_preset(options.model)
    if CALLABLE.match(options.model) and not Path(options.model).exists():
        _only((), chosen, f"no options of a block or checkpoint for the function {options.model}")
        return _model_of_function(options.model)
    _only(OF_CHECKPOINT, chosen, "options of a checkpoint")
    model = _checkpoint(options.model, chosen)
    model.source = {"checkpoint": checkpoint_name(Path(options.model))}
    return model


def checkpoint_name(path: Path) -> str:
    """Return the name of a checkpoint: that of its folder or GGUF file, or organization/name for
    a folder in the cache of the Hugging Face hub.
    """
    whole = path.resolve()
    if cached := next(
        (folder.name for folder in whole.parents if folder.name.startswith(CACHED)), None
    ):
        return cached.removeprefix(CACHED).replace("--", "/", 1)[:LONGEST_NAME]
    return (whole.stem if whole.suffix == ".gguf" else whole.name)[:LONGEST_NAME]


def _checkpoint(folder: str, chosen: Dict[str, Any]) -> Any:
    """Load the model of a folder, and extend its range with --longer."""
    from posenc_export.models.context_extension import extend_positions, to_hierarchical
    from posenc_export.models.pretrained import from_pretrained

    way, positions = chosen.get("longer"), chosen.get("max_positions")
    if way is None:
        model = from_pretrained(
            folder,
            chosen.get("layer"),
            positions,
            chosen.get("part"),
            chosen.get("lengths"),
            "head" not in chosen,
        )
        if Path(folder).is_dir() and "head" not in chosen:
            _name_left_out(folder, model)
        return model
    if positions is None:
        raise ValueError(
            f"export: expected --max-positions with --longer {way}, got none; give the new "
            "number of positions"
        )
    model = from_pretrained(
        folder,
        chosen.get("layer"),
        part=chosen.get("part"),
        lengths=chosen.get("lengths"),
        head="head" not in chosen,
    )
    return (
        to_hierarchical(model, positions)
        if way == "hierarchical"
        else extend_positions(model, positions, way)
    )


def _name_left_out(folder: str, model: Any) -> None:
    """Print a line to stderr if the checkpoint has a task head that the model lacks, and one for
    settings of generation that are not applied.
    """
    from posenc_export.models import generation_settings
    from posenc_export.models.checkpoint import read_config
    from posenc_export.models.sentence_transformers import opened
    from posenc_export.models.stack import Stack
    from posenc_export.models.task_heads import left_out

    task = left_out(model, read_config(opened(Path(folder), False)[0]))
    lines = (
        [
            (
                f"{folder} is a model for {task}, whose head is not exported: the artefact gives "
                "hidden states only"
            )
        ]
        if task is not None
        else []
    )
    unapplied = (
        generation_settings.unapplied(model.text.files)
        if isinstance(model, Stack) and model.config.head is not None
        else []
    )
    if unapplied:
        lines.append(f"generate does not apply {', '.join(unapplied)} of generation_config.json")
    for line in lines:
        note(line)


def _model_of_function(text: str) -> Any:
    """Return the model package.module:name, from Python's path or the current folder, or that which
    the function of this name returns.

    Raises:
        ValueError: no such module or name, or a function with arguments.
    """
    import torch

    place, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(place)
    except ImportError as error:
        raise ValueError(
            f"export: expected a module {place} that can be imported, got {error}; run the "
            "command where it can be imported"
        ) from error
    if not hasattr(module, name):
        names = [
            known
            for known, value in vars(module).items()
            if isinstance(value, torch.nn.Module) or callable(value) and not isinstance(value, type)
        ]
        raise ValueError(
            f"export: expected a model or a function without arguments in {place}, got no "
            f"name {name}; {suggestion(name, names)}"
        )
    function = getattr(module, name)
    if isinstance(function, torch.nn.Module):
        return function
    rule, remedy = (
        f"export: expected {name} in {place} to be a model or a function without arguments",
        "write a function that returns the model",
    )
    if not callable(function):
        raise ValueError(f"{rule}, got {function!r}; {remedy}")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(f"{rule}, got {error}; {remedy}") from None
    return function()


def _seeded_block(chosen: Dict[str, Any]) -> Any:
    from posenc_export import encodings
    from posenc_export.models.presets import seeded
    from posenc_export.models.short_forms import block_config

    _only(tuple(BLOCK), chosen, "options of a block with random weights")
    values: Dict[str, Any] = {**BLOCK, **chosen}
    seed, spec, attention = (
        values.pop("seed"),
        encodings.parse(values.pop("encoding")),
        values.pop("attention"),
    )
    return seeded(block_config(encoding=spec, causal=attention == "causal", **values), seed)


def _block_of_weights(chosen: Dict[str, Any]) -> Any:
    from posenc_export.models.block import AttentionBlock
    from posenc_export.models.from_weights import complete, read_file

    _only(OF_WEIGHTS, chosen, "options of a block with --weights, which determine the sizes")
    if "heads" not in chosen:
        raise ValueError(NO_HEADS)
    found = read_file(chosen["weights"], chosen.get("prefix", ""))
    values = {**BLOCK, **chosen}
    block = AttentionBlock.from_weights(
        heads=values["heads"],
        max_positions=values["max_positions"],
        kv_heads=chosen.get("kv_heads"),
        encoding=values["encoding"],
        layout=chosen.get("layout"),
        encoding_weights=found.trained,
        causal=values["attention"] == "causal",
        **complete(found.weights),
    )
    lines = [f"weights: {line}" for line in found.lines]
    attention, default = block.attention, "" if "encoding" in chosen else " (the default)"
    sizes = (
        f"heads {attention.heads}, kv heads {attention.kv_heads}, head size {attention.head_size}"
    )
    lines.append(f"block: encoding {values['encoding']}{default}, {sizes}, {values['attention']}")
    lines.append(
        "block: certificates compare with this block; posenc_export.compare compares it with "
        "the module that the weights come from"
    )
    for line in lines:
        note(line)
    return block


def _only(names: Any, chosen: Dict[str, Any], rule: str) -> None:
    other = next((name for name in chosen if name not in names), None)
    if other is not None:
        raise ValueError(
            f"export: expected {rule}, got --{other.replace('_', '-')}; leave it out or "
            "export another model"
        )


def _quality(manifest: Any) -> Dict[str, Any]:
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
