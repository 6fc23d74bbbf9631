"""Options that several commands have."""

import argparse
from pathlib import Path
from typing import Any, Container, Dict, Iterable, Tuple, Union

from posenc_export.runtime.graphs.providers import HELP
from posenc_export.runtime.graphs.threads import AUTO
from posenc_export.shared.preset_folders import NAMES

# By the names of an option with spaces between, the keyword arguments of add_argument.
Table = Dict[str, Dict[str, Any]]
SAMPLING: Table = {
    "--temperature": dict(
        type=float,
        default=0.0,
        help="divisor of the logits before the softmax; 0 for the likeliest token (default: 0)",
    ),
    "--top-k": dict(
        type=int,
        default=0,
        help="sample from this many of the likeliest tokens; 0 for all (default: 0)",
    ),
    "--top-p": dict(
        type=float,
        default=1.0,
        help="sample from the likeliest tokens with this total probability (default: 1)",
    ),
    "--seed": dict(type=int, default=0, help="seed of the sampling (default: 0)"),
}
PART = (
    "encoder or decoder of a model that has both (T5, Whisper); embeddings: tokens, positions, "
    "segments and norm before the layers, of any model but Whisper"
)
# Options of a block with their defaults, and their help texts.
BLOCK = {
    "encoding": "rope",
    "width": 512,
    "heads": 8,
    "kv_heads": 0,
    "head_size": 0,
    "max_positions": 4096,
    "attention": "causal",
    "seed": 0,
}
MEANING = {
    "encoding": "position encoding, NAME or NAME:PARAMETER=VALUE,...; see posenc list "
    "(default: rope)",
    "width": "size of the hidden states (default: 512)",
    "heads": "number of query heads (default: 8; required with --weights FILE)",
    "kv_heads": "number of key and value heads, a divisor of heads (default: as many as heads)",
    "head_size": "size of one head (default: width divided by heads)",
    "max_positions": "N: positions are 0 .. N-1, and a cache holds at most N tokens; on a grid, N "
    "bounds the tokens of an image and each coordinate (196 for 14 x 14; default: 4096; for a "
    "checkpoint, the value in its config.json)",
    "attention": (
        "causal: a token sees itself and earlier tokens, with a cache; bidirectional: every call "
        "is a whole sequence, without a cache (default: causal)"
    ),
    "seed": "seed of the random weights (default: 0)",
}


def add_options(parser: "argparse._ActionsContainer", table: Table) -> None:
    """Add the options of a table."""
    for names, settings in table.items():
        parser.add_argument(*names.split(), **settings)


def check_only(command: str, names: Container[str], chosen: Iterable[str], rule: str) -> None:
    """Raise ValueError for a chosen option that is not among `names`."""
    for name in chosen:
        if name not in names:
            option = "--no-head" if name == "head" else f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{command}: expected {rule}, got {option}; leave it out or choose another model"
            )


def add_folder(parser: argparse.ArgumentParser, artefact: str = "an artefact") -> None:
    """Add the folder of an artefact."""
    parser.add_argument(
        "folder", type=Path, help=f"folder of {artefact}, or a preset, such as {NAMES[0]}"
    )


def add_provider(parser: argparse.ArgumentParser) -> None:
    """Add the provider as `load` takes it."""
    parser.add_argument("--provider", default="auto", help=HELP)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of runtime.session.generation.choose."""
    add_options(parser, SAMPLING)


def sampling(options: argparse.Namespace) -> Tuple[float, int, float, int]:
    """Return temperature, top_k, top_p and seed, in the order in which `generate` takes them."""
    return options.temperature, options.top_k, options.top_p, options.seed


def add_speculate(parser: argparse.ArgumentParser) -> None:
    """Add how tokens are drafted, as Session.generate takes it."""
    meaning = (
        "read several drafted tokens in one pass where that is faster, with the same result: "
        "lookup drafts from the text itself, a FOLDER with a smaller decoder"
    )
    parser.add_argument(
        "--speculate", metavar="lookup|FOLDER", help=f"{meaning} (default: one token per pass)"
    )


def drafting(options: argparse.Namespace) -> Any:
    """Return Session.generate's argument `speculate`. Raise ValueError for a folder that is not
    an artefact.
    """
    from posenc_export.runtime import load
    from posenc_export.runtime.artefact.files import locate
    from posenc_export.runtime.session.speculation import LOOKUP

    if options.speculate in (None, LOOKUP):
        return options.speculate
    if not locate(options.speculate).is_dir():
        raise ValueError(
            f"speculate: expected {LOOKUP} or the folder of a decoder's artefact, got "
            f"{options.speculate}; ./{LOOKUP} is a folder of that name"
        )
    return load(options.speculate, options.provider)


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Add the number of threads as `load` takes it."""
    parser.add_argument(
        "--threads",
        type=_threads,
        default=AUTO,
        help="threads of one operator (default: by the size of the model)",
    )


def _threads(text: str) -> Union[int, str]:
    return text if text == AUTO else int(text)


def add_digest(parser: argparse.ArgumentParser, artefact: str = "the artefact") -> None:
    """Add the digest that is compared before an artefact is read."""
    parser.add_argument(
        "--digest",
        help=f"digest that {artefact} must have, from a source other than the folder itself",
    )


def add_block(parser: "argparse._ActionsContainer", names: Iterable[str] = tuple(BLOCK)) -> None:
    """Add options of a block. An option that is not given is None, because a preset refuses even
    the default.
    """
    for name in names:
        choices = ("causal", "bidirectional") if name == "attention" else None
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(BLOCK[name]),
            choices=choices,
            help=MEANING[name],
        )
