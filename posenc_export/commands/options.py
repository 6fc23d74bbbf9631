"""Tables of options, and those that several commands have."""

import argparse
import importlib.util
import os
import pkgutil
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Sequence, Union

from posenc_export.runtime.graphs.providers import AUTO, HELP
from posenc_export.shared.foreign import json_of
from posenc_export.shared.preset_folders import NAMES
from posenc_export.shared.registry import check_registered
from posenc_export.shared.suggestion import download, suggestion

ENCODINGS = "posenc_export.encodings"  # a file for each, and the group of entry points of others

# By the names of an option with spaces between, the keyword arguments of add_argument, or by the
# title of a group, its options.
Table = dict[str, Union[dict[str, Any], "Group"]]


class Group(NamedTuple):
    """Options under a title of their own in the help of a command."""

    description: str
    options: Table


def option(
    meaning: str, default: Any = None, least: int | None = None, **settings: Any
) -> dict[str, Any]:
    """Return the arguments of add_argument. A default gives the type, and stands in the help; with
    `least` it is a whole number that is not smaller.
    """
    if least is not None:
        settings["type"] = partial(_whole, least)
    if default is None:
        return {"help": meaning, **settings}
    shown = f"{default:g}" if isinstance(default, float) else default
    meaning = f"{meaning} (default: {shown})"
    return {"help": meaning, "type": type(default), "default": default, **settings}


def _whole(least: int, text: str) -> int:
    if not re.fullmatch("-?[0-9]+", text) or int(text) < least:
        rule = f"a whole number of at least {least}"
        raise argparse.ArgumentTypeError(f"expected {rule}, got {text!r}")
    return int(text)


def add_options(parser: "argparse._ActionsContainer", table: Table) -> None:
    """Add the options of a table."""
    for names, settings in table.items():
        if isinstance(settings, Group):
            group = parser.add_argument_group(names, settings.description)
            add_options(group, settings.options)
        else:
            parser.add_argument(*names.split(), **settings)


def folder_of(artefact: str = "an artefact") -> Table:
    """The folder of an artefact."""
    return {"folder": option(f"folder of {artefact}, or a preset, such as {NAMES[0]}", type=Path)}


TEMPLATE: Table = {
    "--chat-template-kwargs": option(
        "values for the chat template by names that it reads, in JSON, such as "
        """'{"enable_thinking": false}'""",
        metavar="JSON",
    )
}


def template_values(options: argparse.Namespace) -> dict[str, Any]:
    """Return the values of --chat-template-kwargs. Raise ValueError unless it is a JSON object."""
    text = (options.chat_template_kwargs or "{}").encode(errors="surrogateescape")
    return dict(json_of("chat_template_kwargs", "the option", text, "quote it for the shell"))


# Provider and threads as `load` takes them.
PROVIDER: Table = {"--provider": dict(default="auto", help=HELP)}
THREADS: Table = {
    "--threads": dict(
        type=lambda text: text if text == AUTO else _whole(1, text),
        default=AUTO,
        help="threads of one operator (default: by the size of the model)",
    )
}
SAMPLING: Table = {
    "--temperature": option(
        "randomness: 0 takes the likeliest token, 1 samples by the probabilities of the model", 0.0
    ),
    "--top-k": option("sample from this many of the likeliest tokens; 0 for all", 0),
    "--top-p": option("sample from the likeliest tokens with this total probability", 1.0),
    "--seed": option("seed of the sampling", 0),
}
SPECULATE: Table = {
    "--speculate": option(
        "read several drafted tokens in one pass where that is faster, with the same result: "
        "lookup drafts from the text itself (default: one token per pass)",
        choices=["lookup"],
    )
}


def check_encoding(text: str) -> None:
    """Raise ValueError if no encoding has the name of NAME or NAME:PARAMETER=VALUE,..., before
    torch is imported, which takes seconds.
    """
    from importlib import metadata  # 0.03 s

    if ENCODINGS in sys.modules:
        return  # it knows those that were registered, too, and parse refuses others
    place = importlib.util.find_spec(ENCODINGS)
    files = pkgutil.iter_modules(place.submodule_search_locations if place else None)
    built_in = [file.name for file in files if not file.ispkg]
    offered = metadata.entry_points(group=ENCODINGS).names
    check_registered("encoding", [*built_in, *offered], text.partition(":")[0])


def nearest_model(model: str, names: Sequence[str]) -> str:
    """The remedy for a model that does not exist: a folder, a download, or the nearest name."""
    path = os.sep in model or model.endswith(".gguf")
    near = "give one that exists" if path else suggestion(model, names)
    fetch = download(model)
    return f"{near}, or download the model first: {fetch}" if fetch else near


def sampling_of(options: argparse.Namespace) -> tuple[float, int, float, int]:
    """Temperature, top_k, top_p and seed, in the order in which `generate` takes them."""
    return options.temperature, options.top_k, options.top_p, options.seed
