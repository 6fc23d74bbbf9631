"""The model of `posenc export`: a preset, a checkpoint, a function's model, or a block."""

import argparse
import contextlib
import importlib
import inspect
import os
import re
import sys
import traceback
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Iterator

from posenc_export.commands.options import Table, check_encoding, nearest_model, option
from posenc_export.commands.terminal import note
from posenc_export.models.folder_files import CACHED
from posenc_export.runtime.artefact.manifest import FILE_NAME
from posenc_export.shared.foreign import brief, last_line
from posenc_export.shared.preset_folders import NAMES
from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import suggestion

CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")  # package.module:function
LONGEST_NAME = 128
WIDTH, HEADS = 512, 8  # of a block, unless they are given
SHOWN = 8  # names of a Python module that a message lists
GRAPH = "posenc audit compares an exported graph with its model, posenc inspect reads artefacts"
# What to do with files that hold no model to export, by suffix. {}: the name without it
FILES = {
    ".onnx": GRAPH,
    ".pt2": GRAPH,
    ".py": "run the command in its folder with {}:NAME, the name of a torch module or function",
}
# None if not given: a preset refuses even the default.
OF_BLOCK: Table = {
    "--encoding": option(
        "position encoding, NAME or NAME:PARAMETER=VALUE,...; see posenc list (default: rope)"
    ),
    "--width": option("size of the hidden states (default: 512)", type=int),
    "--heads": option("number of query heads (default: 8)", type=int),
    "--kv-heads": option(
        "number of key and value heads, a divisor of heads (default: as many as heads)", type=int
    ),
    "--head-size": option("size of one head (default: width divided by heads)", type=int),
    "--max-positions": option(
        "N: positions are 0 .. N-1, and a cache holds at most N tokens; on a grid, N bounds the "
        "tokens of an image and each coordinate (196 for 14 x 14; default: 4096; for a checkpoint, "
        "the value in its config.json)",
        type=int,
    ),
    "--attention": option(
        "causal: a token sees itself and earlier tokens, with a cache; bidirectional: every call "
        "is a whole sequence, without a cache (default: causal)",
        choices=("causal", "bidirectional"),
    ),
    "--seed": option("seed of the random weights (default: 0)", type=int),
}
OF_CHECKPOINT: Table = {
    "--part": option(
        "encoder or decoder of a model that has both (T5, BART)", choices=("encoder", "decoder")
    ),
    "--no-head": option(
        "export hidden states in place of what a head or pooling computes", action="store_true"
    ),
}
OF_MODULE: Table = {
    "--example": option(
        "an input of the module: token ids [B,S], or float32 hidden states [B,S,E] (default: ids "
        "of the embedding that forward begins with, or what the function returns after the module)",
        type=Path,
        metavar="FILE.npy",
    ),
    "--positions": option(
        "argument of forward that takes positions [B,S] (default: it counts them)", metavar="NAME"
    ),
    "--axes": option(
        "number of coordinates of each token, if this argument takes them [axes,B,S]",
        type=int,
        metavar="N",
    ),
    "--output-name": option(
        "output of a forward that returns several (default: the first with a row for each token)",
        metavar="NAME",
    ),
}
# The options that a kind of model takes.
BLOCK, PRESET, CHECKPOINT, MODULE = "a block", "a preset", "a checkpoint", "a module of your own"
TAKEN = {
    BLOCK: OF_BLOCK.keys(),
    PRESET: (),
    CHECKPOINT: ("--max-positions", *OF_CHECKPOINT),
    MODULE: ("--max-positions", "--attention", *OF_MODULE),
}


def arguments_of(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return the kind of the model that the arguments name, and its options by name. Raise
    ValueError for a model that does not exist, and options of another kind.
    """
    kind, chosen = _kind_of(options.model), {}
    for text in (*OF_BLOCK, *OF_CHECKPOINT, *OF_MODULE):
        name = text.removeprefix("--").replace("-", "_")
        value = getattr(options, name)
        if value is None or value is False:
            continue
        if text not in TAKEN[kind]:
            none = f"no options of a block or checkpoint for {options.model}"
            rule = f"options of {kind}" if TAKEN[kind] else none
            raise refusal("export", rule, text, "leave it out or choose another model")
        chosen[name] = value
    if "encoding" in chosen:
        check_encoding(chosen["encoding"])
    width, heads = chosen.get("width", WIDTH), chosen.get("heads", HEADS)
    if heads > 0 and width % heads and "head_size" not in chosen:
        rule, remedy = "width to be divisible by heads", "give --head-size"
        raise refusal("export", rule, f"{width} and {heads}", remedy)
    return kind, chosen


def _kind_of(model: str) -> str:
    path, known = Path(model), (*NAMES, "block")
    if model in known:
        return PRESET if model in NAMES else BLOCK
    if (path / FILE_NAME).is_file():
        remedy = "posenc inspect prints what it holds, export its model instead"
        raise refusal("export", "a model", f"{model}, which is an artefact already", remedy)
    if path.is_dir() or path.suffix == ".gguf":
        return CHECKPOINT
    if path.is_file():
        remedy = FILES.get(path.suffix, "give the folder of a checkpoint")
        raise refusal("export", "a model", f"the file {model}", remedy.format(path.stem))
    if CALLABLE.match(model) and not path.exists():
        return MODULE
    module = re.split("[.:]", model)[0]
    if module.isidentifier() and PathFinder.find_spec(module, [os.getcwd(), *sys.path]):
        remedy = FILES[".py"].format(module)
        raise refusal("export", "a model", f"the Python module {module}", remedy)
    kinds = "block, a folder with a checkpoint, a GGUF file, package.module:function, or one of"
    rule, remedy = f"model to be {kinds} {', '.join(NAMES)}", nearest_model(model, known)
    raise refusal("export", rule, repr(model), remedy)


def model_of(kind: str, model: str, chosen: dict[str, Any]) -> Any:
    """Return the model of `arguments_of`."""
    from posenc_export.models.presets import load_preset

    if kind == PRESET:
        return load_preset(model)
    if kind == BLOCK:
        return _block(**chosen)
    return checkpoint(model, chosen) if kind == CHECKPOINT else _read(model, chosen)


def _block(
    encoding: str = "rope",
    width: int = WIDTH,
    heads: int = HEADS,
    max_positions: int = 4096,
    attention: str = "causal",
    seed: int = 0,
    **sizes: int,
) -> Any:
    from posenc_export import encodings
    from posenc_export.models.presets import seeded
    from posenc_export.models.short_forms import block_config

    how: Any = {"encoding": encodings.parse(encoding), "causal": attention == "causal", **sizes}
    return seeded(block_config(width, heads, max_positions, **how), seed)


def checkpoint_name(path: Path) -> str:
    """Return the name of a folder or GGUF file, or organization/name in the cache of the hub."""
    whole = path.resolve()
    name = whole.stem if whole.suffix == ".gguf" else whole.name
    for folder in whole.parents:
        if folder.name.startswith(CACHED):
            name = folder.name.removeprefix(CACHED).replace("--", "/", 1)
    return name[:LONGEST_NAME]


def checkpoint(folder: str, chosen: dict[str, Any]) -> Any:
    """Load the model of a folder or GGUF file with the options of a checkpoint."""
    from posenc_export.models.pretrained import from_pretrained

    with_head = not chosen.get("no_head")
    options = {name: value for name, value in chosen.items() if name != "no_head"}
    model: Any = from_pretrained(folder, head=with_head, **options)
    if Path(folder).is_dir() and with_head:
        _note_unexported(folder, model)
    model.source = {"checkpoint": checkpoint_name(Path(folder))}
    return model


def _note_unexported(folder: str, model: Any) -> None:
    """Note a task head that the model lacks, and settings of generation that are not applied."""
    from posenc_export.models.checkpoint import read_config
    from posenc_export.models.sentence_transformers import opened
    from posenc_export.models.task_heads import left_out
    from posenc_export.models.text_settings import unapplied

    task = left_out(model, read_config(opened(Path(folder), False)[0]))
    if task is not None:
        lost = "whose head is not exported: the artefact gives hidden states only"
        note(f"{folder} is a model for {task}, {lost}")
    if model.decodes:
        unused = unapplied(model.text.files)
        if unused:
            note(f"generate does not apply {', '.join(unused)} of generation_config.json")


def _read(text: str, chosen: dict[str, Any]) -> Any:
    """Return the model package.module:name, or read the module of this name with its options."""
    import torch

    from posenc_export.export import ReadAs
    from posenc_export.export.read_module import as_model

    model, example = imported("export", text), None
    if isinstance(model, tuple) and len(model) == 2:
        model, example = model
    if not isinstance(model, torch.nn.Module):
        rule, remedy = f"{text} to be a model or a function without arguments", "write one"
        raise refusal("export", rule, repr(model), remedy)
    if "example" in chosen:
        example = _example(chosen["example"])
    how = ReadAs(
        example,
        chosen.get("max_positions"),
        chosen.get("positions"),
        chosen.get("attention", "causal") == "causal",
        chosen.get("output_name"),
        chosen.get("axes", 0),
    )
    return as_model(model, how)


def _example(file: Path) -> Any:
    import numpy as np
    import torch

    try:
        with file.open("rb") as stream:
            numbers = np.lib.format.read_array(stream, allow_pickle=False)
    except (OSError, ValueError) as error:
        got = error.strerror if isinstance(error, OSError) else "something else"
        rule, remedy = f"{file} to be an array in numpy's format .npy", "write it with numpy.save"
        raise refusal("export", rule, got, remedy) from None
    whole = numbers.dtype.kind in "iu"
    return torch.from_numpy(numbers.astype(np.int64 if whole else np.float32))


def imported(where: str, text: str) -> Any:
    """Return the module package.module:name, or what the function of this name returns if it needs
    no arguments, or else the function. It runs code of the user. ValueError for another name, and
    for an error in this code.
    """
    import torch

    place, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    right = f"write {Path(place).stem}:{name}, and " if place.endswith(".py") else ""
    missing = f"{right}run the command in its folder, or set PYTHONPATH"
    with _running(where, f"a module {place} that can be imported", place, missing):
        module = importlib.import_module(place)
    value: Any = getattr(module, name, None)
    if not isinstance(value, torch.nn.Module) and _needs_nothing(value):
        with _running(where, rule := f"{text} to return a model"):
            value = value()
        if isinstance(value, type) or not (callable(value) or isinstance(value, tuple)):
            raise refusal(where, rule, repr(value), "return a torch.nn.Module")
    if not isinstance(value, tuple) and (isinstance(value, type) or not callable(value)):
        names = [n for n, v in vars(module).items() if callable(v) and not isinstance(v, type)]
        some = ", ".join(sorted(n for n in names if not n.startswith("_"))[:SHOWN])
        got, rule = repr(value), f"a model or a function without arguments in {place}"
        got = got if hasattr(module, name) else f"no name {name}"
        otherwise = f"give the name of one, such as {some}" if some else "write one there"
        raise refusal(where, rule, got, suggestion(name, names, otherwise))
    return value


@contextlib.contextmanager
def _running(where: str, rule: str, place: str = "", missing: str = "") -> Iterator[None]:
    """Context manager that turns an error in code of the user into one line with its place.

    Args:
        place, missing: a module, and the remedy if it is not found.
    """
    try:
        yield
    except Exception as error:  # whatever the code raises
        steps = traceback.walk_tb(error.__traceback__)
        line = last_line([(frame.f_code.co_filename, number) for frame, number in steps])
        got = f"{type(error).__name__}: {brief(error)}" + (f" ({line})" if line else "")
        unknown = isinstance(error, ModuleNotFoundError) and f"{error.name}." in f"{place}."
        raise refusal(where, rule, got, missing if unknown else "correct the code") from error


def _needs_nothing(function: Any) -> bool:
    """Return whether it can be called without arguments."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):  # no function, or one of C
        return False
    return True
