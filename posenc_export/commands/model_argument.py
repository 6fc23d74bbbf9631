"""The model of `posenc export`: a preset, a checkpoint, a function's model, or a block."""

import argparse
import importlib
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any, Dict

from posenc_export.commands.options import BLOCK, check_only, chosen_of
from posenc_export.commands.terminal import note
from posenc_export.models.folder_files import CACHED
from posenc_export.shared.foreign import explained
from posenc_export.shared.preset_folders import NAMES
from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import suggestion

OF_CHECKPOINT = ("max_positions", "part", "head")
OF_MODULE = ("max_positions", "attention", "example", "positions", "output_name", "axes")
NAMED = (*BLOCK, *OF_CHECKPOINT, *OF_MODULE[2:])
CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")  # package.module:function
LONGEST_NAME = 128


def model_of_block(chosen: Dict[str, Any]) -> Any:
    """Return the block that the options describe. Raise ValueError for others."""
    from posenc_export import encodings
    from posenc_export.models.presets import seeded
    from posenc_export.models.short_forms import block_config

    check_only("export", tuple(BLOCK), chosen, "options of a block")
    values: Dict[str, Any] = {**BLOCK, **chosen}
    seed, spec = values.pop("seed"), encodings.parse(values.pop("encoding"))
    causal = values.pop("attention") == "causal"
    return seeded(block_config(encoding=spec, causal=causal, **values), seed)


def model_of(options: argparse.Namespace) -> Any:
    """Return the model that the arguments describe."""
    from posenc_export.models.presets import load_preset

    chosen = chosen_of(options, NAMED)
    if options.model == "block":
        return model_of_block(chosen)
    none = f"no options of a block or checkpoint for {options.model}"
    if options.model in NAMES:
        check_only("export", (), chosen, none)
        return load_preset(options.model)
    if CALLABLE.match(options.model) and not Path(options.model).exists():
        check_only("export", OF_MODULE, chosen, "options of a module of your own")
        return _read(options.model, chosen)
    check_only("export", OF_CHECKPOINT, chosen, "options of a checkpoint")
    return checkpoint(options.model, chosen)


def checkpoint_name(path: Path) -> str:
    """Return the name of a folder or GGUF file, or organization/name in the cache of the hub."""
    whole = path.resolve()
    name = whole.stem if whole.suffix == ".gguf" else whole.name
    for folder in whole.parents:
        if folder.name.startswith(CACHED):
            name = folder.name.removeprefix(CACHED).replace("--", "/", 1)
    return name[:LONGEST_NAME]


def checkpoint(folder: str, chosen: Dict[str, Any]) -> Any:
    """Load the model of a folder or GGUF file with the options of a checkpoint."""
    from posenc_export.models.pretrained import from_pretrained

    names, with_head = ("max_positions", "part"), "head" not in chosen
    options = {name: chosen[name] for name in names if name in chosen}
    model: Any = from_pretrained(folder, head=with_head, **options)
    if Path(folder).is_dir() and with_head:
        _note_unexported(folder, model)
    model.source = {"checkpoint": checkpoint_name(Path(folder))}
    return model


def _note_unexported(folder: str, model: Any) -> None:
    """Note a task head that the model lacks, and settings of generation that are not applied."""
    from posenc_export.models import generation_settings
    from posenc_export.models.checkpoint import read_config
    from posenc_export.models.sentence_transformers import opened
    from posenc_export.models.task_heads import left_out

    task = left_out(model, read_config(opened(Path(folder), False)[0]))
    if task is not None:
        lost = "whose head is not exported: the artefact gives hidden states only"
        note(f"{folder} is a model for {task}, {lost}")
    if model.decodes:
        unapplied = generation_settings.unapplied(model.text.files)
        if unapplied:
            note(f"generate does not apply {', '.join(unapplied)} of generation_config.json")


def _read(text: str, chosen: Dict[str, Any]) -> Any:
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
        numbers = np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        rule = "an example in a file of numpy"
        raise refusal("export", rule, f"{file}: {error}", "write it with numpy.save") from None
    whole = numbers.dtype.kind in "iu"
    return torch.from_numpy(numbers.astype(np.int64 if whole else np.float32))


def imported(where: str, text: str) -> Any:
    """Return the module package.module:name, or what the function of this name returns if it needs
    no arguments, or else the function. Raise ValueError for another name. The package is code of
    the user, which runs.
    """
    import torch

    place, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    rule = f"{where}: expected a module {place} that can be imported"
    with explained(rule, "run the command where it can be imported", ImportError):
        module = importlib.import_module(place)
    value: Any = getattr(module, name, None)
    if not isinstance(value, torch.nn.Module) and _needs_nothing(value):
        value = value()
    if not isinstance(value, tuple) and (isinstance(value, type) or not callable(value)):
        names = [n for n, v in vars(module).items() if callable(v) and not isinstance(v, type)]
        got, rule = repr(value), f"a model or a function without arguments in {place}"
        got = got if hasattr(module, name) else f"no name {name}"
        raise refusal(where, rule, got, suggestion(name, names))
    return value


def _needs_nothing(function: Any) -> bool:
    """Return whether it can be called without arguments."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):  # no function, or one of C
        return False
    return True
