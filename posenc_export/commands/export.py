"""`posenc export`: a preset, a checkpoint, or a block to artefacts."""

import argparse
import importlib
import inspect
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

from posenc_export.terminal import nearest, refuse, show

FAILED_CHECK = 1
# What describes a block and its default; a preset brings its own.
BLOCK = {"encoding": "rope", "width": 512, "heads": 8, "kv_heads": 0, "head_size": 0, "max_positions": 4096, "attention": "causal", "seed": 0}
OF_CHECKPOINT = ("layer", "max_positions", "part")
CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")  # package.module:function
OF_WEIGHTS = ("weights", "encoding", "heads", "kv_heads", "max_positions", "attention", "layout")


def add_arguments(exporting: argparse.ArgumentParser) -> None:
    """What `posenc export` takes."""
    exporting.add_argument("model", help="a preset, a folder with a checkpoint, 'block', or package.module:function, which returns a model")
    exporting.add_argument("--target", action="append", required=True, help="may be given several times: one subfolder each")
    exporting.add_argument("-o", "--output", type=Path, required=True, help="folder of the artefact")
    for name, default in BLOCK.items():  # absent is not the default: a preset refuses them
        said = "from heads and width" if name in ("kv_heads", "head_size") else default
        choices = ("causal", "bidirectional") if name == "attention" else None
        exporting.add_argument(f"--{name.replace('_', '-')}", type=type(default), choices=choices, help=f"of a block (default {said})")
    exporting.add_argument("--weights", type=Path, help="of a block: a .safetensors file with q, k, v, o or qkv, o (or q_proj.weight, ...); sizes follow from it")
    exporting.add_argument("--layout", choices=("half", "interleaved"), help="of the rotary pairs in --weights (default: that of the encoding)")
    exporting.add_argument("--layer", type=int, help="of a checkpoint: the attention of this layer alone")
    exporting.add_argument("--part", choices=("encoder", "decoder"), help="of a checkpoint with both (T5, Whisper)")
    exporting.add_argument("--signature", default="positions", help="positions or mask")
    exporting.add_argument("--dtype", help="float32 or float16 (default: the target's own)")
    exporting.add_argument("--no-verify", action="store_true", help="write without a certificate")
    exporting.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The exit status: 0, or 1 where an artefact does not agree with its module."""
    from posenc_export.export import VerificationError, folders

    targets = list(dict.fromkeys(options.target))
    _check_export(targets, options)
    model = _model(options)
    try:
        certificates = _write(model, targets, options)
    except VerificationError as error:
        refuse(options.say, str(error))
        return FAILED_CHECK
    options.say.close()
    rows = [{"target": t, "folder": str(f), **summary(c)} for t, f, c in zip(targets, folders(targets, options.output), certificates, strict=True)]
    print(json.dumps(rows, indent=1)) if options.json else show(rows)
    return 0


def summary(certificate: Optional[Dict[str, Any]]) -> Dict[str, Any]:
    """A certificate in four columns."""
    if certificate is None:
        return {"cells": 0, "worst error": "not verified", "tolerance": "-", "passed": False}
    worst = max(certificate["cells"].values())
    return {"cells": len(certificate["cells"]), "worst error": f"{worst:.1e}", "tolerance": f"{certificate['tolerance']:.1e}", "passed": certificate["passed"]}


def _check_export(targets: List[str], options: argparse.Namespace) -> None:
    """Validate targets, options and folders before exporting."""
    from posenc_export.export import TARGETS, check_export

    for target in targets:
        if target not in TARGETS:
            raise ValueError(f"export: target is one of {', '.join(TARGETS)}, got {target!r}; {nearest(target, TARGETS)}")
    check_export(targets, options.output, options.signature, options.dtype)


def _model(options: argparse.Namespace) -> Any:
    """The model that the arguments name."""
    from posenc_export.models.presets import PRESETS, load_preset

    given = {name: getattr(options, name) for name in (*BLOCK, "weights", "layout", "layer", "part") if getattr(options, name) is not None}
    if options.model == "block":
        return _own_block(given) if "weights" in given else _seeded_block(given)
    if options.model in PRESETS:
        _only((), given, f"{options.model} brings its own shape and weights")
        return load_preset(options.model)
    if CALLABLE.match(options.model) and not Path(options.model).exists():
        _only((), given, f"{options.model} brings its own shape and weights")
        return _called(options.model)
    if not Path(options.model).is_dir():
        near = nearest(options.model, [*PRESETS, "block"])
        known = f"block, a folder with a checkpoint, package.module:function, or one of {', '.join(PRESETS)}"
        raise ValueError(f"export: model is {known}, got {options.model!r}; {near}")
    from posenc_export.models.pretrained import from_pretrained

    _only(OF_CHECKPOINT, given, "a checkpoint brings its own shape and weights")
    return from_pretrained(options.model, given.get("layer"), given.get("max_positions"), given.get("part"))


def _called(text: str) -> Any:
    """What the function package.module:function gives, found on Python's path or in the folder that the command runs in.

    Raises:
        ValueError: no such module or function.
    """
    place, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(place)
    except ImportError as error:
        raise ValueError(f"export: expected a module {place} that can be imported, got {error}; run the command where it can be") from error
    function = getattr(module, name, None)
    rule, remedy = f"export: expected a function {name} without arguments in {place}", "write one that returns the model"
    if not callable(function):
        raise ValueError(f"{rule}, got {function!r}; {remedy}")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(f"{rule}, got {error}; {remedy}") from None
    return function()


def _seeded_block(given: Dict[str, Any]) -> Any:
    from posenc_export import encodings
    from posenc_export.models.presets import seeded
    from posenc_export.models.short import block_config

    _only(tuple(BLOCK), given, "a block without --weights has random ones")
    values: Dict[str, Any] = {**BLOCK, **given}
    seed, spec, attention = values.pop("seed"), encodings.parse(values.pop("encoding")), values.pop("attention")
    return seeded(block_config(encoding=spec, causal=attention == "causal", **values), seed)


def _own_block(given: Dict[str, Any]) -> Any:
    from posenc_export.models.block import AttentionBlock
    from posenc_export.models.from_weights import read_file

    _only(OF_WEIGHTS, given, "sizes and numbers of a block follow from --weights")
    if "heads" not in given:
        raise ValueError("export: with --weights the number of heads is given, got none; give --heads H")
    weights, trained = read_file(given["weights"])
    if "o" not in weights:
        raise ValueError(f"weights: an output projection is among them, got {', '.join(weights) or 'none'}; name it o, o.weight or o_proj.weight")
    values = {**BLOCK, **given}
    return AttentionBlock.from_weights(
        heads=values["heads"],
        max_positions=values["max_positions"],
        kv_heads=given.get("kv_heads"),
        encoding=values["encoding"],
        layout=given.get("layout"),
        encoding_weights=trained,
        causal=values["attention"] == "causal",
        **weights,
    )


def _only(names: Any, given: Dict[str, Any], why: str) -> None:
    other = next((name for name in given if name not in names), None)
    if other is not None:
        raise ValueError(f"export: {why}, got --{other.replace('_', '-')}; leave it out or export another model")


def _write(model: Any, targets: List[str], options: argparse.Namespace) -> List[Optional[Dict[str, Any]]]:
    """All artefacts or none. Their certificates."""
    from posenc_export.export import export_all

    return [made.certificate for made in export_all(model, targets, options.output, options.signature, options.dtype, not options.no_verify, options.say)]
